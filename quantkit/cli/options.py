"""Command-line options made from the fields of records, and functions that print and save results.

A parameter annotated with `Fields` becomes one option for each field of a record, with the field's name, type, default
and description; the command gets a dict of the given values. A parameter that is a dataclass becomes one option for
each of its fields, so that commands can share options.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperCommand

from quantkit.checkpoints.side_files import SIDE_FILES
from quantkit.cli.progress import configure_verbosity
from quantkit.errors import LONGEST, OutputError, RecipeError, near_miss, one_line
from quantkit.records.artifact import MANIFEST, Artifact
from quantkit.records.recipe import CalibrationSpec, EngineSpec, ModelRef, Strict, parse
from quantkit.system.files import refuse_unwritable
from quantkit.system.sizes import megabytes
from quantkit.system.untrusted import parse_yaml, path_of, reraise_as, shown

if TYPE_CHECKING:
    from quantkit.records.report import Report
    from quantkit.report.table import Table

out = Console()
FILE_WIDTH = 120  # columns of a table in a file
# JSON files of models, which are never overwritten with results.
OF_MODELS = {MANIFEST, "config.json", "quantize_config.json", "vocabulary.json", *SIDE_FILES}
LONGEST_LINE = 20_000  # characters of a printed line
Values = dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """Options for some fields of a record (default: all), with `prefix` before each name.

    With `unset`, an option that is not given is absent from the values, even if its field has a default. `panel`:
    heading of these options in the help.
    """

    record: type[Strict]
    names: tuple[str, ...] = ()
    prefix: str = ""
    unset: bool = False
    panel: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return self.names or tuple(self.record.model_fields)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the options as function parameters, from which typer makes command-line options."""
        for field in self.fields:
            name, info = self.prefix + field, self.record.model_fields[field]
            flag = "--" + name.replace("_", "-")
            kind, parser = _kind(info.annotation, flag)
            default = None if self.unset or info.get_default() == () else info.get_default()
            text = " ".join(f"{part[:1].upper()}{part[1:]}." for part in (info.description or "").split("; "))
            if self.unset and (own := info.get_default(call_default_factory=True)) is not None:
                text += f" Default: {str(own).lower() if kind is bool else own}."
            option = Option(
                ... if info.is_required() else default, f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
                help=text, rich_help_panel=self.panel, parser=parser,
            )  # fmt: skip
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)

    def take(self, values: Values) -> Values:
        """Remove the values of these options from `values` and return them, without those that are None."""
        taken = {name: values.pop(self.prefix + name) for name in self.fields}
        return {name: value for name, value in taken.items() if value is not None}


def _kind(annotation: Any, flag: str) -> tuple[Any, Callable[[str], Any] | None]:
    """Return the type of a field's option, and a parser if typer does not support the field's type."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    first, *others = (_bare(kind) for kind in kinds if kind is not NoneType)
    if first in (bool, int, float, str) and not others:
        return first, None
    if get_origin(first) is tuple:
        return str, functools.partial(_items, item=_bare(get_args(first)[0]), flag=flag)
    return str, _value


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _items(text: str, item: type, flag: str) -> tuple[Any, ...]:
    """Parse a comma-separated list, such as ``1,2`` or ``size,speed``."""
    try:
        return tuple(item(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise typer.BadParameter(f"{flag} {one_line(text, 80)}: give whole numbers, such as 1,2") from None


def _value(text: str) -> Any:
    """Parse a value as in a recipe: a number, a mapping or list in brackets, or else a string."""
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d{1,18}\.\d{1,18}", text):
        return float(text)
    if text.startswith(("{", "[")):
        try:
            return parse_yaml(text, shown(text), RecipeError)
        except RecipeError as error:
            raise typer.BadParameter(str(error)) from None
    return text


class Group:
    """Options for all parameters of a function or fields of a dataclass; `others` override annotations by name."""

    def __init__(self, function: Callable[..., Any], **others: Fields) -> None:
        parameters = inspect.signature(function, eval_str=True).parameters
        self._function = function
        self._parts = {name: others.get(name) or _part(parameter) for name, parameter in parameters.items()}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the options as function parameters, from which typer makes command-line options."""
        for part in self._parts.values():
            if isinstance(part, inspect.Parameter):
                yield part.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            else:
                yield from part.parameters()

    def take(self, values: Values) -> Any:
        """Remove the values of these options from `values`, and call the function or dataclass with them."""
        given = {}
        for name, part in self._parts.items():
            given[name] = values.pop(name) if isinstance(part, inspect.Parameter) else part.take(values)
        return self._function(**given)


def _part(parameter: inspect.Parameter) -> inspect.Parameter | Fields | Group:
    if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
        return Group(parameter.annotation)
    marks = getattr(parameter.annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Fields)), parameter)


def with_options(function: Callable[..., None], **others: Fields) -> Callable[..., None]:
    """Return a command as a function for typer, with `--quiet` and `--verbose`; `others`: see `Group`."""
    own, verbosity = Group(function, **others), Group(configure_verbosity)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        verbosity.take(values)
        own.take(values)

    command.__annotations__ = {}  # typer would believe them rather than the signature
    vars(command)["__signature__"] = inspect.Signature([*own.parameters(), *verbosity.parameters()])
    return command


class Command(TyperCommand):
    """Command whose error for an unknown option suggests a similar one and lists the method's options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            if not hasattr(error, "possibilities"):  # click's NoSuchOption has them; typer does not export it
                vars(error)["message"] = one_line(vars(error).get("message") or "", LONGEST)
                raise
            flag = str(vars(error)["option_name"])
        flags = [known for option in self.params for known in (*option.opts, *option.secondary_opts)]
        panels: dict[str, list[str]] = {}
        for option in self.params:
            if panel := getattr(option, "rich_help_panel", None):
                panels.setdefault(panel, []).append(option.opts[0])
        of_method = "".join(f" {panel}: {', '.join(names)}." for panel, names in panels.items())
        return ctx.fail(f"no such option {flag}.{near_miss(flag, flags)}{of_method}")


def writable(suffix: str) -> Callable[[Path | None], Path | None]:
    """Return a typer callback that checks an output path before the work; it raises BadParameter or OutputError.

    An existing file is only overwritten if its name ends in `suffix` and it does not belong to a model, or if it is
    empty, a device or a pipe.
    """

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path_of(path, OutputError)
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {path} does not exist. Create it first.")
        if not path.exists():
            refuse_unwritable(path.absolute().parent, OutputError)
        elif path.is_file() and path.stat().st_size:
            if path.suffix.lower() != suffix:
                raise OutputError(f"{path} exists; only {suffix} files are overwritten. Choose another name.")
            if path.name in OF_MODELS or path.name.endswith(".index.json"):
                raise OutputError(f"{path} exists and seems to belong to a model. Choose another name.")
        return path

    return check


Model = Annotated[str, Argument(help="Hub id, checkpoint folder, safetensors or GGUF file, or 'demo' (135M).")]
ArtifactOrModel = Annotated[str, Argument(metavar="MODEL", help="Artifact folder, or a model to use unquantized.")]
ArtifactFolder = Annotated[Path, Argument(help="Artifact folder.")]
Json = Annotated[
    Path | None,
    Option("--json", dir_okay=False, callback=writable(".json"), help="Write the result as JSON to this file."),
]
Force = Annotated[bool, Option("--force", help="Replace an existing artifact.")]
DryRun = Annotated[bool, Option("--dry-run", help="Forecast memory, disk and time; leave no file.")]
Notes = Annotated[bool, Option("--notes", help="Print all notes of the table in full.")]
Adapters = Annotated[
    list[str] | None,
    Option("--adapter", metavar="FOLDER", help="LoRA adapter to merge into the model first; repeatable."),
]
Revision = Annotated[str | None, Option(help="Revision of a hub model.")]
Calibration = Annotated[Values, Fields(CalibrationSpec, prefix="calibration_")]
WINDOWS = ("text", "protocol", "n_ctx", "limit")  # fields that choose the text to evaluate on, and its windows


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the engine that loads a model, and for the model's revision and adapters."""

    engine: Annotated[Values, Fields(EngineSpec)]
    revision: Revision = None
    adapter: Adapters = None

    def ref(self, model: str) -> ModelRef:
        return parse(ModelRef, {"model": model, "revision": self.revision, "adapters": self.adapter or []}, "model")

    @property
    def engine_spec(self) -> EngineSpec:
        return parse(EngineSpec, self.engine, "engine")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options for printing and saving a table."""

    transpose: Annotated[
        bool | None, Option("--transpose/--no-transpose", help="One row per variant. Default: if columns do not fit.")
    ] = None
    notes: Notes = False
    json: Json = None

    def show(self, table: Table) -> None:
        save(self.json, table.to_json())
        print_table(table, self.transpose, self.notes)


def say(line: str) -> None:
    """Print a line; control characters are escaped, since names in it may come from untrusted files."""
    out.print(Text(one_line(line, LONGEST_LINE)), soft_wrap=True)


def say_notes(notes: Iterable[str]) -> None:
    """Print notes below a result."""
    for note in notes:
        say(f"  note: {note}")


def save(path: Path | None, result: object) -> None:
    """Write a result as JSON, or a string unchanged, to `path`; do nothing if `path` is None."""
    if path is None:
        return
    if isinstance(result, BaseModel):
        result = result.model_dump_json(indent=2)
    text = result if isinstance(result, str) else json.dumps(result, indent=2, default=_plain)
    with reraise_as(f"the result cannot be written to {path}", OutputError):
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def print_table(table: Table, transpose: bool | None = None, notes: bool = False) -> None:
    """Print a table in the terminal's width, or in `FILE_WIDTH` columns if the output is a file."""
    wide = out.is_terminal or "COLUMNS" in os.environ
    table.show(out if wide else Console(width=FILE_WIDTH), transpose=transpose, notes=notes)


def print_report(report: Report, notes: bool) -> None:
    """Print a report as a table with one column."""
    from quantkit.report.table import Table

    print_table(Table((report,)), notes=notes)


def print_artifact(artifact: Artifact) -> None:
    """Print an artifact's recipe, size, types, weight errors and notes."""
    m = artifact.manifest
    say(f"{artifact.folder}: {m.recipe.label} of {m.source.model}")
    say(f"  {megabytes(m.weight_bytes)}, {m.bits_per_weight:.2f} bits per weight")
    say(f"  tensors: {', '.join(f'{count} {kind}' for kind, count in m.tensor_types.items())}")
    if error := m.weight_error:
        say(f"  relative weight error: mean {error.mean:.4f}, worst {error.worst:.4f} ({error.worst_tensor})")
    say_notes(m.all_notes)
