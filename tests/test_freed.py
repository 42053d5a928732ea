"""Freed memory goes back to the system while work goes on."""

import sys

import psutil
import pytest
import torch

from quantkit import freed
from quantkit.freed import Tide


def grown(pieces: int, size: int) -> list[torch.Tensor]:
    """Small tensors that stay, each above a large one that went: the C library keeps all the room between them."""
    small = []
    large = []
    for _ in range(pieces):
        large.append(torch.ones(size, dtype=torch.uint8))
        small.append(torch.ones(4096, dtype=torch.uint8))
    del large
    return small


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc gives freed memory back")
def test_a_process_that_has_grown_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process()
    freed.give_back_freed()
    before = process.memory_info().rss
    tide = Tide()
    kept = grown(1000, 100_000)
    high = process.memory_info().rss
    assert high > before + freed.GROWTH
    tide.look()
    low = process.memory_info().rss
    assert low < before + freed.GROWTH / 2
    assert len(kept) == 1000

    calls: list[int] = []
    monkeypatch.setattr(freed, "give_back_freed", lambda: calls.append(1))
    tide.look()
    assert not calls
