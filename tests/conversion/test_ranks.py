"""Several processes share one conversion: real ranks that talk through gloo, forked or from torchrun."""

import itertools
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from edits import contents
from killed import Ends, nothing, started, when_stopped
from tiny_models import SAMPLE, fails
from torch.distributed import TCPStore

from quantkit.calibration import learned_rounding, scale_tuning
from quantkit.checkpoints.spool import read_journal
from quantkit.errors import RecipeError, SourceError
from quantkit.formats.compressed_tensors.kv_scales import kv_scales
from quantkit.methods import gptq
from quantkit.numerics.second_moments import Gram
from quantkit.records.artifact import open_artifact
from quantkit.system import ranks as group

STORES = []
FLAGS = ["--calibration-text", SAMPLE, "--calibration-sequences", 7, "--calibration-length", 512]


def command(model, out, method="gptq", *others):
    return [str(part) for part in ("convert", model, "--method", method, "--out", out, *FLAGS, *others)]


def begun(arguments, logs, prepare=(nothing, nothing)):
    """A rank for each of `prepare`, which runs in it first; the store outlives them, as torchrun's does."""
    logs.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES[:] = [store]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(store.port))
        patch.setenv("WORLD_SIZE", str(len(prepare)))
        children = []
        for rank, first in enumerate(prepare):
            patch.setenv("RANK", str(rank))
            children.append(started(arguments, logs / f"rank{rank}", first))
    return children


def ended(children):
    """Exit code of each rank, and what it told."""
    told = [child.wait() for child in children]
    return [(child.code, text) for child, text in zip(children, told, strict=True)]


def keep_moments(path):
    """Save the moments that the first layers are rounded by, and of how many tokens this process has summed them."""
    plain, add, tokens = gptq.Solver, Gram.add, 0

    def keeping(given, *others):
        if not path.exists():
            moments = (given.hessian, given.cross, given.paired)
            torch.save((tokens, [moment.clone() for moment in moments if moment is not None]), path)
        return plain(given, *others)

    def counting(gram, *given):
        nonlocal tokens
        tokens += len(given[0])
        add(gram, *given)

    gptq.Solver, Gram.add = keeping, counting


@pytest.mark.parametrize("share", [0.5, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_round_by_the_moments_of_one_process_and_give_the_same_bytes(share, tiny, tmp_path):
    every = ("--gptaq-share", share, "--format", "compressed-tensors", "--kv-scales")
    keep = partial(keep_moments, tmp_path / "m")
    alone = started(command(tiny, tmp_path / "one", "gptq", *every), tmp_path / "log", keep)
    prepare = (partial(keep_moments, tmp_path / "m0"), partial(keep_moments, tmp_path / "m1"))
    for name in ("two", "again"):
        ranks = ended(begun(command(tiny, tmp_path / name, "gptq", *every), tmp_path / "logs", prepare))
        assert ranks == [(0, ""), (0, "")]
    assert contents(tmp_path / "two") == contents(tmp_path / "again")
    assert (alone.wait(), alone.code) == ("", 0)
    (tokens, whole), *shares = (torch.load(tmp_path / name) for name in ("m", "m0", "m1"))
    assert len(whole) == (2 if share == 1 else 3)
    assert sum(count for count, _ in shares) == tokens
    for _, found in shares:
        for one, other in zip(whole, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))
    one, two = (kv_scales(tmp_path / name, ("model.safetensors",)) for name in ("one", "two"))
    assert list(two.values()) == [pytest.approx(scales, rel=0.02) for scales in one.values()]
    notes = json.loads((tmp_path / "two" / "quantkit.json").read_text())["notes"]
    assert any(note.startswith("2 processes shared the work") for note in notes)


def keep_learned(path):
    """Save what was learned, and every training's held-out loss at first and at last."""
    values = []
    losses = []
    refine, tune = gptq.refine, scale_tuning.tune

    def refining(*arguments):
        layers = refine(*arguments)
        values.extend(tensor for layer in layers.values() for tensor in (layer.codes, layer.scales))
        return layers

    def tuning(*arguments):
        scales = tune(*arguments)
        torch.save((values + list(scales.values()), losses), path)
        return scales

    def training_of(plain):
        def told(student, *others):
            seen = []
            student.report = lambda *pair: seen.append(pair)
            plain(student, *others)
            losses.append(seen[-1])

        return told

    gptq.refine, scale_tuning.tune = refining, tuning
    learned_rounding.train = training_of(learned_rounding.train)
    scale_tuning.train = training_of(scale_tuning.train)


LEARNS = (
    *("--refine", "--calibration-sequences", 128, "--calibration-length", 64, "--bits", 2, "--refine-steps", 40),
    *("--tune-steps", 16, "--seed", 3),  # with 0 or 2 the first block learns in one run and, by chance, not in another
)
FEW = ("--refine", "--calibration-sequences", 34, "--calibration-length", 64, "--refine-steps", 3, "--tune-steps", 3)


def learned(model, folder, arguments):
    """What two ranks learned, and their losses."""
    prepare = (partial(keep_learned, folder / "m0"), partial(keep_learned, folder / "m1"))
    two = ended(begun(command(model, folder / "two", "gptq", *arguments), folder / "logs", prepare))
    assert two == [(0, ""), (0, "")]
    return [torch.load(folder / name) for name in ("m0", "m1")]


def test_ranks_learn_one_rounding(tiny_with, tmp_path):
    (first, losses), (second, same) = learned(tiny_with(num_hidden_layers=1), tmp_path, FEW)
    assert len(first) == 7 * 3  # layers; codes, scales and tuned scales
    assert all(map(torch.equal, first, second))
    assert losses == same


@pytest.mark.slow
def test_ranks_learn_as_well_as_one_process(tiny_with, tmp_path):
    """The held-out losses are those of the same sequences, and fall about as far."""
    blocks = 4
    model = tiny_with(num_hidden_layers=blocks)
    keep = partial(keep_learned, tmp_path / "m")
    alone = started(command(model, tmp_path / "one", "gptq", *LEARNS), tmp_path / "log", keep)
    (first, losses), (second, same) = learned(model, tmp_path, LEARNS)
    assert (alone.wait(), alone.code) == ("", 0)
    _, whole = torch.load(tmp_path / "m")
    assert all(map(torch.equal, first, second))
    assert losses == same
    assert len(whole) == len(losses) == blocks + 1
    assert losses[0][0] == pytest.approx(whole[0][0], rel=1e-3)  # which alone starts from the same inputs
    for (begin, best), (wanted, reached) in zip(losses, whole, strict=True):
        assert begin == pytest.approx(wanted, rel=0.1)
        assert best == pytest.approx(reached, rel=0.15)
    gains = [1 - best / begin for begin, best in losses]
    assert max(gains[:blocks]) > 0.03  # of a block
    assert gains[blocks] > 0.01  # end to end


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_the_work_goes_on(tiny, tmp_path):
    arguments, partial = command(tiny, tmp_path / "out"), tmp_path / "out.partial"
    joins = Ends(Gram, "join", 2 * len(GROUPS))
    (code, told), (killed, _) = ended(begun(arguments, tmp_path / "logs", (nothing, joins)))
    assert (code, killed) == (1, -signal.SIGKILL)
    assert told.count("error: RankError: another of the processes that share this work has ended") == 1
    assert not (tmp_path / "out").exists()
    assert len(read_journal(partial)[0]) == 2
    (code, told), (other, silent) = ended(begun(arguments, tmp_path / "logs"))
    assert (code, other, silent) == (0, 0, "")
    assert told.startswith("resuming from")
    assert ended(begun(command(tiny, tmp_path / "again"), tmp_path / "logs")) == [(0, ""), (0, "")]
    assert contents(tmp_path / "out") == contents(tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "again", "logs"}


GROUPS = ("query, key and value", "output", "gate and up", "down")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nf4",), "2 processes cannot share what the method nf4 does"),
        (("gptq", "--refine"), "needs 16 or more in each of 2 processes, in whole batches of 2; only 7 were given"),
        (("awq", "--calibration-sequences", "2"), "in 1 batches, which 2 processes cannot share"),
    ],
)
def test_what_ranks_cannot_share_is_refused_once(tiny, tmp_path, arguments, reason):
    (code, told), (other, silent) = ended(begun(command(tiny, tmp_path / "out", *arguments), tmp_path / "logs"))
    assert reason in " ".join(told.replace("│", " ").split())
    assert code == other != 0
    assert silent == ""
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}


def fail():
    """An error of this rank alone, in the middle of the second block."""
    calls, plain = itertools.count(), Gram.join

    def failing(self, sum_over):
        if next(calls) >= len(GROUPS):
            raise SourceError("this rank cannot read on")
        plain(self, sum_over)

    Gram.join = failing


def test_an_error_is_told_once_by_the_rank_that_has_it(tiny, tmp_path):
    ranks = ended(begun(command(tiny, tmp_path / "out"), tmp_path / "logs", (nothing, fail)))
    assert [(code, text.count("error:")) for code, text in ranks] == [(1, 0), (1, 1)]
    assert "error: SourceError: this rank cannot read on" in ranks[1][1]
    assert "1 finished decoder blocks. Run" in ranks[0][1]
    ranks = ended(begun(command(tiny, tmp_path / "all"), tmp_path / "logs", (fail, fail)))
    assert [text.count("error:") for _, text in ranks] == [1, 0]


def test_a_place_that_torchrun_cannot_mean_is_refused(monkeypatch):
    assert group.shards_of_environment() == group.Shards()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert group.shards_of_environment() == group.Shards(1, 2, 1, 2)
    monkeypatch.setenv("RANK", "0")
    fails("eval-ppl", "demo", says="2 processes cannot share this: only the command convert")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(RecipeError, match="RANK=2, WORLD_SIZE=2"):
        group.shards_of_environment()


@pytest.mark.slow
def test_torchrun_starts_ranks_that_share_a_conversion(tiny, tmp_path):
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "quantkit")
    words = [*start, *command(tiny, tmp_path / "out")]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert any("2 processes shared" in note for note in open_artifact(tmp_path / "out").manifest.notes)


@pytest.mark.slow
def test_sigterm_ends_a_rank_that_waits_for_another(tiny, tmp_path):
    """The other one is stopped, so its connection stays open."""
    stops = Ends(Gram, "join", len(GROUPS), number=signal.SIGSTOP)
    first, second = begun(command(tiny, tmp_path / "out"), tmp_path / "logs", (nothing, stops))
    when_stopped(second)
    os.kill(first.process.pid, signal.SIGTERM)
    first.wait()
    os.kill(second.process.pid, signal.SIGKILL)
    second.wait()
    assert first.code == 128 + signal.SIGTERM
    assert not (tmp_path / "out").exists()
