"""Estimate how much changing one tensor moves the model's next-token distribution, to second order.

For a small change of the weights, the Kullback-Leibler divergence from the source is half the quadratic form of the
Fisher information in the change (Amari, Natural Gradient Works Efficiently in Learning, 1998). For a tensor's change D,
the estimate is half the mean over tokens of (sum of dL/dW * D)^2. L is the negative log-likelihood of a token drawn
from the model's own distribution; dL/dW is the token's part of the gradient, (dL/dy) x^T for a layer y = W x. Cross
terms between tokens and between tensors are ignored, so estimates of several tensors can be added.

One decoder block is in memory at a time: the forward pass stores each block's inputs in a file, and the backward pass
runs each block again. A layer's inputs and gradients are in memory while its changes are tried, one by one. Estimates
are cached: another choice of bits for the same model and text computes nothing again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations, Store
from quantkit.calibration.passes import Passes, SourceValues, embed
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.method import CheckedJob, Shapes
from quantkit.contracts.run import Run
from quantkit.errors import SourceError
from quantkit.models.output_head import load_head
from quantkit.models.skeleton import weight_name
from quantkit.numerics.matmul import product
from quantkit.records.recipe import CalibrationSpec
from quantkit.system.files import cache_folder, replace_text
from quantkit.system.memory import trim_heap

VERSION = 4  # of the estimate; a new version invalidates cached scores
SEQUENCES = 16  # calibration sequences used
BATCH_TOKENS = 2048
HEAD_TOKENS = 256  # tokens whose logits are in memory
DENSE_LAYERS = 16  # a block with more has mostly experts' layers, of which a token uses few
TABLE_ROWS = 64  # rows of a per-block input table changed at a time
SLAB_ELEMENTS = 1 << 22  # elements of a head changed at a time
FLOAT32 = 4  # bytes

Scores = dict[str, dict[str, float]]
Make = Callable[[str, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Changes:
    """Changes of a tensor to try: `kinds`, and `make(kind, weight, importance)`, which returns the changed weight.

    Weight and result are (N, K) float32; importance is the mean square of each input, (K,) float32. For the embedding
    and the head it is None, and some rows are passed at a time, so a row's change must depend on that row alone.
    `rows`: number of a linear layer's rows to try, which represent all (None: try all). If rows are rounded
    independently, the effects of their errors on a token are independent, so their squares add up.
    """

    kinds: tuple[str, ...]
    make: Make
    rows: int | None = None

    def tried(self, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a layer to try, (n,) int64, and how many rows each represents, (n,) float32.

        `slopes` (N,) float32 are the sums of squared gradients of the loss w.r.t. each output. Half of the tried rows
        have the largest slopes; the others are spread evenly over the rest.
        """
        order, count = slopes.argsort(descending=True), len(slopes)
        if self.rows is None or count <= self.rows:
            return torch.arange(count, device=slopes.device), torch.ones(count, device=slopes.device)
        first = self.rows // 2
        step = -(-(count - first) // (self.rows - first))
        others = order[first + step // 2 :: step]
        share = torch.full((len(others),), (count - first) / len(others), device=slopes.device)
        return torch.cat([order[:first], others]), torch.cat([torch.ones(first, device=slopes.device), share])


Propose = Callable[[str], Changes | None]


def kept_sensitivities(
    job: CheckedJob, run: Run, kinds: Mapping[str, tuple[str, ...]], make: Make, maker: str, rows: int | None = None
) -> Scores:
    """Return the estimates of `sensitivities` for the `kinds` of each tensor, from the user's cache if possible.

    `maker` identifies everything except the kind that affects `make`; `rows`: see `Changes`. Raises SourceError if an
    estimate is missing or not finite.
    """
    path = _kept_at(job, f"{maker}, {rows} rows")
    cached = read_scores(path)
    if all(set(kinds[name]) <= set(cached.get(name, ())) for name in kinds):
        return cached
    scores = sensitivities(job, run, lambda name: Changes(kinds[name], make, rows) if name in kinds else None)
    scores = {name: cached.get(name, {}) | row for name, row in scores.items()}
    if missing := [name for name in kinds if name not in scores]:
        raise SourceError(f"{job.source.model}: no sensitivity was measured for {missing[0]}")
    if broken := [name for name, row in scores.items() if not all(map(math.isfinite, row.values()))]:
        raise SourceError(f"{job.source.model}: the sensitivity of {broken[0]} is not finite; its values overflow.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(scores), shared=True)
    return scores


def read_scores(path: Path) -> Scores:
    """Return the cached scores in a file; an empty dict if it is missing or has a value that is not a finite number."""
    try:
        return TypeAdapter(dict[str, dict[str, FiniteFloat]]).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError):
        return {}


def _kept_at(job: CheckedJob, maker: str) -> Path:
    """Return the path of the cache file for this source, calibration text and `maker`."""
    digest = hashlib.sha256()
    for part in (VERSION, SEQUENCES, maker, job.recipe.seed, sorted(job.source.hashes.items())):
        digest.update(f"{part}\n".encode())
    digest.update(tokens_of(job).digest.encode())
    return cache_folder() / "sensitivity" / f"{digest.hexdigest()[:32]}.json"


def tokens_measured(spec: CalibrationSpec) -> int:
    """Return the number of calibration tokens that the estimates use, at most."""
    return min(SEQUENCES, spec.sequences) * spec.length


def work_bytes(spec: CalibrationSpec, blocks: int, hidden: int, vocabulary: int = 0, inputs: int = 0) -> int:
    """Return the bytes of the measurement's temporary files, which store each block's inputs.

    `vocabulary` (rows of the head, if its changes are tried) adds the gradients w.r.t. the logits; `inputs` adds that
    many values per block and token of a per-block token table.
    """
    return ((blocks + 1) * hidden + vocabulary + blocks * inputs) * tokens_measured(spec) * DTYPE.itemsize


def peak_bytes(spec: CalibrationSpec, shapes: Shapes, with_head: bool = False) -> dict[str, int]:
    """Return the peak memory in bytes by phase: a block with its layers' inputs and gradients, and the output head.

    `with_head`: changes of the embedding and the head are tried, too.
    """
    tokens = tokens_measured(spec)
    layers = sorted((rows + columns for rows, columns in shapes.layers), reverse=True)[:DENSE_LAYERS]
    batch = min(tokens, BATCH_TOKENS)
    passing = batch * FLOAT32 * (4 * shapes.tallest + 8 * shapes.states * shapes.hidden + 4 * shapes.widest)
    block = DTYPE.itemsize * (2 * shapes.block_parameters + tokens * sum(layers)) + shapes.reading
    head = DTYPE.itemsize * shapes.vocabulary * shapes.hidden
    return {
        "measuring sensitivities": block + max(passing, 10 * FLOAT32 * shapes.largest_layer),
        # With a changed head: more copies of the logits, and memory that the allocator keeps of them (measured).
        "the head's gradients": (4 if with_head else 2) * head
        + (10 if with_head else 4) * FLOAT32 * HEAD_TOKENS * shapes.vocabulary
        + shapes.reading_outside,
    }


def sensitivities(job: CheckedJob, run: Run, propose: Propose) -> Scores:
    """Return the estimated divergence in nats per token, by tensor (name in the skeleton) and kind of change.

    `propose(name)` returns the changes of a tensor to try, or None. It is called for the blocks' linear layers, the
    token embedding, the output head, and a table of per-block token inputs. The first `SEQUENCES` sequences of the
    calibration text are used.
    """
    ids = torch.from_numpy(tokens_of(job).ids[:SEQUENCES])
    device, blocks = torch.device(job.device), len(job.skeleton.blocks)
    title, path = f"{job.method.name}: measuring sensitivities", run.folder / "flows.offload"
    with ExitStack() as stack, run.progress.step(title, 2 * blocks + 1, work=True) as advance:
        first = embed(SourceValues(job.source, job.skeleton), job.skeleton, ids, device, path)
        flows = [stack.enter_context(closing(first))]
        measured = stack.enter_context(closing(_Measurement(job, propose, ids, path)))
        for index in range(blocks):
            flows.append(stack.enter_context(closing(first.like(path))))
            measured.forward(index, flows[index], flows[index + 1])
            advance()
        slopes = flows.pop()
        measured.head(slopes)
        trim_heap()
        advance()
        for index in reversed(range(blocks)):
            measured.backward(index, flows.pop(), slopes)
            trim_heap()
            advance()
        measured.embedding(slopes)
        measured.table()
    trim_heap()
    return measured.scores()


class _Measurement:
    """A forward and a backward pass that record each change's effect on every token, by tensor and kind."""

    def __init__(self, job: CheckedJob, propose: Propose, ids: torch.Tensor, path: Path) -> None:
        self._job, self._skeleton, self._propose, self._ids, self._path = job, job.skeleton, propose, ids, path
        self._passes = Passes(job, BATCH_TOKENS)
        self._device, model = self._passes.device, job.skeleton.model
        # Names of the weights, equal if they are tied.
        self._embedding = weight_name(model, model.get_input_embeddings())
        self._head = weight_name(model, model.get_output_embeddings())
        table = _input_table(model)
        self._table = table if table is not None and propose(table.name) is not None else None
        self._table_slopes: list[Store] = []  # gradients by each block's table inputs, (tokens, width)
        self._effects: dict[str, dict[str, torch.Tensor]] = {}  # tensor -> kind -> (tokens,) float32

    def close(self) -> None:
        for store in self._table_slopes:
            store.close()

    def scores(self) -> Scores:
        """Return half the mean square effect over all tokens; tokens that an expert does not see count as zero."""
        count = self._ids.numel()
        return {
            name: {kind: float(effect.double().square().sum()) / count / 2 for kind, effect in kinds.items()}
            for name, kinds in self._effects.items()
        }

    def forward(self, index: int, inputs: Activations, outputs: Activations) -> None:
        with self._passes.block(index):
            self._passes.forward(index, inputs, outputs)

    def head(self, states: Activations) -> None:
        """Replace the final hidden states with gradients of the drawn tokens' loss w.r.t. them; try the head's changes.

        The gradients w.r.t. the logits, which all these changes need, are in a temporary file meanwhile.
        """
        head = load_head(self._job.source, self._skeleton, self._device, DTYPE)
        changes = self._propose(self._head)
        generator = torch.Generator(self._device).manual_seed(self._job.recipe.seed)
        sequences, length, _ = states.shape
        starts, rows = range(0, length, HEAD_TOKENS), min(HEAD_TOKENS, length)
        count = 0 if changes is None else sequences * len(starts)
        inputs: list[torch.Tensor] = []
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        with closing(Activations(count, rows, len(head.layer.weight), self._path)) as given:
            with head.layer.register_forward_hook(lambda _module, args, out: seen.append((args[0], out))):
                for sequence in range(sequences):
                    hidden = states.read(sequence, sequence + 1).squeeze(-3).to(self._device)
                    slope = torch.empty_like(hidden)
                    for number, at in enumerate(starts, sequence * len(starts)):
                        part = ..., slice(at, at + HEAD_TOKENS), slice(None)
                        x = hidden[part].clone().requires_grad_()
                        with torch.enable_grad():
                            logits = head.logits(x, self._passes.as_tuple).to(torch.float32)
                            picked = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
                            loss = -logits.log_softmax(-1).gather(1, picked).sum()
                        [(before, out)] = seen
                        seen.clear()
                        slope[part], by_logits = torch.autograd.grad(loss, [x, out])
                        if changes is not None:
                            inputs.append(before.detach().flatten(0, -2))
                            by_logits = by_logits.flatten(0, -2)
                            given.write(number, nn.functional.pad(by_logits, (0, 0, 0, rows - len(by_logits)))[None])
                        del logits, loss, out, by_logits
                    states.write(sequence, slope.unsqueeze(-3))
            if changes is not None:
                self._try_head(changes, head.layer.weight.detach(), inputs, given)

    def _try_head(self, changes: Changes, weight: torch.Tensor, inputs: list[torch.Tensor], given: Activations) -> None:
        """Record the effect of each kind of change of the head; `inputs`: (n, D), `given`: gradients w.r.t. logits."""
        for kind in changes.kinds:
            change = torch.empty(weight.shape, dtype=DTYPE, device=self._device)
            step = max(1, SLAB_ELEMENTS // weight.shape[1])
            for some, to in zip(weight.split(step), change.split(step), strict=True):
                wide = some.to(torch.float32)
                to.copy_(changes.make(kind, wide, None) - wide)
            effects = []
            for number, x in enumerate(inputs):
                slope = given.read(number, number + 1)[0, : len(x)].to(self._device, torch.float32)
                effects.append((product(x, change).to(torch.float32) * slope).sum(-1).cpu())
            self._add(self._head, kind, effects)
            trim_heap()

    def backward(self, index: int, inputs: Activations, slopes: Activations) -> None:
        """Backpropagate `slopes` through block `index`, from its outputs to its inputs; try its layers' changes."""
        linears, table = self._skeleton.linears_of(index), self._table
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
        given: dict[str, list[torch.Tensor]] = {name: [] for name in (*linears, *([table.name] if table else []))}
        outputs: dict[str, torch.Tensor] = {}  # of the running batch

        def note(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
            if out.requires_grad:  # an indexer only selects tokens, so no gradient flows through it
                seen[name].append(x.detach().reshape(-1, x.shape[-1]))
                outputs[name] = out

        with self._passes.block(index) as block:
            leaves = nullcontext() if table is None else _as_leaves(block, table.width, outputs, table.name)
            with _watched(linears, note), leaves:
                for gradients in self._passes.backward(index, inputs, slopes, outputs.values()):
                    for name, gradient in zip(outputs, gradients, strict=True):
                        given[name].append(gradient.reshape(-1, gradient.shape[-1]))
                    outputs.clear()
            if table is not None:
                of_table = torch.cat(given.pop(table.name))
                store = Store(len(of_table), (*of_table.shape[1:],), of_table.dtype, self._path)
                store.write(0, of_table)
                self._table_slopes.insert(0, store)
            for name, layer in linears.items():
                changes = self._propose(name)
                if changes is None or not given[name]:
                    continue
                squares = sum(x.to(torch.float32).square().sum(0) for x in seen[name]) / self._ids.numel()
                rows, shares = changes.tried(torch.stack([x.float().square().sum(0) for x in given[name]]).sum(0))
                slopes_of_rows = [slope.index_select(1, rows) for slope in given.pop(name)]
                weight = layer.weight.detach().index_select(0, rows).to(torch.float32)
                for kind in changes.kinds:
                    change = changes.make(kind, weight, torch.as_tensor(squares)) - weight
                    change = (change * shares.sqrt()[:, None]).to(DTYPE)
                    pairs = zip(seen[name], slopes_of_rows, strict=True)
                    self._add(name, kind, [(product(x, change).float() * slope.float()).sum(-1) for x, slope in pairs])
                del seen[name]

    def embedding(self, slopes: Activations) -> None:
        """Try the changes of the token embedding; if it is tied to the head, the head's effect is added.

        Only the use as the (first) hidden states counts.
        """
        name = self._embedding
        changes = self._propose(name)
        if changes is None:
            return
        rows, places = self._ids.unique(return_inverse=True)
        values = SourceValues(self._job.source, self._skeleton)
        weight = values.rows(name, rows.tolist()).to(self._device, torch.float32)
        there = self._effects.get(name, {})
        for kind in changes.kinds:
            change = changes.make(kind, weight, None) - weight
            parts = []
            for start, stop in slopes.batches(BATCH_TOKENS):
                slope = slopes.read(start, stop).to(self._device, torch.float32)
                slope = slope[0] if slopes.states else slope
                parts.append((change[places[start:stop].to(self._device)] * slope).sum(-1).reshape(-1))
            effect = torch.cat(parts).cpu()
            self._effects.setdefault(name, {})[kind] = effect + there[kind] if kind in there else effect

    def table(self) -> None:
        """Try the changes of the per-block token table, in the rows of occurring tokens."""
        table = self._table
        changes = None if table is None else self._propose(table.name)
        if table is None or changes is None:
            return
        ids = self._ids.reshape(-1)  # ids beyond the table use the first row, as in transformers
        rows, places = torch.where(ids < table.rows, ids, 0).unique(return_inverse=True)
        values = SourceValues(self._job.source, self._skeleton)
        effects = {kind: torch.zeros(len(places)) for kind in changes.kinds}
        for start in range(0, len(rows), TABLE_ROWS):
            some = rows[start : start + TABLE_ROWS]
            weight = values.rows(table.name, some.tolist()).to(self._device, torch.float32)
            at = ((places >= start) & (places < start + len(some))).nonzero().flatten()
            made = {kind: changes.make(kind, weight, None) - weight for kind in changes.kinds}
            for part in at.split(TABLE_ROWS):
                slopes = [store.select(part.tolist()) for store in self._table_slopes]
                slope = torch.cat(slopes, -1).to(self._device, torch.float32)
                for kind, change in made.items():
                    effects[kind][part] = ((change[places[part] - start] * slope).sum(-1) * table.factor).cpu()
        self._effects[table.name] = effects

    def _add(self, name: str, kind: str, parts: list[torch.Tensor]) -> None:
        self._effects.setdefault(name, {})[kind] = torch.cat(parts).cpu()


@contextmanager
def _watched(linears: dict[str, nn.Linear], note: Callable[[str, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Call `note` with (weight name, inputs, outputs) each time that one of the layers runs."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, args, out: note(name, args[0], out)

    with ExitStack() as stack:
        for name, layer in linears.items():
            stack.enter_context(layer.register_forward_hook(hook(name)))
        yield


@dataclass(frozen=True)
class _InputTable:
    """A token table from which each block gets its part of a row, in addition to the hidden states.

    Gemma 3n and 4 (transformers: models/gemma3n and models/gemma4) look a token up in one table for all blocks,
    multiply the row by `factor`, add a projection of the token's embedding, and pass each block its `width` values.
    """

    name: str
    rows: int
    width: int
    factor: float


def _input_table(model: Any) -> _InputTable | None:
    """Return the model's table of per-block token inputs, or None if it has none."""
    width = int(getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0) or 0)
    found = [(name, part) for name, part in model.named_modules() if name.endswith("embed_tokens_per_layer")]
    if not width or not found:
        return None
    [(name, table)] = found
    return _InputTable(f"{name}.weight", len(table.weight), width, math.sqrt(width / 2))


@contextmanager
def _as_leaves(block: nn.Module, width: int, outputs: dict[str, torch.Tensor], name: str) -> Iterator[None]:
    """Make the block's table input (B, T, width) a leaf of the autograd graph, and put it into `outputs[name]`."""

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim != 3 or value.shape[-1] != width:
            return value
        outputs[name] = value.detach().requires_grad_()
        return outputs[name]

    def hook(
        _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, *others = args
        return (hidden, *map(given, others)), {key: given(value) for key, value in kwargs.items()}

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
