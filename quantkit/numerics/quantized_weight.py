"""Quantized weights of a linear layer, and the rounding of activations by engines.

A GroupedWeight has integer codes with a scale and zero point per output row and group of input columns. A ScaledWeight
has scaled values: int8; float8_e4m3fn (Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433); or E2M1
4-bit floats (OCP Microscaling Formats 1.0, section 5.3.3) with E4M3 scales and a global divisor (NVFP4), or with E8M0
power-of-two scales (MXFP4, section 5.4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GroupedWeight:
    """A weight of integer codes: value[n, k] = (codes[n, k] - zeros[n, g_idx[k]]) * scales[n, g_idx[k]].

    codes: uint8 (N, K); scales: float16 (N, G); zeros: uint8 (N, G); g_idx: int64 (K,); bits: 2, 3, 4 or 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    g_idx: torch.Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    @property
    def factors(self) -> torch.Tensor:
        return self.scales.float()

    def dense(self) -> torch.Tensor:
        return self.values(self.codes.float(), self.scales)

    def steps(self) -> torch.Tensor:
        """Return codes minus zeros, float32 (N, K)."""
        return self.codes.float().sub_(self.spread(self.zeros))

    def values(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return codes.sub_(self.spread(self.zeros)).mul_(self.spread(factors))

    def positions(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / self.spread(self.scales) + self.spread(self.zeros)

    def code_steps(self) -> torch.Tensor:
        return self.spread(self.scales)

    def factor_slopes(self, gradient: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return self.sums(codes.sub_(self.spread(self.zeros)).mul_(gradient))

    def learned(self, codes: torch.Tensor, factors: torch.Tensor) -> GroupedWeight:
        import torch

        return replace(self, codes=codes, scales=factors.to(torch.float16))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Expand per-group values (N, G) to columns, float32 (N, K)."""
        return values.float().index_select(1, self.g_idx)

    def group_order(self) -> torch.Tensor | None:
        """Return a permutation, int64 (K,), that makes groups contiguous, or None if they already are."""
        order = self.g_idx.argsort(stable=True)
        return None if self.g_idx[order].equal(self.g_idx) else order

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values (N, K) over each group's columns: (N, G)."""
        order = self.group_order()
        values = values if order is None else values.index_select(1, order)
        return values.reshape(*self.scales.shape, -1).sum(-1)

    def split(self, rows: int | list[int]) -> list[GroupedWeight]:
        """Split by rows: into pieces of `rows` rows (the last may be smaller), or of the listed sizes."""
        parts = zip(self.codes.split(rows), self.scales.split(rows), self.zeros.split(rows), strict=True)
        return [GroupedWeight(codes, scales, zeros, self.g_idx, self.bits) for codes, scales, zeros in parts]

    def with_rows(self, taken: torch.Tensor, other: GroupedWeight) -> GroupedWeight:
        """Return a copy with the rows marked in `taken`, bool (N,), taken from `other`, which has the same groups."""
        import torch

        codes, scales, zeros = (
            torch.where(taken[:, None], theirs, ours)
            for theirs, ours in ((other.codes, self.codes), (other.scales, self.scales), (other.zeros, self.zeros))
        )
        return GroupedWeight(codes, scales, zeros, self.g_idx, self.bits)

    def cpu(self) -> GroupedWeight:
        return GroupedWeight(self.codes.cpu(), self.scales.cpu(), self.zeros.cpu(), self.g_idx.cpu(), self.bits)


def contiguous_groups(columns: int, group_size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the group index of each column, int64 (columns,), for contiguous groups."""
    import torch

    return torch.arange(columns, device=device) // group_size


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of codes 0 to 7; codes 8 to 15 are their negatives
E2M1_CODES = (*E2M1, *(-value for value in E2M1))
E8M0_BIAS = 127
INT8_TOP, FLOAT8_TOP, FLOAT4_TOP = 127.0, 448.0, 6.0
# Smallest scale in vLLM's kernel for dynamic FP8.
LEAST_FLOAT8_SCALE = 1 / (FLOAT8_TOP * 512)


@dataclass(frozen=True)
class InputRounding:
    """Dynamic rounding of activations to 8 bits, scaled by the maximum of each token or `group` of its columns.

    `kind` is ``int8`` (scale = maximum / 127) or ``float8`` (maximum / 448), as in vLLM's kernels.
    """

    kind: str
    group: int | None = None

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs (..., K) after rounding as the kernel does (codes times scales), float32."""
        import torch

        parts = x.to(torch.float32)
        if self.group is not None:
            parts = parts.unflatten(-1, (-1, self.group))
        largest = parts.abs().amax(-1, keepdim=True)
        if self.kind == "int8":
            scale = largest / INT8_TOP
            codes = torch.round(parts / torch.where(scale > 0, scale, 1)).clamp_(-INT8_TOP - 1, INT8_TOP)
        else:
            scale = (largest / FLOAT8_TOP).clamp_(min=LEAST_FLOAT8_SCALE)
            codes = (parts / scale).clamp_(-FLOAT8_TOP, FLOAT8_TOP).to(torch.float8_e4m3fn).to(torch.float32)
        values = codes.mul_(scale)
        return values if self.group is None else values.flatten(-2)

    @property
    def words(self) -> str:
        """Return a short description of the rounding."""
        bits = "8-bit integers" if self.kind == "int8" else "8-bit floats"
        each = "token" if self.group is None else f"token and {self.group} columns"
        return f"{bits} with a scale for each {each}"


@dataclass(frozen=True)
class ScaledWeight:
    """A weight of scaled values: value[n, k] = values[n, k] * scales[n // rows, k // columns] / divisor.

    `block` is (rows, columns). values (N, K): int8, float8_e4m3fn, or uint8 codes of E2M1. scales (ceil(N / rows),
    ceil(K / columns)): bfloat16, float16 or float32; float8_e4m3fn with divisor float32 (1,); uint8 E8M0 exponents.
    `inputs`: how engines round activations.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    divisor: torch.Tensor | None = None
    inputs: InputRounding | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.values.shape[0]), int(self.values.shape[1])

    def dense(self) -> torch.Tensor:
        rows, columns = self.block
        factors = self.factors()
        if rows > 1 and len(factors) > 1:
            factors = factors.repeat_interleave(rows, 0)[: self.shape[0]]
        if factors.shape[1] > 1:
            factors = factors.repeat_interleave(columns, 1)[:, : self.shape[1]]
        return self.steps().mul_(factors)

    def steps(self) -> torch.Tensor:
        """Return the values without scales, float32 (N, K)."""
        import torch

        if self.values.dtype != torch.uint8:
            return self.values.to(torch.float32)
        table = torch.tensor(E2M1_CODES, device=self.values.device)
        return table[self.values.to(torch.int32)]

    def factors(self) -> torch.Tensor:
        """Return scales / divisor, float32."""
        import torch

        if self.scales.dtype == torch.uint8:
            exponents = self.scales.to(torch.int32) - E8M0_BIAS
            return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        factors = self.scales.to(torch.float32)
        return factors if self.divisor is None else factors / self.divisor

    def split(self, rows: int | list[int]) -> list[ScaledWeight]:
        """Split by rows: into pieces of about `rows` rows, in whole blocks, or of the listed sizes.

        Raises ValueError if a size cuts through a block.
        """
        high, total = self.block[0], self.shape[0]
        whole = len(self.scales) == 1
        if isinstance(rows, int):
            step = max(1, rows) if whole else max(1, rows // high) * high
            rows = [min(step, total - start) for start in range(0, total, step)]
        parts, start = [], 0
        for count in rows:
            if not whole and start % high:
                raise ValueError(f"row {start} is inside a block of {high} rows")
            scales = self.scales if whole else self.scales[start // high : -(-(start + count) // high)]
            block = (max(1, min(high, count)), self.block[1]) if whole else self.block
            parts.append(replace(self, values=self.values[start : start + count], scales=scales, block=block))
            start += count
        return parts

    def to(self, device: torch.device | str) -> ScaledWeight:
        divisor = None if self.divisor is None else self.divisor.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), divisor=divisor)

    def cpu(self) -> ScaledWeight:
        return self.to("cpu")
