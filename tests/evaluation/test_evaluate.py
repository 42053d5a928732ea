import shutil
import signal
import threading
import time
from copy import copy
from functools import partial
from multiprocessing import active_children

import psutil
import pytest
from edits import rehash
from killed import forked, until
from tiny_models import EVALUATION, SAMPLE

from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format, formats
from quantkit.errors import ArtifactError, EngineError, RecipeError, UnsupportedError
from quantkit.evaluation import evaluate as evaluation
from quantkit.evaluation.cross_check import cross_check
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import evaluate, resolve
from quantkit.evaluation.tasks import evaluate_tasks
from quantkit.formats.source import open_model
from quantkit.records.artifact import Artifact, open_artifact
from quantkit.records.recipe import EngineSpec, EvaluationSpec
from quantkit.records.report import this_machine
from quantkit.system.files import sha256_of
from quantkit.system.processor import threads, usable_cores
from quantkit.system.progress import Progress

QUICK = {**EVALUATION, "new_tokens": 4, "repeats": 2}


@pytest.fixture(scope="module")
def evaluated(gguf, real_workers):
    steps = []
    counts = tuple(range(1, min(2, usable_cores()) + 1))
    note = Progress(lambda step: steps.append(copy(step)))
    return evaluate(gguf, **QUICK | {"threads": counts}, progress=note), steps


def workers(parent=None):
    return [one for one in psutil.Process(parent).children() if "quantkit.evaluation.worker" in one.cmdline()]


@pytest.fixture(autouse=True)
def no_child_is_left():
    yield
    assert active_children() == workers() == []


def test_a_report_has_every_figure_and_says_what_was_evaluated_on_what_with_what(evaluated, gguf, tiny):
    report, steps = evaluated
    model, text, windows = report.model, report.text, report.windows
    assert (model.label, model.method, model.name) == ("gguf-Q8_0", "gguf", tiny.name)
    assert (model.digest, model.notes) == (gguf.digest, gguf.manifest.all_notes)
    assert (text.name, text.sha256, text.bundled) == (SAMPLE.name, sha256_of(SAMPLE), False)  # no path
    assert (windows.protocol, windows.n_ctx, windows.windows, windows.first) == ("llama.cpp", 64, 2, 32)
    assert (report.engine.name, report.engine.dtype) == ("llamacpp", "the file's own types")
    assert report.engine.version.startswith("0.")
    assert report.hardware == this_machine()
    assert report.settings.limit == 2
    assert report.settings.probes == ("size", "memory", "speed", "perplexity")
    counts = report.settings.threads
    found = {m.name: m for m in report.measurements}
    assert len(found) == len(report.measurements)
    units = {"weight_bytes": "bytes", "bits_per_weight": "bits", "peak_rss_bytes": "bytes", "perplexity": ""}
    units |= {f"ms_per_token@{n}": "ms/token" for n in counts} | {f"ttft_ms@{n}": "ms" for n in counts}
    assert {name: m.unit for name, m in found.items()} == units
    assert found["weight_bytes"].value == gguf.manifest.weight_bytes
    assert found["bits_per_weight"].value == pytest.approx(gguf.manifest.bits_per_weight, abs=1e-4)
    perplexity = found["perplexity"]
    assert perplexity.n == report.windows.scored == 2 * 31
    assert 0 < perplexity.stderr < perplexity.value < 1000
    assert len(perplexity.sums) == report.windows.windows
    assert sum(perplexity.sums) / report.windows.scored == pytest.approx(float(perplexity.details["mean_nll"]))
    assert {m.name for m in report.measurements if m.sums} == {"perplexity"}
    for n in counts:
        speed = found[f"ms_per_token@{n}"]
        assert 0 < speed.value < 1000
        assert speed.n == 2
        assert (speed.details["threads"], speed.details["new_tokens"], speed.details["prompt_tokens"]) == (n, 4, 32)
        assert found[f"ttft_ms@{n}"].value > 0
    peak = found["peak_rss_bytes"]
    # The child alone has llama.cpp and numpy; this process has torch, transformers and more.
    assert 20e6 < peak.value < 250e6 < psutil.Process().memory_info().rss
    parts = [float(peak.details[name]) for name in ("loading", "generating")]
    assert peak.value == max(parts)
    assert min(parts) > 20e6
    ends = {step.title: step for step in steps if step.ended}
    assert set(ends) == {"perplexity (llama.cpp)", *(f"speed at {threads(n)}" for n in report.settings.threads)}
    assert (ends["perplexity (llama.cpp)"].done, ends["perplexity (llama.cpp)"].total) == (2, 2)
    assert ends["perplexity (llama.cpp)"].remark == f"{perplexity.value:.3f}"


@pytest.mark.parametrize(("misplaced", "says"), [
    ({"dtype": "float32"}, r"dtype is a field of EngineSpec. Give engine=EngineSpec\(dtype="),
    ({"walk": True}, r"walk is a field of MemoryLimits. Give memory=MemoryLimits\(walk="),
    ({"revision": "main"}, r"revision is a field of ModelRef. Give model=ModelRef\(model=..., revision="),
    ({"n_ctxx": 64}, "unknown key 'n_ctxx'"),
])  # fmt: skip
def test_a_field_of_a_record_is_refused_as_a_keyword_with_its_record(misplaced, says, tiny):
    for command in (evaluate, cross_check, partial(evaluate_tasks, tasks=("wikitext",))):
        with pytest.raises(RecipeError, match=says):
            command(tiny, **misplaced)


def test_threads_are_sorted_and_default_to_one_and_all():
    cores = usable_cores()
    assert resolve(EvaluationSpec()).threads == tuple(sorted({1, cores}))
    assert resolve(EvaluationSpec(threads=(cores, 1, cores))).threads == tuple(sorted({1, cores}))


def test_the_engine_is_the_format_s_first(gguf, artifact_of, tiny):
    source = open_model(str(tiny))
    assert choose(source, EngineSpec()).name == "transformers"
    with pytest.raises(RecipeError, match="the engine llamacpp cannot open bfloat16"):
        choose(source, EngineSpec(engine="llamacpp"))
    for name in formats():
        made = Artifact(gguf.folder, gguf.manifest.model_copy(update={"format": name}))
        if method := {"bitsandbytes": "nf4", "float": "float"}.get(name):  # transformers takes what their files hold
            made = artifact_of(method)
        assert choose(Model(made, None), EngineSpec()).name == find_format(name).engines[0]


def test_an_error_of_the_child_keeps_its_kind(artifact_of):
    with pytest.raises(UnsupportedError, match="cannot compute in float8"):
        evaluate(artifact_of("ctranslate2"), ("size",), **QUICK, engine=EngineSpec(dtype="float8"))


def edit(artifact, folder, name, change):
    shutil.copytree(artifact.folder, folder)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    rehash(folder)
    return open_artifact(folder)


def test_files_that_contradict_the_manifest_are_refused_though_their_hashes_are_right(gguf, artifact_of, tmp_path):
    rtn, [name] = artifact_of("rtn"), gguf.manifest.weight_files
    rtn = edit(rtn, tmp_path / "rtn", "config.json", lambda file: file.replace(b'"model_type"', b'"model_tipe"'))
    other = edit(gguf, tmp_path / "other", name, lambda file: file.replace(b"ggml.model", b"ggml.modem"))
    for artifact, says in ((rtn, "model_tipe is None in its source.config"), (other, "lacks the key")):
        with pytest.raises(ArtifactError, match=says):
            evaluate(artifact, engine="reference", **QUICK)
        with pytest.raises(ArtifactError, match=says):
            evaluate_tasks(artifact, ("wikitext",), engine="reference")


def test_a_file_that_the_engine_refuses_is_an_engine_error(gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "refuse_untrue", lambda _artifact: None)  # which would refuse it first
    (name,) = gguf.manifest.weight_files
    copy = edit(gguf, tmp_path / "copy", name, lambda file: file[:5000])
    with pytest.raises(EngineError, match=rf"llama\.cpp cannot load {copy.folder / name}: .*`quantkit verify`"):
        evaluate(copy, **QUICK)


@pytest.mark.usefixtures("real_workers")
def test_a_child_that_dies_is_an_engine_error(gguf):
    def kill():
        while not (found := workers()):
            time.sleep(0.01)
        found[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineError, match=f"the engine llamacpp was ended by SIGKILL while evaluating {gguf.folder}"):
        evaluate(gguf, **QUICK)
    killer.join()


@pytest.mark.usefixtures("real_workers")
def test_an_interrupt_ends_the_child_too(gguf):
    seen = []

    def interrupt(_step):
        seen.extend(child.pid for child in workers())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(gguf, **QUICK, progress=Progress(interrupt))
    assert len(seen) == 1
    assert not psutil.pid_exists(seen[0])


def evaluate_without_end(folder, told):
    """Say when the worker has told its last event and is busy generating."""
    settings = {**QUICK, "probes": ("speed",), "new_tokens": 100_000}
    evaluate(folder, **settings, progress=Progress(lambda step: told.write_text(step.title)))


def test_a_worker_ends_when_its_parent_is_killed(gguf, tmp_path):
    parent = forked(partial(evaluate_without_end, gguf.folder, tmp_path / "told"), tmp_path / "log")
    until((tmp_path / "told").exists)
    [worker] = workers(parent.process.pid)
    time.sleep(1)
    assert worker.is_running()
    parent.process.kill()
    parent.wait(-signal.SIGKILL)
    assert psutil.wait_procs([worker], timeout=15)[0] == [worker]
