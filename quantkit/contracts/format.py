"""Interface of formats, which store a model's tensors as files.

Formats do not depend on methods. A method produces dense tensors or records of numerics/, and every format that can
store such a value writes it; reading a format returns the same kinds of values. With several processes only the first
(the leader) writes. The others' writers ignore tensors, but know which blocks are finished.
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
Stored: TypeAlias = "torch.Tensor | GroupedWeight | ScaledWeight | Rows"  # values that formats return
KvScales: TypeAlias = Mapping[int, tuple[float, float]]  # of an FP8 cache: of keys and values, by layer
ON_CPU = " on a CPU"  # ends a key of `Format.refusals`


class Content(Enum):
    """Kind of values that methods produce and formats store."""

    GROUPED_CODES = "grouped codes"  # GroupedWeight
    SCALED_VALUES = "scaled values"  # ScaledWeight
    MXFP4_VALUES = "mxfp4 values"  # ScaledWeight, on a grid that GGUF has, too
    NORMAL_FLOAT = "normal float"  # NormalFloatWeight
    FLOATS = "floats"
    GGML_BLOCKS = "ggml blocks"
    ENGINE_MODEL = "engine model"

    @property
    def of_linear_layers(self) -> bool:
        """Return whether exactly the linear layers of transformers' model are quantized."""
        return self not in (Content.FLOATS, Content.GGML_BLOCKS, Content.ENGINE_MODEL)


@dataclass(frozen=True)
class Layout:
    """The quantized layout that a method requests from a format.

    `values` of the layers: integer ``codes``, or ``int8``, ``float8``, ``nvfp4`` or ``mxfp4`` times scales. `bits`: of
    the codes. `group_size`: columns that share a scale (-1: the whole row; ``auto``: the format chooses; float8: as
    many rows share it, too). `symmetric`: all zero points are in the middle. `column_order`: a group's columns need not
    be adjacent. `dtype`: of tensors that are not quantized. `settings`: the method's settings, which some formats
    record. `min_quantized`: least share of the linear layers' weights that must be quantizable. `head_bits`: of a
    quantized output head. `layer_bits`: bits by weight name if layers differ; `bits` is then the most common value.
    `choices`: candidate bits, before layers are assigned. The format fills in `least_zero`, the smallest zero point
    that it can store; `dense`, weights of linear layers that stay unquantized; and `skipped`, modules that the file
    must name as unquantized. `kv_scales`: the file also holds scales of an FP8 key-value cache.
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
    kv_scales: bool = False

    def bits_of(self, name: str) -> int:
        """Return the bits of the layer whose weight is called `name`."""
        return self.layer_bits.get(name, self.bits)

    @property
    def every_bits(self) -> tuple[int, ...]:
        """Return all bits that layers have or may get, sorted."""
        return tuple(sorted({*self.layer_bits.values(), *self.choices} or {self.bits}))


class TensorReader(Protocol):
    """Reader of a stored model's tensors, by their names in the source."""

    def names(self) -> list[str]:
        """Return the names of all tensors, in reading order."""

    def read(self, name: str) -> Stored:
        """Return a tensor: dense, as lazy rows, or as codes and scales. Raises ArtifactError."""

    def types(self) -> Mapping[str, int]:
        """Return the number of tensors by stored type, comparable with the manifest's `tensor_types`."""


class QuantizedReader(TensorReader, Protocol):
    """A reader of another tool's quantized folder, which quantkit can convert again."""

    def read(self, name: str) -> Stored:
        """Return a tensor; quantized layers are lazy rows, dequantized on reading. Raises ArtifactError."""

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape (N, K) of a quantized layer from its header; None for a dense tensor."""

    def quantization(self) -> str:
        """Return a short description of the quantization, for messages."""

    def layout(self) -> Layout:
        """Return a layout that holds the codes of all layers; raises UnsupportedError if none does."""


class TensorWriter:
    """Writer of tensors by their names in the source, in any order; `checkpoint` buffers them on disk."""

    def __init__(self, checkpoint: Spool, source: Source, run: Run) -> None:
        self.checkpoint, self.source, self.run = checkpoint, source, run

    @property
    def finished(self) -> int:
        """Return the number of leading decoder blocks that an earlier run has finished."""
        return self.checkpoint.finished

    def add(self, name: str, value: Written) -> None:
        """Write one tensor to disk. Raises TypeError if the format cannot store this kind of value."""
        raise TypeError(f"{name}: this format cannot store a {type(value).__name__}")

    def block(self, _prefix: str) -> Mapping[str, torch.Tensor | GroupedWeight | ScaledWeight]:
        """Return the written values of the block with this name prefix; empty if they cannot be read back."""
        return {}

    def replace_scales(self, name: str, _scales: torch.Tensor) -> None:
        """Replace the scales (N, G) of the weight `name`; a killed process leaves the old ones."""
        raise TypeError(f"the scales of {name} cannot be replaced in this format")

    def add_kv_scales(self, attention: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the cache's scales, each (), of the module `attention`, if the layout has any: after all blocks."""
        for part, scale in (("k_scale", key), ("v_scale", value)):
            self.checkpoint.add(f"{attention}.{part}", scale.reshape(1).bfloat16())

    def finish_block(self, index: int) -> None:
        """Record decoder block `index` as finished, with the findings so far, so that work can resume."""
        self.checkpoint.finish_block(index, self.run.findings.to_values())


@dataclass(frozen=True)
class Kind:
    """A variant of a format's content that engines treat differently.

    `bits`: as in recipes; `words`: description; `quantization`: its `quantization_config`.
    """

    bits: str
    words: str = ""
    quantization: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Loading:
    """How an engine loads the artifacts of a format.

    `since`: oldest version tested; `package`: an additional module that must be importable. `plugins`: requirements
    (NAME>=OLDEST) on the engine's interpreter, the engine's plugin first. `weights` in memory are ``dense``, ``packed``
    as in the file (only for `packed_bits`, if given), or ``both``. `values`: the engine can compute a source from
    values in memory, not only from files in its folder. `rounds_cache`: it rounds keys and values if the files ask for
    that. refuse(artifact, dtype, device) raises EngineError for an artifact that the engine would compute wrongly.
    """

    since: str = ""
    package: str = ""
    weights: Literal["dense", "packed", "both"] = "dense"
    packed_bits: tuple[str, ...] | None = None
    values: bool = False
    rounds_cache: bool = False
    refuse: Callable[[Artifact, str | None, str], None] = lambda _artifact, _dtype, _device: None
    plugins: tuple[str, ...] = ()

    @property
    def tested(self) -> str:
        """Return the oldest versions of the engine and its plugin tested, for tables."""
        return ", ".join((self.since, *(plugin.replace(">=", " ") for plugin in self.plugins[:1])))

    def stays_packed(self, bits: str | None) -> bool:
        """Return whether layers with these bits stay packed in memory as in the file."""
        return self.weights == "packed" and (self.packed_bits is None or bits in self.packed_bits)


@dataclass(frozen=True)
class Format:
    """A file format.

    `holds`: kinds of values that it can store; empty if quantkit only reads it, as a source. `loading`: how each engine
    loads it; the first engine is the default, and the first one with `values` computes baselines. `servers`: further
    programs that load it, with the arguments that quantkit prints for them. recognizes(path) returns whether a folder
    or file is in this format. open(path, weight_files, config) returns a reader; `config` is the source's config.json
    if known. check(source, skeleton, layout) refuses models that the format cannot store, before long work.
    writer(source, skeleton, run, layout) returns a writer that takes tensors in any order; None if the order in the
    file is fixed or the engine writes it. open_quantized(path, weight_files, config) reads other tools' files as a
    source; None if unsupported. kv_scales(path, weight_files) returns the scales of an FP8 key-value cache (empty: 1),
    or None if the files ask for none, and raises ArtifactError for another cache; None: the format holds none. `kinds`:
    all variants of its content. refusals(quantization) returns, by engine, why it cannot load a folder with this
    `quantization_config` (empty: none); the key NAME + `ON_CPU` says why the engine loads it on GPUs only.
    recorded_options(artifact) returns the recipe's `bits` and options that the files record, each with all values that
    agree with the files. refuse_tensors(config, shapes) raises ArtifactError if a model with this config.json has other
    tensors; None: compare with transformers' model, which needs torch. prepared(source) returns the source as the
    format's engines compute it, with settings that they ignore folded into weights. `usage`: Markdown for the model
    card on loading FOLDER; {file} becomes the first weight file's name, {transformers} the code that loads a folder
    with transformers. `library`: the hub's name of the loading library. `defaults`: of methods' options, where grouped
    codes lose less in this format at no cost.
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
    kv_scales: Callable[[Path, tuple[str, ...]], KvScales | None] | None = None
    kinds: tuple[Kind, ...] = (Kind("any"),)
    refusals: Callable[[Mapping[str, object]], Mapping[str, str]] = lambda _quantization: {}
    servers: Mapping[str, str] = field(default_factory=dict)
    recorded_options: Callable[[Artifact], Mapping[str, tuple[object, ...]]] = lambda _artifact: {}
    refuse_tensors: Callable[[dict[str, object], Mapping[str, tuple[int, ...]]], None] | None = None
    prepared: Callable[[Source], Source] = lambda source: source
    usage: str = ""
    library: str = "transformers"
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the names of the engines that load this format, the default first."""
        return tuple(self.loading)

    def loaded_by(self, engine: str) -> Loading:
        """Return how an engine loads this format; an empty record if the engine does not load it."""
        return self.loading.get(engine, Loading())

    @property
    def keeps(self) -> bool:
        """Return whether its files can store tensors outside the model unchanged, under their published names."""
        return self.weight_files == ("*.safetensors",)


class _Leading(TensorWriter):
    """The first process's writer, which also sends finished blocks to the other processes."""

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
    """The writer of every process but the first: it writes nothing."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._finished = shards, shards.from_leader(0)

    @property
    def finished(self) -> int:
        return self._finished

    def add(self, name: str, value: Written) -> None:
        """Ignore the tensor: the leader writes it."""

    def block(self, _prefix: str) -> Values:
        return self._shards.from_leader({})

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        """Do nothing: the leader replaces the scales."""

    def add_kv_scales(self, attention: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Do nothing: the leader writes them."""

    def finish_block(self, index: int) -> None:
        """Do nothing: the leader records the block."""


@contextmanager
def leading(opened: AbstractContextManager[TensorWriter], shards: Shards) -> Iterator[TensorWriter]:
    """Yield the writer for the first of several processes; for a single process, `opened` itself."""
    with opened as writer:
        if shards.size == 1:
            yield writer
            return
        shards.from_leader(writer.finished)
        yield _Leading(writer, shards)


@contextmanager
def following(shards: Shards) -> Iterator[TensorWriter]:
    """Yield the writer for any process but the first."""
    yield _Following(shards)
