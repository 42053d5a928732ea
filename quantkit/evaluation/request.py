"""What a child process is asked to do: to measure a model, to make a source's baseline, or to run tasks."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from quantkit.errors import EngineError
from quantkit.recipe import MOST_TOKENS, EvaluationSpec, Frozen, Strict, Words
from quantkit.report.records import Windows


class TaskSpec(Strict):
    """Which tasks are run, and how; `include` is a folder with further tasks, whose code the harness runs."""

    tasks: tuple[Words, ...] = Field(max_length=1000)
    include: Words | None = None
    num_fewshot: int | None = Field(None, ge=0, le=10_000)
    limit: int | None = Field(None, ge=1, le=1 << 31)
    chat_template: bool = False
    n_ctx: int | None = Field(None, ge=1, le=MOST_TOKENS)


class LoadRequest(Strict):
    """What all have in common: to open `model` (of the hub at `revision`) in an engine of the interpreter `python`.

    `adapters` are folders of those that are merged into it.
    `dtype` None is the engine's own choice. `walk`: block by block, with one block's weights in memory at a time, and
    hidden states of more than `offload_bytes` in a file.
    """

    model: str
    revision: str | None
    adapters: tuple[str, ...] = ()
    engine: str
    threads: int
    dtype: str | None = None
    python: str = sys.executable
    device: str = "cpu"
    walk: bool = False
    offload_bytes: int = 0


class WindowsFile(Strict):
    """The token windows: `path` of what `Cut.save` wrote, and what a report says of them."""

    path: str
    about: Windows


class BaselineName(Strict):
    """A source (model, revision, folders of adapters), and the key of its baseline."""

    model: str
    revision: str | None
    adapters: tuple[str, ...] = ()
    key: str


class MeasureRequest(Frozen):
    """To run `probes`, and those of speed again with each of `further_threads`, where the engine can change them.

    Finished windows go to the file `resume`, in the end all positions to the file `save`.
    """

    kind: Literal["measure"] = "measure"
    load: LoadRequest
    windows: WindowsFile
    spec: EvaluationSpec
    probes: tuple[str, ...] = ()
    further_threads: tuple[int, ...] = ()
    baseline: BaselineName | None = None
    resume: str | None = None
    save: str | None = None


class BaselineRequest(Frozen):
    """To make the baseline `key` of the model, which is a source."""

    kind: Literal["baseline"] = "baseline"
    load: LoadRequest
    windows: WindowsFile
    key: str


class TasksRequest(Frozen):
    """To run tasks."""

    kind: Literal["tasks"] = "tasks"
    load: LoadRequest
    tasks: TaskSpec


Request = MeasureRequest | BaselineRequest | TasksRequest


def read_request(text: str) -> Request:
    """A request out of its JSON; raises EngineError."""
    adapter: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise EngineError(f"the request of a judgement cannot be read: {place}: {first['msg']}") from None
