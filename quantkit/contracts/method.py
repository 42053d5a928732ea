"""What a method of quantizing must provide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.contracts.job import Job
from quantkit.errors import RecipeError, near_miss
from quantkit.recipe import Strict, parse

if TYPE_CHECKING:
    import torch

    from quantkit.artifact import Artifact
    from quantkit.checkpoints.rows import Rows
    from quantkit.numerics.grouped_weight import GroupedWeight


@dataclass(frozen=True)
class Shapes:
    """What a forecast needs of the largest decoder block, and of the tensors around the blocks.

    `stages` are (rows, columns) of linear layers, those that lie side by side in a module and have as many input
    columns as one.
    """

    block_parameters: int
    stages: tuple[tuple[int, int], ...]
    layers: tuple[tuple[int, int], ...]
    hidden: int
    vocabulary: int
    largest_outside: int
    item_bytes: int
    blocks: int = 1

    @property
    def widest(self) -> int:
        """Input columns of the widest layer."""
        return max((columns for _, columns in self.stages), default=0)

    @property
    def tallest(self) -> int:
        """Rows of the tallest stage."""
        return max((rows for rows, _ in self.stages), default=0)


@dataclass(frozen=True)
class Held:
    """What a method holds at its peak on a decoder block, for the forecast of memory.

    `streams` of activations (0: it does not calibrate; 1.25: a quarter of the sequences goes through the unquantized
    model, too); `paused`: all batches wait inside the block; `work`: bytes beside the block, its activations and the
    forward pass.
    """

    streams: float = 0
    paused: bool = False
    work: int = 0


@dataclass(frozen=True)
class Method:
    """A way to quantize.

    check(job) refuses what cannot work, before any long work, and returns the bytes that the artifact will need.
    write(job) writes the standard files into job.folder.
    read(artifact) yields (tensor name of the source, dense tensor, its Rows or GroupedWeight) from the artifact's own
    bytes.
    weight_files are glob patterns of the files that hold weights.
    usage is Markdown for the model card: how engines load the artifact in FOLDER. {file} becomes the first weight
    file's name, {transformers} the lines that load a folder with transformers.
    light(options) says whether it needs no torch, in this process or in transformers.
    held(job, shapes) says what memory the work on a decoder block takes; without it there is no forecast.
    """

    name: str
    summary: str
    reference: str
    bits: tuple[str, ...]
    default_bits: str
    Options: type[Strict]
    check: Callable[[Job], int]
    write: Callable[[Job], None]
    read: Callable[[Artifact], Iterator[tuple[str, torch.Tensor | GroupedWeight | Rows]]]
    engines: tuple[str, ...]
    weight_files: tuple[str, ...] = ("*.safetensors",)
    keeps_values: bool = True
    calibrated: Callable[[Any], bool] = lambda _options: False
    usage: str = ""
    light: Callable[[Any], bool] = lambda _options: False
    held: Callable[[Job, Shapes], Held] | None = None

    def parse_bits(self, bits: str | int | None) -> str:
        """Return the method's own spelling of `bits`; raises RecipeError."""
        if bits is None:
            return self.default_bits
        for known in self.bits:
            if known.lower() == str(bits).lower():
                return known
        raise RecipeError(
            f"the method {self.name} has no bits {str(bits)!r}.{near_miss(bits, self.bits)} "
            f"It has: {', '.join(self.bits)}."
        )

    def parse_options(self, options: dict[str, Any]) -> Any:
        """Return the method's options record; raises RecipeError."""
        return parse(self.Options, options, f"options of the method {self.name}")
