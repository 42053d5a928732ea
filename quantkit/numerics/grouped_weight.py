"""A linear layer's weight as integer codes with one scale and zero per output row and group of input columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GroupedWeight:
    """value[n, k] = (codes[n, k] - zeros[n, g_idx[k]]) * scales[n, g_idx[k]].

    codes (N, K) uint8; scales (N, G) float16; zeros (N, G) uint8; g_idx (K,) int64; bits 2, 3, 4 or 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    g_idx: torch.Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def dense(self) -> torch.Tensor:
        return self.steps().mul_(self.spread(self.scales))

    def steps(self) -> torch.Tensor:
        """Codes less zeros, (N, K) float32."""
        return self.codes.float().sub_(self.spread(self.zeros))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value of each row and group (N, G) for each of the group's columns, (N, K) float32."""
        return values.float().index_select(1, self.g_idx)

    def beside(self) -> torch.Tensor | None:
        """The order (K,) int64 in which each group's columns lie side by side, or None where they do already."""
        order = self.g_idx.argsort(stable=True)
        return None if self.g_idx[order].equal(self.g_idx) else order

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sums (N, G) of values (N, K) over each group's columns."""
        order = self.beside()
        values = values if order is None else values.index_select(1, order)
        return values.reshape(*self.scales.shape, -1).sum(-1)

    def split(self, rows: int | list[int]) -> list[GroupedWeight]:
        """Cut into layers of that many rows each (the last may have fewer), or of the given numbers of rows."""
        parts = zip(self.codes.split(rows), self.scales.split(rows), self.zeros.split(rows), strict=True)
        return [GroupedWeight(codes, scales, zeros, self.g_idx, self.bits) for codes, scales, zeros in parts]

    def with_rows(self, taken: torch.Tensor, other: GroupedWeight) -> GroupedWeight:
        """Those rows of `other`, a weight with the same groups, that `taken` (N,) bool says, and the rest as here."""
        import torch

        codes, scales, zeros = (
            torch.where(taken[:, None], theirs, ours)
            for theirs, ours in ((other.codes, self.codes), (other.scales, self.scales), (other.zeros, self.zeros))
        )
        return GroupedWeight(codes, scales, zeros, self.g_idx, self.bits)

    def cpu(self) -> GroupedWeight:
        return GroupedWeight(self.codes.cpu(), self.scales.cpu(), self.zeros.cpu(), self.g_idx.cpu(), self.bits)


def contiguous_groups(columns: int, group_size: int, device: torch.device | None = None) -> torch.Tensor:
    """(columns,) int64 group index of each input column on `device`, groups lying side by side."""
    import torch

    return torch.arange(columns, device=device) // group_size
