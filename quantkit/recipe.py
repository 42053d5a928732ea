"""Recipes: what is asked for, as one frozen, strict value that a YAML file, a call and a command line can all say.

A *convert* recipe makes one artifact. A *compare* recipe makes and judges several and prints one table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from quantkit.errors import RecipeError, near_miss

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """A frozen record; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CalibrationSpec(Strict):
    """The text that the model is calibrated on, cut into `sequences` pieces of `length` tokens."""

    text: str | None = Field(None, description="text file; default: WikiText-2 train, or the bundled sample")
    sequences: int = Field(64, ge=1, description="number of sequences")
    length: int = Field(512, ge=16, description="tokens in a sequence")


def _bits_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value


class Variant(Strict):
    """A method, its bits in the words of the method's users (``4``, ``int8``, ``Q4_K_M``), and its options."""

    method: str
    bits: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    _bits = field_validator("bits", mode="before")(_bits_as_text)

    @property
    def label(self) -> str:
        """Short name for tables and folders, such as ``gptq-4`` or ``gptq-4 group_size=32``."""
        name = f"{self.method}-{self.bits}" if self.bits else self.method
        return " ".join([name, *(f"{key}={value}" for key, value in sorted(self.options.items()))])


class ConvertRecipe(Variant):
    """Everything that decides the bytes of one artifact."""

    model: str
    revision: str | None = None
    calibration: CalibrationSpec = CalibrationSpec()
    seed: int = 0


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class EvaluationSpec(Strict):
    """What is measured, on which text, by which protocol."""

    text: str | None = Field(None, description="text file; default: WikiText-2 test, or the bundled sample")
    protocol: str = Field("llama.cpp", description="perplexity protocol: llama.cpp, papers or lm-eval")
    n_ctx: int | None = Field(None, ge=8, description="tokens in a window; default: the protocol's")
    limit: int | None = Field(None, ge=1, description="number of windows (lm-eval: pages); default: all")
    divergence: bool = Field(True, description="also measure how far the model moved away from its source")
    threads: tuple[int, ...] = Field((), description="thread counts for ms/token; default: 1 and all cores")
    probes: tuple[str, ...] = Field((), description="probes to run; default: size, memory, speed, perplexity")
    new_tokens: int = Field(32, ge=2, description="tokens generated in each repeat of the speed probe")
    repeats: int = Field(3, ge=1, description="repeats of the speed and throughput probes after one warm-up")
    answer_tokens: int = Field(200, ge=2, description="most tokens of each answer of the probe answers")
    price_per_hour: Positive | None = Field(None, description="of the machine, in any currency; adds a cost")


class CompareRecipe(Strict):
    """Several variants of one model, judged by one ruler."""

    model: str
    revision: str | None = None
    variants: tuple[Variant, ...]
    calibration: CalibrationSpec = CalibrationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    seed: int = 0
    out: str | None = None


class ConvertRun(ConvertRecipe):
    """A convert recipe as it stands in a file: with the place to write to."""

    out: str | None = None


def _record_at(model: type[BaseModel], place: tuple[str | int, ...]) -> type[BaseModel]:
    """The record that holds the value at `place` of `model`, such as ``("variants", 0, "bits")``."""
    for part in place[:-1]:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        kinds = (annotation, *get_args(annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model


def explain(error: ValidationError, model: type[BaseModel], where: str) -> RecipeError:
    """Turn the first complaint of pydantic into one line that names the key, the value and the fix."""
    # A misspelt key is told before the one that is missing because of it.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    model = _record_at(model, first["loc"])
    known = ", ".join(model.model_fields)
    if first["type"] == "extra_forbidden":
        hint = near_miss(first["loc"][-1], model.model_fields)
        return RecipeError(f"{where}: unknown key {key!r}.{hint} Known keys: {known}.")
    if first["type"] == "missing":
        return RecipeError(f"{where}: the key {key!r} is missing. Known keys: {known}.")
    return RecipeError(f"{where}: {key} = {first['input']!r} cannot be used: {first['msg']}.")


def parse(model: type[M], values: dict[str, Any], where: str) -> M:
    """Check `values` against `model`; raises RecipeError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, model, where) from None


def load_recipe(path: str | Path) -> ConvertRun | CompareRecipe:
    """Read a YAML recipe. It is a compare recipe where it has `variants`. Raises RecipeError."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"the recipe {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"the recipe {path} must hold keys and values, such as 'model: demo'")
    if "variants" in values:
        return parse(CompareRecipe, values, str(path))
    return parse(ConvertRun, values, str(path))
