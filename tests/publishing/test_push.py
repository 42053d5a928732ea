import importlib.util
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import yaml
from edits import contents, edit_json, flip, put
from hub_server import TOKEN, running
from huggingface_hub import ModelCard, constants, parse_eval_result_entries
from huggingface_hub.utils import _runtime
from made_up_reports import diverging, report
from tiny_models import fails, quantkit, succeeds

import quantkit.publishing.push as hub_side
from quantkit import push, verify
from quantkit.checkpoints.spool import CheckpointWriter
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError, HubError, RecipeError
from quantkit.publishing.push import plan_push
from quantkit.publishing.results import BENCHMARKS
from quantkit.records.artifact import CARD, MANIFEST, open_artifact
from quantkit.report.card import write_card

REPO = "someone/tiny-rtn-4"
GSM8K = {"gsm8k": {"exact_match,strict-match": 0.41847, "exact_match,flexible-extract": 0.5}}


@pytest.fixture
def artifact(tiny, once, tmp_path):
    """In several weight files, and with figures in its card."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointWriter.__init__, "__defaults__", (200_000,))
            made = convert(str(tiny), "rtn", out=folder)
        write_card(made, [diverging(report("rtn-4", "rtn", 20.0, 2e6), 0.1)])

    opened = open_artifact(shutil.copytree(once("pushed", make), tmp_path / "artifact"))
    assert len(opened.manifest.weight_files) > 1
    return opened


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that this process takes for the one, with the token in the environment; files go by LFS."""
    with running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert not _runtime.is_xet_available()
        yield server


def fetched(hub, folder):
    for name, data in hub.repositories[REPO].files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_what_is_pushed_is_the_verified_artifact_and_nothing_else(artifact, hub, tmp_path):
    for name in (".env", "notes.txt", "out.lock", "model.safetensors.partial"):
        (artifact.folder / name).write_text(f"secret {TOKEN}")
    before = contents(artifact.folder)
    pushed = push(artifact.folder, REPO, create=True, private=True, base_model="someone/tiny")
    repository = hub.repositories[REPO]
    assert repository.private
    assert set(repository.files) == {*artifact.manifest.files, MANIFEST, ".gitattributes"}
    assert set(pushed.sent) == {*artifact.manifest.files, MANIFEST}
    assert (pushed.kept, pushed.removed, pushed.notes) == ((), (), ())
    assert (pushed.url, pushed.commit) == (f"{hub.url}/{REPO}", repository.commits[-1])
    assert len(repository.commits) == 2  # the hub's first, and ours
    assert contents(artifact.folder) == before
    # A second push sends nothing.
    hub.requests.clear()
    again = push(artifact, REPO, create=True, base_model="someone/tiny")
    assert (again.sent, set(again.kept)) == ((), {*artifact.manifest.files, MANIFEST})
    assert hub.asked("POST", "batch") == hub.asked("POST", "commit") == hub.asked("POST", "preupload") == 0
    assert len(repository.commits) == 2
    # Other bytes of the same size are replaced; the hub knows large and small files by hashes of different kinds.
    others = {"config.json", artifact.manifest.weight_files[0]}
    for name in others:
        repository.files[name] = repository.files[name][::-1]
    assert set(push(artifact, REPO, base_model="someone/tiny").sent) == others
    assert verify(fetched(hub, tmp_path / "fetched")).digest == artifact.digest


def uploaded(made, name):
    [content] = [upload.content for upload in made.uploads if upload.name == name]
    return content.decode()


def test_the_card_of_the_hub(artifact):
    text = uploaded(plan_push(artifact, REPO, base_model="someone/tiny"), CARD)
    card = ModelCard(text)  # the hub's own reader
    assert card.data.base_model == "someone/tiny"
    assert card.data.to_dict()["base_model_relation"] == "quantized"
    assert card.data.tags == ["rtn", "4-bit", "quantkit"]
    lines = text.splitlines()
    for line in (
        "quantkit convert someone/tiny --method rtn --bits 4 --out FOLDER",
        f"hf download {REPO} --local-dir FOLDER",
        "quantkit verify FOLDER",
        "quantkit serve FOLDER",
    ):
        assert lines.count(line) == 1, line
    assert "| tiny | KLD from source |" in text
    assert str(artifact.folder.parent) not in text
    # A source that was a folder is no base model.
    made = plan_push(artifact, REPO)
    metadata = ModelCard(uploaded(made, CARD)).data.to_dict()
    assert not {"base_model", "base_model_relation"} & set(metadata)
    [note] = made.notes
    assert "--base-model" in note


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(artifact, hub):
    push(artifact, REPO, create=True)
    repository = hub.repositories[REPO]
    del repository.files["config.json"]

    def commit(_method, path):
        if "preupload" in path:
            repository.files["config.json"] = b"of somebody else"
            repository.commits.append("1" * 40)

    hub.fail = commit
    with pytest.raises(HubError, match="412, A commit has happened since"):
        push(artifact, REPO)
    assert repository.files["config.json"] == b"of somebody else"
    assert repository.commits[-1] == "1" * 40
    hub.fail = lambda _method, _path: None
    assert push(artifact, REPO).sent == ("config.json",)


@pytest.mark.parametrize("part", ["/store/", "/commit/"])
def test_a_push_goes_on_after_a_server_that_fails(part, artifact, hub):
    weights = artifact.manifest.weight_files
    count = 0

    def fail(_method, path):
        nonlocal count
        count += part in path
        return 400 if part in path and (part == "/commit/" or count == len(weights)) else None

    hub.fail, hub.said = fail, "the disk is full"
    with pytest.raises(HubError, match=r"someone/tiny-rtn-4 .* 400, the disk is full") as failure:
        push(artifact, REPO, create=True)
    assert "Signature" not in str(failure.value)
    assert set(hub.repositories[REPO].files) == {".gitattributes"}  # nothing half of it
    arrived = dict(hub.stored)
    hub.fail = lambda _method, _path: None
    hub.requests.clear()
    push(artifact, REPO, create=True)
    assert set(hub.repositories[REPO].files) == {*artifact.manifest.files, MANIFEST, ".gitattributes"}
    assert hub.asked("PUT", "/store/") == len(weights) - len(arrived)


def test_another_artifact_takes_the_place_of_the_former(artifact, gguf, hub, tmp_path):
    push(artifact, REPO, create=True)
    hub.repositories[REPO].files["picture.png"] = b"of the user"
    hub.repositories[REPO].files[".eval_results/quantkit-gsm8k.yaml"] = b"of the former"
    hub.repositories[REPO].files[".eval_results/hle.yaml"] = b"of the user"
    pushed = push(gguf, REPO)
    gone = set(artifact.manifest.files) - set(gguf.manifest.files)
    assert gone
    assert set(pushed.removed) == {*gone, ".eval_results/quantkit-gsm8k.yaml"}
    names = {*gguf.manifest.files, MANIFEST, ".gitattributes", "picture.png", ".eval_results/hle.yaml"}
    assert set(hub.repositories[REPO].files) == names
    verify(fetched(hub, tmp_path / "fetched"))


def test_a_repository_that_is_not_for_this_push_is_left_alone(artifact, hub):
    with pytest.raises(HubError, match=r"404, Repository not found.* Create it with --create"):
        push(artifact, REPO)
    assert hub.repositories == {}
    push(artifact, REPO, create=True)
    hub.requests.clear()
    with pytest.raises(HubError, match="is public"):
        push(artifact, REPO, create=True, private=True)
    hub.repositories[REPO].files["other.safetensors"] = b"of somebody"
    with pytest.raises(HubError, match=r"has 'other\.safetensors', which is not in this artifact"):
        push(artifact, REPO)
    assert hub.sent() == 0


def test_what_is_refused_before_the_network(artifact, hub, monkeypatch):
    for name in ("", "tiny", "a/b/c", "../b", "a b/c", "a/b.git", "-a/b", "a/b\n", "a/" + "b" * 97):
        with pytest.raises(RecipeError, match="not a name on the hub"):
            push(artifact, name, create=True)
        with pytest.raises(RecipeError, match="--base-model"):
            push(artifact, REPO, base_model=name)
    monkeypatch.setenv("HF_TOKEN", "hf_with a blank")
    with pytest.raises(HubError, match="an invalid character") as failure:
        push(artifact, REPO)
    assert "hf_with" not in str(failure.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match=r"no token.*hf auth login"):
        push(artifact, REPO)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        push(artifact, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ArtifactError, match="is not an artifact"):
        push(artifact.folder.parent, REPO)
    whole = (artifact.folder / MANIFEST).read_text()
    for name, says in ((".env", "is not a file of a model"), ("../x", "refused")):
        edit_json(artifact.folder / MANIFEST, put("files", name, value=artifact.manifest.files[CARD].model_dump()))
        with pytest.raises(ArtifactError, match=says):
            push(artifact.folder, REPO)
        (artifact.folder / MANIFEST).write_text(whole)
    weight = artifact.folder / artifact.manifest.weight_files[0]
    flip(weight)
    with pytest.raises(ArtifactError, match="corrupted"):
        push(artifact, REPO)
    weight.unlink()
    weight.symlink_to("/etc/hostname")
    with pytest.raises(ArtifactError, match="link out of"):
        push(artifact.folder, REPO)
    assert hub.requests == []


def test_bytes_that_change_after_the_check_are_refused(artifact, hub, monkeypatch):
    weight = artifact.folder / artifact.manifest.weight_files[0]
    right = hub_side.send

    def changed(*arguments):
        weight.write_bytes(weight.read_bytes()[:-1] + b"x")
        return right(*arguments)

    monkeypatch.setattr("quantkit.publishing.push.send", changed)
    with pytest.raises(HubError, match="has changed since it was verified"):
        push(artifact, REPO, create=True)
    assert set(hub.repositories[REPO].files) == {".gitattributes"}


def test_a_dry_run_lists_and_asks_nobody(artifact, hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    ended = succeeds("push", artifact.folder, "--repo", REPO, "--dry-run", "--json", tmp_path / "plan.json")
    for name in (*artifact.manifest.files, MANIFEST):
        assert f" bytes  {name}\n" in ended.out
    listed = [one["name"] for one in json.loads((tmp_path / "plan.json").read_text())["files"]]
    assert set(listed) == {*artifact.manifest.files, MANIFEST}
    assert hub.requests == []


@pytest.mark.parametrize("case", ["done", "echoed", "unreachable"])
def test_the_token_is_in_no_output(case, artifact, hub, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    if case == "echoed":
        hub.fail, hub.said = lambda _method, path: 500 if "preupload" in path else None, f"what is {TOKEN}?"
        monkeypatch.setattr("time.sleep", lambda _seconds: None)
    if case == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = tmp_path / "pushed.json"
    ended = quantkit("push", artifact.folder, "--repo", REPO, "--create", "--verbose", "--json", result)
    assert ended.code == (0 if case == "done" else 1), ended.err
    assert "HubError" in ended.err or case == "done"
    assert ended.err.count("\n") <= 1 or case == "done"
    written = result.read_text() if result.exists() else ""
    for text in (ended.out, ended.err, caplog.text, written):
        assert TOKEN not in text
    for path in artifact.folder.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()


def report_of(artifact, path, results, **settings):
    values = {
        "model": {"label": "rtn-4", "name": "tiny", "method": "rtn", "digest": artifact.digest},
        "engine": {"name": "reference", "version": "0.1.0", "dtype": "float32"}, "lm_eval": "0.4.13",
        "hardware": {"cpu": "a processor", "cores": 2, "memory_bytes": 1}, "versions": dict.fromkeys(results, "3.0"),
        "settings": {"tasks": list(results), **settings}, "results": results,
        "num_fewshot": dict.fromkeys(results, 5), "samples": dict.fromkeys(results, 1319),
    }  # fmt: skip
    path.write_text(json.dumps(values))
    return path


def test_scores_of_registered_benchmarks_go_along(artifact, hub, tmp_path):
    report = report_of(artifact, tmp_path / "tasks.json", {**GSM8K, "arc_easy": {"acc,none": 0.5}})
    pushed = push(artifact, REPO, create=True, base_model="someone/tiny", results=[report])
    assert pushed.notes == ("arc_easy is not a benchmark registered on the hub: its scores are not pushed",)
    names = [name for name in hub.repositories[REPO].files if name.startswith(".eval_results/")]
    assert names == [".eval_results/quantkit-gsm8k.yaml"]
    [entry] = parse_eval_result_entries(yaml.safe_load(hub.repositories[REPO].files[names[0]]))  # the hub's own reader
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 41.85)
    assert entry.notes == (
        "5-shot, exact_match (strict-match) of lm-eval 0.4.13, task gsm8k 3.0, engine reference 0.1.0 in float32"
    )
    verify(fetched(hub, tmp_path / "fetched"))
    assert push(artifact, REPO, base_model="someone/tiny", results=[report]).sent == ()
    again = push(artifact, REPO, base_model="someone/else")  # another card of the same bytes: their scores stay
    assert (set(again.sent), again.removed) == ({CARD, MANIFEST}, ())
    assert names[0] in hub.repositories[REPO].files


def test_results_that_are_not_its_own_are_refused(artifact, hub, tmp_path):
    for settings, digest, said in (
        ({"limit": 10}, artifact.digest, "scores of 10 samples"),
        ({"include": "mine"}, artifact.digest, "task definitions of mine"),
        ({}, "0" * 64, "scores of other bytes"),
    ):
        path = report_of(artifact, tmp_path / "tasks.json", GSM8K, **settings)
        path.write_text(path.read_text().replace(artifact.digest, digest))
        fails("push", artifact.folder, "--repo", REPO, "--results", path, says=said)
    assert hub.requests == []


def test_benchmarks_are_tasks_of_the_harness_with_their_figures():
    """By the definitions in the harness's own folder, which are read as text: importing it takes seconds."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        pytest.skip("lm-eval is not installed")
    tasks = Path(found.origin).parent / "tasks"
    folders = [tasks / "gsm8k", tasks / "mmlu_pro", *(tasks / "gpqa").glob("*_*shot"), tasks / "gpqa" / "zeroshot"]
    texts = {folder: {path: path.read_text() for path in folder.glob("*yaml")} for folder in folders}
    for name, benchmark in BENCHMARKS.items():
        own = re.compile(rf"^(?:task|group): {name}$", re.MULTILINE)
        [folder] = {folder for folder, files in texts.items() if any(map(own.search, files.values()))}
        text = "".join(texts[folder].values())
        assert f"dataset_path: {benchmark.dataset}\n" in text, name
        measure, _, how = benchmark.figure.partition(",")
        assert f"metric: {measure}\n" in text, name
        assert how == "none" or re.search(rf'name: "?{how}"?\n', text), name
