"""Second moments of activations, E[x x^T] and E[y x^T], accumulated in float32; symmetric ones cost half."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantkit.numerics.matmul import fast_dtype

PANEL = 256  # columns of one product; only panels on and above the diagonal are computed
CHUNK = 1024  # tokens of one product
SLAB_ROWS = 128  # rows of a permutation at a time


class Gram:
    """Accumulates x^T x of inputs (tokens, K); `mean` returns H, float32 (K, K).

    With `cross`, it also accumulates (other - x)^T x over the first inputs, for which `other` (the undisturbed inputs)
    is given; `paired` is E[x x^T] over these inputs alone. bfloat16 inputs use the CPU's bfloat16 hardware if present,
    twice as fast as float32: each chunk is summed in float32 and rounded to bfloat16 once (relative error up to 2^-9,
    random), and chunks are summed in float32.
    """

    def __init__(self, columns: int, device: torch.device, cross: bool = False) -> None:
        self.tokens = 0
        self._cross_tokens = 0
        self._sum = torch.zeros(columns, columns, device=device)
        self._paired: torch.Tensor | None = None
        self._cross = torch.zeros(columns, columns, device=device) if cross else None
        # Inputs, and their counterparts `other`, until there are enough for one product.
        self._waiting: list[torch.Tensor] = []
        self._filled = 0

    def add(self, x: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Add inputs (tokens, K) of any float dtype, and their undisturbed versions `other` for the cross moment."""
        if self._cross is not None and other is None and self._paired is None:
            self._sum_up()
            self._paired = self._sum.clone()
        given = [x] if other is None or self._cross is None else [x, other]
        while len(self._waiting) < len(given):
            self._waiting.append(torch.empty(CHUNK, x.shape[1], dtype=fast_dtype(x), device=x.device))
        start = 0
        while start < len(x):
            count = min(CHUNK - self._filled, len(x) - start)
            for buffer, new in zip(self._waiting, given, strict=False):
                buffer[self._filled : self._filled + count] = new[start : start + count]
            start, self._filled = start + count, self._filled + count
            if self._filled == CHUNK:
                self._sum_up()
        self.tokens += len(x)
        self._cross_tokens += len(x) if other is not None else 0

    def join(self, sum_over: Callable[..., None]) -> None:
        """Sum over all ranks; `sum_over(*tensors)` sums each tensor over ranks in place."""
        self._sum_up()
        apart = self._paired is not None
        numbers = torch.tensor([self.tokens, self._cross_tokens, apart], dtype=torch.float64, device=self._sum.device)
        sum_over(numbers)
        if self._cross is not None and numbers[2] and self._paired is None:
            self._paired = self._sum.clone()  # ranks differ: here all inputs had an `other`
        self.tokens, self._cross_tokens = int(numbers[0]), int(numbers[1])
        sum_over(*(sums for sums in (self._sum, self._cross, self._paired) if sums is not None))

    def _sum_up(self) -> None:
        if not self._filled:
            return
        x, *others = [buffer[: self._filled] for buffer in self._waiting]
        columns = x.shape[1]
        for left in range(0, columns, PANEL):
            panel = slice(left, min(left + PANEL, columns))
            self._sum[panel, left:] += x[:, panel].T @ x[:, left:]
            if self._cross is not None and self._paired is None:
                self._cross[panel] += (others[0][:, panel] - x[:, panel]).T @ x
        self._filled = 0

    def mean(self, keep: bool = False) -> torch.Tensor:
        """Return H = E[x x^T], float32 (K, K); zeros without inputs. Unless `keep`, the sum's buffer is reused."""
        self._sum_up()
        return _whole(self._sum.clone() if keep else self._sum, self.tokens)

    def cross(self, keep: bool = False) -> torch.Tensor | None:
        """Return C = E[(other - x) x^T], float32 (K, K), or None. Unless `keep`, the sum's buffer is reused."""
        if self._cross is None:
            return None
        self._sum_up()
        return (self._cross.clone() if keep else self._cross).div_(max(self._cross_tokens, 1))

    def paired(self, keep: bool = False) -> torch.Tensor | None:
        """Return E[x x^T] over the inputs of `cross`, or None if these are all. `keep` as in `mean`."""
        if self._paired is None:
            return None
        return _whole(self._paired.clone() if keep else self._paired, self._cross_tokens)


def _whole(sums: torch.Tensor, tokens: int) -> torch.Tensor:
    """Divide the sums by `tokens` in place, and fill the lower triangle, which was not computed, by symmetry."""
    sums.div_(max(tokens, 1))
    for left in range(0, len(sums), PANEL):
        inside = sums[left : left + PANEL, left : left + PANEL]
        inside.copy_(torch.triu(inside) + torch.triu(inside, 1).T)
        sums[left + PANEL :, left : left + PANEL] = sums[left : left + PANEL, left + PANEL :].T
    return sums


def permuted(matrix: torch.Tensor, order: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return matrix[order[i], order[j]] (K, K), for `order` int64 (K,), computed in slabs of rows."""
    turned = torch.empty(matrix.shape, dtype=dtype or matrix.dtype, device=matrix.device)
    for to, rows in zip(turned.split(SLAB_ROWS), order.split(SLAB_ROWS), strict=True):
        to.copy_(matrix.index_select(0, rows).index_select(1, order))
    return turned
