"""The GPTQ checkpoint layout, shared by every method that writes it: names, words, configuration, and the reader.

Per linear layer with weight (N, K) and bits b: `qweight` int32 [K*b/32, N]; `qzeros` int32 [G, N*b/32] holding
zero - 1 (the v1 convention, so a zero of 0 cannot be stored); `scales` float16 [G, N]; `g_idx` int32 [K].
Loaded by vLLM, by exllama and by transformers with gptqmodel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from quantkit.checkpoints.writer import CheckpointWriter, checkpoint, stored_tensors
from quantkit.conversion.alternatives import instead
from quantkit.errors import UnsupportedError
from quantkit.formats._packing import codes_per_unit, pack_columns, pack_rows, unpack_columns, unpack_rows
from quantkit.models.skeleton import Skeleton, linears_to_quantize, open_skeleton, refuse_shapes, rows_of
from quantkit.numerics.grouped_weight import GroupedWeight

if TYPE_CHECKING:
    from quantkit.artifact import Artifact
    from quantkit.contracts.job import Job

GROUP_SIZES = (128, 64, 32)
VLLM_UNIT = 32  # rows and columns of what each processor holds
PARALLEL_SIZES = (2, 4, 8)
# Layers whose columns engines share out among processors (tensor parallel); of all others they share out the rows.
SPLIT_COLUMNS = ("o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
DTYPE = torch.float16  # of everything that is not quantized
PIECE = 1 << 22
USAGE = """
vLLM (symmetric artifacts of 4 and 8 bits without `desc_act`):

```bash
vllm serve FOLDER
```

transformers, with `pip install optimum gptqmodel`:

{transformers}
"""


def resolve_group_size(asked: int | str, linears: dict[str, tuple[int, int]]) -> int | str:
    """Return the group size in columns (or -1 for the whole row) that fits every layer.

    ``auto`` is the largest of 128, 64 and 32 that divides all. Raises UnsupportedError for one that does not.
    """
    columns = sorted({shape[1] for shape in linears.values()})
    dividing = [size for size in GROUP_SIZES if all(k % size == 0 for k in columns)]
    if asked == "auto":
        return dividing[0] if dividing else -1
    size = int(asked)
    if size != -1 and (size < 1 or any(k % size for k in columns)):
        bad = next((k for k in columns if size > 0 and k % size), columns[0])
        fits = ", ".join(map(str, dividing)) or "none of 128, 64, 32"
        raise UnsupportedError(
            f"group_size {asked} does not divide the {bad} input columns of some layers. "
            f"These divide all layers: {fits}; -1 (the whole row) always does. "
            "vLLM and gptqmodel fail on a layer whose last group is not full."
        )
    return asked


def tell_engines(job: Job, linears: dict[str, tuple[int, int]], group_size: int | str) -> None:
    """Note what vLLM would refuse of an artifact that is fine in itself: odd shapes, or some tensor parallel sizes."""
    for name, (n, k) in linears.items():
        if n % VLLM_UNIT or k % VLLM_UNIT:
            job.tell(f"vLLM would refuse this artifact: {name} is {n} x {k}, and it needs multiples of {VLLM_UNIT}")
            return
    refused = {size: reason for size in PARALLEL_SIZES if (reason := _cannot_split(linears, group_size, size))}
    if refused:
        sizes = " or ".join(map(str, refused))
        job.tell(f"vLLM would refuse this artifact with tensor parallel size {sizes}: {next(iter(refused.values()))}")


def _cannot_split(linears: dict[str, tuple[int, int]], group_size: int | str, size: int) -> str | None:
    """Why `size` processors cannot share the layers, or None. Key and value heads are copied where they are too few."""
    group = group_size if isinstance(group_size, int) and group_size > 0 else VLLM_UNIT
    for name, (n, k) in linears.items():
        layer = name.split(".")[-2]
        if layer in SPLIT_COLUMNS and k % (size * group):
            fits = [
                g
                for g in GROUP_SIZES
                if g < group
                and all(
                    shape[1] % (size * g) == 0
                    for other, shape in linears.items()
                    if other.split(".")[-2] in SPLIT_COLUMNS
                )
            ]
            return f"the {k} columns of {name} do not split into {size} parts of whole groups of {group}" + (
                f"; group_size {fits[0]} would" if fits else ""
            )
        if layer not in (*SPLIT_COLUMNS, "k_proj", "v_proj") and n % (size * VLLM_UNIT):
            return f"the {n} rows of {name} do not split into {size} parts of a multiple of {VLLM_UNIT}"
    return None


def check_layout(job: Job, bits: int) -> int:
    """Refuse models and shapes that the layout cannot hold; resolve the group size; return the bytes needed."""
    source = job.source
    skeleton = open_skeleton(source.config)
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    stacked = [n for n, p in skeleton.blocks.named_parameters() if p.ndim > 2]
    if stacked:
        raise UnsupportedError(
            f"the architecture {source.architecture!r} keeps stacked experts ({stacked[0]}), which this layout cannot "
            f"hold. {instead(source)}"
        )
    group_size = resolve_group_size(job.options.group_size, linears)
    unit = codes_per_unit(bits)
    for name, (n, k) in linears.items():
        if n % unit or k % unit:
            raise UnsupportedError(
                f"{name} has {n} x {k} weights; {bits}-bit words need multiples of {unit} in both. {instead(source)}"
            )
    job.resolved["group_size"] = group_size
    tell_engines(job, linears, group_size)
    quantized = sum(n * k for n, k in linears.values())
    group = group_size if isinstance(group_size, int) and group_size > 0 else min(k for _, k in linears.values())
    return int(quantized * (bits + 24 / group) / 8 + (source.parameters - quantized) * 2 + 50_000_000)


def add_layer(writer: CheckpointWriter, name: str, weight: GroupedWeight) -> None:
    """Pack one layer and add its four tensors; `name` is the weight's name."""
    stem = name.removesuffix("weight")
    writer.add(stem + "qweight", pack_rows(weight.codes.T, weight.bits))
    writer.add(stem + "qzeros", pack_columns(weight.zeros.T - 1, weight.bits))
    writer.add(stem + "scales", weight.scales.T.to(torch.float16))
    writer.add(stem + "g_idx", weight.g_idx.to(torch.int32))


def write_layout(
    job: Job,
    bits: int,
    settings: dict[str, Any],
    layers: Callable[[CheckpointWriter], Iterator[tuple[str, GroupedWeight]]],
) -> None:
    """Write the whole checkpoint: quantized `layers` as they come, everything else in float16.

    `layers(writer)` starts after the blocks that `writer.finished` counts, and calls `writer.finish_block` when it
    is asked for a layer of the next block: what was yielded has been written by then.
    """
    group_size = job.resolved["group_size"]
    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "checkpoint_format": "gptq",
        "lm_head": False,
        **settings,
    }
    skeleton = open_skeleton(job.source.config)
    with checkpoint(job.folder, job.source, quantization, "float16") as writer:
        for name, weight in layers(writer):
            add_layer(writer, name, weight)
            job.count(f"int{bits}")
        add_others(job, writer, skeleton)
    text = json.dumps(quantization, indent=2, sort_keys=True) + "\n"
    (job.folder / "quantize_config.json").write_text(text, encoding="utf-8")


def add_others(job: Job, writer: CheckpointWriter, skeleton: Skeleton) -> None:
    """Add the parameters that `writer` does not have yet, quantized or not, as float16, some rows at a time."""
    there = writer.names()
    for name in skeleton.parameter_names():
        if name not in there and name.removesuffix("weight") + "qweight" not in there:
            rows = rows_of(job.source, skeleton, name)
            pieces = (to_float16(job, name, torch.from_numpy(piece)) for _, piece in rows.pieces(PIECE))
            writer.add_pieces(name, DTYPE, rows.shape, pieces)
            job.count("float16")


def to_float16(job: Job, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Round to float16; values beyond its range are refused, since they would become infinite."""
    small = tensor.to(DTYPE)
    if not bool(torch.isfinite(small).all()):
        raise UnsupportedError(f"{name} of {job.source.model} has values beyond float16's range (65504)")
    return small


def read_layout(artifact: Artifact) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    """Read a checkpoint in this layout: quantized layers under their weight name, the rest as stored."""
    names, get = stored_tensors(artifact)
    config = json.loads((artifact.folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    for name in names:
        stem, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            yield stem + ".weight", stored_layer(get, stem + ".weight", int(config["bits"]))
        elif leaf not in ("qzeros", "scales", "g_idx"):
            yield name, get(name)


def stored_layer(get: Callable[[str], torch.Tensor], name: str, bits: int) -> GroupedWeight:
    """Unpack the layer whose weight is called `name`; `get` reads one stored tensor."""
    stem = name.removesuffix("weight")
    zeros = unpack_columns(get(stem + "qzeros"), bits) + 1
    return GroupedWeight(
        codes=unpack_rows(get(stem + "qweight"), bits).T.contiguous(),
        scales=get(stem + "scales").T.contiguous(),
        zeros=zeros.T.contiguous(),
        g_idx=get(stem + "g_idx").to(torch.int64),
        bits=bits,
    )


def layers_of(writer: CheckpointWriter, bits: int, prefix: str) -> dict[str, GroupedWeight]:
    """The quantized layers whose names begin with `prefix` as they are in `writer`, by weight name."""
    names = sorted(name for name in writer.names() if name.startswith(prefix) and name.endswith(".qweight"))
    weights = [name.removesuffix("qweight") + "weight" for name in names]
    return {name: stored_layer(writer.get, name, bits) for name in weights}


def finished_block(writer: CheckpointWriter, index: int, prefix: str, bits: int) -> dict[str, torch.Tensor] | None:
    """The weights (N, K) float32 of block `index` as an earlier, interrupted run has written them, or None."""
    if index >= writer.finished:
        return None
    return {name: layer.dense() for name, layer in layers_of(writer, bits, prefix).items()}
