import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from edits import edit_json, put
from engine_logits import far_apart, logits_by
from quantized_folders import decompressed
from tiny_llama import LINEARS, SHAPES
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, prepare_job, quantkit
from trials import dense_values, read_all, read_back

from quantkit import convert, open_artifact, verify
from quantkit.calibration import sensitivity
from quantkit.checkpoints.spool import Spool
from quantkit.contracts.format import ON_CPU
from quantkit.contracts.registry import find_format
from quantkit.conversion.check import check
from quantkit.errors import ArtifactError, QuantkitError, RecipeError
from quantkit.evaluation.engine_choice import choose as choose_engine
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_model, open_source
from quantkit.methods.rtn import round_layer
from quantkit.models.skeleton import open_skeleton
from quantkit.models.stand_in import layers_of_one_input
from quantkit.records.recipe import ConvertRun, EngineSpec, parse
from quantkit.system.files import sha256_of

pytestmark = pytest.mark.usefixtures("fresh_cache")
CT, GPTQ = "compressed-tensors", "gptq"
GROUP, TARGET = 64, 3.9
CASES = [("rtn", CT), ("awq", CT), ("gptq", GPTQ)]
UNITS = [
    [f"model.layers.{block}.{name}_proj" for name in names]
    for block in range(2)
    for names in (
        *(["self_attn.q", "self_attn.k", "self_attn.v"], ["self_attn.o"]),
        *(["mlp.gate", "mlp.up"], ["mlp.down"]),
    )
]
MODULES = [name.removesuffix(".weight") for name in LINEARS[:14]]


@pytest.fixture
def mixed(two_blocks, artifact_of):
    def get(method, kind, **options):
        options = {"group_size": GROUP, "target_bpw": TARGET, **options}
        return artifact_of(method, "auto", model=two_blocks, format=kind, **options)

    return get


def made(model, out, method, bits="auto", **options):
    options = options if bits == "nvfp4" else {"group_size": GROUP, **options}
    return convert(str(model), method, bits, out, calibration=CALIBRATION, **options)


def bits_of(artifact):
    return artifact.manifest.options["layer_bits"]


def shape_of(module):
    return SHAPES[module.split(".", 3)[3]]


def size(bits, sym=True):
    """Bits per weight of the layers, by hand: 16 for each scale of 64 columns, and a zero point where there is one."""
    total = weights = 0.0
    for module, width in bits.items():
        rows, columns = shape_of(module)
        total += rows * columns * width + rows * columns / GROUP * (16 + (0 if sym else width))
        weights += rows * columns
    return total / weights


def test_no_choice_of_bits_is_better(two_blocks, tmp_path, new_cache):
    """All choices, tried one by one; the harms are those that were kept."""
    for target in (2.6, 5.0):
        artifact = made(two_blocks, tmp_path / str(target), "rtn", target_bpw=target, target_bits=(2, 4, 8))
        [path] = (new_cache / "sensitivity").glob("*")
        scores = json.loads(path.read_text())
        assert all(kinds["2"] > kinds["4"] > kinds["8"] for kinds in scores.values())
        weights = np.array([sum(np.prod(shape_of(name)) for name in names) for names in UNITS])
        sizes = weights[:, None] * (np.array([2, 4, 8]) + 16 / GROUP)
        harms = np.array(
            [[sum(scores[f"{name}.weight"][str(bits)] for name in names) for bits in (2, 4, 8)] for names in UNITS]
        )
        every = np.array(list(itertools.product(range(3), repeat=len(UNITS))))
        where = np.arange(len(UNITS))
        best = harms[where, every].sum(1)[sizes[where, every].sum(1) <= target * weights.sum()].min()
        bits = bits_of(artifact)
        assert size(bits) <= target
        harm = sum(scores[f"{name}.weight"][str(width)] for name, width in bits.items())
        assert harm == pytest.approx(best, rel=1e-5)
        note = next(note for note in artifact.manifest.notes if note.startswith("bits chosen by sensitivity"))
        assert f"{size(bits):.3f} bits per weight of the linear layers" in note
        assert f"estimated divergence {harm:.4f} nats" in note


def test_a_divergence_is_kept_by_the_fewest_bits(mixed):
    """What a size was estimated to harm is reached with no more than that size."""
    sized = mixed("rtn", CT)
    note = next(note for note in sized.manifest.notes if note.startswith("bits chosen"))
    match = re.search(r"divergence ([\d.]+) nats", note)
    divergent = mixed("rtn", CT, target_bpw=None, target_kld=float(match[1]) * 1.001 + 1e-4)
    assert size(bits_of(divergent)) <= size(bits_of(sized))
    smaller = mixed("rtn", CT, target_bpw=None, target_kld=float(match[1]) / 2)
    assert size(bits_of(smaller)) > size(bits_of(sized))


@pytest.mark.parametrize(("name", "units"), [
    ("llama", {"self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp.gate_proj mlp.up_proj"}),
    ("cohere", {"self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"}),
    ("phi3", set()),
    ("mixtral", {"self_attn.q_proj self_attn.k_proj self_attn.v_proj", "experts"}),
])  # fmt: skip
def test_layers_that_engines_join_are_found(name, units, architecture):
    config = json.loads((architecture(name) / "config.json").read_text())
    skeleton = open_skeleton(config)
    found, prefix = layers_of_one_input(skeleton, config), skeleton.block_prefix(0)
    assert sorted(name for names in found for name in names) == sorted(skeleton.linears())
    joined = {
        " ".join(one.removeprefix(prefix).removesuffix(".weight") for one in names)
        for names in found
        if len(names) > 1 and names[0].startswith(prefix)
    }
    # all matrices of all experts
    assert {"experts" if all(".experts." in one for one in name.split()) else name for name in joined} == units


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_each_layer_has_its_bits(method, kind, mixed, two_blocks):
    artifact, source = mixed(method, kind), open_source(str(two_blocks))
    bits, layers = bits_of(artifact), read_back(artifact)
    assert list(bits) == MODULES
    assert len(set(bits.values())) > 1
    for names in UNITS:
        assert len({bits[name] for name in names}) == 1, names
    for module, width in bits.items():
        layer = layers[f"{module}.weight"]
        assert (layer.bits, layer.scales.shape[1]) == (width, shape_of(module)[1] // GROUP)
        assert int(layer.codes.max()) < 1 << width
        if method == "rtn":
            want = round_layer(source.tensor(f"{module}.weight").float(), width, GROUP, symmetric=True)
            for part in ("codes", "zeros", "scales", "g_idx"):
                assert torch.equal(getattr(layer, part), getattr(want, part)), (module, part)
    counts = {f"int{width}": list(bits.values()).count(width) for width in set(bits.values())}
    assert {name: n for name, n in artifact.manifest.tensor_types.items() if name.startswith("int")} == counts
    assert 0.9 * TARGET < size(bits, sym=method != "awq") <= TARGET
    assert artifact.manifest.recipe.bits == "auto"
    assert verify(artifact) == open_artifact(artifact.folder)


@pytest.mark.parametrize(("method", "kind"), CASES[1:])
def test_a_mixed_artifact_is_a_source(method, kind, mixed):
    artifact = mixed(method, kind)
    source = open_source(str(artifact.folder))
    exact = dense_values(artifact)
    for name in source.tensors:
        assert np.array_equal(source.floats(name), exact[name].float().numpy()), name
    assert all(str(bits) in str(source.quantization) for bits in set(bits_of(artifact).values()))
    job = prepare_job(str(artifact.folder), "keep", "4", format=CT)
    with pytest.raises(QuantkitError, match="has layers of several kinds"):
        job.method.check(job)


def test_the_package_reads_what_we_read(mixed):
    """Every layer is named by one group of its bits, and its words are those that the package unpacks."""
    pytest.importorskip("compressed_tensors")
    artifact = mixed("awq", CT)
    groups = quantization_of(artifact.folder)["config_groups"].values()
    assert sorted(name for group in groups for name in group["targets"]) == sorted(MODULES)
    ours, bits = read_back(artifact), bits_of(artifact)
    for name, (scheme, value) in decompressed(artifact.folder, LINEARS[:14]).items():
        layer = ours[name]
        assert scheme.weights.num_bits == bits[name.removesuffix(".weight")]
        assert torch.equal(layer.steps().half() * layer.spread(layer.scales).half(), value), name


def test_transformers_computes_what_we_compute(architecture, mixed, tmp_path):
    pytest.importorskip("compressed_tensors")
    experts = made(architecture("mixtral"), tmp_path / "out", "rtn", group_size=-1, target_bpw=4.5)
    ids = np.arange(2, 30)[None]
    for artifact in (mixed("rtn", CT), experts):
        assert len(set(bits_of(artifact).values())) > 1
        theirs, ours = (logits_by(name, artifact, ids, dtype="float32") for name in ("transformers", "reference"))
        assert far_apart(theirs, ours) < 0.01  # float16 products of codes and scales


def test_dynamic_gives_every_layer_its_bits_by_the_rule_of_its_readers(mixed):
    """GPTQModel takes the first expression that matches from the beginning; vLLM asks it for the joined layers."""
    artifact = mixed("gptq", GPTQ)
    stored, bits = quantization_of(artifact.folder), bits_of(artifact)

    def asked(name):
        for pattern, value in stored["dynamic"].items():
            if re.match(pattern.removeprefix("+:"), name):
                return int(value["bits"])
        return int(stored["bits"])

    assert {module: asked(module) for module in bits} == bits
    for block in range(2):
        assert asked(f"model.layers.{block}.self_attn.qkv_proj") == bits[f"model.layers.{block}.self_attn.q_proj"]
        assert asked(f"model.layers.{block}.mlp.gate_up_proj") == bits[f"model.layers.{block}.mlp.up_proj"]
    assert asked("model.layers.11.self_attn.q_proj") == stored["bits"]
    for module in bits:
        assert asked(f"{module}_2") == asked(module.replace(".", "_")) == stored["bits"]
    weights = {width: sum(np.prod(shape_of(m)) for m in bits if bits[m] == width) for width in set(bits.values())}
    assert weights[stored["bits"]] == max(weights.values())


@pytest.mark.parametrize("kind", [CT, GPTQ])
def test_engines_that_cannot_read_the_mix_are_refused(kind, mixed):
    refusals = find_format(kind).refusals
    few = mixed("rtn", kind)
    assert {2, 3} & set(bits_of(few).values())
    reasons = refusals(quantization_of(few.folder))
    if kind == CT:
        assert "vLLM 0.25 and newer" in reasons[f"vllm{ON_CPU}"]  # not the 0.23 of its layers of 8 bits
    else:
        with pytest.raises(RecipeError, match=r"vLLM loads .*4 and 8 bits.*--format compressed-tensors"):
            choose_engine(open_model(few), EngineSpec(engine="vllm"))
    wide = mixed("rtn", kind, target_bpw=5.5, target_bits=(4, 8))
    assert set(bits_of(wide).values()) == {4, 8}
    assert "vllm" not in refusals(quantization_of(wide.folder))
    assert kind == CT or "exllama" in refusals(quantization_of(wide.folder))


def test_bits_are_given_by_patterns(two_blocks, tmp_path):
    patterns = {"down_proj": 8, r"layers\.1\.": 3, "model.layers.1.mlp.down_proj": 2}
    want = {m: ((8, 2) if "down_proj" in m else (4, 3))[".1." in m] for m in MODULES}
    for kind in (CT, GPTQ):
        artifact = made(two_blocks, tmp_path / kind, "rtn", "4", layer_bits=patterns, format=kind)
        layers = read_back(artifact)
        assert {module: layers[f"{module}.weight"].bits for module in MODULES} == want
        assert artifact.manifest.options["layer_bits"] == patterns
        verify(artifact)
    text = "down_proj=8,layers\\.1\\.=3, model.layers.1.mlp.down_proj=2"
    again = made(two_blocks, tmp_path / "text", "rtn", "4", layer_bits=text, format=GPTQ)
    assert sha256_of(again.folder / "model.safetensors") == sha256_of(artifact.folder / "model.safetensors")


REFUSED = [
    ("gptq", "auto", {}, "bits auto needs --target-bpw or --target-kld to choose bits by"),
    ("gptq", "4", {"target_bpw": 3.5}, "target_bpw chooses the bits itself: it needs --bits auto, not 4"),
    ("gptq", "nvfp4", {"target_bpw": 3.5}, "target_bpw = 3.5 does not apply to nvfp4"),
    ("rtn", "auto", {"target_bpw": 3.5, "target_kld": 0.1}, "target_bpw and target_kld contradict each other"),
    ("rtn", "auto", {"target_bpw": 2.27, "sym": False}, r"have from 2\.2813 to 8\.375 bits per weight"),
    ("gptq", "auto", {"target_bpw": 9, "target_bits": (3, 4)}, r"with bits 3, 4 .* from 3\.25 to 4\.25 bits"),
    ("gptq", "auto", {"target_bpw": 4, "target_bits": (4, 5)}, "target_bits = 4, 5: .* one or more of 2, 3, 4, 8"),
    ("awq", "auto", {"target_bpw": 3.5, "format": "awq"}, "the format awq holds codes of 4 bits, not 2, 3, 8"),
    ("gptq", "auto", {"target_bpw": 3.5, "format": "gguf"}, "the format gguf stores codes of one width"),
    ("gptq", "auto", {"target_bpw": 3.5, "layer_bits": {"q": 4}}, "layer_bits and target_bpw cannot both decide"),
    ("gptq", "auto", {"layer_bits": {"mlp": 4}}, "layer_bits has no bits for model.layers.0.self_attn.q_proj"),
    ("gptq", "4", {"layer_bits": {"mlp": 5}}, "mlp=5 gives unknown bits. Layers can have 2, 3, 4, 8"),
    ("gptq", "4", {"layer_bits": {"mlp(": 8}}, "is not a regular expression"),
    ("gptq", "4", {"layer_bits": {"fc1": 8}}, "the pattern 'fc1' matches no layer's name"),
    ("gptq", "4", {"layer_bits": {"proj": 8}}, "so none has 4 bits. Give --bits auto"),
    ("gptq", "4", {"layer_bits": {"q_proj": 8}}, "q_proj 8 bits and .*k_proj 4: engines fuse layers"),
]


@pytest.mark.parametrize(("method", "bits", "options", "said"), REFUSED)
def test_what_cannot_be_is_refused_before_any_work(method, bits, options, said, one_block, tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured"))
    with pytest.raises(RecipeError, match=said):
        made(one_block, tmp_path / "out", method, bits, **options)
    assert not (tmp_path / "out").exists()


def test_the_ends_of_what_can_be_reached_are_reached_and_one_number_for_all_is_written_as_such(one_block, tmp_path):
    for target, bits in ((2.25, 2), (8.25, 8)):
        artifact = made(one_block, tmp_path / str(target), "rtn", target_bpw=target)
        assert set(bits_of(artifact).values()) == {bits}
    with pytest.raises(RecipeError, match=r"target_kld = 1e-12 is out of reach: .* is [\d.e-]+ nats per token or more"):
        made(one_block, tmp_path / "out", "rtn", target_kld=1e-12)
    assert not (tmp_path / "out").exists()
    chosen = made(one_block, tmp_path / "chosen", "rtn", target_bpw=4.25, target_bits=(4,))
    plain = made(one_block, tmp_path / "plain", "rtn", "4", format=CT)
    assert set(bits_of(chosen).values()) == {4}
    for name in ("config.json", "model.safetensors"):
        assert sha256_of(chosen.folder / name) == sha256_of(plain.folder / name)
    verify(chosen)


def test_the_recipe_beside_the_files_gives_the_same_without_measuring(mixed, two_blocks, tmp_path, monkeypatch):
    artifact = mixed("awq", CT)
    values = yaml.safe_load((artifact.folder / "recipe.yaml").read_text())
    assert not any(name.startswith("target_") for name in values["options"])
    recipe = parse(ConvertRun, values | {"model": str(two_blocks), "calibration": CALIBRATION}, "recipe")
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured again"))
    again = made(two_blocks, tmp_path / "again", "awq", str(recipe.bits), format=recipe.format, **recipe.options)
    for name in ("config.json", "model.safetensors"):
        assert sha256_of(again.folder / name) == sha256_of(artifact.folder / name)
    assert f"({len(MODULES)} in all)" in (artifact.folder / "README.md").read_text()


def test_scores_are_kept_apart_by_what_they_are_of(one_block, tmp_path, new_cache, monkeypatch):
    """Other groups, or zero points, are other estimates; other targets, methods and bits are not."""
    counts = []
    given = {"target_bpw": 5.0}
    for number, options in enumerate(({}, {"sym": False}, {"group_size": 32}, {"target_bits": (3, 8)})):
        made(one_block, tmp_path / str(number), "rtn", **(given | options))
        counts.append(len(list((new_cache / "sensitivity").glob("*"))))
    assert counts == [1, 2, 3, 3]
    kept = [json.loads(path.read_text()) for path in (new_cache / "sensitivity").glob("*")]
    assert sum(all(sorted(kinds) == ["2", "3", "4", "8"] for kinds in each.values()) for each in kept) == 3
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured again"))
    made(one_block, tmp_path / "again", "gptq", target_bpw=4.5)


def test_an_interrupted_conversion_goes_on_with_its_choice(mixed, two_blocks, tmp_path, new_cache, monkeypatch):
    """Without the kept scores: the choice is among what was found out."""
    finish = Spool.finish_block

    def stop(*given):
        finish(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Spool, "finish_block", stop)
    with pytest.raises(KeyboardInterrupt):
        made(two_blocks, tmp_path / "out", "gptq", format=GPTQ, target_bpw=TARGET)
    shutil.rmtree(new_cache)
    monkeypatch.setattr(Spool, "finish_block", finish)
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured again"))
    again = made(two_blocks, tmp_path / "out", "gptq", format=GPTQ, target_bpw=TARGET)
    for name in ("config.json", "model.safetensors"):
        assert sha256_of(again.folder / name) == sha256_of(mixed("gptq", GPTQ).folder / name)


def test_bytes_on_the_disk_follow_the_target(two_blocks, tmp_path):
    jobs = (prepare_job(str(two_blocks), "rtn", "auto", target_bpw=target, group_size=GROUP) for target in (3.0, 5.0))
    small, large = (check(job, tmp_path / "out").job.checked for job in jobs)
    weights = sum(np.prod(shape_of(name)) for name in MODULES)
    assert large.nbytes - small.nbytes == pytest.approx(2.0 * weights / 8, abs=2)


def test_a_dry_run_tells_the_memory_of_the_choice(one_block, tmp_path):
    words = ["convert", one_block, "--method", "gptq", "--bits", "auto", "--target-bpw", 3.9, *CALIBRATION_FLAGS]
    ended = quantkit(*words, "--dry-run", "--out", tmp_path / "out", "--json", tmp_path / "f.json")
    assert (ended.code, ended.err) == (0, "")
    values = json.loads((tmp_path / "f.json").read_text())
    assert {"measuring sensitivities", "the head's gradients"} <= values["phases_bytes"].keys()
    assert 0 < values["work_seconds"] < 60
    assert not (tmp_path / "out").exists()
    ended = quantkit("inspect", made(one_block, tmp_path / "out", "rtn", target_bpw=3.9).folder)
    assert "note: bits chosen by sensitivity: 3." in ended.out
    assert re.search(r"tensors: .*\d+ int[23]", ended.out)


def test_a_dynamic_or_a_manifest_that_lies_is_found(mixed, tmp_path):
    folder = shutil.copytree(mixed("rtn", GPTQ).folder, tmp_path / "copy")
    dynamic, sound = quantization_of(folder)["dynamic"], (folder / "config.json").read_text()
    name, value = next((name, value) for name, value in dynamic.items() if "_proj$" in name and "qkv" not in name)
    changes = [
        {pattern: bits for pattern, bits in dynamic.items() if pattern != name},
        {**dynamic, name: {"bits": 5}},
        {**dynamic, name: {"bits": value["bits"], "group_size": 32}},
        {**dynamic, "+:(a+)+$": {"bits": 4}},
    ]
    for changed in changes:
        (folder / "config.json").write_text(sound)
        edit_json(folder / "config.json", put("quantization_config", "dynamic", value=changed))
        with pytest.raises(ArtifactError):
            read_all(GPTQ, folder).types()
    folder = shutil.copytree(mixed("rtn", CT).folder, tmp_path / "lying")
    bits = bits_of(mixed("rtn", CT))
    one, other = next((a, b) for a, b in itertools.combinations(bits, 2) if bits[a] != bits[b])
    edit_json(folder / "quantkit.json", lambda values: values["options"]["layer_bits"].update({one: bits[other]}))
    with pytest.raises(ArtifactError, match="layer_bits is"):
        verify(open_artifact(folder))
