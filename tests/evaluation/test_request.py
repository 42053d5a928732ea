"""What a child process is asked: three requests that do not fit into one another."""

import json

import pytest

from quantkit.errors import EngineError
from quantkit.evaluation.request import (
    BaselineName,
    BaselineRequest,
    LoadRequest,
    MeasureRequest,
    Request,
    TaskSpec,
    TasksRequest,
    WindowsFile,
    read_request,
)
from quantkit.recipe import EvaluationSpec
from quantkit.report.records import Windows

LOAD = LoadRequest(model="demo", revision=None, engine="reference", threads=2, device="cuda")
ABOUT = Windows(protocol="papers", n_ctx=64, windows=2, first=0, scored=126, tokens_sha256="aa" * 32)
WINDOWS = WindowsFile(path="cut.npz", about=ABOUT)
REQUESTS = [
    MeasureRequest(
        load=LOAD,
        windows=WINDOWS,
        spec=EvaluationSpec(limit=2),
        probes=("size",),
        baseline=BaselineName(model="demo", revision=None, key="k"),
        resume="file",
    ),
    BaselineRequest(load=LOAD, windows=WINDOWS, key="k"),
    TasksRequest(load=LOAD, tasks=TaskSpec(tasks=("wikitext",))),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.kind)
def test_a_request_comes_back_as_what_it_was(request_: Request) -> None:
    assert read_request(request_.model_dump_json()) == request_


def test_a_request_of_two_kinds_is_none() -> None:
    mixed = json.loads(REQUESTS[0].model_dump_json()) | {"tasks": {"tasks": ["wikitext"]}}
    with pytest.raises(EngineError, match="tasks"):
        read_request(json.dumps(mixed))
    with pytest.raises(EngineError, match="kind"):
        read_request(json.dumps({"load": LOAD.model_dump()}))


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "[" * 100_000, '{"kind": "measure"}', '{"kind": []}'])
def test_a_damaged_request_is_one_line(text: str) -> None:
    with pytest.raises(EngineError, match="the request of a judgement cannot be read"):
        read_request(text)
