"""While large modules are imported nobody looks for garbage, and afterwards as before."""

import gc
from contextlib import suppress

import pytest

from quantkit.contracts import registry
from quantkit.models import config
from quantkit.system.modules import importing


def test_collection_is_off_meanwhile_and_on_afterwards() -> None:
    assert gc.isenabled()
    with suppress(KeyError), importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_methods_and_configurations_are_imported_so(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for place, name in ((registry.importlib, "import_module"), (config, "refuse_config")):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, real=real: states.append(gc.isenabled()) or real(*given))
    registry._record.__wrapped__("methods", "METHOD", "rtn")
    config.open_config({"model_type": "llama"})
    assert states
    assert not any(states)
