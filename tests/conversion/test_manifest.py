"""Which code decides the bytes of an artifact."""

import shutil
from pathlib import Path

from quantkit.conversion.manifest import PACKAGE, code_digest


def test_the_digest_of_the_code_is_of_what_computes(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    package = Path(shutil.copytree(PACKAGE, tmp_path / "quantkit", ignore=ignored))
    before = code_digest(package)
    for name in ("formats/gguf/ggml/search.c", "numerics/grid.py", "__init__.py"):
        data = (package / name).read_bytes()
        (package / name).write_bytes(data + b"\n")
        assert code_digest(package) != before
        (package / name).write_bytes(data)
    for name in ("cli/app.py", "cli/newest.py", "data/sample_articles.txt"):
        (package / name).write_text("changed = 1\n")
    assert code_digest(package) == before
    (tmp_path / "cli").mkdir()  # a folder of this name above the package is another one
    package = package.rename(tmp_path / "cli" / "quantkit")
    assert code_digest(package) == before
    (package / "methods" / "newest.py").write_text("BITS = 1\n")
    assert code_digest(package) != before
