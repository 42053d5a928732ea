"""Every source format into every target that the registry has: what converts, and what is refused, pair by pair.

What converts has the values of the target's method on the source's values, which plain arithmetic tells; what `keep`
writes has the source's own values. What is refused is refused in one line before anything is written.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import save_tokenizer
from quantized_folders import OF_GPT_OSS, SOURCES, place, save_floats, values_of
from safetensors.torch import load_file, save_file
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION
from trials import dense

from bench.fuzz.quantized_bases import GPT_OSS
from quantkit.calibration.tokens import draw_tokens
from quantkit.contracts.method import Job
from quantkit.contracts.registry import find_method, formats, formats_for, methods
from quantkit.contracts.run import Checked, Run
from quantkit.contracts.stored import stored_values
from quantkit.conversion.check import prepare
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.formats.quantized_checkpoint import QuantizedCheckpoint
from quantkit.recipe import CalibrationSpec, ConvertRecipe

FORMAT_OF = {"compressed": "compressed-tensors", "nf4": "bitsandbytes", "fp4": "bitsandbytes", "int8": "bitsandbytes"}
INNER = 192  # rows that the real model's 172 are filled up to with zeros: what every format can hold


def targets() -> list[str]:
    """Method, bits where with them it makes another kind of values or has another default format, and format."""
    found = []
    for name, method in methods().items():
        for bits in (method.default_bits, *method.other_kinds):
            words = [name] if bits == method.default_bits else [name, bits]
            found += [" ".join([*words, kind]) for kind in formats_for(method, bits)]
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "awq gguf": {"sym": True},  # which hold no zero points
    "auto": {"layer_bits": {".": 4, "o_proj": 8}},
}
# What the signs of a row stand for, from left to right.
COLUMNS = (
    "awq awq",
    "awq compressed-tensors",
    "awq gguf",
    "awq gptq",
    "awq auto compressed-tensors",
    "awq auto awq",
    "awq auto gguf",
    "awq auto gptq",
    "awq 2 compressed-tensors",
    "awq 2 awq",
    "awq 2 gguf",
    "awq 2 gptq",
    "awq 3 compressed-tensors",
    "awq 3 awq",
    "awq 3 gguf",
    "awq 3 gptq",
    "awq 8 compressed-tensors",
    "awq 8 awq",
    "awq 8 gguf",
    "awq 8 gptq",
    "ctranslate2 ctranslate2",
    "float float",
    "fp8 compressed-tensors",
    "gguf gguf",
    "gptq gptq",
    "gptq awq",
    "gptq compressed-tensors",
    "gptq gguf",
    "gptq nvfp4 compressed-tensors",
    "gptq mxfp4 compressed-tensors",
    "gptq mxfp4 gguf",
    "gptq auto compressed-tensors",
    "gptq auto awq",
    "gptq auto gguf",
    "gptq auto gptq",
    "int8 compressed-tensors",
    "keep compressed-tensors",
    "keep awq",
    "keep gguf",
    "keep gptq",
    "keep mxfp4 gguf",
    "keep mxfp4 compressed-tensors",
    "nf4 bitsandbytes",
    "rtn gptq",
    "rtn awq",
    "rtn compressed-tensors",
    "rtn gguf",
    "rtn nvfp4 compressed-tensors",
    "rtn mxfp4 compressed-tensors",
    "rtn mxfp4 gguf",
    "rtn auto compressed-tensors",
    "rtn auto awq",
    "rtn auto gguf",
    "rtn auto gptq",
)
# Why a pair is refused; "+": it converts.
REASONS: dict[str, str] = {
    "n": "keep writes the codes of",
    "k": "has no grouped codes",
    "v": "has layers of several kinds",
    "f": "converter reads checkpoint folders of floats",
    "e": "which it keeps stacked",
    "z": "have no zero points|has zero points of 0",
    "o": "cannot say which columns form a group",
    "b": "holds (grouped )?codes of .* bits",
    "l": "has no linear layer where",
    "g": "is not converted to GGUF",
    "u": "converter has no loader",
    "w": "give --bits",
    "s": "needs? a? ?multiples? of|does not divide|no multiple of",
}
MATRIX = {
    "stories260k": {
        "float": "s+ss+bbs+bbs+bbs+bz+++++ss+ssss+bbs+nnnnnn+ss+ssss+bbs",
        "compressed int8": "s+ss+bbs+bbs+bbs+bz+f+++ss+ssss+bbs+kkkkkk+ss+ssss+bbs",
        "compressed fp8 blocks": "s+ss+bbs+bbs+bbs+bz+f+++ss+ssss+bbs+kkkkkk+ss+ssss+bbs",
        "fp8": "s+ss+bbs+bbs+bbs+bz+f+++ss+ssss+bbs+kkkkkk+ss+ssss+bbs",
        "nf4": "s+ss+bbs+bbs+bbs+bz+f+++ss+ssss+bbs+kkkkkk+ss+ssss+bbs",
        "int8": "s+ss+bbs+bbs+bbs+bz+f+++ss+ssss+bbs+kkkkkk+ss+ssss+bbs",
        "gguf": "s+ss+bbs+bbs+bbs+bz+f+++ss+ssss+bbs+nnnnnn+ss+ssss+bbs",
    },
    "filled stories260k": {
        "float": "+++++bb++bb++bb++bz+++++++++++++bb++nnnnnn+++++++++bb+",
        "gptq": "+++++bb++bb++bb++bz+f+++++++++++bb++++++ww+++++++++bb+",
        "gptq version 2": "+++++bb++bb++bb++bz+f+++++++++++bb++++++ww+++++++++bb+",
        "gptq zeros": "+++++bb++bb++bb++bz+f+++++++++++bb++++z+ww+++++++++bb+",
        "gptq order": "+++++bb++bb++bb++bz+f+++++++++++bb++ooo+ww+++++++++bb+",
        "awq": "+++++bb++bb++bb++bz+f+++++++++++bb++++z+ww+++++++++bb+",
        "compressed": "+++++bb++bb++bb++bz+f+++++++++++bb+++b++ww+++++++++bb+",
        "compressed zeros": "+++++bb++bb++bb++bz+f+++++++++++bb+++bb+ww+++++++++bb+",
        "compressed int8": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "compressed fp8": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "compressed fp8 blocks": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "compressed nvfp4": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "compressed mxfp4": "+++++bb++bb++bb++bz+f+++++++++++bb++wwww+++++++++++bb+",
        "compressed mixed": "+++++bb++bb++bb++bz+f+++++++++++bb++vvvvvv+++++++++bb+",
        "fp8": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "fp8 tensor": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "nf4": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "fp4": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "int8": "+++++bb++bb++bb++bz+f+++++++++++bb++kkkkkk+++++++++bb+",
        "gguf": "+++++bb++bb++bb++bz+f+++++++++++bb++nnnnnn+++++++++bb+",
    },
    "mixtral": {
        "float": "+++++bb++bb++bb++bz+u+++++++++++bb++nnnnnne++++++++bb+",
        "gptq": "+++++bb++bb++bb++bz+u+++++++++++bb++++++wwe++++++++bb+",
        "gptq version 2": "+++++bb++bb++bb++bz+u+++++++++++bb++++++wwe++++++++bb+",
        "gptq zeros": "+++++bb++bb++bb++bz+u+++++++++++bb++++z+wwe++++++++bb+",
        "gptq order": "+++++bb++bb++bb++bz+u+++++++++++bb++ooo+wwe++++++++bb+",
        "awq": "+++++bb++bb++bb++bz+u+++++++++++bb++++z+wwe++++++++bb+",
        "compressed": "+++++bb++bb++bb++bz+u+++++++++++bb+++b++wwe++++++++bb+",
        "compressed zeros": "+++++bb++bb++bb++bz+u+++++++++++bb+++bb+wwe++++++++bb+",
        "compressed int8": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "compressed fp8": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "compressed fp8 blocks": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "compressed nvfp4": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "compressed mxfp4": "+++++bb++bb++bb++bz+u+++++++++++bb++wwww++e++++++++bb+",
        "compressed mixed": "+++++bb++bb++bb++bz+u+++++++++++bb++vvvvvve++++++++bb+",
        "fp8": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "fp8 tensor": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "nf4": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "fp4": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "int8": "+++++bb++bb++bb++bz+u+++++++++++bb++kkkkkke++++++++bb+",
        "gguf": "+++++bb++bb++bb++bz+u+++++++++++bb++nnnnnne++++++++bb+",
    },
    "gpt_oss": {
        "mxfp4": "+l++lbb+lbb+lbb+lbz+u+l+++l+ll+lbb+lkkkkkk+++l+ll+lbb+",
    },
}


def save_stories(folder: Path, data: Path, inner: int | None) -> Path:
    """The real model of 260K parameters, which computes the same with rows of zeros in its MLPs."""
    shutil.copytree(data / "stories260k", folder)
    if inner is None:
        return folder
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if "down_proj" in name:
            tensors[name] = torch.nn.functional.pad(value, (0, inner - value.shape[1]))
        elif "mlp" in name:
            tensors[name] = torch.nn.functional.pad(value, (0, 0, 0, inner - len(value)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": inner}))
    return folder


def save_experts(folder: Path, name: str, **changes: Any) -> Path:
    settings = {"num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2, **changes}
    save_architecture(folder, name, torch.float32, changes=settings)
    save_tokenizer(folder)
    return folder


class Made:
    """Sources of one model by name, each made once: where it lies, its values, and a job for it."""

    def __init__(self, model: Path, makes: dict[str, Callable[[Path, Path], Any]], folder: Path) -> None:
        self.model, self.makes, self.folder = model, makes, folder
        self.job = cache(self._job)
        self.floats = cache(self._floats)
        self.values = cache(lambda name: values_of(self.model, self.folder / name))

    def _job(self, name: str) -> Job:
        self.makes[name](self.model, self.folder / name)
        return _prepared(self.folder / name)

    def _floats(self, name: str) -> Job:
        """The same values as a checkpoint of floats."""
        return _prepared(save_floats(self.folder / name, self.folder / f"{name} as floats", self.values(name)))


def _prepared(folder: Path) -> Job:
    job = prepare(ConvertRecipe(model=str(place(folder)), method="float", bits="float32"))
    assert job.skeleton
    return job


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Made]:
    @cache
    def get(model: str) -> Made:
        folder = tmp_path_factory.mktemp("matrix")
        if "stories260k" in model:
            inner = INNER if model == "filled stories260k" else None
            return Made(save_stories(folder / "model", request.getfixturevalue("shared_data"), inner), SOURCES, folder)
        if model == "gpt_oss":
            changes = {**GPT_OSS, "layer_types": ["full_attention"]}
            return Made(save_experts(folder / "model", "gpt_oss", **changes), OF_GPT_OSS, folder)
        changes = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": INNER}
        return Made(save_experts(folder / "model", "mixtral", **changes), SOURCES, folder)

    return get


def of_target(job: Job, target: str) -> Job:
    """The job of that target on the same source."""
    method, *_, kind = target.split(" ")
    calibration = CalibrationSpec(**CALIBRATION)
    asked = {"method": method, "bits": bits_of(job, target), "format": kind, "calibration": calibration}
    recipe = job.recipe.model_copy(update={**asked, "options": options_of(target)})
    other = prepare(recipe, job.source)
    return job.changed(
        recipe=other.recipe, method=other.method, format=other.format, options=other.options, checked=Checked()
    )


def options_of(target: str) -> dict[str, Any]:
    return OPTIONS.get("auto" if " auto " in target else target, {})


def bits_of(job: Job, target: str) -> str | None:
    """Those of the target's name; of what `keep` writes those of the source's codes."""
    method, *between, _ = target.split(" ")
    if between:
        return between[0]
    if method == "keep" and isinstance(job.source, QuantizedCheckpoint):
        with contextlib.suppress(UnsupportedError):
            return str(job.source.layout().bits)
    return find_method(method).default_bits


def sign_of(job: Job, target: str) -> str:
    """How a pair is told to be."""
    try:
        job = of_target(job, target)
        job.method.check(job)
    except QuantkitError as error:
        text = str(error)
        assert text.isprintable(), text
        found = [letter for letter, says in REASONS.items() if re.search(says, text)]
        return found[0] if len(found) == 1 else f"({text})"
    return "+"


def written(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    """What the target's format reads back, dense."""
    folder.mkdir()
    job.source.copy_side_files(folder)
    job = job.changed(checked=job.method.check(job))
    if job.method.calibrated(job.options):
        job = job.changed(calibration=draw_tokens(job.source.tokenizer(), job.recipe.calibration, 0, job.source.config))
    job.method.write(job, Run(folder))
    files = tuple(sorted(path.name for pattern in job.format.weight_files for path in folder.glob(pattern)))
    reader = job.format.open(folder, files, dict(job.source.config))
    return {name: dense(value) for name, value in stored_values(reader)}


def kept_values(job: Job, values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Codes stand for the source's own values; all else is rounded to 16 bits, but for norms in GGUF files."""
    assert isinstance(job.source, QuantizedCheckpoint)
    codes, in_gguf = job.source.quantized, job.format.name == "gguf"
    dtype = torch.bfloat16 if job.recipe.bits == "mxfp4" and not in_gguf else torch.float16
    exact = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    same = {name for name, value in exact.items() if name in codes or (in_gguf and _is_float32(name, value))}
    return {name: value if name in same else value.to(dtype).float() for name, value in exact.items()}


def _is_float32(name: str, value: torch.Tensor) -> bool:
    """Norms, and the gate of experts."""
    return value.ndim == 1 or name.endswith(".gate.weight")


ROWS = [(model, source) for model, rows in MATRIX.items() for source in rows]
Get = Callable[[str], Made]


def every_row(rows: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("model", "source"), rows, ids=[", ".join(row) for row in rows])


def place_of(model: str, source: str, target: str) -> int:
    """A number that is another one in each row and column beside it."""
    return ROWS.index((model, source)) + COLUMNS.index(target)


def test_every_target_has_a_column_and_every_source_a_row() -> None:
    assert list(COLUMNS) == targets()
    assert all(len(row) == len(COLUMNS) for rows in MATRIX.values() for row in rows.values())
    sources = [*SOURCES, *OF_GPT_OSS]
    assert sources == [*MATRIX["mixtral"], *MATRIX["gpt_oss"]] == [*MATRIX["filled stories260k"], *MATRIX["gpt_oss"]]
    read = {name for name, kind in formats().items() if kind.open_quantized is not None}
    assert {FORMAT_OF.get(name.split(" ")[0], name.split(" ")[0]) for name in sources} == {*read, "float", "gguf"}


def told_as_written(model: str, source: str, made: Get, now: Callable[[int, str], bool]) -> None:
    """Those pairs are told to convert, or refused for the reason, that the table says."""
    row, job = MATRIX[model][source], made(model).job(source)
    chosen = [
        (sign, target)
        for sign, target in zip(row, COLUMNS, strict=True)
        if now(place_of(model, source, target), target)
    ]
    assert [(sign_of(job, target), target) for _, target in chosen] == chosen


def is_slow(target: str) -> bool:
    """Methods whose check computes with the model."""
    return target.split(" ")[0] in ("awq", "int8")


@every_row(ROWS)
def test_pairs_convert_or_are_refused_as_told(model: str, source: str, made: Get) -> None:
    told_as_written(model, source, made, lambda place, target: not is_slow(target) or place % 9 == 0)


@pytest.mark.slow
@every_row(ROWS)
def test_so_are_all_others(model: str, source: str, made: Get) -> None:
    told_as_written(model, source, made, lambda place, target: is_slow(target) and place % 9 != 0)


def hold_values(model: str, source: str, made: Get, folder: Path, now: Callable[[int, Job], bool]) -> None:
    """Those pairs that convert have the values that they should have."""
    here = made(model)
    for sign, target in zip(MATRIX[model][source], COLUMNS, strict=True):
        if sign != "+":
            continue
        job = of_target(here.job(source), target)
        if not now(place_of(model, source, target), job):
            continue
        ours = written(job, folder / target)
        if job.method.name == "keep":
            theirs = kept_values(job, here.values(source))
        else:
            theirs = written(of_target(here.floats(source), target), folder / f"{target} of floats")
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name].float(), value.float()), (target, name)


def is_quick(place: int, job: Job) -> bool:
    """What is tried each time: all codes that are kept, and some of every row and column."""
    return job.method.name == "keep" or (place % 7 == 0 and not job.method.calibrated(job.options))


QUANTIZED = [row for row in ROWS if row[1] != "float"]  # which are their own reference


@every_row(QUANTIZED)
def test_values_are_the_methods_on_the_sources_own(model: str, source: str, made: Get, tmp_path: Path) -> None:
    hold_values(model, source, made, tmp_path, is_quick)


@pytest.mark.slow
@every_row(QUANTIZED)
def test_so_are_the_values_of_all_others(model: str, source: str, made: Get, tmp_path: Path) -> None:
    hold_values(model, source, made, tmp_path, lambda place, job: not is_quick(place, job))
