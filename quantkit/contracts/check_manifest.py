"""Check an artifact's manifest against its files' headers and settings, and against its model's parameters.

Hashes only show that no byte has changed since the manifest was written. These checks show that its contents are true.
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

# Keys of config.json that may differ: how weights are stored, and code that is not run.
NOT_OF_THE_MODEL = ("dtype", "torch_dtype", "quantization", "quantization_config", "auto_map")
SLACK = 1.01  # tolerance for small buffers that sources store
# Architectures whose older checkpoints store masks, which count as parameters of the source.
MASKED = ("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj")


def refuse_untrue(artifact: Artifact) -> None:
    """Raise ArtifactError if a file of an artifact disagrees with its manifest in hash, header or settings.

    No tensor is read; `quantkit.verify` also reads tensors.
    """
    artifact.refuse_changed_files()
    kind = open_format(artifact)
    refuse_disagreement(artifact, kind, open_stored(artifact, kind))


def open_format(artifact: Artifact) -> Format:
    """Return the format that the manifest names; raises ArtifactError if the manifest contradicts itself."""
    manifest = artifact.manifest
    try:
        method, kind = find_method(manifest.recipe.method), find_format(manifest.format)
    except RecipeError as error:
        raise _damaged(artifact, str(error)) from None
    makes, _ = method.kind_of(manifest.recipe.bits)
    if makes not in kind.holds:
        raise _damaged(artifact, f"the method {method.name} makes {makes.value}, and {kind.name} holds none")
    if not kind.recognizes(artifact.folder):
        raise _damaged(artifact, f"it names the format {kind.name}, but the files are not in it")
    _refuse_options(artifact, method)
    _refuse_sizes(artifact, kind)
    return kind


def refuse_disagreement(artifact: Artifact, kind: Format, reader: TensorReader) -> None:
    """Raise ArtifactError if tensor types, options or config.json disagree with the manifest."""
    manifest = artifact.manifest
    method = find_method(manifest.recipe.method)
    if (types := dict(reader.types())) != manifest.tensor_types:
        raise _damaged(artifact, f"it counts {_counted(manifest.tensor_types)}, but the files have {_counted(types)}")
    recorded = {"bits": manifest.recipe.bits or method.default_bits, **manifest.options}
    for name, values in kind.recorded_options(artifact).items():
        if name in recorded and not any(_same(recorded[name], value) for value in values):
            found = " or ".join(map(shown, values))
            raise _damaged(artifact, f"{name} is {shown(recorded[name])} there, but {found} in the files")
    _refuse_config(artifact, kind)


def _refuse_options(artifact: Artifact, method: Method) -> None:
    """Raise ArtifactError if the manifest's options are invalid for the method or contradict the recipe."""
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
        raise _damaged(artifact, f"it has {word}, which contradicts the method {method.name} and its options")
    try:
        asked = method.parse_options(manifest.recipe.options).model_dump(mode="json")
    except RecipeError as error:
        raise _damaged(artifact, str(error)) from None
    made = options.model_dump(mode="json")
    for name in manifest.recipe.options:
        if asked[name] not in ("auto", made[name]):
            raise _damaged(artifact, f"{name} = {shown(asked[name])} in the recipe, {shown(made[name])} in the options")


def _refuse_sizes(artifact: Artifact, kind: Format) -> None:
    manifest = artifact.manifest
    weights = {name for name in manifest.files if any(Path(name).match(pattern) for pattern in kind.weight_files)}
    named = manifest.weight_files
    if sorted(weights) != sorted(named):
        other = min(weights ^ set(named), default=max(named, key=named.count, default=""))
        raise _damaged(artifact, f"its weight files do not belong to the format {kind.name}: {shown(other)}")
    nbytes = sum(manifest.files[name].bytes for name in weights)
    if nbytes != manifest.weight_bytes:
        raise _damaged(artifact, f"weight_bytes is {manifest.weight_bytes}, but the weight files have {nbytes}")
    bits = bits_per_weight(nbytes, manifest.source.parameters)
    if not math.isclose(bits, manifest.bits_per_weight, abs_tol=1e-3):
        raise _damaged(artifact, f"bits_per_weight is {manifest.bits_per_weight}, but the files have {bits:.4f}")


def _refuse_config(artifact: Artifact, kind: Format) -> None:
    """Raise ArtifactError if config.json disagrees with the source's config.json in the manifest."""
    path = artifact.folder / "config.json"
    if "config.json" not in artifact.manifest.files:
        return
    stored = read_object(path, ArtifactError, "Convert again with --force.")
    if kind.library != "transformers" and "model_type" not in stored:
        return  # config.json has the engine's own settings
    one, other = _model_settings(stored), _model_settings(artifact.manifest.source.config)
    names = other.keys() if kind.library != "transformers" else one.keys() | other.keys()  # others add defaults
    if is_multimodal(stored):
        # Other keys of the text half belong to the whole model, or follow from the tensors.
        one = _model_settings(stated_of(stored))
        names = one.keys() - {"tie_word_embeddings"}
    for name in sorted(names):
        if not _same(one.get(name), other.get(name)):
            raise _damaged(
                artifact,
                f"{name} is {shown(other.get(name))} in its source.config, but {shown(one.get(name))} in config.json",
            )


def _model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}


def _same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are identical; 1, 1.0 and true are different."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


class Parameters:
    """Checklist of a model's parameters: finds tensors that are missing, unknown, repeated or of a wrong shape."""

    def __init__(self, artifact: Artifact, prefix: str = "") -> None:
        self._artifact, self._prefix = artifact, prefix
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # shapes of codes, and of dense values
        self._stands_for: dict[str, set[str]] = {}  # stored name -> the parameters in it
        self._missing: set[str] = set()
        self._read: set[str] = set()

    def expect(self, name: str, shape: tuple[int, ...], dense: tuple[int, ...] | None = None) -> None:
        """Require a parameter of this shape; `dense` is its shape if it is stored as floats instead of codes."""
        self._shapes[name] = (shape, shape if dense is None else dense)
        self._stands_for[name] = {name}
        self._missing.add(name)

    def allow(self, name: str, shape: tuple[int, ...], parameters: set[str] | None = None) -> None:
        """Allow an optional tensor; reading it marks `parameters` as read, such as the experts in a stack."""
        self._shapes.setdefault(name, (shape, shape))
        self._stands_for.setdefault(name, parameters or set())

    def take(self, name: str, stored: Stored) -> None:
        """Check a stored tensor and mark its parameters as read; raises ArtifactError."""
        own = next((n for n in (name, self._prefix + name, name.removeprefix(self._prefix)) if n in self._shapes), None)
        if own is None:
            raise ArtifactError(
                f"{self._artifact.folder} has the tensor {name}, which its config.json does not describe. "
                "Convert again with --force."
            )
        codes, dense = self._shapes[own]
        shape, want = tuple(stored.shape), codes if isinstance(stored, GroupedWeight | ScaledWeight) else dense
        if shape != want:
            raise ArtifactError(f"{self._artifact.folder}: the tensor {name} has the shape {shape}, not {want}")
        if own in self._read:
            raise ArtifactError(f"{self._artifact.folder} has the tensor {name} twice")
        self._read.add(own)
        self._missing -= self._stands_for[own]

    def refuse_missing(self) -> None:
        """Raise ArtifactError if a required parameter was not read."""
        if self._missing:
            raise ArtifactError(
                f"{self._artifact.folder} lacks the tensor {min(self._missing)}. Convert again with --force."
            )


def refuse_parameters(artifact: Artifact, weights: int) -> None:
    """Raise ArtifactError if the manifest's parameter count does not match `weights`, the number of values read.

    Tolerated differences: a tied head that is stored, and small buffers in the source.
    """
    source = artifact.manifest.source
    sizes = (source.config.get(name) for name in ("vocab_size", "hidden_size", "n_embd", "d_model"))
    head = math.prod(size for size in sizes if isinstance(size, int))
    least = weights - head if source.config.get("tie_word_embeddings", True) else weights
    most = weights * SLACK + head
    if source.parameters < least or (source.parameters > most and source.architecture not in MASKED):
        raise _damaged(artifact, f"it counts {source.parameters} parameters of the source, but {weights} are there")


def parameters_of(artifact: Artifact, skeleton: Skeleton) -> Parameters:
    """Return the checklist of parameters that an artifact of the skeleton's model must have."""
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
    for name, value in model.state_dict().items():  # also copies of tied weights, and buffers
        expected.allow(name, tuple(value.shape))
    return expected


def _counted(types: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "no tensors"


def _damaged(artifact: Artifact, what: str) -> ArtifactError:
    return ArtifactError(f"{artifact.folder / MANIFEST} is corrupted: {what.rstrip('.')}. Convert again with --force.")
