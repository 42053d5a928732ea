"""What a child process is asked to do: to measure a model, to make a source's baseline, or to run tasks."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from quantkit.recipe import EvaluationSpec, Strict
from quantkit.report.records import Windows


class TaskSpec(Strict):
    """Which tasks are run, and how; `include` is a folder with further tasks, whose code the harness runs."""

    tasks: tuple[str, ...]
    include: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    chat_template: bool = False
    n_ctx: int | None = None


class LoadRequest(Strict):
    """What all have in common: to open `model` (of the hub at `revision`) in an engine of the interpreter `python`.

    `dtype` None is the engine's own choice.
    """

    model: str
    revision: str | None
    engine: str
    threads: int
    dtype: str | None = None
    python: str = sys.executable
    device: str = "cpu"


class WindowsFile(Strict):
    """The token windows: `path` of what `Cut.save` wrote, and what a report says of them."""

    path: str
    about: Windows


class BaselineName(Strict):
    """A source (model, revision), and the key of its baseline."""

    model: str
    revision: str | None
    key: str


class MeasureRequest(Strict):
    """To run `probes`. Finished windows go to the file `resume`, in the end all positions to the file `save`."""

    kind: Literal["measure"] = "measure"
    load: LoadRequest
    windows: WindowsFile
    spec: EvaluationSpec
    probes: tuple[str, ...] = ()
    baseline: BaselineName | None = None
    resume: str | None = None
    save: str | None = None


class BaselineRequest(Strict):
    """To make the baseline `key` of the model, which is a source."""

    kind: Literal["baseline"] = "baseline"
    load: LoadRequest
    windows: WindowsFile
    key: str


class TasksRequest(Strict):
    """To run tasks."""

    kind: Literal["tasks"] = "tasks"
    load: LoadRequest
    tasks: TaskSpec


Request = MeasureRequest | BaselineRequest | TasksRequest


def read_request(text: str) -> Request:
    """A request out of its JSON."""
    adapter: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
    return adapter.validate_json(text)
