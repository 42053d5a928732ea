"""A model computed block by block as a LoadedModel: logits of windows, with one decoder block's weights in memory.

Every block is filled with the same values in the same modules as our reader's whole model, and windows go through them
in the same batches, so that the figures are the same. The output layer is held as it is stored and widened in pieces.
It generates no tokens: each would take all blocks from the disk.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from quantkit.calibration.passes import Values, WindowWalk
from quantkit.checkpoints.rows import Rows
from quantkit.contracts.engine import LoadSpec
from quantkit.engines._torch_model import PIECE_ROWS, ROWS
from quantkit.errors import EngineError
from quantkit.models.output_head import LastStates, NarrowOutput, OutputHead
from quantkit.models.skeleton import Skeleton, tables, weight_name
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.matmul import products_everywhere
from quantkit.numerics.scaled_weight import ScaledWeight
from quantkit.system.memory import trim_heap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit.contracts.windows import Window

NARROW = (torch.float16, torch.bfloat16)
PIECE = 1 << 23  # values of the output layer that are in float32 at a time while it is read


class Parts(Values, Protocol):
    """The values of a model by the names of its skeleton's parameters, and how they are put into its modules."""

    def place(self, module: Any, prefix: str, name: str, dtype: torch.dtype) -> None:
        """Put the parameter `prefix` + `name` into `module`, where it is called `name`."""

    def stored(self, parameter: str) -> torch.Tensor | Rows | GroupedWeight | ScaledWeight:
        """One that lies outside the blocks, as it is read."""


class WalkedModel:
    """The model of `skeleton`, whose values are `parts`, in `dtype`."""

    def __init__(self, skeleton: Skeleton, parts: Parts, dtype: str, spec: LoadSpec, notes: tuple[str, ...]) -> None:
        self._skeleton, self._parts, self._spec = skeleton, parts, spec
        self.dtype, self.notes = dtype, notes

    def states(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield (n, D) of each window in order: what goes into the output layer at its judged positions."""
        device, dtype = torch.device(self._spec.device), getattr(torch, self.dtype)
        walk = WindowWalk(
            self._skeleton, self._parts, self._block, device, dtype, self._spec.offload_bytes, self._spec.progress
        )
        last = LastStates(self._behind(), self._skeleton.blocks_path)
        for batch, outputs in walk.outputs(windows):
            with torch.inference_mode(), products_everywhere():
                hidden = last.states(outputs)
            for window, states in zip(batch, hidden, strict=True):
                yield states[window.first : window.first + len(window.targets)]

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of the judged positions in order, (n, V) with at most `PIECE_ROWS` positions each.

        The output layer comes into memory when the first windows have gone through all blocks.
        """
        head: OutputHead | None = None
        for states in self.states(windows):
            head = head or self._head()
            for part in states.split(ROWS):
                with torch.inference_mode(), products_everywhere():
                    logits = head.logits(part)
                for piece in logits.split(PIECE_ROWS):
                    yield piece.to("cpu", torch.float32).numpy()
                del logits, piece  # not beside the next ones

    @staticmethod
    def set_threads(_model: object, threads: int) -> None:
        """Have torch compute on so many threads from now on."""
        torch.set_num_threads(threads)

    def to(self, dtype: str) -> None:
        """Change the type that the model computes in."""
        self._skeleton.model.to(getattr(torch, dtype))  # its buffers
        self.dtype = dtype

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Raise EngineError: see above."""
        raise EngineError("a model that is computed block by block generates no tokens. Leave --walk out.")

    @contextmanager
    def _block(self, index: int) -> Iterator[nn.Module]:
        prefix = self._skeleton.block_prefix(index)
        module: nn.Module = copy.deepcopy(self._skeleton.blocks[index])
        for name, _ in list(module.named_parameters()):
            self._parts.place(module, prefix, name, getattr(torch, self.dtype))
        yield module.to(self._spec.device)  # its buffers

    def _behind(self) -> Any:
        """The model without its blocks', its embeddings' and its output layer's weights."""
        model = copy.deepcopy(self._skeleton.model)
        ends = model.get_input_embeddings(), model.get_output_embeddings(), *tables(model).values()
        without = [value for layer in ends for value in layer.parameters()]
        inside = f"{self._skeleton.blocks_path}."
        for name, parameter in list(model.named_parameters()):
            if not name.startswith(inside) and not any(parameter is value for value in without):
                self._parts.place(model, "", name, getattr(torch, self.dtype))
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(self._spec.device))
        return model

    def _head(self) -> OutputHead:
        dtype, device = getattr(torch, self.dtype), self._spec.device
        model = self._behind()
        layer = model.get_output_embeddings()
        weight = _narrow(self._parts.stored(weight_name(model, layer)), dtype).to(device)
        bias = None
        if layer.bias is not None:
            bias = self._parts.tensor(weight_name(model, layer, "bias")).to(device, dtype)
        model.set_output_embeddings(NarrowOutput(weight, bias))
        trim_heap()
        return OutputHead(model)


def _narrow(stored: torch.Tensor | Rows | GroupedWeight | ScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    """A weight in the narrowest type that gives its values in `dtype`."""
    if isinstance(stored, GroupedWeight | ScaledWeight):
        return stored.dense().to(dtype)
    if isinstance(stored, Rows):
        weight = torch.empty(stored.shape, dtype=dtype)
        for start, values in stored.pieces(PIECE):
            weight[start : start + len(values)] = torch.from_numpy(values)
        return weight
    return stored if stored.dtype in NARROW and dtype == torch.float32 else stored.to(dtype)
