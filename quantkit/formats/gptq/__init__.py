"""The GPTQ checkpoint layout, version 1.

Per linear layer with weight (N, K) and bits b: `qweight` int32 [K*b/32, N]; `qzeros` int32 [G, N*b/32] holding
zero - 1 (so a zero of 0 cannot be stored); `scales` float16 [G, N]; `g_idx` int32 [K].
Loaded by vLLM, by exllama and by transformers with gptqmodel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from quantkit.artifact import Artifact
from quantkit.contracts.format import Format, Layout
from quantkit.contracts.run import Run
from quantkit.errors import ArtifactError
from quantkit.formats._grouped import AGAIN, GroupedReader, GroupedWriter, Packing, check, tells, write
from quantkit.formats._packing import codes_per_unit, pack_columns, pack_rows, unpack_columns, unpack_rows
from quantkit.formats._quantization_config import quantization_of, recognizes
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source
from quantkit.untrusted import read_object, shown

SETTINGS = "quantize_config.json"
SYMMETRIC_ONLY = "vLLM loads only symmetric GPTQ without desc_act; this artifact is for exllama and gptqmodel"
USAGE = """
vLLM (symmetric artifacts of 4 and 8 bits without `desc_act`):

```bash
vllm serve FOLDER
```

transformers, with `pip install optimum gptqmodel`:

{transformers}
"""


def _refusal(name: str, n: int, k: int, bits: int) -> str | None:
    unit = codes_per_unit(bits)
    if n % unit or k % unit:
        return f"{name} has {n} x {k} weights; {bits}-bit words need multiples of {unit} in both"
    return None


def _quantization(layout: Layout, group_size: int | str) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": layout.bits,
        "group_size": group_size,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "sym": layout.symmetric,
        "desc_act": layout.column_order,
        **(layout.settings or {}),
    }


PACKING = Packing(
    name="gptq",
    bits=(2, 3, 4, 8),
    pack=pack_rows,
    unpack=unpack_rows,
    pack_zeros=lambda zeros, bits: pack_columns(zeros - 1, bits),
    unpack_zeros=lambda words, bits: unpack_columns(words, bits) + 1,
    refusal=_refusal,
    quantization=_quantization,
    notes=lambda layout: (SYMMETRIC_ONLY,) if layout.column_order or not layout.symmetric else (),
    least_zero=1,
    orders_columns=True,
)


@contextmanager
def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[GroupedWriter]:
    with write(PACKING, source, skeleton, run, layout) as writer:
        yield writer
    text = json.dumps(_quantization(layout, layout.group_size), indent=2, sort_keys=True) + "\n"
    (run.folder / SETTINGS).write_text(text, encoding="utf-8")


def _tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """What config.json says, of which quantize_config.json has a copy; raises ArtifactError where they differ."""
    path = artifact.folder / SETTINGS
    if SETTINGS in artifact.manifest.files:
        copy, settings = read_object(path, ArtifactError, AGAIN), quantization_of(artifact.folder)
        for name in sorted(copy.keys() | settings.keys()):
            if copy.get(name) != settings.get(name):
                one, other = shown(copy.get(name)), shown(settings.get(name))
                raise ArtifactError(f"{path}: {name} is {one}, and {other} in config.json. {AGAIN}")
    return tells(artifact)


def _refusals(artifact: Artifact) -> Mapping[str, str]:
    stored = quantization_of(artifact.folder)
    bits = stored.get("bits")
    reasons = {}
    if stored.get("desc_act") or not stored.get("sym", True) or bits not in (4, 8):
        reasons["vllm"] = "vLLM loads GPTQ files of 4 and 8 bits that are symmetric and have no desc_act"
    if bits != 4:
        reasons["tabbyapi"] = "exllama loads GPTQ files of 4 bits"
    return reasons


FORMAT = Format(
    name="gptq",
    summary="grouped integer codes in GPTQ's layout",
    reference="https://github.com/ModelCloud/GPTQModel",
    holds=("grouped codes",),
    engines=("reference", "vllm"),
    recognizes=partial(recognizes, "gptq"),
    open=partial(GroupedReader, PACKING),
    check=partial(check, PACKING),
    writer=_write,
    refusals=_refusals,
    tells=_tells,
    usage=USAGE,
)
