"""Three hundred damaged inputs of one seed: every one is refused in one line, or done as somebody else would do it."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# The kinds whose cases are quickest; `make bench-fuzz` runs all of them.
KINDS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("model.safetensors", "shards", "index.json", "links", "quantkit.json", "artifact files", "rehashed files"),
    *("GGUF file", "importance file", "recipe", "command line", "output folder"),
)


def test_three_hundred_damaged_inputs() -> None:
    command = [sys.executable, "-m", "bench.fuzz", "--seed", "20", "--cases", "300", "--kinds", ",".join(KINDS)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "| all | 300 |" in done.stdout, done.stdout
