"""Whether a result is right, by somebody else's word: transformers, safetensors, the gguf package, llama.cpp.

Each returns what is wrong, or an empty string. `Unjudged` is raised where nobody can say.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IDS = [1, 5, 260, 17, 3, 265, 99, 42]
CLOSE = 1e-3


class Unjudged(Exception):  # noqa: N818 - a signal, not an error
    """There is nobody to ask."""


def quiet() -> None:
    """Keep transformers from talking."""
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def notes_of(out: Path) -> str:
    """The notes that the manifest of an artifact holds."""
    return " ".join(json.loads((out / "quantkit.json").read_text())["notes"])


def load(folder: Path) -> tuple[Any, str]:
    """The model as transformers loads it, or why it should not have been taken."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    try:
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # noqa: BLE001 - whatever it raises is its refusal
        return None, f"transformers refuses the model: {type(error).__name__}: {str(error)[:200]}"
    odd = {
        key: sorted(map(str, told.get(key) or ()))[:3]
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if told.get(key)
    }
    return model.eval(), f"transformers says {odd}" if odd else ""


@contextmanager
def without_code(folder: Path) -> Iterator[Path]:
    """The folder, or a copy whose tokenizer names no code of its own, where it does: quantkit never runs that."""
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else None
    if not isinstance(values, dict) or "auto_map" not in values:
        yield folder
        return
    del values["auto_map"]
    with tempfile.TemporaryDirectory() as name:
        copy = Path(shutil.copytree(folder, name, dirs_exist_ok=True))
        (copy / settings.name).write_text(json.dumps(values), encoding="utf-8")
        yield copy


def load_tokenizer(folder: Path) -> tuple[Any, str]:
    """The tokenizer as transformers loads it, or why it should not have been taken."""
    from transformers import AutoTokenizer

    quiet()
    try:
        with without_code(folder) as place:
            tokenizer = AutoTokenizer.from_pretrained(place)
        tokenizer("the bath")
    except BaseException as error:  # noqa: BLE001 - tokenizers panics
        return None, f"transformers refuses the tokenizer: {type(error).__name__}: {str(error)[:200]}"
    return tokenizer, ""


def logits_of(model: Any) -> Any:
    """Logits (8, V) of a few tokens."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].float()


def loadable(folder: Path) -> str:
    """Whether transformers takes a source and computes something."""
    import torch

    model, wrong = load(folder)
    if wrong:
        return wrong
    try:
        if not torch.isfinite(logits_of(model)).all():
            return "transformers computes NaN or infinite logits of the source"
    except Exception as error:  # noqa: BLE001
        return f"transformers cannot compute: {type(error).__name__}: {str(error)[:200]}"
    return load_tokenizer(folder)[1]


def only_more(wrong: str) -> bool:
    """Whether all that is wrong with a checkpoint is that it has more tensors than its model."""
    return "transformers says" in wrong and "unexpected" in wrong and "missing" not in wrong and "mism" not in wrong


def judged(folder: Path, report: Path) -> str:
    """Whether a checkpoint was right to be judged; tensors too many have to be told."""
    wrong = loadable(folder)
    return "" if only_more(wrong) and "leaves out" in json.loads(report.read_text())["engine"]["notes"][0] else wrong


def source(folder: Path, out: Path, method: str) -> str:
    """Whether a checkpoint was right to be converted, and whether a float copy of it computes the same."""
    import torch

    if wrong := loadable(folder):
        return "" if notes_of(out) and only_more(wrong) else wrong
    ids = [load_tokenizer(path)[0]("the bath of the hat").input_ids for path in (folder, out)]
    if ids[0] != ids[1]:
        return f"the artifact's tokenizer gives other ids: {ids}"
    if method == "float":
        model, wrong = load(out)
        if wrong:
            return f"the artifact: {wrong}"
        exact = logits_of(load(folder)[0])
        apart = float((logits_of(model) - exact).abs().max() / exact.abs().max().clamp(min=1e-9))
        if not torch.isfinite(exact).all() or not apart < CLOSE:
            return f"the artifact's logits are {apart:.3g} from the source's"
    return ""


def keeps_secret(out: Path, secret: str) -> str:
    """Whether an artifact is free of what lies in another folder."""
    for path in out.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            return f"{path.name} holds what lies outside the source's folder"
    return ""


def same_figures(report: Path, clean: dict[str, float]) -> str:
    """Whether a report has the figures of the sound artifact."""
    from bench.fuzz.bases import figures

    found = figures(report)
    same = found.keys() == clean.keys() and all(math.isclose(found[name], clean[name], rel_tol=1e-6) for name in clean)
    return "" if same else f"figures {found}, of the sound one {clean}"


def same_files(sound: Path, out: Path) -> str:
    """Whether two folders hold the same bytes."""
    one, two = (
        {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in (sound, out)
    )
    differing = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return f"not the bytes of a quiet run: {differing}" if differing else ""


# What the files of an artifact show, so that nobody has to believe the manifest.
SHOWN = ("files", "weight_files", "weight_bytes", "tensor_types", "format", "bits_per_weight")


def manifest(before: dict[str, Any], path: Path, command: str) -> str:
    """Whether a changed manifest still says of its files what they are."""
    after = json.loads(path.read_text())
    if command != "verify" or after == before:
        raise Unjudged
    wrong = [key for key in SHOWN if after.get(key) != before[key]]
    if after.get("recipe", {}).get("method") != before["recipe"]["method"]:
        wrong.append("recipe.method")
    if after.get("source", {}).get("parameters") != before["source"]["parameters"]:
        wrong.append("source.parameters")
    if not wrong:
        raise Unjudged
    return f"verify believes {wrong}"


def artifact(sound: Path, folder: Path, file: str, verified: bool) -> str:
    """Whether a damaged file whose hash was made anew can be read by others as what it was."""
    path = folder / file
    if file.endswith(".safetensors"):
        one, two = _shapes(sound / file), _shapes(path)
        if isinstance(two, str):
            return two
        if one != two:
            return f"other tensors: {sorted(map(str, one.items() ^ two.items()))[:4]}"  # type: ignore[union-attr]
        return ""
    if file.endswith(".gguf"):
        return _gguf(sound / file, path)
    kind = json.loads((sound / "quantkit.json").read_text())["format"]
    if kind == "ctranslate2" and file in ("model.bin", "config.json", "vocabulary.json"):
        return _ctranslate2(folder)
    if file == "config.json" and kind != "gguf":
        return load(folder)[1] if kind == "float" else _config(folder)
    if "token" in file and not verified:
        return load_tokenizer(folder)[1]
    raise Unjudged


def _shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | str:
    """What is in the file; transformers takes the base model's prefix twice for once, and so do we."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return {
                name.replace("model.model.", "model.", 1): (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()
            }
    except BaseException as error:  # noqa: BLE001
        return f"safetensors refuses {path.name}: {str(error)[:200]}"


def _config(folder: Path) -> str:
    from transformers import AutoConfig

    quiet()
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001
        return f"transformers refuses config.json: {str(error)[:200]}"
    return ""


def _ctranslate2(folder: Path) -> str:
    import ctranslate2

    try:
        generator = ctranslate2.Generator(str(folder), device="cpu", intra_threads=1)
        generator.forward_batch([IDS], return_log_probs=True)
    except Exception as error:  # noqa: BLE001
        return f"ctranslate2 refuses the model: {str(error)[:200]}"
    return ""


def _entries(path: Path) -> dict[str, tuple[str, list[int]]] | str:
    import gguf

    try:
        return {t.name: (t.tensor_type.name, t.shape.tolist()) for t in gguf.GGUFReader(path).tensors}
    except Exception as error:  # noqa: BLE001
        return f"the gguf package refuses {path.name}: {type(error).__name__}: {str(error)[:200]}"


def llama_logits(path: Path) -> Any:
    """Logits (8, V) by llama.cpp, or why it refuses the file."""
    import llama_cpp
    import numpy as np

    try:
        model = llama_cpp.Llama(str(path), n_ctx=32, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
        model.eval(IDS)
        return np.array(model.scores[: len(IDS)])
    except Exception as error:  # noqa: BLE001
        return f"llama.cpp refuses {path.name}: {str(error)[:200]}"


def _gguf(sound: Path, path: Path) -> str:
    one, two = _entries(sound), _entries(path)
    if isinstance(two, str):
        return two
    if one != two:
        return "other tensors than before"
    logits = llama_logits(path)
    return logits if isinstance(logits, str) else ""


def gguf_header(path: Path) -> str:
    """Whether the gguf package reads a file, too."""
    found = _entries(path)
    return found if isinstance(found, str) else ""


def gguf_runs(path: Path) -> str:
    """Whether llama.cpp runs a file."""
    logits = llama_logits(path)
    return logits if isinstance(logits, str) else ""


def imported(path: Path, out: Path) -> str:
    """Whether transformers computes with an imported checkpoint what llama.cpp computes with the file."""
    import numpy as np

    theirs = llama_logits(path)
    if isinstance(theirs, str):
        return theirs
    model, wrong = load(out)
    if wrong:
        return f"the imported checkpoint: {wrong}"
    ours = logits_of(model).numpy().astype(np.float64)
    if not np.isfinite(ours).all() or not np.isfinite(theirs).all():
        return "NaN or infinite logits"
    p, q = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True) for logits in (theirs.astype(np.float64), ours))
    apart = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    return "" if apart < 0.02 else f"transformers is {apart:.3g} nats from llama.cpp"


def weighted(path: Path, out: Path) -> str:
    """Whether an importance file was one."""
    import gguf
    import numpy as np

    if path.suffix != ".gguf":
        raise Unjudged
    try:
        tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    except Exception as error:  # noqa: BLE001
        return f"the gguf package refuses it: {type(error).__name__}: {str(error)[:200]}"
    for name, values in tensors.items():
        if not np.isfinite(values).all() or (values < 0).any():
            return f"{name} holds NaN, infinite or negative values"
    return ""


def recipe(path: Path, here: Path) -> str:
    """Whether a recipe is YAML that says what the manifest says; a whole float stands for the whole number."""
    import yaml

    try:
        values = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except BaseException as error:  # noqa: BLE001
        return f"yaml refuses it: {type(error).__name__}"
    for found in here.rglob("quantkit.json"):
        made = json.loads(found.read_text())["recipe"]
        asked = values["variants"][0] if "variants" in values else values
        for key in ("method", "bits", "seed"):
            said = asked.get(key)
            said = int(said) if isinstance(said, float) and said.is_integer() else said
            if said is not None and str(said) != str(made[key]):
                return f"{key} is {made[key]!r}, and the recipe says {asked[key]!r}"
    return ""


def text(path: Path) -> str:
    """Whether a text is UTF-8."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return "the text is not UTF-8"
    return ""


def same_table(sound: Path, path: Path) -> str:
    """Whether a comparison came out as it did before, but for times and memory."""
    one, two = (_rows(json.loads(p.read_text())) for p in (sound, path))
    differing = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    return (
        f"other figures than before: {[(key, one.get(key), two.get(key)) for key in differing[:3]]}"
        if differing
        else ""
    )


def _rows(table: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{report['model']['label']} {m['name']}": m["value"]
        for report in table["reports"]
        for m in report["measurements"]
        if not any(word in m["name"] for word in ("ms", "rss", "seconds", "per_second", "memory", "cost"))
    }


def table(sound: Path, path: Path) -> str:
    """Whether a table that was read holds numbers that can be figures."""
    for key, value in _rows(json.loads(path.read_text())).items():
        least = {"perplexity": 1, "weight_bytes": 1, "bits_per_weight": 1e-9}.get(key.rpartition(" ")[2], -math.inf)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            return f"{key} is {value}, which is no figure"
    return ""
