"""Second moments of the inputs of a block's linear layers, which methods use for rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from quantkit.errors import SourceError
from quantkit.models.unfuse import expert_of, same_of_every_expert
from quantkit.numerics.second_moments import Gram
from quantkit.system.ranks import Shards

FEW_TOKENS = 128  # an expert with fewer is calibrated on the inputs of all experts of its block

Gather = Callable[[str, torch.Tensor], None]  # called with a weight's name and its layer's inputs (tokens, K)


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers `names` with the same input, and its H = E[x x^T] (K, K) float32.

    cross is E[(exact - x) x^T] (K, K) float32 or None; exact is the input in the unquantized model. If it is
    known for some inputs only, `paired` is their E[x x^T].
    """

    names: list[str]
    hessian: torch.Tensor
    cross: torch.Tensor | None = None
    paired: torch.Tensor | None = None


@dataclass
class Moments:
    """The second moments of a block's inputs over the `all_tokens` tokens of all `shards`.

    `linears` are the block's linear layers by full weight name. If a layer that is not an expert gets twice `ample`
    tokens per column, every second token is used (0: always all). With `exact`, there are moments with the unquantized
    model's inputs, too. `few` is called with each layer of an expert that saw too few tokens; `tokens` counts the
    tokens of a group's first layer.
    """

    linears: dict[str, nn.Linear]
    device: torch.device
    shards: Shards
    all_tokens: int
    ample: int
    exact: bool
    few: Callable[[str], None]
    tokens: dict[str, int] = field(default_factory=dict)
    _of_all_experts: dict[str, Gram] = field(default_factory=dict)

    def empty(self, name: str, exact: bool = False) -> Gram:
        return Gram(self.linears[name].in_features, self.device, exact)

    def stride(self, name: str) -> int:
        """Return the stride of used tokens of a layer, if they are compared with the unquantized model's."""
        enough = 2 * self.ample * self.linears[name].in_features
        return 2 if self.ample and expert_of(name) is None and self.all_tokens >= enough else 1

    def group(self, names: list[str], gram: Gram, collect: Callable[[list[str], Gather], None]) -> LinearGroup:
        """Return the moments of layers with the same input; `gram` has this process's sums.

        An expert with too few tokens gets the moments of all experts' inputs in its block, which `collect` passes
        on. Raises SourceError if inputs are not finite.
        """
        self._join(gram)
        self.tokens[names[0]] = gram.tokens
        keep = expert_of(names[0]) is not None and gram.tokens < FEW_TOKENS
        if keep:
            self.few(names[0])
            gram = self._shared(same_of_every_expert(names[0], self.linears), collect)
        hessian = gram.mean(keep)
        if not bool(torch.isfinite(hessian).all()):
            raise SourceError(f"the inputs of {names[0]} are not finite on the calibration text; the model overflows")
        return LinearGroup(names, hessian, gram.cross(keep), gram.paired(keep))

    def _shared(self, names: list[str], collect: Callable[[list[str], Gather], None]) -> Gram:
        if names[0] not in self._of_all_experts:
            gram = self.empty(names[0], self.exact)
            collect(names, lambda _, x: gram.add(x, x if self.exact else None))
            self._join(gram)
            self._of_all_experts[names[0]] = gram
        return self._of_all_experts[names[0]]

    def _join(self, gram: Gram) -> None:
        if self.shards.size > 1:  # only for several, since a GPU would synchronize
            gram.join(self.shards.sum)
