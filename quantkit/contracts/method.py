"""What a method of quantizing must provide, and the Job that it is given: one conversion that was asked for.

A Job does not change while it runs. What the work finds out goes into the Findings of its Run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quantkit.artifact import CalibrationEntry
from quantkit.contracts.format import Content, Format, Layout, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.contracts.shared_writer import following, leading
from quantkit.errors import RecipeError, UnsupportedError, near_miss
from quantkit.models.source import Source
from quantkit.recipe import ConvertRecipe, Strict, parse
from quantkit.system.ranks import Shards, joined_shards

if TYPE_CHECKING:
    import numpy as np

    from quantkit.models.skeleton import Skeleton


@dataclass(frozen=True)
class Shapes:
    """What a forecast needs of the largest decoder block, and of the tensors around the blocks.

    `stages` are (rows, columns) of linear layers, those that lie side by side in a module and have as many input
    columns as one. `states` hidden states of a token flow side by side, and with them values `of_text` that blocks are
    called with and values that blocks have `shared`. `reading` is what memory a tensor of a block takes while it is
    read (`Source.reading_bytes`), `reading_outside` one that lies in none.
    """

    block_parameters: int
    stages: tuple[tuple[int, int], ...]
    layers: tuple[tuple[int, int], ...]
    hidden: int
    vocabulary: int
    largest_outside: int
    item_bytes: int
    blocks: int = 1
    states: int = 1
    of_text: int = 0
    shared: int = 0
    reading: int = 0
    reading_outside: int = 0

    @property
    def widest(self) -> int:
        """Input columns of the widest layer."""
        return max((columns for _, columns in self.stages), default=0)

    @property
    def tallest(self) -> int:
        """Rows of the tallest stage."""
        return max((rows for rows, _ in self.stages), default=0)

    @property
    def largest_layer(self) -> int:
        """Values of the largest linear layer."""
        return max((rows * columns for rows, columns in self.layers), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """What a method holds at its peak on a decoder block, for the forecast of memory.

    `streams` of activations (0: it does not calibrate; 1.25: a quarter of the sequences goes through the unquantized
    model, too); `suspended`: all batches wait inside the block; `work`: bytes beside the block, its activations and
    the forward pass; `further`: phases of its own, in words, and their bytes.
    """

    streams: float = 0
    suspended: bool = False
    work: int = 0
    further: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BitSearch:
    """What a method chooses by long work before it writes, such as the bits of each layer.

    choose(job, run) gives the job with what was chosen in its plan, and keeps it among the findings, so that unfinished
    work goes on with it. memory(job, shapes) names phases of it with the bytes that they hold.
    """

    choose: Callable[[Job, Run], Job]
    memory: Callable[[Job, Shapes], Mapping[str, int]]


@dataclass(frozen=True)
class Method:
    """A way to quantize. It knows no file: what it makes goes to the job's format.

    Every format that holds what it `makes` can be written, `default_format` where none is asked for. With some bits it
    makes something else, or has another default format: `other_kinds` gives both.
    refuse_config(config) gives the reason why no model of this config.json can be taken, where the file alone tells it,
    without torch or transformers. check(job) refuses what cannot work, before any long work.
    write(job, run) makes the tensors and gives them to the format's writer, which writes into run.folder.
    weights_comparable: the stored values are near the source's, tensor by tensor. calibrated(options) says whether it
    needs calibration text, needs_torch(options) whether it needs torch, in this process or in transformers.
    peak_memory(job, shapes) says what memory the work on a decoder block takes; without it there is no forecast.
    refuse_ranks(job) gives the reason why several processes cannot share the work; None: they can.
    bits_of(source) gives the bits that the source decides where the user does not say any; None: the default.
    `bit_search` is done before `write`; None: nothing is left to be chosen after the check.
    `records` are what manifests have among the options and users cannot set: constants that decide bytes.
    """

    name: str
    summary: str
    reference: str
    bits: tuple[str, ...]
    default_bits: str
    Options: type[Strict]
    makes: Content
    default_format: str
    check: Callable[[Job], Checked]
    write: Callable[[Job, Run], None]
    weights_comparable: bool = True
    calibrated: Callable[[Any], bool] = lambda _options: False
    needs_torch: Callable[[Any], bool] = lambda _options: True
    peak_memory: Callable[[Job, Shapes], PeakMemory] | None = None
    refuse_config: Callable[[Mapping[str, Any]], str | None] = lambda _config: None
    other_kinds: Mapping[str, tuple[Content, str]] = field(default_factory=dict)
    bits_of: Callable[[Source], str | None] = lambda _source: None
    refuse_ranks: Callable[[Job], str | None] = lambda _job: "it is done by one"
    bit_search: BitSearch | None = None
    records: tuple[str, ...] = ()

    def kind_of(self, bits: str | None) -> tuple[Content, str]:
        """What it makes with these bits (None: the default), and the default format for that."""
        return self.other_kinds.get(bits or self.default_bits, (self.makes, self.default_format))

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


@dataclass(frozen=True)
class CalibrationTokens:
    """The token ids (S, T) int64 that a model is calibrated on, and what the manifest says of them."""

    ids: np.ndarray
    entry: CalibrationEntry

    @cached_property
    def digest(self) -> str:
        """sha256 of the ids."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()


BATCH_TOKENS = 1024  # on the CPU
FEEDBACK_RECORD = (
    "error_feedback"  # what manifests of methods that round so, and leave no option of it, call its settings
)


@dataclass(frozen=True)
class Job:
    """A recipe with its opened source, its method and the format to write.

    `options` is the method's record. `device` is torch's name of where the maths runs, `batch_tokens` of calibration
    go through a block together, activations beyond `offload_bytes` go to files, and the process may take `max_memory`
    bytes (None: what is free). `checked` and `calibration` (of methods that calibrate) are there once it was checked.
    `shards` are the processes that share the work.
    """

    source: Source
    recipe: ConvertRecipe
    method: Method
    format: Format
    options: Any
    device: str
    offload_bytes: int
    max_memory: int | None = None
    batch_tokens: int = BATCH_TOKENS
    checked: Checked = field(default_factory=Checked)
    calibration: CalibrationTokens | None = None
    shards: Shards = field(default_factory=joined_shards)

    @property
    def bits(self) -> str:
        """The bits, in the words of the method's users."""
        return self.recipe.bits or self.method.default_bits

    def check_layout(self, layout: Layout) -> Checked:
        """Let the format refuse what it cannot hold; raises UnsupportedError, RecipeError."""
        if self.format.check is None:
            raise UnsupportedError(f"the format {self.format.name} takes no tensors one by one")
        return self.format.check(self.source, self.skeleton, layout)

    def open_writer(self, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
        """The format's writer into the run's folder; of several ranks the first one's alone writes."""
        if self.format.writer is None:
            raise UnsupportedError(f"the format {self.format.name} takes no tensors one by one")
        if self.shards.rank:
            return following(self.shards)
        return leading(self.format.writer(self.source, self.skeleton, run, layout), self.shards)

    def with_layer_bits(self, run: Run) -> Job:
        """This checked job with the bits of its layers, where they are chosen before the writing."""
        return self if self.method.bit_search is None else self.method.bit_search.choose(self, run)

    def changed(self, **values: Any) -> Job:
        """This job with other values of some fields, and the same skeleton where that is built already."""
        other = replace(self, **values)
        if "skeleton" in self.__dict__ and other.source.config is self.source.config:
            other.__dict__["skeleton"] = self.skeleton
        return other

    @cached_property
    def skeleton(self) -> Skeleton:
        """The model without weights, built once. Whoever loads weights into it takes them out again."""
        from quantkit.models.skeleton import open_skeleton

        return open_skeleton(self.source.config, settings=self.source.settings)
