"""Interface of quantization methods, and Job: one requested conversion.

A Job does not change while it runs. Results and notes go into the Findings of its Run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic

from typing_extensions import TypeVar

from quantkit.contracts.format import Content, Format, Layout, TensorWriter, following, leading
from quantkit.contracts.run import Checked, Plan, Run
from quantkit.errors import RecipeError, UnsupportedError, near_miss
from quantkit.models.source import Source
from quantkit.records.artifact import CalibrationEntry
from quantkit.records.recipe import ConvertRecipe, Strict, parse
from quantkit.system.ranks import Shards, joined_shards

if TYPE_CHECKING:
    import numpy as np

    from quantkit.models.skeleton import Skeleton

# For jobs, which only return them (covariant), and for methods, which also accept them.
Options = TypeVar("Options", bound=Strict, covariant=True, default=Strict)
OwnOptions = TypeVar("OwnOptions", bound=Strict, default=Strict)
OwnPlan = TypeVar("OwnPlan", default=object)
TakenOptions = TypeVar("TakenOptions", bound=Strict, contravariant=True, default=Strict)


@dataclass(frozen=True)
class Shapes:
    """Sizes for a memory forecast, of the largest decoder block and of the tensors outside the blocks.

    `layers`: (rows, columns) of linear layers. `stages`: the same, but adjacent layers of a module with equally many
    columns count as one. Per token: `states` hidden states, `of_text` other values that blocks are called with, and
    `shared` values that blocks share. `reading`: memory in bytes to read a tensor of a block (`Source.reading_bytes`);
    `reading_outside`: to read a tensor outside the blocks. `item_bytes`: bytes of the widest stored type.
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
        """Return the number of input columns of the widest layer."""
        return max((columns for _, columns in self.stages), default=0)

    @property
    def tallest(self) -> int:
        """Return the number of rows of the tallest stage."""
        return max((rows for rows, _ in self.stages), default=0)

    @property
    def largest_layer(self) -> int:
        """Return the number of values of the largest linear layer."""
        return max((rows * columns for rows, columns in self.layers), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """A method's peak memory on a decoder block, for the forecast.

    `streams`: copies of the activations (0: no calibration; 1.25: a quarter of the sequences also pass through the
    unquantized model). `suspended`: all batches wait inside the block. `work`: bytes in addition to the block, its
    activations and the forward pass. `further`: bytes of other phases of the method, by name.
    """

    streams: float = 0
    suspended: bool = False
    work: int = 0
    further: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BitSearch(Generic[TakenOptions, OwnPlan]):
    """A long search before writing, such as for the bits of each layer.

    choose(job, run) returns the plan with the chosen bits and records them in the findings, so that unfinished work
    resumes with the same bits. memory(job, shapes) returns the bytes of its phases by name.
    """

    choose: Callable[[CheckedJob[TakenOptions, OwnPlan], Run], OwnPlan]
    memory: Callable[[CheckedJob[TakenOptions, OwnPlan], Shapes], Mapping[str, int]]


@dataclass(frozen=True)
class Method(Generic[OwnOptions, OwnPlan]):
    """A quantization method. It handles no files: it passes its results to the job's format.

    Any format that holds what it `makes` can store the result; default: `default_format`. `other_kinds`: by bits,
    another kind of values and default format. refuse_config(config) returns why no model with this config.json is
    supported, if config.json alone shows it (without torch or transformers), else None. check(job) refuses jobs that
    cannot work, before any long work. write(job, run) computes the tensors and passes them to the format's writer in
    run.folder. weights_comparable(options): stored values approximate the source's, one by one. calibrated(options)
    returns whether it needs calibration text, needs_torch(options) whether it needs torch, directly or in transformers.
    peak_memory(job, shapes) returns the memory of the work on a decoder block; None: no forecast. refuse_ranks(job)
    returns why several processes cannot share the work; None: they can. bits_of(source) returns the bits that the
    source implies if the user gives none; None: the default. `bit_search` runs before `write`; None: the check decides
    everything. `records`: constants that decide bytes; manifests record them among the options, but users cannot set
    them.
    """

    name: str
    summary: str
    reference: str
    bits: tuple[str, ...]
    default_bits: str
    Options: type[OwnOptions]
    makes: Content
    default_format: str
    check: Callable[[Job[OwnOptions]], Checked[OwnPlan]]
    write: Callable[[CheckedJob[OwnOptions, OwnPlan], Run], None]
    weights_comparable: Callable[[OwnOptions], bool] = lambda _options: True
    calibrated: Callable[[OwnOptions], bool] = lambda _options: False
    needs_torch: Callable[[OwnOptions], bool] = lambda _options: True
    peak_memory: Callable[[CheckedJob[OwnOptions, OwnPlan], Shapes], PeakMemory] | None = None
    refuse_config: Callable[[Mapping[str, object]], str | None] = lambda _config: None
    other_kinds: Mapping[str, tuple[Content, str]] = field(default_factory=dict)
    bits_of: Callable[[Source], str | None] = lambda _source: None
    refuse_ranks: Callable[[Job[OwnOptions]], str | None] = lambda _job: "one process does it"
    bit_search: BitSearch[OwnOptions, OwnPlan] | None = None
    records: tuple[str, ...] = ()

    def kind_of(self, bits: str | None) -> tuple[Content, str]:
        """Return (kind of values, default format) for these bits (None: the default bits)."""
        return self.other_kinds.get(bits or self.default_bits, (self.makes, self.default_format))

    def parse_bits(self, bits: str | int | None) -> str:
        """Return `bits` in the method's own spelling, or its default; raises RecipeError for unknown bits."""
        if bits is None:
            return self.default_bits
        for known in self.bits:
            if known.lower() == str(bits).lower():
                return known
        raise RecipeError(
            f"the method {self.name} has no bits {str(bits)!r}.{near_miss(bits, self.bits)} "
            f"It has: {', '.join(self.bits)}."
        )

    def parse_options(self, options: Mapping[str, object]) -> OwnOptions:
        """Return the options as the method's `Options` record; raises RecipeError if one is invalid."""
        return parse(self.Options, dict(options), f"options of the method {self.name}")


@dataclass(frozen=True)
class CalibrationTokens:
    """Calibration token ids (S, T) int64, and their entry in the manifest."""

    ids: np.ndarray
    entry: CalibrationEntry

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.tobytes()).hexdigest()


BATCH_TOKENS = 1024  # on the CPU
FEEDBACK_RECORD = "error_feedback"  # key of these settings in manifests of methods that always round this way


@dataclass(frozen=True)
class Job(Generic[Options]):
    """A recipe with its opened source, its method and the format to write.

    `options`: the method's record. `device`: name in torch. `batch_tokens`: calibration tokens that pass through a
    block together. `offload_bytes`: activations beyond it go to files. `max_memory`: bytes that the process may use
    (None: the free memory). `shards`: the processes that share the work.
    """

    source: Source
    recipe: ConvertRecipe
    method: Method
    format: Format
    options: Options
    device: str
    offload_bytes: int
    max_memory: int | None = None
    batch_tokens: int = BATCH_TOKENS
    shards: Shards = field(default_factory=joined_shards)
    # Shared by all copies of the job, each with the config.json that it was built from.
    _skeletons: list[tuple[Mapping[str, object], Skeleton]] = field(default_factory=list, repr=False, compare=False)

    @property
    def bits(self) -> str:
        """Return the bits in the method's own spelling."""
        return self.recipe.bits or self.method.default_bits

    @property
    def skeleton(self) -> Skeleton:
        """Return the model without weights, built once. Code that loads weights into it must remove them again."""
        from quantkit.models.skeleton import open_skeleton

        source = self.source
        for config, skeleton in self._skeletons:
            if config is source.config:
                return skeleton
        self._skeletons.append((source.config, open_skeleton(source.config, settings=source.settings)))
        return self._skeletons[-1][1]

    def check_layout(self, layout: Layout) -> Checked[Layout]:
        """Return the format's check of a layout; raises UnsupportedError or RecipeError."""
        if self.format.check is None:
            raise UnsupportedError(f"the format {self.format.name} cannot be written tensor by tensor")
        layout = replace(layout, kv_scales=getattr(self.options, "kv_scales", False))
        return self.format.check(self.source, self.skeleton, layout)

    def open_writer(self, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
        """Open the format's writer in the run's folder; in any process but the first, a writer that does nothing."""
        if self.format.writer is None:
            raise UnsupportedError(f"the format {self.format.name} cannot be written tensor by tensor")
        if self.shards.rank:
            return following(self.shards)
        return leading(self.format.writer(self.source, self.skeleton, run, layout), self.shards)


@dataclass(frozen=True)
class CheckedJob(Job[Options], Generic[Options, Plan]):
    """A job with the result of its check, and with calibration tokens if the method needs them."""

    _: KW_ONLY
    checked: Checked[Plan]
    calibration: CalibrationTokens | None = None

    @classmethod
    def of(
        cls, job: Job[Options], checked: Checked[Plan], calibration: CalibrationTokens | None = None
    ) -> CheckedJob[Options, Plan]:
        """Return the job with the result of its check added."""
        asked = {field.name: getattr(job, field.name) for field in fields(job)}
        return cls(**asked, checked=checked, calibration=calibration)


def with_layer_bits(job: CheckedJob, run: Run) -> CheckedJob:
    """Run the method's bit search, if it has one, and return the job with the chosen bits in its plan."""
    if (search := job.method.bit_search) is None:
        return job
    return replace(job, checked=replace(job.checked, plan=search.choose(job, run)))
