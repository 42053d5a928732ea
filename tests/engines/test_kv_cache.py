"""Types of the key-value cache: what they cost, against slow references, and what is refused."""

import pytest
import torch
from engine_logits import IDS, far_apart, logits_by
from tiny_models import EVALUATION
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from quantkit import evaluate
from quantkit.errors import RecipeError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.source import open_model
from quantkit.records.recipe import EngineSpec
from quantkit.report.table import Table

QUICK = {**EVALUATION, "probes": ("perplexity",)}


def test_fp8_is_what_rounding_behind_the_rotary_embedding_gives(tiny, monkeypatch):
    plain = modeling_llama.apply_rotary_pos_emb

    def rounded(query, key, *rest, **how):
        query, key = plain(query, key, *rest, **how)
        return query, key.to(torch.float8_e4m3fn).to(key.dtype)

    ours = logits_by("reference", tiny, [IDS], 128, dtype="float32", kv_cache="fp8")[0]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: out.to(torch.float8_e4m3fn).to(out.dtype))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rounded)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([IDS])).logits[0]
    # A value on the edge of two codes may fall to either side.
    assert far_apart(ours, theirs) < far_apart(ours, logits_by("reference", tiny, [IDS], 128, dtype="float32")[0]) / 30


@pytest.mark.usefixtures("new_cache")
def test_a_narrower_cache_costs_more_and_columns_may_differ_in_it_alone(artifact_of, tiny):
    made = artifact_of("gguf", "Q8_0")
    reports = [
        evaluate(made, **QUICK, source=str(tiny), engine=EngineSpec(kv_cache=cache))
        for cache in (None, "f16", "q8_0", "q4_0")
    ]
    none, half, eight, four = (report.find("kld").value for report in reports)
    assert none == half != eight
    assert four > 2 * max(half, eight)
    table = Table(tuple(reports[1:]))
    assert table.columns == [f"gguf-Q8_0, cache {cache}" for cache in ("f16", "q8_0", "q4_0")]
    assert reports[3].engine.kv_cache == "q4_0"
    assert len({report.fingerprint for report in reports}) == 4


def test_a_cache_that_the_engine_lacks_is_refused_at_once(artifact_of, tiny):
    for model, cache in ((artifact_of("gguf", "Q8_0").folder, "fp8"), (tiny, "q8_0")):
        with pytest.raises(RecipeError, match=f"has no key-value cache of type {cache}, only .* Leave --kv-cache out"):
            choose(open_model(str(model)), EngineSpec(kv_cache=cache))
