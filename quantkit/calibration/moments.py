"""Second moments E[x x^T] of the inputs of a block's linear layers, from which methods compute their rounding."""

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
    """Linear layers `names` that share one input x, with `hessian` H = E[x x^T], (K, K) float32.

    `cross` is E[(exact - x) x^T], (K, K) float32, where exact is the same input in the unquantized model, or None. If
    exact is known for some tokens only, `paired` is E[x x^T] over these tokens.
    """

    names: list[str]
    hessian: torch.Tensor
    cross: torch.Tensor | None = None
    paired: torch.Tensor | None = None


@dataclass
class Moments:
    """Second moments of a block's inputs over the `all_tokens` tokens of all processes in `shards`.

    `linears`: the block's linear layers by full weight name. If a layer outside experts gets at least 2 * `ample`
    tokens per column, only every second token is used (0: always all). `exact`: also compute moments with the
    unquantized model's inputs. `few` is called with the name of each expert's layer that saw too few tokens; `tokens`:
    number of tokens by the first layer of each group.
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
        """Return 2 if every second token of a layer suffices (see `ample`), else 1."""
        enough = 2 * self.ample * self.linears[name].in_features
        return 2 if self.ample and expert_of(name) is None and self.all_tokens >= enough else 1

    def group(self, names: list[str], gram: Gram, collect: Callable[[list[str], Gather], None]) -> LinearGroup:
        """Return the moments of the layers `names`, which share an input; `gram` has this process's sums.

        An expert with too few tokens gets the moments of all experts' inputs in its block, gathered with `collect`.
        Raises SourceError if inputs are not finite.
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
