"""Every source format into every target: what is refused, and what converts with the values of plain arithmetic."""

import contextlib
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from gguf_files import save_tokenizer
from quantized_folders import OF_GPT_OSS, SOURCES, place, save_floats, values_of
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, save_tiny
from trials import dense

from bench.fuzz.quantized_bases import GPT_OSS
from quantkit.calibration.tokens import draw_tokens
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.registry import find_method, formats, formats_for, methods
from quantkit.contracts.run import Run
from quantkit.contracts.stored import stored_values
from quantkit.conversion.check import prepare
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.formats._quantized_checkpoint import QuantizedCheckpoint
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe

FORMAT_OF = {"compressed": "compressed-tensors", "nf4": "bitsandbytes", "fp4": "bitsandbytes", "int8": "bitsandbytes"}
OPTIONS = {
    "awq gguf": {"sym": True},  # which hold no zero points
    "auto": {"layer_bits": {".": 4, "o_proj": 8}},
}
# Methods and their formats, with bits where these make another kind of values or have another default format.
ALL_KINDS = "compressed-tensors awq gguf gptq mlx"
TARGETS = {
    "awq": "awq compressed-tensors gguf gptq mlx", **dict.fromkeys(("awq auto", "awq 2", "awq 3", "awq 8"), ALL_KINDS),
    "ctranslate2": "ctranslate2", "float": "float", "fp8": "compressed-tensors", "gguf": "gguf",
    "gptq": "gptq awq compressed-tensors gguf mlx", "gptq nvfp4": "compressed-tensors",
    "gptq mxfp4": "compressed-tensors gguf mlx", "gptq auto": ALL_KINDS, "int8": "compressed-tensors",
    "keep": ALL_KINDS, "keep mxfp4": "gguf compressed-tensors mlx", "nf4": "bitsandbytes",
    "rtn": "gptq awq compressed-tensors gguf mlx",
    "rtn nvfp4": "compressed-tensors", "rtn mxfp4": "compressed-tensors gguf mlx", "rtn auto": ALL_KINDS,
}  # fmt: skip
COLUMNS = [f"{words} {kind}" for words, kinds in TARGETS.items() for kind in kinds.split(" ")]
# Why a pair is refused; "+": it converts.
REASONS = {
    "n": "keep rewrites codes of",
    "k": "has no grouped codes",
    "v": "has layers of several kinds",
    "f": "converter reads checkpoint folders of floats",
    "e": "keeps stacked",
    "z": "have no zero points|has zero points of 0",
    "o": "cannot store an order of columns",
    "b": "(holds|stores) (grouped )?codes of .*bits",
    "l": "has no linear layer at",
    "g": "has no GGUF conversion",
    "u": "converter has no loader",
    "w": "give --bits",
    "x": "does not load quantized models of the architecture",
    "q": "are no whole multiples of their scales",
    "s": "needs? a? ?multiples? of|does not divide|not a multiple of",
}
# By model the signs of its columns from left to right, but for what depends on the source: what CTranslate2 says (of
# floats "+"), and the signs of `keep`.
ROWS = {
    "llama": "++++++bb+++bb+++bb+++bz++{floats}+++++++++++++bb+++{kept}+++++++++++bb++",
    "llama of odd rows": "s+sss+bbss+bbss+bbss+bz+s{floats}+++ss+ssssss+bbss+{kept}+ss+ssssss+bbss",
    "mixtral": "++++++bb+++bb+++bb+++bz++u+++++++++++++bb+++{kept}e++++++++++bb++",
    "gpt_oss": "+l++xlbb+xlbb+xlbb+xlbz+xu+l+++l+xll+xlbb+xl{kept}+++l+xll+xlbb+x",
}
KEPT = {
    "float": "nnnnnnnn", "gptq": "+++++www", "gptq version 2": "+++++www", "gptq zeros": "++z++www",
    "gptq order": "ooo+owww", "awq": "++z++www", "compressed": "+b+++www", "compressed zeros": "+bb++www",
    **dict.fromkeys(("compressed int8", "compressed fp8", "compressed fp8 blocks", "compressed nvfp4"), "kkkkkkkk"),
    "compressed mxfp4": "wwwww+++", "compressed mixed": "vvvvvvvv", "fp8": "kkkkkkkk", "fp8 tensor": "kkkkkkkk",
    "nf4": "kkkkkkkk", "fp4": "kkkkkkkk", "int8": "kkkkkkkk", "gguf": "nnnnnnnn",
    "mlx": "+++++www", "mlx zeros": "qqqqqqqq", "mxfp4": "kkkkkkkk",
}  # fmt: skip
OF_ODD_ROWS = ("float", "compressed int8", "compressed fp8 blocks", "fp8", "nf4", "int8", "gguf")  # which hold 172


def signs(model, source):
    return ROWS[model].format(floats="+" if source == "float" else "f", kept=KEPT[source])


class Made:
    """Sources of one model by name, each made once: where it lies, its values, and a job for it."""

    def __init__(self, name, folder):
        self.folder, self.model = folder, folder / "model"
        self.makes = OF_GPT_OSS if name == "gpt_oss" else SOURCES
        self.job, self.floats = cache(self._job), cache(self._floats)
        self.values = cache(lambda source: values_of(self.model, self.folder / source))
        inner = 172 if name == "llama of odd rows" else 192
        if "llama" in name:
            save_tiny(self.model, num_hidden_layers=1, hidden_size=64, intermediate_size=inner)
            return
        settings = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": inner}
        if name == "gpt_oss":
            settings = {**GPT_OSS, "layer_types": ["full_attention"]}
        settings |= {"num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
        save_architecture(self.model, name, torch.float32, changes=settings)
        save_tokenizer(self.model)

    def _job(self, source):
        self.makes[source](self.model, self.folder / source)
        return _prepared(self.folder / source)

    def _floats(self, source):
        return _prepared(save_floats(self.folder / source, self.folder / f"{source} as floats", self.values(source)))


def _prepared(folder):
    job = prepare(ConvertRecipe(model=str(place(folder)), method="float", bits="float32"))
    assert job.skeleton
    return job


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cache(lambda model: Made(model, tmp_path_factory.mktemp("matrix")))


def of_target(job, target):
    method, *between, kind = target.split(" ")
    bits = between[0] if between else find_method(method).default_bits
    if method == "keep" and not between and isinstance(job.source, QuantizedCheckpoint):
        with contextlib.suppress(UnsupportedError):
            bits = str(job.source.layout().bits)
    options = OPTIONS.get("auto" if "auto" in between else target, {})
    asked = {"method": method, "bits": bits, "format": kind, "options": options}
    recipe = job.recipe.model_copy(update={**asked, "calibration": CalibrationSpec(**CALIBRATION)})
    other = prepare(recipe, job.source)
    return replace(job, recipe=other.recipe, method=other.method, format=other.format, options=other.options)


def sign_of(job, target):
    try:
        job = of_target(job, target)
        job.method.check(job)
    except QuantkitError as error:
        text = str(error)
        assert text.isprintable(), text
        found = [letter for letter, says in REASONS.items() if re.search(says, text)]
        return found[0] if len(found) == 1 else f"({text})"
    return "+"


def written(job, folder):
    """What the target's format reads back, dense."""
    folder.mkdir()
    job.source.copy_side_files(folder)
    job = CheckedJob.of(job, job.method.check(job))
    if job.method.calibrated(job.options):
        tokens = draw_tokens(job.source.tokenizer(), job.recipe.calibration, 0, job.source.config)
        job = replace(job, calibration=tokens)
    job.method.write(job, Run(folder))
    files = tuple(sorted(path.name for pattern in job.format.weight_files for path in folder.glob(pattern)))
    reader = job.format.open(folder, files, dict(job.source.config))
    return {name: dense(value) for name, value in stored_values(reader)}


def kept_values(job, values):
    """Codes stand for the source's own values; all else is rounded to 16 bits, but for norms in GGUF files."""
    assert isinstance(job.source, QuantizedCheckpoint)
    codes, in_gguf = job.source.quantized, job.format.name == "gguf"
    scaled = job.recipe.bits == "mxfp4" and job.format.name == "compressed-tensors"
    dtype = torch.bfloat16 if scaled else torch.float16
    exact = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    same = {n for n, v in exact.items() if n in codes or (in_gguf and (v.ndim == 1 or n.endswith(".gate.weight")))}
    return {name: value if name in same else value.to(dtype).float() for name, value in exact.items()}


def test_every_target_has_a_column_and_every_source_a_row():
    found = []
    for name, method in methods().items():
        for bits in (method.default_bits, *method.other_kinds):
            words = [name] if bits == method.default_bits else [name, bits]
            found += [" ".join([*words, kind]) for kind in formats_for(method, bits)]
    assert found == COLUMNS
    assert list(KEPT) == [*SOURCES, *OF_GPT_OSS]
    assert all(len(signs(model, "gptq")) == len(COLUMNS) for model in ROWS)
    read = {name for name, kind in formats().items() if kind.open_quantized is not None}
    assert {FORMAT_OF.get(name.split(" ")[0], name.split(" ")[0]) for name in KEPT} == {*read, "float", "gguf"}


def rows():
    quick = [("llama", source, False) for source in SOURCES] + [("gpt_oss", source, False) for source in OF_GPT_OSS]
    whole = [("llama", source, True) for source in SOURCES]
    whole += [("mixtral", source, True) for source in SOURCES]
    whole += [("llama of odd rows", source, True) for source in OF_ODD_ROWS]
    whole += [("gpt_oss", source, True) for source in OF_GPT_OSS]
    return [*quick, *(pytest.param(*row, marks=pytest.mark.slow) for row in whole)]


@pytest.mark.parametrize(("model", "source", "whole"), rows())
def test_pairs_convert_or_are_refused_as_told(model, source, whole, made, tmp_path):
    """All pairs of a source, or what is kept of it and each 19th of the other targets."""
    here, row = made(model), list(KEPT).index(source)
    job = here.job(source)
    for column, (target, sign) in enumerate(zip(COLUMNS, signs(model, source), strict=True)):
        if not (whole or target.startswith("keep") or column % 19 == row % 19):
            continue
        assert (sign_of(job, target), target) == (sign, target)
        if sign != "+" or source == "float":  # which is its own reference
            continue
        aimed = of_target(job, target)
        ours = written(aimed, tmp_path / target)
        if aimed.method.name == "keep":
            theirs = kept_values(aimed, here.values(source))
        else:
            theirs = written(of_target(here.floats(source), target), tmp_path / f"{target} of floats")
        assert ours.keys() == theirs.keys()
        rounds = target == "keep mlx" and source in ("gptq zeros", "awq", "compressed zeros")  # to float16 biases
        for name, value in theirs.items():
            most = 15 / 2048 * value.float().abs().max() if rounds else 0
            assert (ours[name].float() - value.float()).abs().max() <= most, (target, name)
