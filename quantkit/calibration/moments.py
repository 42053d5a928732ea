"""Second moments of the inputs of a block's linear layers, as methods round by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from quantkit.errors import SourceError
from quantkit.models.unfuse import expert_of, same_of_every_expert
from quantkit.numerics.second_moments import Gram
from quantkit.system.ranks import Shards

FEW_TOKENS = 128  # an expert that saw fewer is calibrated on what all experts of its block saw

Gather = Callable[[str, torch.Tensor], None]  # takes a weight's name and inputs (tokens, K) of its layer


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers `names` that get the same input: its H = E[x x^T] (K, K) float32.

    cross is E[(exact - x) x^T] (K, K) float32, exact being the input in the unquantized model, or None. Where it is
    known for some inputs only, `paired` is the E[x x^T] of those.
    """

    names: list[str]
    hessian: torch.Tensor
    cross: torch.Tensor | None = None
    paired: torch.Tensor | None = None


@dataclass
class Moments:
    """The second moments of a block's inputs, of the tokens of all `shards`: `all_tokens` of them.

    `linears` are the block's linear layers by full weight name. Where twice `ample` tokens a column come to a layer
    that is no expert, every second one counts (0: always all). With `exact` there are moments with the unquantized
    model's inputs, too. `few` is called with each layer of an expert that saw too few tokens; `tokens` counts what
    came to the first layer of a group.
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
        """Every how many tokens of a layer count, where they are held against those of the unquantized model."""
        enough = 2 * self.ample * self.linears[name].in_features
        return 2 if self.ample and expert_of(name) is None and self.all_tokens >= enough else 1

    def group(self, names: list[str], gram: Gram, collect: Callable[[list[str], Gather], None]) -> LinearGroup:
        """The moments of layers that get the same input, of which `gram` has the sums of this process.

        Those of an expert that saw too few tokens are of the inputs of all experts of its block, which `collect` hands
        on. Raises SourceError where the inputs are not finite.
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
        if self.shards.size > 1:  # a GPU would wait for it
            gram.join(self.shards.sum)
