"""Gradients by what each block gets of a table with a row for each token, beside the hidden states.

Gemma 3n and 4 (transformers: models/gemma3n and models/gemma4) look a token up in a table of all blocks, multiply what
stands there, add a projection of the token's embedding, and call each block with its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.calibration.flow.store import Store


@dataclass(frozen=True)
class InputTable:
    """The table `name` of so many `rows`: each has `width` values for every block. `factor` multiplies a value."""

    name: str
    rows: int
    width: int
    factor: float

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The row of each token; one behind the table takes the first, as in transformers."""
        return torch.where(ids < self.rows, ids, 0)


def input_table(model: Any) -> InputTable | None:
    """That of a model, or None where its blocks get nothing of the kind."""
    width = int(getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0) or 0)
    found = [(name, part) for name, part in model.named_modules() if name.endswith("embed_tokens_per_layer")]
    if not width or not found:
        return None
    [(name, table)] = found
    return InputTable(f"{name}.weight", len(table.weight), width, math.sqrt(width / 2))


@contextmanager
def as_leaves(block: nn.Module, width: int, outputs: dict[str, torch.Tensor], name: str) -> Iterator[None]:
    """While it lasts, what the block gets of a table, (B, T, width), is a leaf of the graph, and put into `outputs`."""

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim != 3 or value.shape[-1] != width:
            return value
        outputs[name] = value.detach().requires_grad_()
        return outputs[name]

    def hook(
        _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, *others = args
        return (hidden, *map(given, others)), {key: given(value) for key, value in kwargs.items()}

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class InputSlopes:
    """The gradients of all tokens by what each block gets of a table, in a file at `path` or in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._blocks: dict[int, Store] = {}

    def put(self, index: int, slopes: torch.Tensor) -> None:
        """Those by what block `index` gets, (tokens, width)."""
        self._blocks[index] = Store(len(slopes), (*slopes.shape[1:],), slopes.dtype, self._path)
        self._blocks[index].write(0, slopes)

    def of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Those of some tokens by a whole row of the table, (tokens, blocks * width)."""
        return torch.cat([self._blocks[index].select(tokens) for index in sorted(self._blocks)], -1)

    def close(self) -> None:
        """Let go of the files."""
        for store in self._blocks.values():
            store.close()
