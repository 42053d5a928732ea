"""Interface of formats, which store a model's tensors as files.

A format knows no method. A method makes a dense tensor or one of the records in numerics/, and every format that can
store it writes it; reading a format returns such values again.
With several ranks only the leader writes. Other ranks' writers ignore tensors, but know which blocks are finished.
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


class Content(Enum):
    """The kinds of values that methods make and formats store."""

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

    `values` of the layers: integer ``codes``, or ``int8``, ``float8``, ``nvfp4`` or ``mxfp4`` times scales.
    `bits` of the codes; `group_size` columns share a scale (-1: the row; ``auto``: the format chooses; float8: as many
    rows share it, too); `symmetric`: all zero points are in the middle; `column_order`: groups are not of neighbouring
    columns; `dtype` of tensors that are not quantized; `settings` of the method that some formats record;
    `min_quantized`: the format refuses to quantize a smaller share of the linear layers' weights; `head_bits` of a
    quantized output head. `layer_bits`: bits of every layer by its weight's name, if they differ; `bits` are then those
    of most weights. `choices`: bits to choose from, before the choice. The format sets `least_zero`, the smallest zero
    point that it can store; `dense`, the weights of linear layers that stay unquantized; and `skipped`, modules that
    its readers would take for quantized unless the file names them.
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
        """Return the bits of the layer whose weight is `name`."""
        return self.layer_bits.get(name, self.bits)

    @property
    def every_bits(self) -> tuple[int, ...]:
        """Return all bits that layers have, or may get."""
        return tuple(sorted({*self.layer_bits.values(), *self.choices} or {self.bits}))


class TensorReader(Protocol):
    """Reads the tensors of an artifact, or of another folder or file, by the source's names."""

    def names(self) -> list[str]:
        """Return all names, in order."""

    def read(self, name: str) -> Stored:
        """Return a tensor: dense, in rows, or as codes and scales. Raises ArtifactError."""

    def types(self) -> Mapping[str, int]:
        """Count tensors by stored type, as the writer does for the manifest's `tensor_types`."""


class QuantizedReader(TensorReader, Protocol):
    """A reader of quantized folders that quantkit can convert again."""

    def read(self, name: str) -> Stored:
        """Return a tensor; rows are dequantized when they are read. Raises ArtifactError."""

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape (N, K) of a quantized layer's values without reading them; None for a dense tensor."""

    def quantization(self) -> str:
        """Describe in a few words how the layers are quantized."""

    def layout(self) -> Layout:
        """Return the layout that fits the codes of all layers; raises UnsupportedError for other codes."""


class TensorWriter:
    """Writes tensors by the source's names, in any order, into a spool; `checkpoint` may write safetensors."""

    def __init__(self, checkpoint: Spool, source: Source, run: Run) -> None:
        self.checkpoint, self.source, self.run = checkpoint, source, run

    @property
    def finished(self) -> int:
        """Return the number of decoder blocks that an earlier run has finished, from the first on."""
        return self.checkpoint.finished

    def add(self, name: str, value: Written) -> None:
        """Write one tensor to disk. Raises TypeError for a kind that the format cannot store."""
        raise TypeError(f"{name}: this format cannot store a {type(value).__name__}")

    def block(self, _prefix: str) -> Mapping[str, torch.Tensor | GroupedWeight | ScaledWeight]:
        """Return the values written of the block with this name prefix; empty if the format cannot read them back."""
        return {}

    def replace_scales(self, name: str, _scales: torch.Tensor) -> None:
        """Replace the scales (N, G) of the weight `name`; if the process is killed, the old ones remain."""
        raise TypeError(f"the scales of {name} cannot be replaced in this format")

    def finish_block(self, index: int) -> None:
        """Record decoder block `index` as finished, with all tensors and findings so far, for resuming."""
        self.checkpoint.finish_block(index, self.run.findings.to_values())


@dataclass(frozen=True)
class Kind:
    """One kind of a format's content that engines distinguish.

    `bits` as in recipes; `words` describe the kind; `quantization` is its `quantization_config`.
    `only`: the only device on which an engine loads it, by engine, such as ``GPUs``.
    """

    bits: str
    words: str = ""
    quantization: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loading:
    """How an engine loads the artifacts of a format.

    `since`: oldest version tested; `package`: an additional module that must be importable. `weights` in memory are
    dense, ``packed`` as in the file (if `packed_bits` are given, only those), or ``both``. `values`: it can compute
    with the values of a source, not only with the files in its folder. refuse(artifact, dtype, device) raises
    EngineError for an artifact that it would compute wrongly.
    """

    since: str = ""
    package: str = ""
    weights: Literal["dense", "packed", "both"] = "dense"
    packed_bits: tuple[str, ...] | None = None
    values: bool = False
    refuse: Callable[[Artifact, str | None, str], None] = lambda _artifact, _dtype, _device: None

    def stays_packed(self, bits: str | None) -> bool:
        """Return whether layers with these bits stay in memory as packed in the file."""
        return self.weights == "packed" and (self.packed_bits is None or bits in self.packed_bits)


@dataclass(frozen=True)
class Format:
    """A file format.

    `holds`: the values that it can store; empty: quantkit only reads it, as a source. `loading`: how each engine loads
    it, the default engine first; the first with `values` computes baselines. `servers` load it, too, but quantkit only
    prints their commands, with these arguments by name. recognizes(path) returns whether a folder or file is in this
    format. open(path, weight_files, config) reads it; `config` is the source's config.json if known. check(source,
    skeleton, layout) refuses models that the format cannot store, before long work. writer(source, skeleton, run,
    layout) stores tensors in any order; None if the order of a file's parts is fixed, or its engine writes it.
    open_quantized(path, weight_files, config) reads other tools' files as a source; None if it cannot. `kinds`: all
    kinds of its content. refusals(quantization) returns by engine why it cannot load a folder whose config.json has
    this `quantization_config` (empty: none). recorded_options(artifact) returns the recipe's `bits` and options that
    the files record, each with all values that agree with the files. refuse_tensors(config, shapes) raises
    ArtifactError if a model of this config.json has other tensors; None: compare with transformers' model, which needs
    torch. prepared(source) returns the source as the format's engines compute it, with unknown settings folded into
    weights. `usage`: Markdown for the model card on how engines load FOLDER; {file} becomes the first weight file's
    name, {transformers} the code that loads a folder with transformers. `library`: the hub's name of the loading
    library.
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
        """Return the names of the engines that load it."""
        return tuple(self.loading)

    def loaded_by(self, engine: str) -> Loading:
        """Return how an engine loads it; an empty record if the engine cannot."""
        return self.loading.get(engine, Loading())

    @property
    def keeps(self) -> bool:
        """Return whether its files store tensors outside the model unchanged, under their published names."""
        return self.weight_files == ("*.safetensors",)


class _Leading(TensorWriter):
    """The leader's writer, which reads finished blocks for all ranks."""

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
    """The writer of every other rank."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._finished = shards, shards.from_leader(0)

    @property
    def finished(self) -> int:
        return self._finished

    def add(self, name: str, value: Written) -> None:
        """Ignore the tensor: the leader has the same."""

    def block(self, _prefix: str) -> Values:
        return self._shards.from_leader({})

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        """Do nothing: the leader replaces them."""

    def finish_block(self, index: int) -> None:
        """Do nothing: the leader finishes the block."""


@contextmanager
def leading(opened: AbstractContextManager[TensorWriter], shards: Shards) -> Iterator[TensorWriter]:
    """Yield the leader's writer; in a single process, the `opened` writer itself."""
    with opened as writer:
        if shards.size == 1:
            yield writer
            return
        shards.from_leader(writer.finished)
        yield _Leading(writer, shards)


@contextmanager
def following(shards: Shards) -> Iterator[TensorWriter]:
    """Yield the writer of a rank that is not the leader."""
    yield _Following(shards)
