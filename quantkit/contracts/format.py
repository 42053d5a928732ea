"""What a format must provide: bytes on disk that hold a model's tensors.

A format knows no method. What a method makes is a value, a dense tensor or one of the records in numerics/, and a
format that can hold it writes it; what a format reads is such a value again.
With several ranks the leader writes; the writers of the others take nothing, and know what was finished earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from quantkit.contracts.run import Checked, Run
from quantkit.models.source import Source
from quantkit.system.ranks import Shards

if TYPE_CHECKING:
    import torch

    from quantkit.checkpoints.rows import Rows
    from quantkit.checkpoints.spool import Spool
    from quantkit.models.skeleton import Skeleton
    from quantkit.numerics.normal_float import NormalFloatWeight
    from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
    from quantkit.records.artifact import Artifact

    Values = Mapping[str, torch.Tensor | GroupedWeight | ScaledWeight]

Written: TypeAlias = "torch.Tensor | Rows | GroupedWeight | NormalFloatWeight | ScaledWeight"  # what methods make
Stored: TypeAlias = "torch.Tensor | GroupedWeight | ScaledWeight | Rows"  # what formats give back


class Content(Enum):
    """What a method makes and a format holds."""

    GROUPED_CODES = "grouped codes"  # GroupedWeight
    SCALED_VALUES = "scaled values"  # ScaledWeight
    MXFP4_VALUES = "mxfp4 values"  # ScaledWeight, in a grid that GGUF has, too
    NORMAL_FLOAT = "normal float"  # NormalFloatWeight
    FLOATS = "floats"
    GGML_BLOCKS = "ggml blocks"
    ENGINE_MODEL = "engine model"

    @property
    def of_linear_layers(self) -> bool:
        """Whether the linear layers of transformers' model are quantized, and nothing else."""
        return self not in (Content.FLOATS, Content.GGML_BLOCKS, Content.ENGINE_MODEL)


@dataclass(frozen=True)
class Layout:
    """What a method asks a format to hold.

    `values` of the layers are integer ``codes``, or ``int8``, ``float8``, ``nvfp4`` or ``mxfp4`` times scales.
    Codes of `bits` bits; `group_size` columns share a scale (-1: the row; ``auto``: the format chooses; of float8 as
    many rows do, too); `symmetric`: all zero points in the middle; `column_order`: groups are not of neighbouring
    columns; `dtype` of what stays as it is; `settings` of the method that files of some formats name; `min_quantized`:
    the format refuses to quantize a smaller share of the linear layers' weights; `head_bits` of an output head that is
    quantized, too. `layer_bits` are the bits of every layer by its weight's name, where they differ, `bits` then those
    of most weights; `choices` are bits that layers may get, where that is still open. The format says `least_zero`, the
    smallest zero point that can be stored; `dense`, the weights of linear layers that stay as they are; `skipped`,
    modules that its readers would take for quantized unless the file names them.
    """

    bits: int = 16
    group_size: int | str = -1
    symmetric: bool = True
    column_order: bool = False
    dtype: str = "float16"
    least_zero: int = 0
    settings: Mapping[str, object] | None = None
    values: str = "codes"
    min_quantized: float = 0
    head_bits: int | None = None
    layer_bits: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[int, ...] = ()
    dense: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def bits_of(self, name: str) -> int:
        """Bits of the codes of the layer whose weight is called `name`."""
        return self.layer_bits.get(name, self.bits)

    @property
    def every_bits(self) -> tuple[int, ...]:
        """All bits that layers have, or may get."""
        return tuple(sorted({*self.layer_bits.values(), *self.choices} or {self.bits}))


class TensorReader(Protocol):
    """The tensors of an artifact or a foreign folder or file, by the source's names."""

    def names(self) -> list[str]:
        """All of them, in order."""

    def read(self, name: str) -> Stored:
        """One of them: dense, in rows, or as codes and scales. Raises ArtifactError."""

    def types(self) -> Mapping[str, int]:
        """How many tensors are stored as what, as the writer counts them for the manifest's `tensor_types`."""


class QuantizedReader(TensorReader, Protocol):
    """A reader whose folder can be converted again."""

    def read(self, name: str) -> Stored:
        """One of the tensors. Rows are dequantized when they are asked for. Raises ArtifactError."""

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values, told without reading them; None for a dense tensor."""

    def quantization(self) -> str:
        """How the layers are quantized, in a few words."""

    def layout(self) -> Layout:
        """What would hold the codes of all layers; raises UnsupportedError where they are no grouped codes."""


class TensorWriter:
    """Takes tensors by the source's names, in any order, into a spool; `checkpoint` may be one of safetensors."""

    def __init__(self, checkpoint: Spool, source: Source, run: Run) -> None:
        self.checkpoint, self.source, self.run = checkpoint, source, run

    @property
    def finished(self) -> int:
        """Number of decoder blocks that an earlier run has finished, from the first on."""
        return self.checkpoint.finished

    def add(self, name: str, value: Written) -> None:
        """Take one tensor; its bytes go to disk at once. Raises TypeError for a kind that the format does not hold."""
        raise TypeError(f"{name}: this format does not hold a {type(value).__name__}")

    def block(self, _prefix: str) -> Mapping[str, torch.Tensor | GroupedWeight | ScaledWeight]:
        """What was taken of the block whose names begin with the prefix; nothing where there is no way back."""
        return {}

    def replace_scales(self, name: str, _scales: torch.Tensor) -> None:
        """Give the weight `name` other scales (N, G) of the same shape; after a kill it has the old ones."""
        raise TypeError(f"the scales of {name} cannot be replaced in this format")

    def finish_block(self, index: int) -> None:
        """Make decoder block `index`, and all that was taken and found out so far, survive the end of the process."""
        self.checkpoint.finish_block(index, self.run.findings.to_values())


@dataclass(frozen=True)
class Kind:
    """One kind of what a format holds, as users of engines tell them apart.

    `bits` as they are asked for, `words` for what else it is told by; `quantization` is what config.json says of it.
    `only`: where alone an engine that takes it does so, by engine, such as ``GPUs``.
    """

    bits: str
    words: str = ""
    quantization: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loading:
    """How an engine loads the artifacts of a format.

    `since` is the oldest version tried, `package` what must be importable beside the engine's own. `weights` are what
    it holds in memory: dense ones, those of the file as they are ``packed``, where `packed_bits` are given with these
    bits alone, or ``both``. `values`: it can compute with the values of a source, not only with the files in its
    folder. refuse(artifact, dtype, device) raises EngineError for an artifact that it computes wrongly.
    """

    since: str = ""
    package: str = ""
    weights: Literal["dense", "packed", "both"] = "dense"
    packed_bits: tuple[str, ...] | None = None
    values: bool = False
    refuse: Callable[[Artifact, str | None, str], None] = lambda _artifact, _dtype, _device: None

    def stays_packed(self, bits: str | None) -> bool:
        """Whether layers of an artifact with these bits are in memory as they are in the file."""
        return self.weights == "packed" and (self.packed_bits is None or bits in self.packed_bits)


@dataclass(frozen=True)
class Format:
    """One kind of files.

    `holds` is what methods make that it can store; none: it is read as a source only. `loading` says how each engine
    takes it, the one that its users run first; of those with `values` the first computes baselines. `servers` load it,
    too, and quantkit only prints how they are started: arguments that their commands need, by name. recognizes(path)
    says whether a folder or file is of this kind. open(path, weight_files, config) reads: `config` is the source's
    config.json, where it is known. check(source, skeleton, layout) refuses what the format cannot hold, before any long
    work. writer(source, skeleton, run, layout)
    takes tensors as they come; None where the order of a file's parts is fixed, or its engine writes it.
    open_quantized(path, weight_files, config) reads what other tools wrote, as a source; None where it cannot. `kinds`
    are all that it holds. refusals(quantization) are reasons why engines cannot take a folder whose config.json has
    this `quantization_config` (empty: none), by engine. recorded_options(artifact) is what the files themselves say of
    the recipe: `bits` and options of methods by name, each with all values that agree with the files.
    refuse_tensors(config, shapes) raises ArtifactError where a model of this config.json has other tensors; None:
    transformers' model is asked, which takes torch. prepared(source) is the source as the format's engines compute it:
    what they do not know is put into its weights. `usage` is Markdown for the model card: how engines load FOLDER;
    {file} becomes the first weight file's name, {transformers} the lines that load a folder with transformers.
    `library` is the hub's name of who loads it.
    """

    name: str
    summary: str
    reference: str
    holds: tuple[Content, ...]
    loading: Mapping[str, Loading]
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, tuple[str, ...], dict[str, object]], TensorReader]
    check: Callable[[Source, Skeleton, Layout], Checked[Layout]] | None = None
    writer: Callable[[Source, Skeleton, Run, Layout], AbstractContextManager[TensorWriter]] | None = None
    open_quantized: Callable[[Path, tuple[str, ...], dict[str, object]], QuantizedReader] | None = None
    weight_files: tuple[str, ...] = ("*.safetensors",)
    kinds: tuple[Kind, ...] = (Kind("any"),)
    refusals: Callable[[Mapping[str, object]], Mapping[str, str]] = lambda _quantization: {}
    servers: Mapping[str, str] = field(default_factory=dict)
    recorded_options: Callable[[Artifact], Mapping[str, tuple[object, ...]]] = lambda _artifact: {}
    refuse_tensors: Callable[[dict[str, object], Mapping[str, tuple[int, ...]]], None] | None = None
    prepared: Callable[[Source], Source] = lambda source: source
    usage: str = ""
    library: str = "transformers"

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines that take it."""
        return tuple(self.loading)

    def loaded_by(self, engine: str) -> Loading:
        """How an engine loads it; of one that does not take it nothing is known."""
        return self.loading.get(engine, Loading())

    @property
    def keeps(self) -> bool:
        """Whether its files hold tensors beside the model, as they are, under the names of the published checkpoint."""
        return self.weight_files == ("*.safetensors",)


class _Leading(TensorWriter):
    """The leader's: it reads finished blocks for all."""

    def __init__(self, writer: TensorWriter, shards: Shards) -> None:
        super().__init__(writer.checkpoint, writer.source, writer.run)
        self._writer, self._shards = writer, shards

    def add(self, name: str, value: Written) -> None:
        self._writer.add(name, value)

    def block(self, prefix: str) -> Values:
        return self._shards.from_leader(self._writer.block(prefix))

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        self._writer.replace_scales(name, scales)

    def finish_block(self, index: int) -> None:
        self._writer.finish_block(index)


class _Following(TensorWriter):
    """Another rank's."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._finished = shards, shards.from_leader(0)

    @property
    def finished(self) -> int:
        return self._finished

    def add(self, name: str, value: Written) -> None:
        """The leader has the same."""

    def block(self, _prefix: str) -> Values:
        return self._shards.from_leader({})

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        """The leader does."""

    def finish_block(self, index: int) -> None:
        """The leader does."""


@contextmanager
def leading(opened: AbstractContextManager[TensorWriter], shards: Shards) -> Iterator[TensorWriter]:
    """The leader's writer; in a single process the `opened` one as it is."""
    with opened as writer:
        if shards.size == 1:
            yield writer
            return
        shards.from_leader(writer.finished)
        yield _Leading(writer, shards)


@contextmanager
def following(shards: Shards) -> Iterator[TensorWriter]:
    """What another rank has in place of the leader's writer."""
    yield _Following(shards)
