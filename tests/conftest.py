import gc
import os
import sys
import venv
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from gguf_files import save_model
from huggingface_hub import constants
from tiny_architectures import save_architecture
from tiny_llama import save_llama
from tiny_models import CALIBRATION, SAMPLE, save_tiny

from quantkit.conversion.convert import convert
from quantkit.data.demo import FOLDER
from quantkit.data.texts import load_text
from quantkit.evaluation import process
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_source
from quantkit.numerics import matmul
from quantkit.records.artifact import open_artifact
from quantkit.system import forking
from quantkit.system.files import cache_folder


def pytest_collection_finish():
    """What is imported by now stays: whoever looks for garbage need not look there each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Many small operations on several threads are up to fifty times slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def set_units(monkeypatch):
    """Lets the processor seem to have units for half-size floats, or none."""

    def set_to(units):
        monkeypatch.setattr(matmul, "_has_units", lambda dtype: units or dtype == torch.float32)

    return set_to


@pytest.fixture(params=[True, False], ids=["units", "no-units"])
def units(request, set_units):
    """Whether the processor seems to have units for half-size floats, with and without which a test runs."""
    set_units(request.param)
    return bool(request.param)


@pytest.fixture
def float32_products(set_units):
    """All products are of float32, as slow references have them, also where the processor has other units."""
    set_units(False)


REAL_START = process.start


def start_or_fork(python, request, events, log, variables):
    """In place of `process.start`: a fork, also where the engine needs neither torch nor transformers."""
    own = python == sys.executable
    forked = own and forking.fork(process.WORKER, [str(request)], events, log.fileno(), variables)
    return forked or REAL_START(python, request, events, log, variables)


@pytest.fixture(scope="session", autouse=True)
def forked_workers():
    """Processes that judge do not import everything anew; tests start hundreds of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", start_or_fork)
        yield


@pytest.fixture(scope="module")
def real_workers():
    """Processes that judge are started as users have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", REAL_START)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What tests judge is not kept in the user's cache; the demo model there is used."""
    demo = cache_folder() / FOLDER
    if not demo.is_dir():
        yield
        return
    folder = tmp_path_factory.mktemp("cache")
    (folder / FOLDER).symlink_to(demo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(folder))
        yield


@pytest.fixture(scope="module")
def fresh_cache(tmp_path_factory):
    """A cache that nothing has been kept in before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    """The same for one test: its folder, which is made when something is kept."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cached_demo():
    """The folder of the demo model."""
    folder = cache_folder() / FOLDER
    if not (folder / "config.json").is_file():
        pytest.skip("the demo model is not in the cache; `make demo` fetches it")
    return folder


@pytest.fixture(scope="session")
def wide(once):
    """Two blocks as wide as K-quants need it, for GGUF."""
    return once("gguf-two-blocks", lambda folder: save_model(folder, num_hidden_layers=2))


@pytest.fixture(scope="session")
def shared_data():
    """Texts and checkpoints that may lie beside the repository."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist; it holds WikiText-2 and other texts")
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Tied embeddings, two key-value heads for four query heads, bfloat16."""
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make): the folder of that name that `make(folder)` writes, made once for all test processes.

    Tests only read it; one that changes files works on a copy.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    shared.mkdir(exist_ok=True)

    def get(name, make):
        folder = shared / name
        if not folder.is_dir():
            with FileLock(shared / f"{name}.lock"):
                if not folder.is_dir():
                    make(shared / f"{name}.new")
                    (shared / f"{name}.new").rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def tiny(once):
    """The tiny llama of three blocks that every method and llama.cpp take: bfloat16, tied embeddings."""
    return once("tiny", save_tiny)


@pytest.fixture(scope="session")
def tiny_with(once):
    """tiny_with(num_hidden_layers=1, ...): `tiny` with other settings, see `save_tiny`; each made once."""

    def get(**changes):
        name = "tiny-" + "-".join(f"{key}={value}" for key, value in sorted(changes.items()))
        return once(name, lambda folder: save_tiny(folder, **changes))

    return get


@pytest.fixture(scope="session")
def one_block(tiny_with):
    return tiny_with(num_hidden_layers=1)


@pytest.fixture(scope="session")
def two_blocks(tiny_with):
    return tiny_with(num_hidden_layers=2)


@pytest.fixture(scope="session")
def architecture(once):
    """architecture("mixtral"): a tiny checkpoint of that row of `tiny_architectures`, made once."""
    return lambda name: once(f"architecture-{name}", lambda folder: save_architecture(folder, name))


@pytest.fixture(scope="session")
def artifact_of(once, tiny):
    """artifact_of("gptq", "4", group_size=32): `tiny` converted, made once; `model=` gives another checkpoint."""

    def get(method, bits=None, *, model=tiny, **options):
        words = [model.name, method, bits or "default", *(f"{key}={value}" for key, value in sorted(options.items()))]
        name = "artifact-" + "-".join(words).replace("/", "_")

        def make(folder):
            convert(str(model), method, bits, folder, calibration=CALIBRATION, **options)

        return open_artifact(once(name, make))

    return get


@pytest.fixture(scope="session")
def windows(tiny):
    """Six windows of 32 tokens."""
    return cut(load_text(str(SAMPLE), "evaluation"), open_source(str(tiny)).tokenizer(), "llama.cpp", 32, 6)


@pytest.fixture(scope="session")
def gguf(artifact_of):
    """`tiny` as GGUF Q8_0."""
    return artifact_of("gguf", "Q8_0")


@pytest.fixture
def bare(tmp_path):
    """The root of a Python environment with nothing in it."""
    venv.create(tmp_path / "environment", with_pip=False)
    return tmp_path / "environment"


@pytest.fixture
def no_hub(monkeypatch):
    """Nothing listens there, so the bundled sample serves."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
