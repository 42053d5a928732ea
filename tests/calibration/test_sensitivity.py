import pytest
import torch
from tiny_architectures import save_architecture
from tiny_llama import LINEARS, VOCABULARY, calibration_ids, job_for, plain_model

from quantkit.calibration import sensitivity
from quantkit.calibration.sensitivity import Changes, sensitivities

LENGTH, NAMES = 16, LINEARS[:14]  # of two blocks
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLE = "model.embed_tokens_per_layer.weight"
SIZES = {"small": 1e-3, "large": 1e-2}


def nudged(kind, weight, importance):
    """The weight with noise of a size, larger where inputs are; of each value by itself, whatever rows there are."""
    noise = torch.sin(weight * 1e5) * (2**0.5 * SIZES[kind])
    return weight + (noise if importance is None else noise * (1 + importance.sqrt()))


def slow_scores(trial):
    """One sequence after the other through the whole model, tokens drawn in the same order."""
    model, ids = plain_model(trial.source.folder), calibration_ids(trial)[: sensitivity.SEQUENCES]
    generator = torch.Generator().manual_seed(0)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    layers = {name: model.get_submodule(name.removesuffix(".weight")) for name in (*NAMES, EMBEDDING, HEAD)}
    seen = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _m, args, out, name=name: seen[name].append((args[0], out)))
    given = {name: [] for name in layers}
    for row in ids:
        embedded = model.model.embed_tokens(row[None]).detach().requires_grad_()
        seen[EMBEDDING][-1] = (row[None], embedded)
        logits = model(inputs_embeds=embedded).logits[0].float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
        loss = -logits.log_softmax(-1).gather(1, drawn).sum()
        outs = [seen[name][-1][1] for name in layers]
        for name, gradient in zip(layers, torch.autograd.grad(loss, outs), strict=True):
            given[name].append(gradient[0].float())
    scores = {}
    for kind in SIZES:
        effects = {}
        for name, layer in layers.items():
            weight = layer.weight.detach().float()
            inputs = torch.cat([x[0] for x, _ in seen[name]]).float() if name != EMBEDDING else None
            importance = None if name in (EMBEDDING, HEAD) or inputs is None else inputs.square().mean(0)
            change = nudged(kind, weight, importance) - weight
            moved = change[ids.reshape(-1)] if inputs is None else inputs @ change.T
            effects[name] = (moved * torch.cat(given[name])).sum(-1).detach()
        if tied:
            effects[EMBEDDING] = effects[EMBEDDING] + effects.pop(HEAD)
        for name, effect in effects.items():
            scores.setdefault(name, {})[kind] = float(effect.double().square().mean()) / 2
    return scores


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": False}])
def test_scores_are_those_of_the_whole_model(changes, tiny_with, tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "HEAD_TOKENS", LENGTH)
    monkeypatch.setattr(sensitivity, "BATCH_TOKENS", 3 * LENGTH)
    trial = job_for(tiny_with(num_hidden_layers=2, **changes), "gptq", tmp_path, length=LENGTH)
    got = sensitivities(trial.job, trial.run, lambda _name: Changes(tuple(SIZES), nudged))
    want = slow_scores(trial)
    assert set(got) == set(want)
    for name, kinds in want.items():
        assert got[name] == pytest.approx(kinds, rel=0.05), name
    assert list(tmp_path.iterdir()) == []


def test_some_rows_stand_for_all_where_each_is_rounded_by_itself(tiny_llama, tmp_path):
    """Of independent errors a quarter of the rows has a quarter of the effect, but for its own spread."""
    trial = job_for(tiny_llama, "gptq", tmp_path)

    def scores(rows):
        changes = Changes(("eighths",), lambda _kind, weight, _importance: (weight * 8).round() / 8, rows)
        return sensitivities(trial.job, trial.run, lambda name: changes if name in LINEARS else None)

    whole, some = scores(None), scores(32)
    ratios = [some[name]["eighths"] / whole[name]["eighths"] for name in LINEARS]
    assert whole.keys() == some.keys() == set(LINEARS)
    assert all(0.4 < ratio < 2.5 for ratio in ratios)
    assert 0.85 < sum(ratios) / len(ratios) < 1.15
    assert len({round(ratio, 3) for ratio in ratios}) > len(ratios) // 2


def uneven(kind, weight, _importance):
    """Of each row by itself: more in some rows, and in the last columns."""
    noise = torch.sin(weight * 1e5) * SIZES[kind] * torch.linspace(0, 2, weight.shape[1]) ** 2
    return weight + noise * (10 * weight[:, :1]).exp()


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_a_table_of_what_each_block_gets_is_tried_as_in_the_whole_model(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "HEAD_TOKENS", LENGTH)
    monkeypatch.setattr(sensitivity, "BATCH_TOKENS", 3 * LENGTH)
    monkeypatch.setattr(sensitivity, "TABLE_ROWS", 7)
    behind = VOCABULARY // 2 if name == "gemma3n" else 0  # tokens behind the table, which Gemma 4 cannot have
    folder = save_architecture(tmp_path / "model", name, changes={"vocab_size_per_layer_input": VOCABULARY - behind})
    (tmp_path / "out").mkdir()
    trial = job_for(folder, "gptq", tmp_path / "out", length=LENGTH)
    got = sensitivities(trial.job, trial.run, lambda name: Changes(tuple(SIZES), uneven) if name == TABLE else None)
    assert set(got) == {TABLE}
    model, ids = plain_model(folder), calibration_ids(trial)[: sensitivity.SEQUENCES]
    assert int(ids.max()) >= VOCABULARY - behind or not behind
    table = model.model.embed_tokens_per_layer
    seen = []
    table.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    generator, effects = torch.Generator().manual_seed(0), dict.fromkeys(SIZES, 0.0)
    weight = table.weight.detach().float()
    for row in ids:
        logits = model(row[None]).logits[0].float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
        loss = -logits.log_softmax(-1).gather(1, drawn).sum()
        [(places, out)] = seen
        [slope] = torch.autograd.grad(loss, [out])
        seen.clear()
        for kind in SIZES:
            moved = (uneven(kind, weight, None) - weight)[places[0]] * float(table.embed_scale)
            effects[kind] += float((moved * slope[0].float()).sum(-1).double().square().sum())
    for kind, effect in effects.items():
        assert got[TABLE][kind] == pytest.approx(effect / ids.numel() / 2, rel=0.05), kind
    assert list((tmp_path / "out").iterdir()) == []
