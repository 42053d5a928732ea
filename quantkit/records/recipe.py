"""Recipes: frozen, strict records of what the user asks for, from YAML, Python or the command line.

A *convert* recipe makes one artifact. A *compare* recipe makes and evaluates several, and prints a table.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from quantkit.errors import RecipeError, cut, near_miss, one_line
from quantkit.system.device import AUTO
from quantkit.system.untrusted import LARGEST_NAME, LONGEST_VALUE, MOST_YAML, parse_yaml, path_of, read_text, shown

M = TypeVar("M", bound=BaseModel)


DEVICE = "device to compute on: auto (the GPU if torch has one), cpu, cuda, cuda:1"
PLAIN = (int, float, str, NoneType, dict, list, tuple)


class Frozen(BaseModel):
    """Base class of immutable records; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Strict(Frozen):
    """Base class of user input records: types are not coerced, so ``true`` is not accepted as 1.

    The command line derives its options from the fields: name, type, default, and the description as help.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, about: ValidationInfo) -> Any:
        annotation: Any = cls.model_fields[str(about.field_name)].annotation
        kinds = _kinds(annotation)
        parts = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
        plain = kinds <= {*PLAIN, *(kind for kind in kinds if not isinstance(kind, type))}
        if plain and Any not in kinds and any(isinstance(part, bool) for part in parts):
            raise ValueError("it is neither a number nor a string")
        return value


SELDOM = ("adapters", "kept", "passages", "device")


class WithSeldom(Strict):
    """A record that leaves empty `adapters`, `kept`, `passages` and `device` out of files."""

    @model_serializer(mode="wrap")
    def _without_none(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {name: value for name, value in values.items() if name not in SELDOM or value}


@cache
def _kinds(annotation: Any) -> set[Any]:
    """Return all types nested in an annotation."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


LARGEST_NUMBER = (1 << 63) - 1
LONGEST_OPTION = 1 << 17  # characters of one text of a method's options, which may name every tensor
LONGEST_IN_LABEL = 60  # bytes of an option's value
NOT_UTF8 = re.compile("[\ud800-\udfff]")


def _plain(value: Any, longest: int = LARGEST_NAME) -> Any:
    """Return `value`; raise ValueError if it contains a string or number that cannot be stored."""
    if isinstance(value, str):
        if len(value) > longest:
            raise ValueError(f"a string of {len(value):,} characters is longer than {longest:,}")
        if "\0" in value:
            raise ValueError("a string contains the character NUL")
        if NOT_UTF8.search(value):
            raise ValueError("a string contains bytes that are not UTF-8")
    elif isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ValueError("a number has more than 64 bits")
    elif isinstance(value, dict | list | tuple):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            _plain(part, longest)
    return value


def _plain_options(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(value, LONGEST_OPTION) for key, value in values.items()}


MOST_TOKENS = 1 << 24  # of a window, a sequence or an answer; the longest published contexts have some 10^7
MOST_ADAPTERS = 64
TEXTS = "UTF-8 text file, or a bundled text: sample, articles, chat, code, languages or mixed"
Words = Annotated[str, AfterValidator(_plain)]
Adapters = Annotated[tuple[Words, ...], Field(max_length=MOST_ADAPTERS)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Gigabytes = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]


class CalibrationSpec(Strict):
    """The calibration text, to be cut into `sequences` pieces of `length` tokens."""

    text: Words | None = Field(None, description=f"{TEXTS}; default: WikiText-2 train, or the bundled sample")
    sequences: int = Field(64, ge=1, le=1 << 20, description="number of calibration sequences")
    length: int = Field(512, ge=16, le=MOST_TOKENS, description="tokens in a calibration sequence")


def _bits_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value


def _in_label(value: Any) -> str:
    """Format an option's value for a label; long values are cut and get a hash."""
    text = ",".join(f"{key}={part}" for key, part in value.items()) if isinstance(value, dict) else str(value)
    return cut(text, LONGEST_IN_LABEL, "...")


class Variant(Strict):
    """A method with its bits and options, and the format to write.

    May be written as ``METHOD`` or ``METHOD:BITS``.
    """

    method: Words = Field(
        description="name of the method: gptq, awq, nf4, ctranslate2, gguf, rtn or float; see `quantkit methods`"
    )
    bits: Words | None = Field(None, description="4, int8, Q4_K_M, ...; see `quantkit methods`")
    options: Annotated[dict[str, Any], AfterValidator(_plain_options)] = Field(default_factory=dict)
    format: Words | None = Field(None, description="the format to write; default: the method's first")

    _bits = field_validator("bits", mode="before")(_bits_as_text)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        method, _, bits = value.partition(":")
        return {"method": method, "bits": bits or None}

    @property
    def label(self) -> str:
        """Return a short name for tables and folders, such as ``gptq-4`` or ``gptq-4 group_size=32``."""
        name = f"{self.method}-{self.bits}" if self.bits else self.method
        given = sorted(self.options.items()) + ([("format", self.format)] if self.format else [])
        return " ".join([name, *(f"{key}={_in_label(value)}" for key, value in given)])


class ConvertRecipe(Variant, WithSeldom):
    """Everything that determines the bytes of an artifact."""

    model: Words
    revision: Words | None = Field(None, description="revision of a hub model")
    adapters: Adapters = Field((), description="folders of LoRA adapters to merge into the model, in this order")
    calibration: CalibrationSpec = CalibrationSpec()
    seed: Seed = Field(0, description="seed that draws the calibration sequences")


class ResourceSpec(Strict):
    """Device and memory limits of a conversion."""

    device: Words = Field(AUTO, description=DEVICE)
    offload_gb: Gigabytes | None = Field(
        None,
        description="GB of activations above which they go to a file; default: 0.02, or a quarter of a GPU's memory",
    )
    max_memory_gb: Gigabytes | None = Field(None, description="most GB of memory to use; default: free memory")

    @property
    def max_memory(self) -> int | None:
        """Return the memory limit in bytes; None means all free memory."""
        return None if self.max_memory_gb is None else int(self.max_memory_gb * 1e9)


KvCache = Literal["f16", "q8_0", "q4_0", "fp8"]


class EngineSpec(Strict):
    """The engine with dtype, interpreter, device and cache; None: the default of the format or engine."""

    engine: Words | None = Field(None, description="engine; default: the format's native engine")
    dtype: Words | None = Field(None, description="dtype to compute in, for engines with a choice")
    python: Words | None = Field(None, description="Python interpreter that has the engine; default: this one")
    device: Words = Field(AUTO, description=DEVICE)
    kv_cache: KvCache | None = Field(
        None, description="type of the cached keys and values: f16, q8_0 or q4_0 (llamacpp), fp8 (reference)"
    )


class MemoryLimits(Strict):
    """Memory limits of an evaluation."""

    walk: bool | None = Field(
        None,
        description="evaluate block by block with the reference engine, one block in memory at a time; default: "
        "if the whole model does not fit",
    )
    offload_gb: Gigabytes | None = Field(
        None, description="with --walk: GB of hidden states above which they go to a file; default: 0.02"
    )
    max_memory_gb: Gigabytes | None = Field(None, description="most GB of memory to use; default: free memory")


class EvaluationSpec(Strict):
    """What to measure, on which text, by which protocol."""

    text: Words | None = Field(
        None, description=f"{TEXTS}; default: WikiText-2 test, or the bundled sample without the hub"
    )
    protocol: Words = Field("llama.cpp", description="perplexity protocol: llama.cpp, papers or lm-eval")
    n_ctx: int | None = Field(
        None,
        ge=8,
        le=MOST_TOKENS,
        description="tokens per window; default: 512 (llama.cpp), 2048 (papers), the model's context (lm-eval)",
    )
    limit: int | None = Field(
        None, ge=1, le=1 << 31, description="number of windows (lm-eval: pages); default: the whole text"
    )
    divergence: bool = Field(True, description="also measure the divergence from the source model")
    threads: tuple[Annotated[int, Field(le=1 << 16)], ...] = Field(
        (), max_length=1000, description="thread counts for ms/token, such as 1,2; default: 1 and all cores"
    )
    probes: tuple[Words, ...] = Field(
        (), max_length=1000, description="probes, such as size,speed; default: size,memory,speed,perplexity"
    )
    new_tokens: int = Field(32, ge=2, le=MOST_TOKENS, description="tokens generated in each repeat of the speed probe")
    repeats: int = Field(
        3, ge=1, le=100_000, description="repeats of the speed and throughput probes after one warm-up"
    )
    max_tokens: int = Field(200, ge=2, le=MOST_TOKENS, description="most tokens per answer of the probe answers")
    price_per_hour: Positive | None = Field(
        None, description="price of the machine per hour, in any currency; adds the cost of tokens"
    )


def _server_reads(value: str) -> str:
    if value.startswith("-") or not value.isprintable():
        raise ValueError("it begins with a dash or is unprintable, which a server would misread")
    return value


Argument = Annotated[Words, AfterValidator(_server_reads)]


class TaskSpec(Strict):
    """The lm-evaluation-harness tasks to run; `include` is a folder with more tasks, whose code is run."""

    tasks: tuple[Words, ...] = Field(max_length=1000)
    include: Words | None = None
    num_fewshot: int | None = Field(None, ge=0, le=10_000)
    limit: int | None = Field(None, ge=1, le=1 << 31)
    chat_template: bool = False
    n_ctx: int | None = Field(None, ge=1, le=MOST_TOKENS)


class ServeSpec(Strict):
    """The server to start, with its address and limits."""

    engine: Words | None = Field(
        None,
        description="the server: xllamacpp, llamacpp, mlx or vllm; with --print also llama-server, sglang, tgi or "
        "tabbyapi; default: by format",
    )
    host: Argument = Field("127.0.0.1", description="address to listen on; there is no password, so do not expose it")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    n_ctx: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="context in tokens; default: the model's, up to 4096"
    )
    parallel: int | None = Field(
        None, ge=1, le=256, description="requests answered at once, with a context each (xllamacpp only); default: 4"
    )
    threads: int | None = Field(None, ge=1, le=4096, description="threads to compute with; default: all cores")
    python: Argument | None = Field(None, description="Python interpreter that has the engine")
    name: Argument | None = Field(None, description="the model's name in the API; default: the source's")


class LoadTestSpec(Strict):
    """The requests of a load test, and its duration."""

    concurrency: int | None = Field(
        None, ge=1, le=4096, description="most requests at once; default: 1, or 256 at a rate"
    )
    request_rate: Positive | None = Field(
        None, description="requests per second, at random times; default: one after another"
    )
    duration: Positive = Field(30.0, description="seconds of sending requests and counting tokens")
    requests: int | None = Field(None, ge=1, le=1 << 31, description="most requests; default: no limit")
    max_tokens: int = Field(200, ge=1, le=MOST_TOKENS, description="most tokens per answer")
    warm_up: int = Field(1, ge=0, le=100_000, description="requests before the clock starts")
    seed: Seed = Field(0, description="seed of the random times")
    connect_timeout: Positive = Field(10.0, description="seconds to wait for a connection")
    ttft_timeout: Positive = Field(60.0, description="seconds to wait for the first token")
    pause_timeout: Positive = Field(30.0, description="seconds to wait between two tokens")
    timeout: Positive = Field(300.0, description="seconds to wait for a whole answer")
    price_per_hour: Positive | None = Field(
        None, description="price of the machine per hour, in any currency; adds the cost of tokens"
    )


class CompareRecipe(Strict):
    """Several variants of one model, evaluated under the same conditions."""

    model: Words
    revision: Words | None = Field(None, description="revision of a hub model")
    adapters: Adapters = Field((), description="folders of LoRA adapters to merge into the model, in this order")
    variants: tuple[Variant, ...] = Field(max_length=1000)
    calibration: CalibrationSpec = CalibrationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    seed: Seed = Field(0, description="seed that draws the calibration sequences")
    device: Words = Field(AUTO, description=DEVICE)
    out: Words | None = None


class ModelRef(WithSeldom):
    """A model: ``demo``, a folder, a file or a Hub id, with revision and LoRA adapters to merge."""

    model: Words
    revision: Words | None = Field(None, description="revision of a hub model")
    adapters: Adapters = ()

    @field_validator("model", "adapters", mode="before")
    @classmethod
    def _paths_as_text(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(str(part) if isinstance(part, Path) else part for part in value)
        return str(value) if isinstance(value, Path) else value


class SweepRecipe(Strict):
    """The same variants for several models, evaluated under the same conditions."""

    models: tuple[ModelRef, ...] = Field(min_length=1, max_length=1000)
    variants: tuple[Variant, ...] = Field(max_length=1000)
    calibration: CalibrationSpec = CalibrationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    seed: Seed = Field(0, description="seed that draws the calibration sequences")
    device: Words = Field(AUTO, description=DEVICE)
    out: Words | None = None

    @field_validator("models", mode="before")
    @classmethod
    def _names(cls, values: Any) -> Any:
        return (
            [{"model": one} if isinstance(one, str) else one for one in values] if isinstance(values, list) else values
        )


class ConvertRun(ConvertRecipe):
    """A convert recipe file, with device and output folder."""

    device: Words = Field(AUTO, description=DEVICE)
    out: Words | None = None


def _record_at(model: type[BaseModel], place: tuple[str | int, ...]) -> type[BaseModel]:
    """Return the record class that holds the value at `place`, such as ``("variants", 0, "bits")``."""
    for part in place[:-1]:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        kinds = (annotation, *get_args(annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model


def explain(error: ValidationError, model: type[BaseModel], where: str) -> RecipeError:
    """Turn pydantic's first error into one line with the key, the value and the fix."""
    # Report a misspelt key before the key that is missing because of it.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    key = one_line(".".join(str(part) for part in first["loc"]), LONGEST_VALUE)
    model = _record_at(model, first["loc"])
    known = ", ".join(model.model_fields)
    if first["type"] == "extra_forbidden":
        hint = near_miss(first["loc"][-1], model.model_fields)
        return RecipeError(f"{where}: unknown key {key!r}.{hint} Known keys: {known}.")
    if first["type"] == "missing":
        return RecipeError(f"{where}: the key {key!r} is missing. Known keys: {known}.")
    complaint = first["msg"].removeprefix("Value error, ")
    return RecipeError(f"{where}: {key} = {shown(first['input'])} cannot be used: {complaint}.")


def parse(model: type[M], values: M | dict[str, Any], where: str) -> M:
    """Validate `values` as a `model` record; records are returned unchanged. Raises RecipeError."""
    try:
        record = model.model_validate(values)
    except ValidationError as error:
        raise explain(error, model, where) from None
    for name, value in record:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise RecipeError(f"{where}: {name} = {shown(value)} cannot be used: it has more than 64 bits.")
    return record


def take_fields(settings: dict[str, Any], record: type[M], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Remove a record's fields (default: all) from `settings`; return them as a dict."""
    return {name: settings.pop(name) for name in names or tuple(record.model_fields) if name in settings}


# Arguments of `evaluate` and similar functions that are records; their fields are not separate keywords.
ARGUMENTS: dict[str, type[Strict]] = {"model": ModelRef, "engine": EngineSpec, "memory": MemoryLimits}


def spec_of(model: type[M], settings: dict[str, Any], where: str, **given: Any) -> M:
    """Build a record from `settings` and `given`; raise RecipeError, naming the record of a misplaced field."""
    for argument, record in ARGUMENTS.items():
        for name in settings.keys() & (record.model_fields.keys() - model.model_fields.keys()):
            value = f"{record.__name__}({'model=..., ' if argument == 'model' else ''}{name}=...)"
            raise RecipeError(f"{where}: {name} is a field of {record.__name__}. Give {argument}={value}.")
    return parse(model, {**settings, **given}, where)


def load_recipe(path: str | Path) -> ConvertRun | CompareRecipe | SweepRecipe:
    """Read a YAML recipe: a sweep if it has `models`, a comparison if it has `variants`. Raises RecipeError."""
    path = path_of(path, RecipeError)
    if not path.is_file():
        raise RecipeError(f"the recipe {path} {'is not a file' if path.exists() else 'does not exist'}")
    values = parse_yaml(read_text(path, RecipeError, most=MOST_YAML), f"the recipe {path}", RecipeError)
    if not isinstance(values, dict):
        raise RecipeError(f"the recipe {path} must have keys and values, such as 'model: demo'")
    if "models" in values:
        return parse(SweepRecipe, values, str(path))
    if "variants" in values:
        return parse(CompareRecipe, values, str(path))
    return parse(ConvertRun, values, str(path))
