from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import job_for

from quantkit.calibration import learned_rounding, scale_tuning
from quantkit.calibration.sensitivity import Changes, _kept_at, sensitivities
from quantkit.calibration.tokens import draw_tokens, tokens_of
from quantkit.records.recipe import CalibrationSpec

LENGTH = 16
# Starts that leave something to learn.
POOR = {
    "gptq": {"scale_search": False, "refit": False, "gptaq": False, "shrinkage": 100.0},
    "awq": {"apply_clip": False, "n_grid": 2, "rounding": "nearest"},
}
LEARNED = {"rounding": {"refine_steps": 12, "tune_steps": 0}, "scales": {"refine_steps": 0, "tune_steps": 6}}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """With all sequences in one batch, their order would not matter."""
    for module in (learned_rounding, scale_tuning):
        monkeypatch.setattr(module, "BATCH_TOKENS", 2 * LENGTH)
    monkeypatch.setattr(scale_tuning, "Tuning", partial(scale_tuning.Tuning, rate=5e-3))


def seeded(model, method, seed, folder, bits="4", **options):
    """A job with another seed, on the tokens that seed 0 draws."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = job_for(model, method, folder, length=LENGTH, bits=bits, **options)
    recipe = trial.job.recipe.model_copy(update={"seed": seed})
    trial.job = replace(trial.job, calibration=tokens_of(trial.job), recipe=recipe)
    return trial


@pytest.mark.parametrize(
    ("method", "bits", "what"),
    [("gptq", "4", "rounding"), ("gptq", "2", "rounding"), ("gptq", "4", "scales"), ("awq", "4", "rounding")],
)
def test_what_is_learned_depends_on_the_recipes_seed(method, bits, what, one_block, tmp_path):
    made = []
    for number, seed in enumerate((0, 0, 1)):
        options = {"refine": True, "group_size": 32, **LEARNED[what], **POOR[method]}
        trial = seeded(one_block, method, seed, tmp_path / str(number), bits, **options)
        trial.write()
        made.append(load_file(trial.folder / "model.safetensors"))
    first, same, other = made
    assert all(torch.equal(first[name], same[name]) for name in first)
    changed = {name.rpartition(".")[2] for name in first if not torch.equal(first[name], other[name])}
    assert changed == {"scales"} if what == "scales" else changed & {"qweight", "scales"}


def test_sequences_and_sensitivities_depend_on_the_seed_and_so_does_the_place_where_they_are_kept(two_blocks, tmp_path):
    trials = [seeded(two_blocks, "gptq", seed, tmp_path / str(n)) for n, seed in enumerate((0, 0, 1))]
    changes = Changes(("large",), lambda _kind, weight, _importance: weight * 1.01)
    one, same, other = (sensitivities(t.job, t.run, lambda _name: changes) for t in trials)
    assert one == same
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one)
    places = [_kept_at(trial.job, "codes") for trial in trials]
    assert places[0] == places[1] != places[2]
    trial = job_for(two_blocks, "gptq")
    few = CalibrationSpec(text=trial.job.recipe.calibration.text, sequences=5, length=LENGTH)
    ids = [draw_tokens(trial.source.tokenizer(), few, seed).ids for seed in (0, 0, 1)]
    assert np.array_equal(ids[0], ids[1])
    assert not np.array_equal(ids[0], ids[2])
