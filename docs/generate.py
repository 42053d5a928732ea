"""Write docs/api.md, docs/commands.md and the table of docs/engines.md from the code.

Usage: python docs/generate.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

import quantkit
from quantkit.cli.app import make_app
from quantkit.serving.servers import loaders, what_loads

DOCS = Path(__file__).parent

# api.md

API_HEAD = """\
# Python API

The public names of `import quantkit`. `make docs-generate` writes this page from the docstrings. A `ModelLike` is a
name, a path, a `ModelRef`, an `Artifact` or an opened source. Longer programs are in [examples/](../examples).

```python
import quantkit

artifact = quantkit.convert("demo", "gptq", 4, "demo-gptq")
report = quantkit.evaluate(artifact, probes=("size", "perplexity"), limit=4)
print(report.find("perplexity").value)
```
"""
WIDTH = 100  # characters of a signature on one line


def api_page() -> str:
    """Return docs/api.md."""
    parts = [API_HEAD]
    for name in sorted(quantkit.__all__, key=lambda name: (name[0].isupper(), name.lower())):
        parts += _entry(name, getattr(quantkit, name))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isclass(value):
        yield f"{_text(value)}\n"
        members = [(m, inspect.getattr_static(value, m)) for m in vars(value) if not m.startswith("_")]
        lines = [f"- `{m}{_brief(member)}`: {_text(member).splitlines()[0]}" for m, member in members if _shown(member)]
        if lines:
            yield "\n".join(lines) + "\n"
    else:
        yield f"```text\n{_signature(name, value)}\n```\n\n{_text(value)}\n"


def _shown(member: Any) -> bool:
    return (inspect.isfunction(member) or isinstance(member, property)) and bool(inspect.getdoc(member))


def _brief(member: Any) -> str:
    if isinstance(member, property):
        return ""
    names = [p.name for p in inspect.signature(member).parameters.values() if p.name != "self"]
    return f"({', '.join(names)})"


def _signature(name: str, function: Any) -> str:
    """Return the signature on one line, or with one parameter per line if it is long."""
    signature = inspect.signature(function)
    parts, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    returns = signature.return_annotation
    line = f"{name}({', '.join(parts)}) -> {returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f") -> {returns}"])


def _text(value: Any) -> str:
    """Return the docstring with Markdown's single backquotes."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.getdoc(value) or "")


# engines.md

TABLE = re.compile(r"(<!-- made by .*? -->\n).*?(<!-- end -->\n)", re.DOTALL)


def engines_page() -> str:
    """Return docs/engines.md with a new table of engines and formats."""
    before, begin, end, after = re.split(TABLE, (DOCS / "engines.md").read_text(encoding="utf-8"))
    return before + begin + "\n" + "\n".join(_matrix()) + "\n\n" + end + after


def _matrix() -> Iterator[str]:
    yield f"| format | bits | {' | '.join(loaders())} |"
    yield "|---" * (2 + len(loaders())) + "|"
    reasons: dict[str, None] = {}
    for stored, kinds, programs in what_loads():
        cells = []
        for tested, refusal, gpus_only in programs.values():
            if reason := refusal or gpus_only:
                reasons.setdefault(reason)
                cells.append(f"{'no' if refusal else 'GPUs only'} [{list(reasons).index(reason) + 1}]")
            else:
                cells.append(f"yes ({tested})" if tested else "yes")
        yield f"| `{stored}` | {kinds} | {' | '.join(cells)} |"
    yield ""
    yield "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))


# commands.md

COMMANDS_HEAD = """\
# Commands

```bash
quantkit --help
quantkit convert --help
quantkit convert --method gptq --help
```

The second line shows the options of a command. The third also shows the options of a method; the pages of
[methods](methods/index.md) describe them. `make docs-generate` writes this page from the command line.

Results go to standard output and progress goes to standard error. `quantkit --version` prints the version.
`quantkit --install-completion` installs completion for your shell.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | an error, explained in one line |
| 2 | wrong usage |
| 130 | interrupted with Ctrl-C |
"""
# One line for each command. tests/test_commands.py runs them in this order in one folder.
EXAMPLES = {
    "convert": "quantkit convert demo --method gptq --bits 4 --out demo-gptq",
    "eval-ppl": "quantkit eval-ppl demo-gptq --protocol papers --limit 10",
    "eval": "quantkit eval demo-gptq --threads 1,2 --json report.json",
    "eval-tasks": "quantkit eval-tasks demo-gptq --tasks arc_easy --limit 200",
    "compare": "quantkit compare demo --methods rtn:4,gptq:4,gguf:Q4_K_M --limit 16 --out comparison",
    "run": "quantkit run recipes/sweep.yaml",
    "status": "quantkit status sweep-output",
    "table": "quantkit table comparison laptop=comparison/table.json --out all",
    "report": "quantkit report comparison --out page.html",
    "bench": "quantkit bench demo-gptq --threads 1,2",
    "serve": "quantkit serve demo-gguf --port 8000",
    "push": "quantkit push demo-gptq --repo user/demo-gptq --dry-run",
    "inspect": "quantkit inspect demo-gptq",
    "verify": "quantkit verify demo-gptq",
    "methods": "quantkit methods",
    "cache": "quantkit cache",
    "imatrix": "quantkit imatrix demo --out demo.imatrix.gguf",
    "import": "quantkit import model.gguf --out model-float16",
}
PLACEHOLDERS = {int: "N", float: "X", bool: ""}  # of an option's value, by type; others are PATH or TEXT


def commands_page() -> str:
    """Return docs/commands.md."""
    commands = {name: command for name, command in _commands().items() if not command.hidden}
    shared = set.intersection(*({_name(option) for option in command.params} for command in commands.values()))
    parts = [COMMANDS_HEAD, "Every command has these options:\n"]
    parts.append(_table("option", (o for o in commands["convert"].params if _name(o) in shared)))
    for name, command in commands.items():
        parts.append(f"## {name}\n\n{command.help}\n\n```bash\n{EXAMPLES[name]}\n```\n")
        own = [param for param in command.params if _name(param) not in shared]
        arguments = [param for param in own if not _is_option(param)]
        if arguments:
            parts.append(_table("argument", arguments))
        if len(own) > len(arguments):
            parts.append(_table("option", (param for param in own if _is_option(param))))
    return "\n".join(parts)


def _commands() -> dict[str, Any]:
    return dict(vars(typer.main.get_command(make_app()))["commands"])


def _is_option(param: Any) -> bool:
    return str(param.opts[0]).startswith("-")


def _name(param: Any) -> str:
    return str(param.opts[0])


def _table(title: str, params: Any) -> str:
    lines = [f"| {title} | default | meaning |", "|---|---|---|"]
    for param in params:
        names = " ".join(f"`{name}`" for name in (_spelled(param), *param.secondary_opts))
        default, meaning = _default_and_meaning(param)
        lines.append(f"| {names} | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _spelled(param: Any) -> str:
    """Return the option's name with a placeholder for its value, or the argument's name."""
    if not _is_option(param):
        return str(param.metavar or _name(param).upper()).strip("{}")
    kind = param.type_descriptor.annotation
    other = "PATH" if inspect.isclass(kind) and issubclass(kind, Path) else "TEXT"
    return f"{_name(param)} {param.metavar or PLACEHOLDERS.get(kind, other)}".strip()


def _default_and_meaning(param: Any) -> tuple[str, str]:
    """Return the default and the help text without its sentence ``Default: ...``."""
    text = " ".join((param.help or "").split())
    if stated := re.fullmatch(r"(.*?)\s*Default: (.+?)\.?", text):
        return stated[2], stated[1]
    if param.required:
        return "required", text
    if param.default is None or callable(param.default) or isinstance(param.default, bool):
        on = param.default is True
        return f"`{_name(param)}`" if on else "", text
    return f"`{param.default}`", text


PAGES: dict[str, Callable[[], str]] = {"api": api_page, "commands": commands_page, "engines": engines_page}

if __name__ == "__main__":
    for page, content in PAGES.items():
        (DOCS / f"{page}.md").write_text(content(), encoding="utf-8")
