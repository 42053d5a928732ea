"""llama.cpp's own converter, out of the source archive of the llama-cpp-python that is installed.

python -m bench.llama_source
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

from bench.folders import BenchError, work_folder

PARTS = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")  # of vendor/llama.cpp


def llama_cpp_source() -> Path:
    """The folder with convert_hf_to_gguf.py and what it imports, fetched first where it is missing."""
    number = version("llama-cpp-python")
    folder = work_folder() / f"llama.cpp-{number}"
    if not folder.is_dir():
        archive = _fetch(number, work_folder())
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        root = f"llama_cpp_python-{number}/vendor/llama.cpp/"
        with tarfile.open(archive) as tar:
            for member in tar:
                inside = member.name.removeprefix(root)
                if member.isfile() and inside != member.name and inside.startswith(PARTS):
                    member.name = inside
                    tar.extract(member, partial, filter="data")
        if not folder.is_dir():  # another process may have been faster
            partial.rename(folder)
        archive.unlink(missing_ok=True)
    return folder


def _fetch(number: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*command, f"llama-cpp-python=={number}"], capture_output=True, text=True, check=False)
    found = list(folder.glob(f"llama_cpp_python-{number}.tar.gz"))
    if not found:
        raise BenchError(f"llama-cpp-python's source archive cannot be fetched: {done.stderr.strip()[-300:]}")
    return found[0]


if __name__ == "__main__":
    print(llama_cpp_source())
