import json

import numpy as np
import pytest
import torch
from gguf_files import slow_but
from killed import told
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantkit.calibration import passes
from quantkit.contracts.engine import LoadSpec, Window
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.errors import EngineError, UnsupportedError
from quantkit.formats.source import open_model
from quantkit.system.memory import peak_rss_bytes

SLOW = pytest.mark.slow
QUICK = ["llama", "gemma2", "gemma3n"]
PLAIN = LlamaRotaryEmbedding.forward
HIDDEN, INNER, BLOCKS = 512, 2048, 8
WEIGHTS = 4 * BLOCKS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)  # bytes in float32, but for the small ends


def windows(vocabulary):
    """Of two lengths, longer than gemma2's sliding window; those of one length are computed together."""
    draw = np.random.default_rng(0)
    lengths = [48, 48, 24, 24, 24, 48]
    every = [draw.integers(3, vocabulary, length) for length in lengths]
    return [Window(ids[:-1], len(ids) // 2 - 1, ids[len(ids) // 2 :]) for ids in every]


def logits(model, engine, dtype="float32", **how):
    """(all scored positions, V) float32."""
    loaded = find_engine(engine).load(model, LoadSpec(1, 128, dtype, **how))
    return np.concatenate(list(loaded.pieces(windows(int(model.config["vocab_size"])))))


@pytest.mark.parametrize("name", slow_but(QUICK, [*QUICK, "mixtral", "gpt2", "opt", "gemma4", "gpt_oss"]))
def test_its_logits_are_those_of_the_whole_model(name, architecture):
    """transformers computes the same products in the same order, but for the experts of gpt_oss, all at once."""
    model = open_model(str(architecture(name)))
    walked, theirs = logits(model, "reference", walk=True), logits(model, "transformers")
    assert len(walked) == sum(len(window.targets) for window in windows(int(model.config["vocab_size"])))
    assert np.array_equal(walked, logits(model, "reference"))
    assert np.array_equal(walked, theirs) or (name == "gpt_oss" and np.abs(walked - theirs).max() < 2e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3n", pytest.param("mixtral", marks=SLOW)])
def test_states_in_a_file_and_in_waves_change_nothing(name, architecture, monkeypatch):
    model = open_model(str(architecture(name)))
    in_memory = logits(model, "reference", walk=True, offload_bytes=1 << 30)
    places = []
    plain = passes.Activations
    monkeypatch.setattr(passes, "Activations", lambda *given: places.append(given[3]) or plain(*given))
    assert np.array_equal(in_memory, logits(model, "reference", walk=True, offload_bytes=0))
    assert len(places) == 3  # runs of one length
    assert all(place is not None and not place.exists() for place in places)
    monkeypatch.setattr(passes, "WAVE_TOKENS", 50)
    places.clear()
    assert np.array_equal(in_memory, logits(model, "reference", walk=True, offload_bytes=1 << 30))
    assert places == [None, None, None]


@pytest.mark.parametrize(("method", "bits", "options"), [
    pytest.param("gptq", "4", {"group_size": 32}, marks=SLOW),
    pytest.param("awq", "4", {"group_size": 32}, marks=SLOW),
    ("gguf", "Q4_K_M", {}),
    ("int8", "8", {}),
    pytest.param("nf4", "4", {}, marks=SLOW),
    pytest.param("ctranslate2", "int8", {}, marks=SLOW),
])  # fmt: skip
def test_artifacts_are_walked_as_they_are_loaded(method, bits, options, tiny_with, artifact_of):
    made = artifact_of(method, bits, model=tiny_with(hidden_size=256, num_hidden_layers=2), **options)
    model = Model(made, None)
    whole, walked = (find_engine("reference").load(model, LoadSpec(1, 128, walk=walk)) for walk in (False, True))
    assert (walked.notes, walked.dtype) == (whole.notes, whole.dtype)
    assert bool(walked.notes) == (method == "int8")
    every = windows(int(model.config["vocab_size"]))
    assert np.array_equal(np.concatenate(list(walked.pieces(every))), np.concatenate(list(whole.pieces(every))))


def test_the_skeleton_stays_without_weights_and_generates_no_tokens(architecture):
    llama = open_model(str(architecture("llama")))
    loaded = find_engine("reference").load(llama, LoadSpec(1, 128, "float32", walk=True))
    list(loaded.pieces(windows(int(llama.config["vocab_size"]))))
    assert all(parameter.is_meta for parameter in loaded._skeleton.model.parameters())
    with pytest.raises(EngineError, match="cannot generate tokens"):
        loaded.stream([1], 1)


class Changing(passes.Recorder):
    """Of a model that does something between two blocks."""

    def forward(self, hidden, *args, **how):
        return (2 * super().forward(hidden, *args, **how)[0],)


def of_all_texts(self, x, **ids):
    """Rotations that depend on the text, and are not one for each."""
    return tuple(part[0] + x.mean() for part in PLAIN(self, x, **ids))


@pytest.mark.parametrize(("owner", "name", "stand_in", "says"), [
    (passes, "Recorder", Changing, "changes hidden states between"),
    (LlamaRotaryEmbedding, "forward", of_all_texts, "depend on the text, but not one per text"),
])  # fmt: skip
def test_what_blocks_cannot_be_called_with_alone_is_refused(owner, name, stand_in, says, architecture, monkeypatch):
    llama = open_model(str(architecture("llama")))
    loaded = find_engine("reference").load(llama, LoadSpec(1, 128, "float32", walk=True))
    monkeypatch.setattr(owner, name, stand_in)
    with pytest.raises(UnsupportedError, match=says):
        list(loaded.states(windows(int(llama.config["vocab_size"]))))
    assert all(parameter.is_meta for parameter in loaded._skeleton.model.parameters())


def evaluated(folder, walk, out):
    """Compute two windows in this process; write the peak beyond what was there, and a sum of the logits."""
    model = open_model(str(folder))
    warm_up = torch.ones(256, HIDDEN) @ torch.ones(HIDDEN, INNER)
    before = peak_rss_bytes()
    loaded = find_engine("reference").load(model, LoadSpec(1, 128, "float32", walk=walk))
    total = sum(float(piece.sum()) for piece in loaded.pieces(windows(int(model.config["vocab_size"]))[:2]))
    out.write_text(json.dumps([peak_rss_bytes() - before, total, float(warm_up[0, 0])]))


def test_the_peak_is_that_of_a_block(tiny_with, tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    folder = tiny_with(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=BLOCKS, **heads)
    peaks, totals = {}, {}
    for walk in (False, True):
        peaks[walk], totals[walk], _ = told(evaluated, folder, walk, folder=tmp_path)
    assert totals[True] == totals[False]
    assert peaks[False] > WEIGHTS
    assert peaks[True] < WEIGHTS / BLOCKS * 2 + 60e6
