"""Scales of an FP8 key-value cache, calibrated on the finished model.

A layer has one scale for its keys (behind the rotary embedding) and one for its values: the largest absolute value on
the calibration text, divided by 448, the largest number of E4M3. llm-compressor computes the same.
"""

from __future__ import annotations

from contextlib import closing

import torch
from pydantic import Field
from torch import nn

from quantkit.calibration.passes import Passes, SourceValues, embed
from quantkit.calibration.tokens import tokens_of
from quantkit.calibration.walk import own_sequences, written_block
from quantkit.contracts.format import Layout, TensorWriter
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.run import Run
from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.attention import change_keys_and_values
from quantkit.numerics.quantized_weight import FLOAT8_TOP
from quantkit.records.recipe import Strict


class WithKvScales(Strict):
    """Option of methods that write linear layers."""

    kv_scales: bool = Field(
        False, description="calibrate scales of an FP8 key-value cache, for --format compressed-tensors"
    )


def add_kv_scales(job: CheckedJob[Strict, Layout], run: Run, writer: TensorWriter) -> None:
    """Pass the calibration text through the blocks in `writer`, and write the scales, if the layout has any."""
    if not job.checked.plan.kv_scales:
        return
    skeleton, device = job.skeleton, torch.device(job.device)
    names = {module: name for name, module in skeleton.model.named_modules()}
    largest: dict[str, torch.Tensor] = {}  # (2,): of keys and values

    def record(attention: nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen, name = torch.stack([key.abs().amax(), value.abs().amax()]), names[attention]
        largest[name] = seen.maximum(largest.get(name, seen))
        return key, value

    ids, _ = own_sequences(tokens_of(job).ids, 0, job.shards)
    path = run.folder / "activations.offload"
    values = SourceValues(job.source, skeleton)
    inputs = embed(values, skeleton, torch.from_numpy(ids), device, path, job.offload_bytes)
    passes, blocks = Passes(job, job.batch_tokens), len(skeleton.blocks)
    undo = change_keys_and_values(skeleton.model, record)
    try:
        with closing(inputs), run.progress.step("key-value scales: blocks", blocks) as advance:
            for index in range(blocks):
                with passes.block(index, written_block(writer, skeleton.block_prefix(index)).get):
                    passes.forward(index, inputs, inputs)
                advance()
    finally:
        undo()
    if not largest:
        raise UnsupportedError(
            f"the blocks of {job.source.architecture!r} cache no keys and values: leave kv_scales out"
        )
    of_ranks = torch.zeros(job.shards.size, len(largest), 2, device=device)
    of_ranks[job.shards.rank] = torch.stack(list(largest.values()))
    job.shards.sum(of_ranks)
    scales = of_ranks.amax(0).cpu() / FLOAT8_TOP
    for name, scale in zip(largest, scales.where(scales != 0, torch.ones(())), strict=True):
        if not bool(scale.isfinite().all()):
            raise SourceError(f"{job.source.model}: keys or values of {name} are not finite: leave kv_scales out")
        writer.add_kv_scales(name, *scale)
