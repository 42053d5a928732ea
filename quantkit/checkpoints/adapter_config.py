"""The adapter_config.json of a LoRA adapter: by how much each layer's change counts, and what is not merged here.

Fields: https://huggingface.co/docs/peft/package_reference/lora. One that is not known and has a value is refused: it
may change what the adapter computes. Not supported: other kinds than LoRA, variants of LoRA but rsLoRA and DoRA,
initial values that change the base model's own weights (pissa, olora, corda, loftq, lora_ga).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError, UnsupportedError
from quantkit.system.patterns import full_matches
from quantkit.untrusted import inside, read_object, shown, whole_number

CONFIG = "adapter_config.json"
MOST_CONFIG = 1 << 22  # bytes; one with a rank for each of 10,000 layers has a tenth of it
MOST_RANK = 1 << 16
MERGE_FIRST = "Merge it with peft (merge_and_unload) and give the merged folder as MODEL."
AGAIN = "Save the adapter again with peft's save_pretrained."
RANK, ALPHA = 8, 8  # where the file does not say
# Fields that decide what is merged, and those that say nothing of it: what is saved, the tensors tell.
READ = (
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("use_dora", "lora_bias", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "ensure_weight_tying"),
)
IDLE = (
    *("task_type", "revision", "inference_mode", "lora_dropout", "auto_mapping", "peft_version", "megatron_core"),
    *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "bias"),
    *("modules_to_save", "fan_in_fan_out"),
)
# Kinds that have no weights which a model could take up: they put something before the text.
BEFORE_THE_TEXT = (
    *("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE"),
)
KEEPS_BASE = ("gaussian", "eva", "orthogonal")  # of init_lora_weights, beside true and false


class AdapterConfig:
    """The file in `folder`; raises SourceError for a damaged one, UnsupportedError for what is not merged."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / CONFIG
        if not path.is_file():
            raise SourceError(f"{folder} has no {CONFIG}, so it is no adapter. Give the folder that holds it.")
        if not inside(folder, path):
            raise SourceError(f"{path} is a link out of the adapter's folder. Put the file itself there.")
        self._values = read_object(path, SourceError, AGAIN, MOST_CONFIG)
        _refuse_kind(folder, self._values)
        _refuse_values(self._values, str(path))
        _refuse_variants(self._values, path)
        self.base: str | None = self._values.get("base_model_name_or_path") or None
        self.dora = bool(self._values.get("use_dora"))
        self.bias = bool(self._values.get("lora_bias"))
        self.ties = bool(self._values.get("ensure_weight_tying"))  # the head, which is not among the targets then
        self.rank_stabilized = bool(self._values.get("use_rslora"))

    def scales(self, paths: list[str]) -> dict[str, tuple[int, float]]:
        """By the path of a layer its rank r, and the number s in W + s B A."""
        ranks, alphas = self._values.get("rank_pattern") or {}, self._values.get("alpha_pattern") or {}
        patterns = [rf"(.*\.)?({pattern})" for pattern in (*ranks, *alphas)]
        found = full_matches(patterns, paths, f"{self._path}: rank_pattern or alpha_pattern", SourceError)
        of_ranks = list(zip(ranks.values(), found[: len(ranks)], strict=True))
        of_alphas = list(zip(alphas.values(), found[len(ranks) :], strict=True))
        scales = {}
        for path in paths:
            rank = next((number for number, those in of_ranks if path in those), self._values.get("r", RANK))
            alpha = next(
                (number for number, those in of_alphas if path in those), self._values.get("lora_alpha", ALPHA)
            )
            scales[path] = rank, alpha / (math.sqrt(rank) if self.rank_stabilized else rank)
        return scales

    def untargeted(self, paths: list[str]) -> tuple[str, str] | None:
        """The first of the layers that peft would leave as it is, and the field that says so; None: there is none."""
        for key, wanted in (("target_modules", True), ("exclude_modules", False)):
            named = self._values.get(key)
            if named in (None, "", [], "all-linear"):
                continue
            if isinstance(named, str):
                those = full_matches([named], paths, f"{self._path}: {key}", SourceError)[0]
            else:
                those = frozenset(path for path in paths if not set(named).isdisjoint(_ends_of(path)))
            for path in paths:
                if (path in those) != wanted:
                    return path, key
        layers, lists = self._values.get("layers_to_transform"), self._values.get("layers_pattern") or []
        if layers in (None, []):
            return None
        numbers = set(layers) if isinstance(layers, list) else {layers}
        names = {lists} if isinstance(lists, str) else set(lists)
        return next(((path, "layers_to_transform") for path in paths if _layer_of(path, names) not in numbers), None)


def base_of(folder: Path) -> str | None:
    """What adapter_config.json calls the base model; raises SourceError where the file is damaged."""
    name = read_object(folder / CONFIG, SourceError, AGAIN, MOST_CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _ends_of(path: str) -> Iterator[str]:
    """The path, and what is left of it without its first parts."""
    parts = path.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _layer_of(path: str, lists: set[str]) -> int | None:
    """The number of the layer that a path goes through, in one of these lists of layers, or in any."""
    parts = path.split(".")
    for place in range(1, len(parts) - 1):
        if parts[place].isdecimal() and (not lists or parts[place - 1] in lists):
            return int(parts[place])
    return None


def _refuse_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind in BEFORE_THE_TEXT:
        raise UnsupportedError(
            f"{folder} is an adapter of the kind {kind}, which puts something before the text and changes no weights: "
            "no model can take it up. Only LoRA adapters are merged."
        )
    if kind != "LORA":
        raise UnsupportedError(f"{folder} is an adapter of the kind {shown(kind)}. Only LoRA is merged. {MERGE_FIRST}")


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    for key, value in config.items():
        if key not in (*READ, *IDLE) and value not in (None, False, "", [], {}):
            raise UnsupportedError(f"{path} sets {shown(key)} ({shown(value)}), which is not merged. {MERGE_FIRST}")
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | None) and start not in KEEPS_BASE:
        raise UnsupportedError(
            f"{path}: init_lora_weights is {shown(start)}, which changes the base model's own weights, too. Save the "
            "adapter with peft's path_initial_model_for_weight_conversion, or merge it with peft."
        )
    if config.get("use_dora") and config.get("lora_bias"):
        raise UnsupportedError(f"{path}: use_dora with lora_bias is not merged: peft's own merge is not exact there")


def _refuse_values(config: Mapping[str, Any], where: str) -> None:
    """Raise SourceError for a value that is not of its field's kind."""
    whole_number(config, "r", 1, MOST_RANK, where, SourceError)
    _refuse_number(config.get("lora_alpha", ALPHA), f"{where}: lora_alpha")
    for key in ("rank_pattern", "alpha_pattern"):
        values = config.get(key)
        if not isinstance(values, dict | None):
            raise SourceError(f"{where}: {key} is {shown(values)}, not keys and numbers. {AGAIN}")
        for name, value in (values or {}).items():
            _refuse_number(value, f"{where}: {key}: {shown(name)}")
            if key == "rank_pattern":
                whole_number({shown(name): value}, shown(name), 1, MOST_RANK, f"{where}: {key}", SourceError)
    for key in ("use_rslora", "use_dora", "lora_bias"):
        if not isinstance(config.get(key), bool | None):
            raise SourceError(f"{where}: {key} is {shown(config[key])}, not true or false. {AGAIN}")
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(key)
        if not isinstance(value, str | None) and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise SourceError(f"{where}: {key} is {shown(value)}, neither names nor an expression. {AGAIN}")
    layers = config.get("layers_to_transform")
    for number in layers if isinstance(layers, list) else [layers]:
        whole_number({"layers_to_transform": number}, "layers_to_transform", 0, MOST_RANK, where, SourceError)
    if not isinstance(config.get("base_model_name_or_path"), str | None):
        raise SourceError(f"{where}: base_model_name_or_path is {shown(config['base_model_name_or_path'])}. {AGAIN}")


def _refuse_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise SourceError(f"{what} is {shown(value)}, not a number. {AGAIN}")
