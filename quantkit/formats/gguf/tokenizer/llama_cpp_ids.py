"""Tokenize with llama.cpp in a child process, because llama.cpp aborts the process for an invalid vocabulary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from quantkit.errors import UnsupportedError, one_line
from quantkit.system.untrusted import parse_json

LIMIT = 600.0  # seconds; the largest vocabularies take a few
LONGEST = 300  # characters of llama.cpp's output
SIGNS = ("error", "assert", "failed")


def llama_cpp_ids(path: Path, text: str) -> list[int]:
    """Tokenize `text` with the vocabulary of a GGUF file, without BOS and EOS; raise UnsupportedError."""
    what = f"{path}: llama.cpp cannot read its vocabulary"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(path.absolute())],
            input=text.encode(), capture_output=True, timeout=LIMIT, check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"{what} within {LIMIT:.0f} seconds") from None
    if done.returncode != 0:
        raise UnsupportedError(f"{what}: {_reason(done.returncode, done.stderr.decode(errors='replace'))}")
    ids: list[int] = parse_json(done.stdout.splitlines()[-1], what, UnsupportedError)
    return ids


def _reason(code: int, said: str) -> str:
    """Describe how the child process ended, with the first line of its output that reports an error."""
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = next((line for line in lines if any(sign in line.lower() for sign in SIGNS)), "".join(lines[-1:]))
    return f"{how}: {one_line(telling, LONGEST)}" if telling else how


def main() -> None:
    """Child process: read the text from standard input, print token ids; the argument is the GGUF file."""
    import resource

    import llama_cpp

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    model = llama_cpp.Llama(model_path=sys.argv[1], vocab_only=True, verbose=True)
    ids = model.tokenize(sys.stdin.buffer.read(), add_bos=False, special=False)
    sys.stdout.write(f"\n{json.dumps(ids)}")


if __name__ == "__main__":
    main()
