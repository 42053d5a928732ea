"""MLX as an engine: its logits and tokens against transformers', and its server."""

import shutil

import numpy as np
import pytest
import torch
from edits import edit_json, put
from engine_logits import TWO_TEXTS, engine_logits, far_apart, logits_of_transformers
from tiny_models import EVALUATION

from quantkit import evaluate
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import engines, server_of
from quantkit.engines.mlx import ENGINE
from quantkit.errors import RecipeError, UnsupportedError
from quantkit.formats.source import open_model
from quantkit.serving.servers import SERVERS, plan_server

pytest.importorskip("mlx_lm", reason="mlx-lm is the engine of these tests")


@pytest.fixture(scope="module")
def loaded(tiny):
    return ENGINE.load(open_model(str(tiny)), LoadSpec(1, 64, dtype="float32"))


def test_logits_and_pieces_are_those_of_transformers(loaded, tiny):
    ids = np.asarray(TWO_TEXTS)
    ours = torch.from_numpy(engine_logits(loaded, ids))
    theirs = torch.stack([logits_of_transformers(tiny, row.tolist()) for row in TWO_TEXTS])
    assert far_apart(ours, theirs) < 1e-5
    assert torch.from_numpy(engine_logits(loaded, ids, first=13)).equal(ours[:, 13:])


def test_a_stream_is_the_loop_without_a_cache_and_can_be_left(loaded):
    ids, made = [5, 6, 7], []
    for _ in range(12):
        made.append(int(engine_logits(loaded, np.array([ids + made]))[0, -1].argmax()))
    assert list(loaded.stream(ids, 12)) == made
    stream = loaded.stream(ids, 300)
    assert [next(stream), next(stream)] == made[:2]
    stream.close()


@pytest.mark.usefixtures("new_cache")
def test_an_artifact_is_evaluated_by_mlx_in_float16_and_by_our_reader_alike(artifact_of):
    made = artifact_of("gptq", group_size=64, format="mlx")
    reports = [evaluate(made, **EVALUATION, probes=("perplexity",), engine=engine) for engine in (None, "reference")]
    assert (reports[0].engine.name, reports[0].engine.dtype) == ("mlx", "float16")
    one, other = (report.find("perplexity").value for report in reports)
    assert one == pytest.approx(other, rel=0.02)


def test_what_mlx_cannot_do_is_refused(artifact_of):
    with pytest.raises(RecipeError, match="has no dtype 'int8'"):
        ENGINE.refuse("int8")
    with pytest.raises(RecipeError, match="it computes on cpu here"):
        ENGINE.find_device("cuda")


def test_its_server_knows_the_model_by_one_name_alone(artifact_of):
    folder = str(artifact_of("gptq", group_size=64, format="mlx").folder)
    planned = plan_server(folder, port=8123)
    assert (planned.server.name, planned.name) == ("mlx", "default_model")
    with pytest.raises(RecipeError, match="calls every model default_model"):
        plan_server(folder, name="mine")


def test_servers_are_called_alike_by_their_engines():
    named = {name: engine.server for name, engine in engines().items() if engine.server}
    assert named == {server.loader: server.summary for server in SERVERS.values() if server.modules}
    assert (server_of("float"), server_of("mlx"), server_of("fp8")) == ("vLLM's server", "mlx-lm's server", None)


def test_a_checkpoint_is_served_only_if_its_config_json_has_the_names_that_mlx_lm_reads(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "copy")
    with pytest.raises(UnsupportedError, match=r"mlx-lm reads rope_theta, .* Convert it with --format mlx"):
        plan_server(str(folder), "mlx")
    edit_json(folder / "config.json", put("rope_theta", value=10_000.0))
    assert plan_server(str(folder), "mlx").server.name == "mlx"
