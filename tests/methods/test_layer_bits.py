"""Bits by layer: chosen for a size or a divergence, or given by hand; for every method of grouped codes."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from engine_logits import engine_logits
from killed import Ends, started
from safetensors.torch import load_file
from tiny_architectures import save_architecture
from tiny_llama import LINEARS, SHAPES, calibration, converted, job_for, save_llama
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit
from trials import dense_values, read_back

from quantkit import verify
from quantkit.artifact import Artifact, open_artifact
from quantkit.calibration import sensitivity
from quantkit.checkpoints.spool import Spool
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine, find_format
from quantkit.conversion.check import check, prepare_job
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError, QuantkitError, RecipeError
from quantkit.evaluation.engine_choice import choose as choose_engine
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_model, open_source
from quantkit.methods import awq
from quantkit.methods._budget.choice import programme
from quantkit.methods.awq import search_scale
from quantkit.models.skeleton import open_skeleton
from quantkit.models.stand_in import layers_of_one_input
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.recipe import ConvertRun, EngineSpec, parse
from quantkit.system.files import sha256_of

CT, GPTQ = "compressed-tensors", "gptq"
GROUP, TARGET = 64, 3.9
CASES = [("rtn", CT), ("gptq", CT), ("awq", CT), ("rtn", GPTQ), ("gptq", GPTQ)]
UNITS = [
    [f"model.layers.{block}.{name}" for name in names]
    for block in range(3)
    for names in (
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    )
]
SCALED = [" ".join(one.split(".", 3)[3] for one in names) for names in UNITS[:4]]
MODULES = [name.removesuffix(".weight") for name in LINEARS]


@pytest.fixture(scope="module", autouse=True)
def own_scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where estimates are kept."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("QUANTKIT_CACHE", str(cache))
        yield cache / "sensitivity"


@pytest.fixture(scope="module")
def mixed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    """Artifacts of the tiny llama whose layers' bits were chosen, each made once."""
    made: dict[str, Artifact] = {}

    def get(method: str, kind: str, **options: Any) -> Artifact:
        options = {"group_size": GROUP, "target_bpw": TARGET, **options}
        key = repr((method, kind, sorted(options.items())))
        if key not in made:
            out = tmp_path_factory.mktemp("mixed") / "out"
            made[key] = converted(tiny_llama, out, method, "auto", format=kind, **options)
        return made[key]

    return get


def bits_of(artifact: Artifact) -> dict[str, int]:
    bits = artifact.manifest.options["layer_bits"]
    assert isinstance(bits, dict)
    return bits


def shape_of(module: str) -> tuple[int, int]:
    return SHAPES[module.split(".", 3)[3]]


def size(bits: dict[str, int], sym: bool = True) -> float:
    """Bits per weight of the layers, by hand: 16 for each scale of 64 columns, and a zero point where there is one."""
    total = weights = 0.0
    for module, width in bits.items():
        rows, columns = shape_of(module)
        total += rows * columns * width + rows * columns / GROUP * (16 + (0 if sym else width))
        weights += rows * columns
    return total / weights


# The choice


def test_no_choice_of_bits_is_better(tiny_llama: Path, own_scores: Path, tmp_path: Path) -> None:
    """All choices of a model of two blocks, tried one by one; the harms are those that were kept."""
    model = save_llama(tmp_path / "model", num_hidden_layers=2)
    before = set(own_scores.glob("*"))
    units = UNITS[:8]
    for target in (2.6, 3.5, 5.0):
        options = {"group_size": GROUP, "target_bpw": target, "target_bits": (2, 4, 8)}
        artifact = converted(model, tmp_path / str(target), "rtn", "auto", **options)
        [path] = set(own_scores.glob("*")) - before
        scores = json.loads(path.read_text())
        sizes, harms = [], []
        for names in units:
            weights = sum(np.prod(shape_of(name)) for name in names)
            sizes.append([weights * (bits + 16 / GROUP) for bits in (2, 4, 8)])
            harms.append([sum(scores[f"{name}.weight"][str(bits)] for name in names) for bits in (2, 4, 8)])
        limit = target * sum(row[0] for row in sizes) / (2 + 16 / GROUP)
        every = np.array(list(itertools.product(range(3), repeat=len(units))))
        where = np.arange(len(units))
        small = np.array(sizes)[where, every].sum(1) <= limit
        best = np.array(harms)[where, every].sum(1)[small].min()
        bits = bits_of(artifact)
        assert size(bits) <= target
        harm = sum(scores[f"{name}.weight"][str(width)] for name, width in bits.items())
        assert harm == pytest.approx(best, rel=1e-5)
        note = next(note for note in artifact.manifest.notes if note.startswith("bits chosen by sensitivity"))
        assert f"{size(bits):.3f} bits per weight of the linear layers" in note
        assert f"estimated divergence {harm:.4f} nats" in note


def test_a_divergence_is_kept_by_the_fewest_bits(mixed: Callable[..., Artifact], own_scores: Path) -> None:
    """What a size was estimated to harm is reached with no more than that size."""
    sized = mixed("rtn", CT)
    note = next(note for note in sized.manifest.notes if note.startswith("bits chosen"))
    match = re.search(r"divergence ([\d.]+) nats", note)
    assert match is not None
    divergent = mixed("rtn", CT, target_bpw=None, target_kld=float(match[1]) * 1.001 + 1e-4)
    assert size(bits_of(divergent)) <= size(bits_of(sized))
    smaller = mixed("rtn", CT, target_bpw=None, target_kld=float(match[1]) / 2)
    assert size(bits_of(smaller)) > size(bits_of(sized))


def test_harm_falls_with_bits(mixed: Callable[..., Artifact], own_scores: Path) -> None:
    mixed("rtn", CT)
    for path in own_scores.glob("*.json"):
        for kinds in json.loads(path.read_text()).values():
            harms = [kinds[bits] for bits in sorted(kinds, key=int)]
            assert harms == sorted(harms, reverse=True)


def test_sizes_count_scales_and_zero_points(tiny_llama: Path) -> None:
    for sym in (True, False):
        job = prepare_job(str(tiny_llama), "rtn", "auto", group_size=GROUP, sym=sym, target_bpw=3.5)
        layout = job.method.check(job).plan
        shapes = {f"{name}.weight": shape_of(name) for name in MODULES}
        scores = {name: {str(bits): 0.0 for bits in (2, 3, 4, 8)} for name in shapes}
        sizes, _ = programme([[name] for name in shapes], shapes, scores, layout)
        for name, row in zip(MODULES, sizes, strict=True):
            weights = np.prod(shape_of(name))
            assert row == [weights * size({name: bits}, sym) for bits in (2, 3, 4, 8)]


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("llama", {"self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp.gate_proj mlp.up_proj"}),
        ("cohere", {"self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"}),
        ("phi3", set()),
        ("mixtral", {"self_attn.q_proj self_attn.k_proj self_attn.v_proj"}),
    ],
)
def test_layers_that_engines_join_are_found(name: str, units: set[str], tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "model", name)
    config = json.loads((model / "config.json").read_text())
    skeleton = open_skeleton(config)
    found = layers_of_one_input(skeleton, config)
    assert sorted(name for names in found for name in names) == sorted(skeleton.linears())
    first = [
        [name.removeprefix(skeleton.block_prefix(0)).removesuffix(".weight") for name in names]
        for names in found
        if names[0].startswith(skeleton.block_prefix(0))
    ]
    experts = [names for names in first if any(".experts." in name for name in names)]
    together = {" ".join(names) for names in first if len(names) > 1 and names not in experts}
    assert together == units
    assert len(experts) == (1 if name == "mixtral" else 0)  # all matrices of all experts
    assert all(".experts." in one for names in experts for one in names)


# What is written


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_each_layer_has_its_bits(method: str, kind: str, mixed: Callable[..., Artifact]) -> None:
    artifact = mixed(method, kind)
    bits, layers = bits_of(artifact), read_back(artifact)
    assert list(bits) == MODULES
    assert len(set(bits.values())) > 1
    for names in UNITS:
        assert len({bits[name] for name in names}) == 1, names
    for module, width in bits.items():
        layer = layers[f"{module}.weight"]
        assert isinstance(layer, GroupedWeight)
        assert (layer.bits, layer.scales.shape[1]) == (width, shape_of(module)[1] // GROUP)
        assert int(layer.codes.max()) < 1 << width
    counts = {f"int{width}": list(bits.values()).count(width) for width in set(bits.values())}
    assert {name: n for name, n in artifact.manifest.tensor_types.items() if name.startswith("int")} == counts
    assert 0.9 * TARGET < size(bits, sym=method != "awq") <= TARGET
    assert artifact.manifest.recipe.bits == "auto"
    assert verify(artifact) == open_artifact(artifact.folder)


@pytest.mark.parametrize("kind", [CT, GPTQ])
def test_plain_rounding_gives_the_layers_of_uniform_artifacts(
    kind: str, mixed: Callable[..., Artifact], tiny_llama: Path, tmp_path: Path
) -> None:
    artifact = mixed("rtn", kind)
    uniform = {
        bits: read_back(converted(tiny_llama, tmp_path / str(bits), "rtn", str(bits), format=kind, group_size=GROUP))
        for bits in set(bits_of(artifact).values())
    }
    layers = read_back(artifact)
    for module, bits in bits_of(artifact).items():
        ours, theirs = layers[f"{module}.weight"], uniform[bits][f"{module}.weight"]
        assert isinstance(ours, GroupedWeight)
        assert isinstance(theirs, GroupedWeight)
        for part in ("codes", "zeros", "scales", "g_idx"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), (module, part)


def test_formats_hold_the_same_codes(mixed: Callable[..., Artifact]) -> None:
    one, other = dense_values(mixed("gptq", CT)), dense_values(mixed("gptq", GPTQ))
    assert bits_of(mixed("gptq", CT)) == bits_of(mixed("gptq", GPTQ))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_a_mixed_artifact_is_a_source(method: str, kind: str, mixed: Callable[..., Artifact]) -> None:
    artifact = mixed(method, kind)
    source = open_source(str(artifact.folder))
    exact = dense_values(artifact)
    for name in source.tensors:
        assert np.array_equal(source.floats(name), exact[name].float().numpy()), name
    assert source.quantization is not None
    for bits in set(bits_of(artifact).values()):
        assert str(bits) in source.quantization


def test_mixed_codes_are_not_kept(mixed: Callable[..., Artifact], tmp_path: Path) -> None:
    for kind in (CT, GPTQ):
        with pytest.raises(QuantkitError, match="has layers of several kinds"):
            convert(str(mixed("rtn", kind).folder), "keep", 4, tmp_path / "out", format=CT)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_the_package_reads_what_we_read(method: str, mixed: Callable[..., Artifact]) -> None:
    """Every layer is named by one group of its bits, and its words are those that the package unpacks."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    artifact = mixed(method, CT)
    stored = QuantizationConfig.model_validate(quantization_of(artifact.folder))
    schemes = {name: scheme for scheme in stored.config_groups.values() for name in scheme.targets}
    assert sorted(schemes) == sorted(MODULES)
    assert sum(len(scheme.targets) for scheme in stored.config_groups.values()) == len(MODULES)
    tensors = load_file(artifact.folder / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(stored.format)
    ours = read_back(artifact)
    for module, scheme in schemes.items():
        assert scheme.weights.num_bits == bits_of(artifact)[module]
        stem = f"{module}."
        parts = {part.removeprefix(stem): value for part, value in tensors.items() if part.startswith(stem)}
        layer = ours[f"{module}.weight"]
        assert isinstance(layer, GroupedWeight)
        value = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(layer.steps().half() * layer.spread(layer.scales).half(), value), module


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_transformers_computes_what_we_compute(method: str, mixed: Callable[..., Artifact]) -> None:
    pytest.importorskip("compressed_tensors")
    artifact = mixed(method, CT)
    ids = np.arange(2, 40)[None]
    theirs, ours = (
        engine_logits(find_engine(name).load(open_model(artifact), LoadSpec(1, 64, dtype="float32")), ids)
        for name in ("transformers", "reference")
    )
    assert np.abs(theirs - ours).max() < 2e-3  # float16 products of codes and scales


@pytest.mark.parametrize("name", ["mixtral", "cohere", "gemma2"])
def test_transformers_reads_other_architectures(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = save_architecture(tmp_path / "model", name)
    options = {"group_size": -1, "target_bpw": 4.5}
    artifact = convert(str(model), "rtn", "auto", tmp_path / "out", calibration=CALIBRATION, **options)
    assert len(set(bits_of(artifact).values())) > 1
    ids = np.arange(2, 30)[None]
    theirs, ours = (
        engine_logits(find_engine(engine).load(open_model(artifact), LoadSpec(1, 64, dtype="float32")), ids)
        for engine in ("transformers", "reference")
    )
    assert np.abs(theirs - ours).max() < 0.01 * np.abs(ours).max()


def test_dynamic_gives_every_layer_its_bits_by_the_rule_of_its_readers(mixed: Callable[..., Artifact]) -> None:
    """GPTQModel takes the first expression that matches from the beginning; vLLM asks it for the joined layers."""
    artifact = mixed("gptq", GPTQ)
    stored, bits = quantization_of(artifact.folder), bits_of(artifact)

    def asked(name: str) -> int:
        for pattern, value in stored["dynamic"].items():
            if re.match(pattern.removeprefix("+:"), name):
                return int(value["bits"])
        return int(stored["bits"])

    assert {module: asked(module) for module in bits} == bits
    for block in range(3):
        assert asked(f"model.layers.{block}.self_attn.qkv_proj") == bits[f"model.layers.{block}.self_attn.q_proj"]
        assert asked(f"model.layers.{block}.mlp.gate_up_proj") == bits[f"model.layers.{block}.mlp.up_proj"]
    assert asked("model.layers.11.self_attn.q_proj") == stored["bits"]
    for module in bits:
        assert asked(f"{module}_2") == asked(module.replace(".", "_")) == stored["bits"]
    weights = {width: sum(np.prod(shape_of(m)) for m in bits if bits[m] == width) for width in set(bits.values())}
    assert weights[stored["bits"]] == max(weights.values())


@pytest.mark.parametrize("kind", [CT, GPTQ])
def test_engines_that_cannot_read_the_mix_are_refused(
    kind: str, mixed: Callable[..., Artifact], tiny_llama: Path, tmp_path: Path
) -> None:
    refusals = find_format(kind).refusals
    few = mixed("rtn", kind)
    assert {2, 3} & set(bits_of(few).values())
    assert "vllm" in refusals(quantization_of(few.folder))
    with pytest.raises(RecipeError, match=r"vLLM loads .*4 and 8 bits"):
        choose_engine(open_model(few), EngineSpec(engine="vllm"))
    rare = converted(tiny_llama, tmp_path / "rare", "rtn", "4", format=kind, group_size=GROUP, layer_bits={"o_proj": 3})
    assert "vllm" in refusals(quantization_of(rare.folder))
    wide = mixed("rtn", kind, target_bpw=5.5, target_bits=(4, 8))
    assert set(bits_of(wide).values()) == {4, 8}
    assert "vllm" not in refusals(quantization_of(wide.folder))
    if kind == GPTQ:
        assert "tabbyapi" in refusals(quantization_of(wide.folder))


def test_one_number_of_bits_for_all_is_written_as_such(tiny_llama: Path, tmp_path: Path) -> None:
    options = {"group_size": GROUP, "target_bpw": 4.25, "target_bits": (4,)}
    chosen = converted(tiny_llama, tmp_path / "chosen", "rtn", "auto", **options)
    plain = converted(tiny_llama, tmp_path / "plain", "rtn", "4", group_size=GROUP, format=CT)
    assert set(bits_of(chosen).values()) == {4}
    for name in ("config.json", "model.safetensors"):
        assert sha256_of(chosen.folder / name) == sha256_of(plain.folder / name)
    verify(chosen)


def test_a_head_lies_beside_mixed_layers(tiny_llama_untied: Path, tmp_path: Path) -> None:
    options = {"group_size": GROUP, "target_bpw": TARGET, "head_bits": 8}
    artifact = converted(tiny_llama_untied, tmp_path / "out", "rtn", "auto", **options)
    head = read_back(artifact)["lm_head.weight"]
    assert isinstance(head, GroupedWeight)
    assert head.bits == 8
    assert "lm_head" not in bits_of(artifact)
    verify(artifact)
    with pytest.raises(RecipeError, match="the format gptq has no quantized output head"):
        converted(tiny_llama_untied, tmp_path / "other", "rtn", "auto", format=GPTQ, **options)


def test_awq_searches_scales_for_the_bits_of_the_layers(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[tuple[int, int]] = []

    def noted(weights: list[torch.Tensor], *others: Any) -> torch.Tensor:
        searched.append((sum(map(len, weights)), others[-2]))  # bits
        return search_scale(weights, *others)

    monkeypatch.setattr(awq, "search_scale", noted)
    patterns = {"mlp.(gate|up)": 8, "layers.0.mlp.down_proj": 3, "layers.2.self_attn.o_proj": 2}
    converted(tiny_llama, tmp_path / "out", "awq", "4", format=CT, group_size=GROUP, n_grid=2, layer_bits=patterns)
    rows = {name: sum(shape_of(f"model.layers.0.{one}")[0] for one in name.split()) for name in SCALED}
    want = [(rows[name], 8 if "gate" in name else 4) for _ in range(3) for name in SCALED]
    for block, name, bits in ((0, "mlp.down_proj", 3), (2, "self_attn.o_proj", 2)):
        want[4 * block + SCALED.index(name)] = (rows[name], bits)
    assert sorted(searched) == sorted(entry for entry in want if entry[0] in {size for size, _ in searched})
    assert {bits for _, bits in searched} >= {3, 4, 8}


# Given by hand


def test_bits_are_given_by_patterns(tiny_llama: Path, tmp_path: Path) -> None:
    patterns = {"down_proj": 8, r"layers\.1\.": 3, "model.layers.1.mlp.down_proj": 2}
    for kind in (CT, GPTQ):
        artifact = converted(
            tiny_llama, tmp_path / kind, "gptq", "4", group_size=GROUP, layer_bits=patterns, format=kind
        )
        layers = read_back(artifact)
        for module in MODULES:
            want = 8 if "down_proj" in module else 4
            want = (2 if "down_proj" in module else 3) if ".1." in module else want
            layer = layers[f"{module}.weight"]
            assert isinstance(layer, GroupedWeight)
            assert layer.bits == want
        assert artifact.manifest.options["layer_bits"] == patterns
        verify(artifact)
    text = "down_proj=8,layers\\.1\\.=3, model.layers.1.mlp.down_proj=2"
    again = converted(tiny_llama, tmp_path / "text", "gptq", "4", group_size=GROUP, layer_bits=text, format=GPTQ)
    assert sha256_of(again.folder / "model.safetensors") == sha256_of(artifact.folder / "model.safetensors")


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("gptq", "auto", {}, "bits auto needs --target-bpw or --target-kld to choose bits by"),
    ("gptq", "4", {"target_bpw": 3.5}, "target_bpw chooses the bits itself: it needs --bits auto, not 4"),
    ("awq", "4", {"target_kld": 0.1}, "target_kld chooses the bits itself"),
    ("gptq", "nvfp4", {"target_bpw": 3.5}, "target_bpw = 3.5 is not for nvfp4"),
    ("rtn", "auto", {"target_bpw": 3.5, "target_kld": 0.1}, "target_bpw and target_kld contradict each other"),
    ("rtn", "auto", {"target_bpw": 2.2}, r"2.2 is out of reach: .* take from 2\.25 to 8\.25 bits per weight"),
    ("rtn", "auto", {"target_bpw": 8.3}, r"8.3 is out of reach: .* take from 2\.25 to 8\.25 bits per weight"),
    ("rtn", "auto", {"target_bpw": 2.27, "sym": False}, r"take from 2\.2813 to 8\.375 bits per weight"),
    ("gptq", "auto", {"target_bpw": 9, "target_bits": (3, 4)}, r"with bits 3, 4 .* from 3\.25 to 4\.25 bits"),
    ("gptq", "auto", {"target_bpw": 4, "target_bits": (4, 5)}, "target_bits = 4, 5: .* some of 2, 3, 4, 8"),
    ("gptq", "4", {"target_bits": (4, 8)}, "target_bits = 4, 8: with bits auto and a target"),
    ("awq", "auto", {"target_bpw": 3.5, "format": "awq"}, "the format awq holds codes of 4 bits, not of 2, 3, 8"),
    ("gptq", "auto", {"target_bpw": 3.5, "format": "awq"}, "the format awq holds codes of 4 bits, not of 2, 3, 8"),
    ("gptq", "auto", {"target_bpw": 3.5, "format": "gguf"}, "the format gguf holds codes of one number"),
    ("gptq", "auto", {"target_bpw": 3.5, "format": "gptqq"}, "Did you mean"),
    ("gptq", "auto", {"target_bpw": 3.5, "layer_bits": {"q": 4}}, "layer_bits and target_bpw cannot both decide"),
    ("gptq", "auto", {"layer_bits": {"mlp": 4}}, "layer_bits gives model.layers.0.self_attn.q_proj no bits"),
    ("gptq", "4", {"layer_bits": {"mlp": 5}}, "mlp=5 gives no bits that layers can have: 2, 3, 4, 8"),
    ("gptq", "4", {"layer_bits": {"mlp(": 8}}, "is no regular expression"),
    ("gptq", "4", {"layer_bits": {"fc1": 8}}, "the pattern 'fc1' is found in no layer's name"),
    ("gptq", "4", {"layer_bits": {"proj": 8}}, "leaves no layer with 4 bits. Give --bits auto"),
    ("gptq", "4", {"layer_bits": {"q_proj": 8}}, "q_proj 8 bits and .*k_proj 4: engines join layers"),
    ("rtn", "4", {"layer_bits": {"up_proj": 8}}, "gate_proj 4 bits and .*up_proj 8: engines join layers"),
    ("rtn", "4", {"layer_bits": {"down_proj": 4}, "format": "awq"}, "nothing"),
    ("rtn", "4", {"layer_bits": {"down_proj": 8}, "format": "awq"}, "the format awq holds codes of 4 bits, not of 8"),
]


@pytest.mark.parametrize(("method", "bits", "options", "said"), REFUSED)
def test_what_cannot_be_is_refused_before_any_work(
    method: str, bits: str, options: dict[str, Any], said: str, tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured"))
    if said == "nothing":
        converted(tiny_llama, tmp_path / "out", method, bits, group_size=GROUP, **options)
        return
    options = options if bits == "nvfp4" else {"group_size": GROUP, **options}
    with pytest.raises(RecipeError, match=said):
        converted(tiny_llama, tmp_path / "out", method, bits, **options)
    assert not (tmp_path / "out").exists()


def test_the_ends_of_what_can_be_reached_are_reached(tiny_llama: Path, tmp_path: Path) -> None:
    for target, bits in ((2.25, 2), (8.25, 8)):
        options = {"group_size": GROUP, "target_bpw": target}
        artifact = converted(tiny_llama, tmp_path / str(target), "rtn", "auto", **options)
        assert set(bits_of(artifact).values()) == {bits}


def test_a_divergence_out_of_reach_is_told_with_the_least(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"target_kld = 1e-12 is out of reach: .* is [\d.e-]+ nats a token or more"):
        converted(tiny_llama, tmp_path / "out", "rtn", "auto", group_size=GROUP, target_kld=1e-12)
    assert not (tmp_path / "out").exists()


# Again


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_recipe_beside_the_files_gives_the_same_without_measuring(
    method: str, mixed: Callable[..., Artifact], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = mixed(method, CT)
    values = yaml.safe_load((artifact.folder / "recipe.yaml").read_text())
    assert not any(name.startswith("target_") for name in values["options"])
    given = calibration().model_dump()
    recipe = parse(ConvertRun, values | {"model": str(tiny_llama), "calibration": given}, "recipe")
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured again"))
    again = converted(
        tiny_llama, tmp_path / "again", recipe.method, str(recipe.bits), format=recipe.format, **recipe.options
    )
    for name in ("config.json", "model.safetensors"):
        assert sha256_of(again.folder / name) == sha256_of(artifact.folder / name)
    assert f"({len(MODULES)} in all)" in (artifact.folder / "README.md").read_text()


def test_the_same_recipe_gives_the_same_bytes_with_and_without_kept_scores(
    mixed: Callable[..., Artifact], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = mixed("gptq", CT)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    again = converted(tiny_llama, tmp_path / "again", "gptq", "auto", format=CT, group_size=GROUP, target_bpw=TARGET)
    assert len(list((tmp_path / "cache" / "sensitivity").glob("*"))) == 1
    files = {name: entry.sha256 for name, entry in artifact.manifest.files.items()}
    assert {name: entry.sha256 for name, entry in again.manifest.files.items()} == files


def test_scores_are_kept_apart_by_what_they_are_of(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other groups, or zero points, are other estimates; other targets, methods and bits are not."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    counts = []
    given: dict[str, Any] = {"group_size": GROUP, "target_bpw": 5.0}
    for number, options in enumerate(({}, {"sym": False}, {"group_size": 32}, {"target_bits": (3, 8)})):
        converted(tiny_llama, tmp_path / str(number), "rtn", "auto", **(given | options))
        counts.append(len(list((tmp_path / "cache" / "sensitivity").glob("*"))))
    assert counts == [1, 2, 3, 3]
    measured = sensitivity.sensitivities
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured again"))
    converted(tiny_llama, tmp_path / "again", "gptq", "auto", **(given | {"target_bpw": 4.5}))
    monkeypatch.setattr(sensitivity, "sensitivities", measured)


def test_estimates_of_further_bits_are_kept_beside_the_others(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    for number, bits in enumerate(((3, 4), (4, 8))):
        given: dict[str, Any] = {"group_size": GROUP, "target_bpw": 4.25, "target_bits": bits}
        converted(tiny_llama, tmp_path / str(number), "rtn", "auto", **given)
    [path] = (tmp_path / "cache" / "sensitivity").glob("*")
    assert all(sorted(kinds) == ["3", "4", "8"] for kinds in json.loads(path.read_text()).values())


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_killed_conversion_goes_on_with_its_choice(
    method: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kept scores: the choice is among what was found out."""

    def command(out: Path) -> list[str]:
        flags = ["--bits", "auto", "--target-bpw", "3.9", "--target-bits", "2,3,4,8", "--group-size", "64"]
        return [
            str(part) for part in ("convert", tiny_llama, "--method", method, *flags, "--out", out, *CALIBRATION_FLAGS)
        ]

    whole, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "log"
    child = started(command(whole), log)
    assert child.wait() == ""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    child = started(command(out), log, Ends(Spool, "finish_block", 1, after=True))
    child.wait()
    assert child.code == -9
    for path in (tmp_path / "cache" / "sensitivity").glob("*"):
        path.write_text("{}")
    child = started(command(out), log)
    assert "going on after 2 finished decoder blocks" in child.wait()
    assert [path.read_text() for path in (tmp_path / "cache" / "sensitivity").glob("*")] == ["{}"]
    names = {path.name for path in whole.iterdir()}
    assert {path.name: sha256_of(path) for path in out.iterdir()} == {name: sha256_of(whole / name) for name in names}


def test_a_dry_run_tells_the_memory_of_the_choice(tiny_llama: Path, tmp_path: Path) -> None:
    made = ["convert", tiny_llama, "--method", "gptq", "--bits", "auto", "--target-bpw", 3.9, *CALIBRATION_FLAGS]
    ended = quantkit(*made, "--dry-run", "--out", tmp_path / "out", "--json", tmp_path / "f.json")
    assert (ended.code, ended.err) == (0, "")
    values = json.loads((tmp_path / "f.json").read_text())
    assert {"measuring sensitivities", "the head's gradients"} <= values["phases_bytes"].keys()
    assert 0 < values["work_seconds"] < 60
    assert not (tmp_path / "out").exists()
    ended = quantkit("inspect", converted(tiny_llama, tmp_path / "out", "rtn", "auto", target_bpw=3.9).folder)
    assert "note: bits chosen by sensitivity: 3." in ended.out
    assert re.search(r"tensors: .*\d+ int[23]", ended.out)


def test_bytes_on_the_disk_follow_the_target(tiny_llama: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"group_size": GROUP, "calibration": CALIBRATION}
    small, large = (
        check(prepare_job(str(tiny_llama), "rtn", "auto", target_bpw=target, **given), tmp_path).job.checked.nbytes
        for target in (3.0, 5.0)
    )
    weights = sum(np.prod(shape_of(name)) for name in MODULES)
    assert large - small == pytest.approx(2.0 * weights / 8, abs=2)


# What lies


def test_names_and_bits_of_config_groups_that_lie_are_found(mixed: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = mixed("rtn", CT)

    def dropped(groups: dict[str, Any]) -> None:
        groups["group_0"]["targets"].pop()

    def moved(groups: dict[str, Any]) -> None:
        groups["group_1"]["targets"].append(groups["group_0"]["targets"].pop())

    def twice(groups: dict[str, Any]) -> None:
        groups["group_1"]["targets"].append(groups["group_0"]["targets"][0])

    def wider(groups: dict[str, Any]) -> None:
        groups["group_1"]["weights"]["num_bits"] = 8 if groups["group_1"]["weights"]["num_bits"] != 8 else 4

    def other_groups(groups: dict[str, Any]) -> None:
        groups["group_1"]["weights"]["group_size"] = 32

    def with_classes(groups: dict[str, Any]) -> None:
        groups["group_0"]["targets"] = ["Linear"]

    for number, change in enumerate((dropped, moved, twice, wider, other_groups, with_classes)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((artifact.folder / "config.json").read_text())
        change(config["quantization_config"]["config_groups"])
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((artifact.folder / "model.safetensors").read_bytes())
        with pytest.raises(ArtifactError):
            read_all(CT, folder)


def read_all(kind: str, folder: Path) -> None:
    reader = find_format(kind).open(folder, ("model.safetensors",), {})
    for name in reader.names():
        reader.read(name)
    reader.types()


def test_a_dynamic_that_lies_is_found(mixed: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = mixed("rtn", GPTQ)
    original = quantization_of(artifact.folder)["dynamic"]
    name, value = next((name, value) for name, value in original.items() if "_proj$" in name and "qkv" not in name)
    changes: list[dict[str, Any]] = [
        {pattern: bits for pattern, bits in original.items() if pattern != name},
        {**original, name: {"bits": 8 if value["bits"] != 8 else 4}},
        {**original, name: {"bits": 5}},
        {**original, name: {"bits": value["bits"], "group_size": 32}},
        {**original, "+:.*": {"bits": 4}},
        {**original, "+:(a+)+$": {"bits": 4}},
    ]
    for number, dynamic in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((artifact.folder / "config.json").read_text())
        config["quantization_config"]["dynamic"] = dynamic
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((artifact.folder / "model.safetensors").read_bytes())
        with pytest.raises(ArtifactError):
            read_all(GPTQ, folder)


@pytest.mark.parametrize("kind", [CT, GPTQ])
def test_a_manifest_that_lies_of_a_layers_bits_is_found(
    kind: str, mixed: Callable[..., Artifact], tmp_path: Path
) -> None:
    artifact = mixed("rtn", kind)
    for path in artifact.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads((tmp_path / "quantkit.json").read_text())
    bits = values["options"]["layer_bits"]
    one, other = next((a, b) for a, b in itertools.combinations(bits, 2) if bits[a] != bits[b])
    bits[one], bits[other] = bits[other], bits[one]
    (tmp_path / "quantkit.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match="layer_bits is"):
        verify(open_artifact(tmp_path))


def test_the_walk_of_the_estimate_sees_the_layers_inputs(tiny_llama: Path, tmp_path: Path) -> None:
    """The estimate is that of the codes which plain rounding with a weighted search makes, layer by layer."""
    trial = job_for(tiny_llama, "gptq", tmp_path)
    assert trial.job.checked.plan.layer_bits == {}
    assert trial.job.settled(trial.run) is trial.job
