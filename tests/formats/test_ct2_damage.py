"""A damaged model.bin of CTranslate2 is refused in one line, before anything large is made of it."""

import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_ct2 import config_of, job_of, save_checkpoint
from tiny_ct2 import convert as convert_ct2
from tiny_models import changed_copy
from trials import Trial

from quantkit.errors import ArtifactError, QuantkitError, UnsupportedError
from quantkit.formats.ctranslate2.model_file import REVISION, SPEC, TYPES, VERSION, open_ct2_model
from quantkit.formats.ctranslate2.names import SourceTensors
from quantkit.models.config import open_config

pytest.importorskip("ctranslate2")
SIZE = 4 + 2 + 4  # of the head of a file, with an empty name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    folder = tmp_path_factory.mktemp("ct2")
    return convert_ct2(save_checkpoint(folder / "llama", config_of("LlamaConfig")), "int8", folder / "int8")


def text(name: str) -> bytes:
    raw = name.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def variable(name: str, shape: tuple[int, ...], kind: str, data: bytes, count: int | None = None) -> bytes:
    sizes = b"".join(struct.pack("<I", n) for n in shape)
    tail = struct.pack("<BI", TYPES.index(kind), len(data) if count is None else count)
    return text(name) + struct.pack("<B", len(shape)) + sizes + tail + data


def file_of(
    path: Path,
    *variables: bytes,
    aliases: tuple[tuple[str, str], ...] = (),
    count: int | None = None,
    revision: int = REVISION,
) -> Path:
    head = struct.pack("<I", VERSION) + text(SPEC)
    head += struct.pack("<II", revision, len(variables) if count is None else count)
    tail = struct.pack("<I", len(aliases)) + b"".join(text(a) + text(b) for a, b in aliases)
    path.write_bytes(head + b"".join(variables) + tail)
    return path


ONE = variable("a", (2,), "float32", bytes(8))


def test_what_is_whole_is_read_and_what_the_engine_has_no_model_for_refused(tmp_path: Path) -> None:
    model = open_ct2_model(file_of(tmp_path / "model.bin", ONE, aliases=(("b", "a"),)))
    assert model.types() == {"float32": 1}
    assert model.values("b").tolist() == [0.0, 0.0]
    with pytest.raises(ArtifactError, match=f"holds a '{SPEC}' of revision 7, expected"):
        open_ct2_model(file_of(tmp_path / "model.bin", ONE, revision=7))


@pytest.mark.parametrize(
    ("variables", "aliases", "count", "says"),
    [
        ((ONE,), (), 2**32 - 1, "is truncated|no string|corrupted"),
        ((variable("a", (2**31, 2**31), "float32", b"", 0),), (), None, "do not match"),
        ((variable("a", (1,) * 9, "float32", bytes(4)),), (), None, "has 9 dimensions"),
        ((ONE, ONE), (), None, "twice"),
        ((ONE,), (("b", "c"),), None, "the alias b names c"),
    ],
)
def test_counts_and_sizes_are_held_against_the_file(
    variables: tuple[bytes, ...], aliases: tuple[tuple[str, str], ...], count: int | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=says):
        open_ct2_model(file_of(tmp_path / "model.bin", *variables, aliases=aliases, count=count))


SCALES = [
    variable("a_scale", (2,), "float32", np.array([np.nan, 1.0], "<f4").tobytes()),
    variable("a_scale", (2, 1), "float32", np.ones(2, "<f4").tobytes()),
    variable("a_scale", (2,), "int8", b"\1\1"),
    variable("other", (2,), "float32", np.ones(2, "<f4").tobytes()),
]


@pytest.mark.parametrize("scale", SCALES)
def test_codes_without_a_usable_scale_are_refused(scale: bytes, tmp_path: Path) -> None:
    model = open_ct2_model(file_of(tmp_path / "model.bin", variable("a", (2, 2), "int8", b"\1\2\3\4"), scale))
    with pytest.raises(ArtifactError, match=r"a_scale|the scale of a"):
        model.values("a")


def test_flipped_and_cut_files_are_read_or_refused(made: Trial, tmp_path: Path) -> None:
    whole, settings = (made.folder / "model.bin").read_bytes(), open_config(made.source.config)
    rng, path = random.Random(0), tmp_path / "model.bin"
    starts = [v.start for v in open_ct2_model(made.folder / "model.bin").variables.values()]
    refusals = 0
    for _ in range(150):
        data = bytearray(whole)
        place = max(0, rng.choice(starts) - rng.randrange(1, 40))  # names, shapes, types and sizes
        data[place] = rng.randrange(256)
        path.write_bytes(bytes(data) if rng.random() < 0.8 else bytes(data[:place]))
        try:
            tensors = SourceTensors(open_ct2_model(path), settings)
            for name in tensors.names():
                tensors.read(name).whole()
        except QuantkitError as error:
            refusals += 1
            assert str(path) in str(error)  # noqa: PT017
    assert refusals > 75


def test_a_vocabulary_that_is_none_is_told(made: Trial, tmp_path: Path) -> None:
    from quantkit.engines.ctranslate2 import Ct2Generator

    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    for content in ("{}", "[1, 2]", "[" * 100_000):
        (tmp_path / "vocabulary.json").write_text(content)
        with pytest.raises(ArtifactError, match=r"vocabulary\.json"):
            Ct2Generator(tmp_path, "float32", 1)


def test_a_model_that_answers_nan_is_not_proven(tmp_path: Path) -> None:
    """Weights that are finite and whose logits are not: a difference of NaN is below no bound."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][:] = 3e38
        tensors["lm_head.weight"][::2] *= -1

    plain = save_checkpoint(tmp_path / "llama", config_of("LlamaConfig", tie_word_embeddings=False))
    checkpoint = changed_copy(plain, tmp_path / "changed", change)
    (tmp_path / "out").mkdir()
    trial = job_of(checkpoint, "float32", tmp_path / "out")
    trial.check()
    trial.source.copy_side_files(trial.folder)
    with pytest.raises(UnsupportedError, match="mean difference of log-probabilities nan"):
        trial.write()
