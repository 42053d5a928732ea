"""An artifact held against itself: its manifest, what its files say, and the parameters of the model it stands for.

Hashes show that no byte has changed since the manifest was written; whether the manifest tells the truth is asked here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.contracts.format import Format, Stored, TensorReader
from quantkit.contracts.method import Method
from quantkit.contracts.registry import find_format, find_method
from quantkit.contracts.stored import open_stored
from quantkit.errors import ArtifactError, RecipeError
from quantkit.models.text_half import is_multimodal, stated_of
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
from quantkit.records.artifact import MANIFEST, Artifact
from quantkit.system.sizes import bits_per_weight
from quantkit.system.untrusted import read_object, shown

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton

# Of a config.json: how it is stored, and code that is not run.
NOT_OF_THE_MODEL = ("dtype", "torch_dtype", "quantization", "quantization_config", "auto_map")
SLACK = 1.01  # for small buffers that sources store
# Architectures whose older checkpoints store masks, which count as the source's parameters.
MASKED = ("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj")


def refuse_untrue(artifact: Artifact) -> None:
    """Hold every file of an artifact against its manifest, by hash and by what headers and settings say.

    No tensor is read; see `quantkit.verify` for that. Raises ArtifactError.
    """
    artifact.refuse_changed_files()
    kind = open_format(artifact)
    refuse_disagreement(artifact, kind, open_stored(artifact, kind))


def open_format(artifact: Artifact) -> Format:
    """The format that the manifest names; raises ArtifactError where the manifest contradicts itself."""
    manifest = artifact.manifest
    try:
        method, kind = find_method(manifest.recipe.method), find_format(manifest.format)
    except RecipeError as error:
        raise _damaged(artifact, str(error)) from None
    makes, _ = method.kind_of(manifest.recipe.bits)
    if makes not in kind.holds:
        raise _damaged(artifact, f"the method {method.name} makes {makes.value}, and {kind.name} holds none")
    if not kind.recognizes(artifact.folder):
        raise _damaged(artifact, f"it says that the files are {kind.name}, and they are not")
    _refuse_options(artifact, method)
    _refuse_sizes(artifact, kind)
    return kind


def refuse_disagreement(artifact: Artifact, kind: Format, reader: TensorReader) -> None:
    """Raise ArtifactError where the manifest says something else than the files."""
    manifest = artifact.manifest
    method = find_method(manifest.recipe.method)
    if (types := dict(reader.types())) != manifest.tensor_types:
        raise _damaged(artifact, f"it counts {_counted(manifest.tensor_types)}, and the files hold {_counted(types)}")
    told = {"bits": manifest.recipe.bits or method.default_bits, **manifest.options}
    for name, values in kind.recorded_options(artifact).items():
        if name in told and not any(_same(told[name], value) for value in values):
            found = " or ".join(map(shown, values))
            raise _damaged(artifact, f"{name} is {shown(told[name])} there, and the files say {found}")
    _refuse_config(artifact, kind)


def _refuse_options(artifact: Artifact, method: Method) -> None:
    """Hold the options against the method's and against the recipe that asked for them."""
    manifest = artifact.manifest
    given = {name: value for name, value in manifest.options.items() if name not in method.records}
    if unknown := sorted(given.keys() - method.Options.model_fields.keys()):
        raise _damaged(artifact, f"the method {method.name} has no option {unknown[0]!r}")
    try:
        method.parse_bits(manifest.recipe.bits)
        options = method.parse_options(given)
    except RecipeError as error:
        raise _damaged(artifact, str(error)) from None
    if method.calibrated(options) != (manifest.calibration_sha256 is not None):
        word = "no calibration" if manifest.calibration_sha256 is None else "a calibration"
        raise _damaged(artifact, f"it tells of {word}, which does not fit the method {method.name} with its options")
    try:
        asked = method.parse_options(manifest.recipe.options).model_dump(mode="json")
    except RecipeError as error:
        raise _damaged(artifact, str(error)) from None
    made = options.model_dump(mode="json")
    for name in manifest.recipe.options:
        if asked[name] not in ("auto", made[name]):
            raise _damaged(artifact, f"{name} = {shown(asked[name])} was asked for, and {shown(made[name])} made")


def _refuse_sizes(artifact: Artifact, kind: Format) -> None:
    manifest = artifact.manifest
    weights = {name for name in manifest.files if any(Path(name).match(pattern) for pattern in kind.weight_files)}
    named = manifest.weight_files
    if sorted(weights) != sorted(named):
        other = min(weights ^ set(named), default=max(named, key=named.count, default=""))
        raise _damaged(artifact, f"its weight files are not those of the format {kind.name}: {shown(other)}")
    nbytes = sum(manifest.files[name].bytes for name in weights)
    if nbytes != manifest.weight_bytes:
        raise _damaged(artifact, f"weight_bytes is {manifest.weight_bytes}, and the weight files have {nbytes}")
    bits = bits_per_weight(nbytes, manifest.source.parameters)
    if not math.isclose(bits, manifest.bits_per_weight, abs_tol=1e-3):
        raise _damaged(artifact, f"bits_per_weight is {manifest.bits_per_weight}, and the files have {bits:.4f}")


def _refuse_config(artifact: Artifact, kind: Format) -> None:
    """Hold the config.json that foreign loaders read against the one that the manifest has of the source."""
    path = artifact.folder / "config.json"
    if "config.json" not in artifact.manifest.files:
        return
    stored = read_object(path, ArtifactError, "Convert again with --force.")
    if kind.library != "transformers" and "model_type" not in stored:
        return  # the engine's own settings
    one, other = _model_settings(stored), _model_settings(artifact.manifest.source.config)
    names = one.keys() | other.keys()
    if is_multimodal(stored):
        # What the text half has beside these is the whole's, or told by the tensors.
        one = _model_settings(stated_of(stored))
        names = one.keys() - {"tie_word_embeddings"}
    for name in sorted(names):
        if not _same(one.get(name), other.get(name)):
            raise _damaged(
                artifact,
                f"{name} is {shown(other.get(name))} in its source.config, and {shown(one.get(name))} in config.json",
            )


def _model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are one; 1, 1.0 and true are three."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


class Parameters:
    """The parameters of a model, each ticked off when it is read: none is missing, unknown, doubled or misshapen."""

    def __init__(self, artifact: Artifact, prefix: str = "") -> None:
        self._artifact, self._prefix = artifact, prefix
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # of codes, and of dense values
        self._stands_for: dict[str, set[str]] = {}  # the parameters that a name of the files stands for
        self._missing: set[str] = set()
        self._read: set[str] = set()

    def expect(self, name: str, shape: tuple[int, ...], dense: tuple[int, ...] | None = None) -> None:
        """Expect a parameter; `dense` is its shape where it is not stored as codes."""
        self._shapes[name] = (shape, shape if dense is None else dense)
        self._stands_for[name] = {name}
        self._missing.add(name)

    def allow(self, name: str, shape: tuple[int, ...], parameters: set[str] | None = None) -> None:
        """Let the files hold a tensor that stands for several of the `parameters`, or for none."""
        self._shapes.setdefault(name, (shape, shape))
        self._stands_for.setdefault(name, parameters or set())

    def take(self, name: str, stored: Stored) -> None:
        """Tick a tensor off; raises ArtifactError."""
        own = next((n for n in (name, self._prefix + name, name.removeprefix(self._prefix)) if n in self._shapes), None)
        if own is None:
            raise ArtifactError(f"{self._artifact.folder} holds the tensor {name}, which the model does not have")
        codes, dense = self._shapes[own]
        shape, want = tuple(stored.shape), codes if isinstance(stored, GroupedWeight | ScaledWeight) else dense
        if shape != want:
            raise ArtifactError(f"{self._artifact.folder}: the tensor {name} has the shape {shape}, not {want}")
        if own in self._read:
            raise ArtifactError(f"{self._artifact.folder} holds the tensor {name} twice")
        self._read.add(own)
        self._missing -= self._stands_for[own]

    def refuse_missing(self) -> None:
        """Raise ArtifactError for a parameter that was not there."""
        if self._missing:
            raise ArtifactError(
                f"{self._artifact.folder} lacks the tensor {min(self._missing)}. Convert again with --force."
            )


def refuse_parameters(artifact: Artifact, weights: int) -> None:
    """Raise ArtifactError where the manifest counts other parameters than the `weights` that were read.

    A source or a file may store a head that is tied to the embedding; a source also small buffers.
    """
    source = artifact.manifest.source
    sizes = (source.config.get(name) for name in ("vocab_size", "hidden_size", "n_embd", "d_model"))
    head = math.prod(size for size in sizes if isinstance(size, int))
    least = weights - head if source.config.get("tie_word_embeddings", True) else weights
    most = weights * SLACK + head
    if source.parameters < least or (source.parameters > most and source.architecture not in MASKED):
        raise _damaged(artifact, f"it counts {source.parameters} parameters of the source, and {weights} are there")


def parameters_of(artifact: Artifact, skeleton: Skeleton) -> Parameters:
    """What an artifact of that model must hold."""
    model = skeleton.model
    expected = Parameters(artifact, f"{model.base_model_prefix}.")
    stacks: dict[str, set[str]] = {}
    for name, value in model.named_parameters():
        origin = skeleton.origins.get(name)
        shape = tuple(value.shape)
        turned = origin is not None and origin.transposed and origin.expert is None
        expected.expect(name, shape, origin.shape if origin is not None and turned else shape)
        for stack in (origin.name, origin.also) if origin is not None else ():
            if stack not in ("", name):
                stacks.setdefault(stack, set()).add(name)
    origins = {name: each.shape for each in skeleton.origins.values() for name in (each.name, each.also)}
    for name, parts in stacks.items():
        expected.allow(name, origins[name], parts)
    for name, value in model.state_dict().items():  # copies of tied weights, and buffers
        expected.allow(name, tuple(value.shape))
    return expected


def _counted(types: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "no tensors"


def _damaged(artifact: Artifact, what: str) -> ArtifactError:
    return ArtifactError(f"{artifact.folder / MANIFEST} is corrupted: {what.rstrip('.')}. Convert again with --force.")
