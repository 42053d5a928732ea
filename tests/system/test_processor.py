"""What is known of the processor, with and without Linux's file."""

import platform
from pathlib import Path

import pytest

from quantkit.report.records import this_machine
from quantkit.system import processor
from quantkit.system.processor import cpuinfo, processor_name, usable_cores


def test_the_name_is_that_of_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: another\n"
    monkeypatch.setattr(processor, "cpuinfo", lambda: text)
    assert processor_name() == "Some CPU: 3 GHz"


def test_without_the_file_the_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _path: False)
    assert cpuinfo() == ""
    assert processor_name() == (platform.processor() or platform.machine())


def test_a_report_names_this_machine() -> None:
    machine = this_machine()
    assert (machine.cpu, machine.cores) == (processor_name(), usable_cores())
    assert machine.memory_bytes > 1e8
