import json
import shutil

import pytest
import torch
from edits import edit_json
from safetensors.torch import load_file, save_file
from tiny_adapters import low_rank, save_adapter
from tiny_models import CALIBRATION, EVALUATION, prepare_job, quantkit, succeeds
from transformers import AutoModelForCausalLM

from quantkit.comparison.compare import compare
from quantkit.conversion.check import check
from quantkit.conversion.manifest import fingerprint
from quantkit.data.texts import load_text
from quantkit.errors import ArtifactError, QuantkitError, RecipeError
from quantkit.evaluation.baseline import key_of
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import open_with_source, prepare
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model, open_source
from quantkit.models.adapter import CONFIG, WEIGHTS
from quantkit.models.skeleton import load_whole
from quantkit.records.artifact import MANIFEST, open_artifact
from quantkit.records.recipe import EngineSpec, EvaluationSpec, ModelRef, load_recipe

SETTINGS = {"calibration": CALIBRATION, "evaluation": {**EVALUATION, "probes": ("size", "perplexity")}}
VARIANTS, LABEL = ["float:float32"], "float-float32"
PATHS = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.v_proj", "mlp.down_proj")]


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapters") / "style", low_rank(tiny, PATHS))


@pytest.fixture(scope="module")
def done(tiny, adapter, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    adapter = shutil.copytree(adapter, out.parent / adapter.name)
    return out, compare(str(tiny), VARIANTS, out=out, adapters=[adapter], **SETTINGS)


def other_weights(folder):
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    tensors[name][0, 0] += 5
    save_file(tensors, folder / WEIGHTS)


def other_alpha(folder):
    edit_json(folder / CONFIG, lambda values: values.update(lora_alpha=values["lora_alpha"] + 1))


def test_the_table_says_what_was_evaluated(done, gguf):
    _, table = done
    assert {report.model.name for report in table.reports} == {"tiny + style"}
    manifest = open_artifact(done[0] / "artifacts" / LABEL).manifest
    assert [entry.name for entry in manifest.source.adapters] == ["style"]
    assert manifest.recipe.adapters == ("style",)
    assert any("style (LoRA) merged in float32 into 4 of" in note for note in manifest.notes)
    assert "adapters" not in (gguf.folder / MANIFEST).read_text()


@pytest.mark.parametrize("change", [other_weights, other_alpha])
def test_whatever_is_kept_has_another_key(change, tiny, adapter, tmp_path):
    copy = shutil.copytree(adapter, tmp_path / "style")
    source, text = open_source(str(tiny)), load_text(EVALUATION["text"], "evaluation")
    windows = cut(text, source.tokenizer(), "llama.cpp", 64, 2, source.config)

    def keys(*adapters):
        job = check(prepare_job(str(tiny), "rtn", 4, adapters=adapters), tmp_path / "out").job
        work = fingerprint(job)
        recipe = work.pop("recipe")
        assert recipe.get("adapters", []) == [str(adapter) for adapter in adapters]
        model = open_model(ModelRef(model=tiny, adapters=adapters))
        judgement = prepare(model, EvaluationSpec(**EVALUATION), text, choose(model, EngineSpec()))
        return json.dumps(work), key_of(job.source, windows, "float32"), judgement.fingerprint(None), model.digest

    same, without = keys(adapter), keys()
    assert keys(copy) == same
    change(copy)
    for others in (keys(copy), keys(adapter, adapter), without):
        assert all(one != other for one, other in zip(same, others, strict=True))


def test_the_merged_model_is_the_baseline_and_is_evaluated(done, tiny):
    """Its exact copy diverges from it by nothing, and what transformers finds for both is what the copy computes."""
    of_model, of_copy = (
        {one.name: float(one.value) for one in report.measurements if one.value is not None}
        for report in done[1].reports
    )
    assert abs(of_copy["kld"]) < 1e-6
    assert of_copy["perplexity"] == pytest.approx(of_model["perplexity"], rel=0.02)  # in bfloat16
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        base, copy = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (tiny, done[0] / "artifacts" / LABEL)
        )
        whole, _ = load_whole(open_source(str(tiny), None, [done[0].parent / "style"]), dtype="float32")
        assert torch.equal(whole.eval()(ids).logits, copy)
    assert (base - copy).abs().max() > 0.1


def test_an_artifact_is_compared_with_the_adapters_that_it_was_made_with(tiny, adapter, done, tmp_path):
    folder = done[0] / "artifacts" / LABEL
    copy = shutil.copytree(adapter, tmp_path / "style")
    other_alpha(copy)
    spec, text = EvaluationSpec(**EVALUATION), load_text(EVALUATION["text"], "evaluation")
    for adapters, given in (((), "none"), ((copy,), "style"), ((adapter, adapter), "style, style")):
        model, source = open_with_source(ModelRef(model=folder, adapters=adapters), tiny)
        with pytest.raises(ArtifactError, match=rf"other adapters than the given ones \({given}; the manifest"):
            prepare(model, spec, text, choose(model, EngineSpec()), source)
    model, source = open_with_source(ModelRef(model=folder, adapters=[adapter]), tiny)
    assert prepare(model, spec, text, choose(model, EngineSpec()), source).source is source
    with pytest.raises(RecipeError, match=r"give its folder \(tiny\) with --source"):
        open_with_source(ModelRef(model=folder, adapters=[adapter]))


def test_recipes_and_commands_name_adapters_and_engines_that_read_files_are_refused(tiny, adapter, here):
    recipe = here / "recipe.yaml"
    recipe.write_text(f"model: {tiny}\nadapters: [{adapter}]\nmethod: rtn\nout: {here / 'out'}\n")
    assert load_recipe(recipe).adapters == (str(adapter),)
    ended = succeeds("run", recipe)
    manifest = open_artifact(here / "out").manifest
    assert [entry.kind for entry in manifest.source.adapters] == ["LoRA"]
    assert manifest.source.hashes["adapter 1: adapter_model.safetensors"] == manifest.source.adapters[0].hashes[WEIGHTS]
    # The default place and the next command name the adapter.
    ended = quantkit("convert", tiny, "--adapter", adapter, "--method", "rtn", "--bits", 4)
    assert (here / "tiny-style-rtn-4").is_dir(), ended.err
    assert f"--source {tiny} --adapter {adapter}" in ended.out.replace("\n", " ")
    model = open_model(ModelRef(model=tiny, adapters=[adapter]))
    with pytest.raises(QuantkitError, match=r"whose files are of another model.*--method float.*--engine reference"):
        choose(model, EngineSpec(engine="vllm"))
    assert choose(model, EngineSpec()).name == "transformers"
    assert model.ref.adapters == (str(adapter),)
