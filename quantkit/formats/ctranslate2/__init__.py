"""CTranslate2 model folders: model.bin, config.json, vocabulary.json. The engine's own converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.contracts.format import Format, TensorReader

USAGE = """
With `pip install ctranslate2 transformers`:

```python
import ctranslate2
from transformers import AutoTokenizer

generator = ctranslate2.Generator("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
tokens = tokenizer.convert_ids_to_tokens(tokenizer("Hello")["input_ids"])
[result] = generator.generate_batch([tokens], max_length=32)
print(tokenizer.decode(result.sequences_ids[0]))
```
"""


def _open(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> TensorReader:
    from quantkit.formats.ctranslate2.model_file import open_ct2_model
    from quantkit.formats.ctranslate2.names import SourceTensors
    from quantkit.models.config import open_config

    return SourceTensors(open_ct2_model(folder / files[0]), open_config(config))


def _recognizes(path: Path) -> bool:
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (path / "model.bin").is_file() and isinstance(values, dict) and "model_type" not in values


FORMAT = Format(
    name="ctranslate2",
    summary="model folders of the CTranslate2 engine",
    reference="https://opennmt.net/CTranslate2/quantization.html",
    holds=("engine model",),
    engines=("ctranslate2", "reference"),
    recognizes=_recognizes,
    open=_open,
    weight_files=("model.bin",),
    usage=USAGE,
    library="ctranslate2",
)
