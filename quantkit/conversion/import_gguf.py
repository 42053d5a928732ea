"""import: a GGUF file as a plain checkpoint, dequantized."""

from __future__ import annotations

from pathlib import Path

from quantkit.conversion.check import prepare
from quantkit.conversion.convert import run
from quantkit.conversion.staging import place_of, refuse_existing
from quantkit.errors import RecipeError
from quantkit.formats.gguf.checkpoint import GgufCheckpoint
from quantkit.progress import Progress
from quantkit.recipe import ConvertRecipe, parse

DTYPES = ("float16", "bfloat16", "float32")


def import_gguf(
    path: Path,
    out: Path,
    *,
    dtype: str = "float16",
    tokenizer: Path | None = None,
    config: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model in the GGUF file `path` (of a split one the first file) as a checkpoint folder; return `out`.

    float32 holds the file's values exactly, float16 rounds them. `tokenizer` is a folder with the tokenizer to take
    instead of the file's, `config` a config.json. Raises ArtifactError for a file that cannot be read, UnsupportedError
    where the configuration means something else than the file says, where its tokenizer comes out otherwise than
    llama.cpp's, or for values beyond `dtype`.
    """
    if dtype not in DTYPES:
        raise RecipeError(f"unknown dtype {dtype!r}. Known: {', '.join(DTYPES)}.")
    out = place_of(out)
    refuse_existing(out, force)
    source = GgufCheckpoint(path, tokenizer, config)
    recipe = parse(ConvertRecipe, {"model": str(path), "method": "float", "bits": dtype}, "import")
    return run(prepare(recipe, source), out, force=force, progress=progress).folder
