"""What the commands share: options made of the records' fields, the console, how results are printed and saved.

A parameter of a command that is annotated with `Fields` stands for options: one for each field of a record, with the
field's name, type, default and description. The command gets what was given as a dict.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from quantkit.artifact import MANIFEST
from quantkit.checkpoints.side_files import SIDE_FILES
from quantkit.cli.progress import choose
from quantkit.errors import LONGEST, OutputError, RecipeError, near_miss, one_line
from quantkit.recipe import CalibrationSpec, EngineSpec, Strict
from quantkit.system.files import refuse_unwritable
from quantkit.untrusted import parse_yaml, path_of, reraise_as, shown

if TYPE_CHECKING:
    from quantkit.report.table import Table

out = Console()
FILE_WIDTH = 120  # columns of a table in a file
# JSON files of models, which no result overwrites.
OF_MODELS = {MANIFEST, "config.json", "quantize_config.json", "vocabulary.json", *SIDE_FILES}
LONGEST_LINE = 20_000  # characters of what is printed at once
Values = dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """Options for these fields of a record (default: all of them); `prefix` stands before each of their names.

    `unset`: an option that is not given is None, whatever the field's default is. `panel`: their heading in the help.
    """

    record: type[Strict]
    names: tuple[str, ...] = ()
    prefix: str = ""
    unset: bool = False
    panel: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.names or tuple(self.record.model_fields)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The options as parameters of a function that typer reads."""
        for field in self.fields:
            name, info = self.prefix + field, self.record.model_fields[field]
            flag = "--" + name.replace("_", "-")
            kind, settings = _kind(info.annotation, flag)
            flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
            default = None if self.unset or info.get_default() == () else info.get_default()
            text = _help(info.description)
            if self.unset and (own := info.get_default(call_default_factory=True)) is not None:
                text += f" Default: {str(own).lower() if kind is bool else own}."
            option = typer.Option(
                ... if info.is_required() else default, flags, help=text, rich_help_panel=self.panel, **settings
            )
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)

    def take(self, values: Values) -> Values:
        """Take the values of these options out of `values`; those that are None are left out."""
        taken = {name: values.pop(self.prefix + name) for name in self.fields}
        return {name: value for name, value in taken.items() if value is not None}


def _help(description: str | None) -> str:
    """``a text; default: ours`` as sentences."""
    return " ".join(f"{part[:1].upper()}{part[1:]}." for part in (description or "").split("; "))


def _kind(annotation: Any, flag: str) -> tuple[Any, Values]:
    """The type of a field's option, and the settings that read what is no plain type from text."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = tuple(
        get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds if kind is not NoneType
    )
    if kinds[0] in (bool, int, float, str) and len(kinds) == 1:
        return kinds[0], {}
    if get_origin(kinds[0]) is tuple:
        item = get_args(kinds[0])[0]
        item = get_args(item)[0] if get_origin(item) is Annotated else item
        return str, {"parser": functools.partial(_items, item=item, flag=flag)}
    return str, {"parser": _value}


def _items(text: str, item: type, flag: str) -> tuple[Any, ...]:
    """``1,2`` as numbers, ``size,speed`` as names."""
    try:
        return tuple(item(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise typer.BadParameter(f"{flag} {one_line(text, 80)}: give whole numbers, such as 1,2") from None


def _value(text: str) -> Any:
    """A value as a recipe says it: a number such as ``64``, a mapping or list in brackets, else the text itself."""
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


def _loudness(
    *,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the result.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what libraries say, too.")] = False,
) -> None: ...


def with_options(function: Callable[..., None], **others: Fields) -> Callable[..., None]:
    """The command with options in place of its parameters that are annotated with `Fields`; `others` replace those."""
    groups: dict[str, Fields] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        marks = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, Fields)]
        if marks:
            groups[parameter.name] = others.get(parameter.name, marks[0])
        parameters += groups[parameter.name].parameters() if marks else (parameter,)
    parameters += inspect.signature(_loudness, eval_str=True).parameters.values()

    @functools.wraps(function)
    def command(*, quiet: bool, verbose: bool, **values: Any) -> None:
        choose(quiet, verbose)
        function(**{name: fields.take(values) for name, fields in groups.items()}, **values)

    command.__annotations__ = {}  # typer would believe them rather than the signature
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


class Command(TyperCommand):
    """A command that suggests the nearest option where one does not exist."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with click; the error for an unknown option suggests the nearest one, and names those in a panel."""
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
            if (panel := getattr(option, "rich_help_panel", None)) is not None:
                panels.setdefault(panel, []).append(option.opts[0])
        known_options = "".join(f" {panel}: {', '.join(names)}." for panel, names in panels.items())
        return ctx.fail(f"no such option {flag}.{near_miss(flag, flags)}{known_options}")


def writable(suffix: str) -> Callable[[Path | None], Path | None]:
    """Return the check of an output file, before long work; it raises a usage error or OutputError.

    An existing file is overwritten only if its name ends in `suffix` and is not that of a model's file. An empty
    file, a device and a pipe take anything.
    """

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path_of(path, OutputError)
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {path} does not exist; make it first")
        if not path.exists():
            refuse_unwritable(path.absolute().parent, OutputError)
        elif path.is_file() and path.stat().st_size:
            if path.suffix.lower() != suffix:
                raise OutputError(f"{path} exists, and only *{suffix} files are overwritten. Choose another name.")
            if path.name in OF_MODELS or path.name.endswith(".index.json"):
                raise OutputError(f"{path} exists, and seems to belong to a model. Choose another name.")
        return path

    return check


ModelArgument = Annotated[
    str, typer.Argument(help="Hub id, checkpoint folder, safetensors or GGUF file, or 'demo' (135M).")
]
ArtifactArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Artifact folder, or a model to judge unquantized.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=writable(".json"), help="Write the result as JSON to this file."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")]
TransposeOption = Annotated[
    bool | None,
    typer.Option("--transpose/--no-transpose", help="A row for each variant. Default: where columns do not fit."),
]
NotesOption = Annotated[bool, typer.Option("--notes", help="Print all notes of the table in full.")]
RevisionOption = Annotated[str | None, typer.Option(help="Revision of a hub model.")]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="FOLDER",
        help="LoRA adapter to merge into the model first. Give it again for further ones, in their order.",
    ),
]
CalibrationFields = Annotated[Values, Fields(CalibrationSpec, prefix="calibration_")]
EngineFields = Annotated[Values, Fields(EngineSpec)]
WINDOWS = ("text", "protocol", "n_ctx", "limit")  # the fields that say which text is judged, and how


def say(line: str) -> None:
    """Print a line as it is, but for characters that would steer the terminal: names in it come from others."""
    out.print(Text(one_line(line, LONGEST_LINE)), soft_wrap=True)


def save(path: Path | None, text: str) -> None:
    """Write a result where that was asked for."""
    if path is not None:
        with reraise_as(f"the result cannot be written to {path}", OutputError):
            path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def print_table(table: Table, transpose: bool | None = None, notes: bool = False) -> None:
    """Print a table for this terminal, or for a file."""
    wide = out.is_terminal or "COLUMNS" in os.environ
    table.show(out if wide else Console(width=FILE_WIDTH), transpose=transpose, notes=notes)


def print_artifact(artifact: Any) -> None:
    """Print what an artifact is: recipe, size, types, errors of its weights, notes."""
    from quantkit.report.table import megabytes

    m = artifact.manifest
    say(f"{artifact.folder}: {m.recipe.label} of {m.source.model}")
    say(f"  {megabytes(m.weight_bytes)}, {m.bits_per_weight:.2f} bits per weight")
    say(f"  tensors: {', '.join(f'{n} {t}' for t, n in m.tensor_types.items())}")
    if m.weight_error:
        e = m.weight_error
        say(f"  relative weight error: mean {e.mean:.4f}, worst {e.worst:.4f} ({e.worst_tensor})")
    for note in m.all_notes:
        say(f"  note: {note}")
