import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked_workers import new_interpreters, start
from tiny_llama import save_llama

from quantkit.data.demo import FOLDER
from quantkit.evaluation import process
from quantkit.numerics import matmul
from quantkit.system.cache import cache_folder

# Files that take longest, the longest first: begun last, one of them would keep one process busy and the other idle.
LONGEST = (
    *("architectures", "ctranslate2", "examples", "fuzz", "tasks", "agreement", "gguf_architectures", "resume"),
    *("forecast", "progress", "bad_input", "launch", "pressure", "gguf_write", "learned_rounding", "docs", "gptq"),
    *("compare", "gguf_tokenizer_kinds", "baseline", "quantized_sources", "artifact", "card", "source_target_matrix"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order within a file stays."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: whoever looks for garbage need not look there each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Many small operations on several threads are up to fifty times slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def set_units(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Lets the processor seem to have units for half-size floats, or none."""

    def set_to(units: bool) -> None:
        monkeypatch.setattr(matmul, "_has_units", lambda dtype: units or dtype == torch.float32)

    return set_to


@pytest.fixture(params=[True, False], ids=["units", "no-units"])
def units(request: pytest.FixtureRequest, set_units: Callable[[bool], None]) -> bool:
    """Whether the processor seems to have units for half-size floats, with and without which a test runs."""
    set_units(request.param)
    return bool(request.param)


@pytest.fixture
def float32_products(set_units: Callable[[bool], None]) -> None:
    """All products are of float32, as slow references have them, also where the processor has other units."""
    set_units(False)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Judging processes do not import everything anew, see forked_workers.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", start)
        yield


@pytest.fixture
def real_workers() -> Iterator[None]:
    """Judging processes are new interpreters, as users have them."""
    with new_interpreters():
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
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


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Texts and checkpoints that may lie beside the repository."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist; it holds WikiText-2 and other texts")
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, two key-value heads for four query heads, bfloat16."""
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def tiny_llama_with_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "biased", attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="session")
def tiny_llama_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "untied", tie_word_embeddings=False)
