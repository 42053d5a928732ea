"""CTranslate2 model folders (model.bin, config.json, vocabulary.json), written by CTranslate2's own converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.contracts.format import Content, Format, Kind, Loading, TensorReader
from quantkit.errors import ArtifactError
from quantkit.formats.ctranslate2.architectures import SourceTensors
from quantkit.formats.ctranslate2.model_file import AGAIN, open_ct2_model, read_vocabulary, refuse_settings
from quantkit.models.config import open_config
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import read_object

EMBEDDINGS = ("decoder/embeddings/weight", "decoder/embeddings_0/weight")
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
    refuse_settings(folder / "config.json")
    model, tokens = open_ct2_model(folder / files[0]), len(read_vocabulary(folder / "vocabulary.json"))
    rows = next((v.shape[0] for name, v in model.variables.items() if name in EMBEDDINGS and v.shape), tokens)
    if rows != tokens:
        raise ArtifactError(f"{folder / 'vocabulary.json'} has {tokens} tokens, but the model has {rows} rows. {AGAIN}")
    return SourceTensors(model, open_config(config))


def _recognizes(path: Path) -> bool:
    try:
        values = read_object(path / "config.json", ArtifactError)
    except ArtifactError:
        return False
    return (path / "model.bin").is_file() and "model_type" not in values


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    types = artifact.manifest.tensor_types
    plain = next((kind for kind in ("float16", "bfloat16", "float32") if kind in types), "")
    if "int8" not in types:
        return {"bits": ("int16",) if "int16" in types else (plain,)}
    return {"bits": ("int8", f"int8_{plain}")}  # plain int8 stores other values in the source's type


FORMAT = Format(
    name="ctranslate2",
    summary="model folders of the CTranslate2 engine",
    reference="https://opennmt.net/CTranslate2/quantization.html",
    holds=(Content.ENGINE_MODEL,),
    loading={"ctranslate2": Loading("4.8"), "reference": Loading()},
    kinds=(Kind("int8 and its mixes"), Kind("int16"), Kind("float16"), Kind("bfloat16"), Kind("float32")),
    recognizes=_recognizes,
    open=_open,
    weight_files=("model.bin",),
    recorded_options=_recorded_options,
    usage=USAGE,
    library="ctranslate2",
)
