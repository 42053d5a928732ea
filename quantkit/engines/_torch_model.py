"""A LoadedModel that wraps a transformers model, and linear layers that compute with 4-bit or 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from quantkit.contracts.engine import Window, alike
from quantkit.contracts.format import KvScales
from quantkit.models.architectures import running
from quantkit.models.attention import change_keys_and_values
from quantkit.models.output_head import OutputHead, last_states
from quantkit.numerics.matmul import product, products_everywhere
from quantkit.numerics.quantized_weight import FLOAT8_TOP, GroupedWeight, ScaledWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

EVALUATED_ROWS = 8  # most rows on the kernel in an evaluation
GENERATED_ROWS = 64
KERNEL_GROUPS = (256, 128, 64, 32)
KERNEL_STEP = 16  # the number of output features is a multiple of it; others are padded
INT4_SLAB = 1 << 18  # elements dequantized at a time, so that they stay in the processor's cache
SCALED_SLAB = 1 << 20  # elements of the weight converted at a time


def kernel_group(weight: GroupedWeight) -> int:
    """Return the largest group size of the int4 kernel that divides the weight's groups.

    Return 0 if the kernel cannot run the layer: it needs at most 4 bits and equal groups of a multiple of 32 columns.
    """
    k, groups = weight.shape[1], weight.scales.shape[1]
    sizes = torch.bincount(weight.g_idx, minlength=groups)
    if weight.bits > 4 or k % groups or not bool((sizes == k // groups).all()):
        return 0
    return next((size for size in KERNEL_GROUPS if (k // groups) % size == 0), 0)


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Let the model's int4 layers use the kernel for more rows, and so for short prompts, in this context."""
    layers = [module for module in model.modules() if isinstance(module, Int4Linear)]
    for layer in layers:
        layer.kernel_rows = GENERATED_ROWS
    try:
        yield
    finally:
        for layer in layers:
            layer.kernel_rows = EVALUATED_ROWS


class Int4Linear(nn.Module):
    """y = x W^T + b for a GroupedWeight W (N, K): torch's int4 CPU kernel for few rows of x, dense for many.

    Kernel: torch.ops.aten._weight_int4pack_mm_for_cpu; value = (code - 8) * scale + zero, with (scale, zero) in
    bfloat16. More rows use the dequantized weight: in evaluations from nine rows on, because it is exact; in generation
    when it is faster. Uses 1 byte per weight, half of it for the kernel's copy of the codes.
    """

    def __init__(self, weight: GroupedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, k = weight.shape
        self.group = kernel_group(weight)
        repeats = k // weight.scales.shape[1] // self.group
        padding = -self.rows % KERNEL_STEP
        self.order = weight.group_order()
        codes = weight.codes if self.order is None else weight.codes[:, self.order]
        codes = nn.functional.pad(codes, (0, 0, 0, padding))
        self.codes = (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
        scales = weight.scales.to(torch.float32).repeat_interleave(repeats, 1)
        shift = (8 - weight.zeros.to(torch.float32).repeat_interleave(repeats, 1)) * scales
        self.scales, self.shift = (nn.functional.pad(part, (0, 0, 0, padding)) for part in (scales, shift))
        self.scale_zero = torch.stack([self.scales.T, self.shift.T], -1).to(dtype).contiguous()
        self.register_parameter("bias", bias)
        self.dtype, self.kernel_rows = dtype, EVALUATED_ROWS

    def dense(self) -> torch.Tensor:
        """Return the dequantized W (N, K) in the layer's dtype, with columns in the kernel's order."""
        width = 2 * self.codes.shape[1]
        weight = torch.empty(self.rows, width, dtype=self.dtype)
        step = max(1, INT4_SLAB // width)
        for start in range(0, self.rows, step):
            rows = slice(start, min(start + step, self.rows))
            pairs = self.codes[rows]
            values = torch.stack([pairs & 15, pairs >> 4], -1).view(len(pairs), -1, self.group).to(torch.float32)
            values.sub_(8).mul_(self.scales[rows, :, None]).add_(self.shift[rows, :, None])
            weight[rows] = values.view(len(pairs), width)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y (..., N) for x (..., K)."""
        flat = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            flat = flat[:, self.order]
        if len(flat) <= self.kernel_rows:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat.contiguous(), self.packed, self.group, self.scale_zero)
            y = y[:, : self.rows]
        else:
            y = product(flat, self.dense())
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


class ScaledLinear(nn.Module):
    """y = round(x) W^T + b in float32 for a ScaledWeight W (N, K), stored in one byte per weight.

    Inputs are rounded as `weight.inputs` describes and multiplied by the dequantized weight, some rows of W at a time.
    vLLM's kernels sum the same products of codes, exactly or in float32.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: ScaledWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.dtype = weight.inputs, dtype
        self.slabs = weight.split(max(1, SCALED_SLAB // weight.shape[1]))
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y (..., N) for x (..., K)."""
        wide = x.float() if self.inputs is None else self.inputs.rounded(x)
        y = torch.cat([nn.functional.linear(wide, slab.dense()) for slab in self.slabs], -1)
        y = y if self.bias is None else y + self.bias.float()
        return y.to(self.dtype)


ROWS = 256  # positions that go through the output layer together
PIECE_ROWS = 32  # positions of a piece, which fits in the processor's cache


class TorchModel:
    """A causal language model of transformers as a LoadedModel."""

    def __init__(self, model: PreTrainedModel, dtype: str, notes: tuple[str, ...] = ()) -> None:
        self._model, self.dtype, self.notes = model, dtype, notes

    def hidden(self, windows: Sequence[Window]) -> Iterator[tuple[list[Window], torch.Tensor]]:
        """Yield (windows of a batch, final hidden states (B, T, D)) in order; the states enter the output layer."""
        for batch in alike(windows):
            with torch.inference_mode(), products_everywhere():
                hidden = last_states(self._model, self._here(np.stack([w.ids for w in batch])))
            yield batch, hidden

    def states(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield (n, D) for each window, in order: the output layer's inputs at the scored positions."""
        for batch, hidden in self.hidden(windows):
            for window, states in zip(batch, hidden, strict=True):
                yield states[window.scored]

    def head(self) -> OutputHead:
        """Return the model's output layer."""
        return OutputHead(self._model)

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (n, V) of the scored positions in order, at most `PIECE_ROWS` positions at a time.

        The output layer is loaded after the first windows have passed through all blocks.
        """
        head: OutputHead | None = None
        for states in self.states(windows):
            head = head or self.head()
            for part in states.split(ROWS):
                with torch.inference_mode(), products_everywhere():
                    logits = head.logits(part)
                for piece in logits.split(PIECE_ROWS):
                    yield piece.to("cpu", torch.float32).numpy()
                del logits, piece  # before the next ones are made

    def _here(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids).to(self._model.device)

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def to(self, dtype: str) -> None:
        self._model.to(getattr(torch, dtype))
        self.dtype = dtype

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`, also past EOS, computed by transformers' modules."""
        from transformers import DynamicCache

        with torch.inference_mode(), generating(self._model):
            cache = DynamicCache(config=self._model.config)
            step = self._here(np.array([ids]))
            for _ in range(count):
                with running(self._model.config, "the generation of tokens"):
                    out = self._model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                step = out[:, -1:].argmax(-1)
                yield int(step)


def round_keys_and_values(model: PreTrainedModel, scales: KvScales) -> None:
    """Round keys and values to FP8 (E4M3) in attention, as vLLM's `--kv-cache-dtype fp8` does.

    vLLM divides by the layer's scale, 1 if it has none, and clamps at the largest code, 448.
    """

    def narrow(states: torch.Tensor, scale: float) -> torch.Tensor:
        codes = (states.float() / scale).clamp(-FLOAT8_TOP, FLOAT8_TOP).to(torch.float8_e4m3fn)
        return (codes.float() * scale).to(states.dtype)

    def rounded(attention: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys, of_values = scales.get(getattr(attention, "layer_idx", -1), (1.0, 1.0))
        return narrow(key, of_keys), narrow(value, of_values)

    change_keys_and_values(model, rounded)
