"""Calibration: one walk over the decoder blocks in order, with one block and its activations in memory at a time.

`walk` yields each block with its weights loaded. The method asks it for statistics of its linear layers' inputs,
may replace weights by quantized ones, and the walk then computes the next block's inputs with the block as it is
now, so that later blocks are calibrated on what they will really see. With `exact` a second stream of activations
goes through the unquantized blocks beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quantkit.activations import DTYPE, Activations
from quantkit.core.gram import Gram
from quantkit.errors import SourceError
from quantkit.linears import expert_of, same_of_every_expert
from quantkit.registry import Job
from quantkit.skeleton import Skeleton, load, open_skeleton, set_parameter, source_name
from quantkit.source import Source
from quantkit.text import calibration_tokens

BATCH_TOKENS = 4096
FEW_TOKENS = 128  # an expert that saw fewer is calibrated on what all experts of its block saw

Restore = Callable[[int, str], dict[str, torch.Tensor] | None]


class _Enough(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early: the last input that was asked for has been seen."""


class _Recorder(nn.Module):
    """Stands for a block: keeps the arguments it is called with and passes the hidden states through.

    They are passed on in a tuple: some models take the first of what a block returns, some all of it. The last block
    ends the forward pass.
    """

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.hidden = torch.empty(0)

    def forward(self, hidden: torch.Tensor | tuple[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        self.hidden, self.args, self.kwargs = hidden[0] if isinstance(hidden, tuple) else hidden, args, kwargs
        if self.last:
            raise _Enough
        return (self.hidden,)


@dataclass(frozen=True)
class Stage:
    """Linear layers `names` that get the same input: its H = E[x x^T] (K, K) float32 over `tokens` inputs.

    cross is E[(exact - x) x^T] (K, K) float32, exact being the input in the unquantized model, or None.
    """

    names: list[str]
    hessian: torch.Tensor
    cross: torch.Tensor | None
    tokens: int


@dataclass
class Block:
    """Block `index` with real weights. `linears` are its linear layers by full weight name.

    `exact` and `exact_inputs` are the unquantized block and what flows into it there, where the walk keeps them.
    `few` is told each layer of an expert that saw too few tokens; `tokens` counts those of the latest `hessians`.
    """

    index: int
    prefix: str
    module: nn.Module
    inputs: Activations
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    skeleton: Skeleton
    device: torch.device
    linears: dict[str, nn.Linear] = field(default_factory=dict)
    exact: nn.Module | None = None
    exact_inputs: Activations | None = None
    pause_bytes: int = 1 << 31
    few: Callable[[str], None] = lambda _name: None
    tokens: dict[str, int] = field(default_factory=dict)
    _shared: dict[str, Gram] = field(default_factory=dict)
    _done: bool = False
    _exact_done: bool = False

    def batches(self) -> list[tuple[int, int]]:
        """Bounds of the sequences that go through the block together."""
        step = max(1, BATCH_TOKENS // self.inputs.shape[1])
        return [(start, min(start + step, len(self.inputs))) for start in range(0, len(self.inputs), step)]

    def call(self, module: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D) through `module`, the block or another with the same arguments."""
        args = (_for_batch(value, len(hidden)) for value in self.args)
        kwargs = {key: _for_batch(value, len(hidden), key) for key, value in self.kwargs.items()}
        out = module(hidden.to(self.device), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, told: Callable[[int, torch.Tensor], None] = lambda _start, _out: None) -> None:
        """Run the block over all calibration inputs, handing (first sequence, outputs) of each batch to `told`."""
        with torch.no_grad():
            for start, stop in self.batches():
                try:
                    out = self.call(self.module, self.inputs.read(start, stop))
                except _Enough:
                    continue
                told(start, out)

    def stages(self) -> list[list[str]]:
        """Linear layers in the order of execution; those that get the same input stand together."""
        seen: list[tuple[torch.Tensor, list[str]]] = []

        def note(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                for tensor, names in seen:
                    if tensor is args[0]:
                        names.append(name)
                        return
                seen.append((args[0], [name]))

            return hook

        handles = [module.register_forward_pre_hook(note(name)) for name, module in self.linears.items()]
        with torch.no_grad():
            self.call(self.module, self.inputs.read(0, 1))
        for handle in handles:
            handle.remove()
        return [names for _, names in seen]

    def collect(self, names: list[str], gather: Callable[[str, torch.Tensor], None]) -> None:
        """Hand (weight name, inputs (tokens, K)) of the named layers to `gather`, batch by batch.

        `names` are in the order of execution; the block runs only as far as the last one's input.
        """
        handles = []
        for name in names:

            def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                gather(name, args[0].reshape(-1, args[0].shape[-1]))
                if name == names[-1]:
                    raise _Enough

            handles.append(self.linears[name].register_forward_pre_hook(hook))
        try:
            self.forward()
        finally:
            for handle in handles:
                handle.remove()

    def hessians(self, stages: list[list[str]]) -> dict[str, torch.Tensor]:
        """H = mean of x x^T over all calibration tokens, (K, K) float32, for each stage under its first name.

        Raises SourceError where the inputs of a layer are not finite.
        """
        grams = {names[0]: self._gram(names[0]) for names in stages}
        self.collect(list(grams), lambda name, x: grams[name].add(x))
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        return {name: self._stage([name], gram).hessian for name, gram in grams.items()}

    def visit(self, visitor: Callable[[Stage], None], *, keep_outputs: bool = True) -> None:
        """Stop before each stage of the block, in the order of execution, and hand its statistics to `visitor`.

        The visitor may replace the stage's weights; what follows in the block then runs with the new ones (true
        sequential). All batches wait at the stage with what they have computed so far, unless that is more than
        `pause_bytes`: then the block starts again for each stage. With `keep_outputs` the next block's inputs are
        ready afterwards.
        """
        stages = self.stages()
        if self._paused_bytes() <= self.pause_bytes:
            self._visit_paused(stages, visitor, keep_outputs)
        else:
            self._visit_again(stages, visitor)

    def finish(self) -> None:
        """Turn the inputs of this block into those of the next one, in both streams."""
        if not self._done:
            self.forward(self.inputs.write)
            if self.exact is not None:
                self.targets()
        self._done = True

    def targets(self) -> Activations:
        """The outputs of the unquantized block, which are the exact stream's inputs of the next one."""
        assert self.exact is not None
        assert self.exact_inputs is not None
        if not self._exact_done:
            with torch.no_grad():
                for start, stop in self.batches():
                    self.exact_inputs.write(start, self.call(self.exact, self.exact_inputs.read(start, stop)))
        self._exact_done = True
        return self.exact_inputs

    def call_with(self, parameters: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D) through the block with other values of some parameters, given by full name."""
        named = {name.removeprefix(self.prefix): value for name, value in parameters.items()}
        return self.call(lambda *args, **kwargs: torch.func.functional_call(self.module, named, args, kwargs), hidden)

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Put another parameter in place; later statistics and blocks see it."""
        set_parameter(self.module, name.removeprefix(self.prefix), value.to(self.device, DTYPE))

    def _gram(self, name: str, cross: bool = False) -> Gram:
        return Gram(self.linears[name].in_features, self.device, cross)

    def _stage(self, names: list[str], gram: Gram) -> Stage:
        enough = self._enough(names[0], gram)
        shared = enough is not gram
        return Stage(names, _finite(names[0], enough.mean(shared)), enough.cross(shared), gram.tokens)

    def _enough(self, name: str, gram: Gram) -> Gram:
        """The statistics of a layer or, for an expert that saw too few tokens, those of all experts of its block."""
        if expert_of(name) is None or gram.tokens >= FEW_TOKENS:
            return gram
        self.few(name)
        names = same_of_every_expert(name, self.linears)
        if names[0] not in self._shared:
            shared = self._gram(name, self.exact is not None)
            self.collect(names, lambda _, x: shared.add(x, x))
            self._shared[names[0]] = shared
        return self._shared[names[0]]

    def _paused_bytes(self) -> int:
        """What all batches hold at most while they wait: residual, normed input, and the widest layer's input.

        At the last stage, which is the widest, the unquantized stream has left.
        """
        sequences, length, hidden = self.inputs.shape
        # Each token waits in as many experts as it is sent to.
        copies = {True: int(getattr(self.skeleton.model.config, "num_experts_per_tok", 1)), False: 1}
        widest = max((m.in_features * copies[bool(expert_of(n))] for n, m in self.linears.items()), default=0)
        streams = 1 if self.exact is None else 2
        return sequences * length * (streams * 2 * hidden + widest) * DTYPE.itemsize

    def _visit_paused(self, stages: list[list[str]], visitor: Callable[[Stage], None], keep_outputs: bool) -> None:
        scheduler = getcurrent()
        order = {names[0]: i for i, names in enumerate(stages)}

        def hook(at: int) -> Callable[..., None]:
            def stop(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                if getcurrent() is not scheduler:
                    scheduler.switch((at, args[0]))

            return stop

        modules = [(self.module, self.inputs)]
        if self.exact is not None and self.exact_inputs is not None:
            modules.append((self.exact, self.exact_inputs))
        handles = [
            module.get_submodule(name.removeprefix(self.prefix).removesuffix(".weight")).register_forward_pre_hook(
                hook(at)
            )
            for module, _ in modules
            for name, at in order.items()
        ]
        past, step = len(stages), self.batches()[0][1]
        runs: list[list[greenlet]] = []
        waits: list[list[tuple[int, torch.Tensor]]] = []

        def go(b: int, m: int) -> None:
            """Let one batch run on to its next stop; a finished one waits past all stages."""
            waits[b][m] = (-1, torch.empty(0))  # so that its frames alone hold what they still need
            got = runs[b][m].switch()
            waits[b][m] = got if not runs[b][m].dead else (past, got)

        def leave(b: int, m: int) -> None:
            """Let one batch run to the block's end and keep what comes out."""
            while waits[b][m][0] != past:
                go(b, m)
            modules[m][1].write(b * step, waits[b][m][1])
            waits[b][m] = (past, torch.empty(0))

        try:
            with torch.no_grad():
                for start, stop in self.batches():
                    runs.append([greenlet(_later(self, module, store, start, stop)) for module, store in modules])
                    waits.append([(-1, torch.empty(0))] * len(modules))
                for at, names in enumerate(stages):
                    gram = self._gram(names[0], self.exact is not None)
                    for b in range(len(runs)):
                        for m in range(len(modules)):
                            while waits[b][m][0] < at:
                                go(b, m)
                        here = [x.reshape(-1, x.shape[-1]) for i, x in waits[b] if i == at]
                        if waits[b][0][0] == at:
                            # An expert is given other tokens in the two streams.
                            alike = expert_of(names[0]) is None and here[0].shape == here[-1].shape
                            matching = len(here) == len(modules) and alike
                            gram.add(here[0], here[-1] if matching else here[0])
                        del here
                        if at + 1 == past and len(modules) == 2:
                            leave(b, 1)  # nothing waits for the unquantized block any more
                    stage = self._stage(names, gram)
                    del gram
                    visitor(stage)
                    del stage
                self._exact_done = len(modules) == 2
                if keep_outputs:
                    for b in range(len(runs)):
                        leave(b, 0)
                    self._done = True
        finally:
            for handle in handles:
                handle.remove()
            for pair in runs:
                for run in pair:
                    if run:
                        run.throw(GreenletExit)

    def _visit_again(self, stages: list[list[str]], visitor: Callable[[Stage], None]) -> None:
        for names in stages:
            gram = self._gram(names[0], self.exact is not None)
            kept: list[torch.Tensor] = []

            def take(_name: str, x: torch.Tensor, kept: list[torch.Tensor] = kept) -> None:
                kept.append(x)

            for start, stop in self.batches():
                for module, store in [(self.module, self.inputs), (self.exact, self.exact_inputs)]:
                    if module is not None and store is not None:
                        self._run_to(names[0], module, store.read(start, stop), take)
                if kept:
                    alike = expert_of(names[0]) is None and kept[0].shape == kept[-1].shape
                    gram.add(kept[0], kept[-1] if alike else kept[0])
                kept.clear()
            visitor(self._stage(names, gram))

    def _run_to(
        self, name: str, module: nn.Module, hidden: torch.Tensor, take: Callable[[str, torch.Tensor], None]
    ) -> None:
        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            take(name, args[0].reshape(-1, args[0].shape[-1]))
            raise _Enough

        linear = module.get_submodule(name.removeprefix(self.prefix).removesuffix(".weight"))
        handle = linear.register_forward_pre_hook(hook)
        try:
            with torch.no_grad():
                self.call(module, hidden)
        except _Enough:
            pass
        finally:
            handle.remove()


def _later(block: Block, module: nn.Module, store: Activations, start: int, stop: int) -> Callable[[], torch.Tensor]:
    return lambda: block.call(module, store.read(start, stop))


def _finite(name: str, hessian: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(hessian).all()):
        raise SourceError(f"the inputs of {name} are not finite on the calibration text; the model overflows")
    return hessian


def _for_batch(value: Any, size: int, key: str = "") -> Any:
    """Spread arguments that were recorded for one sequence over a batch of `size`."""
    if isinstance(value, torch.Tensor) and key == "alibi" and value.ndim == 3:
        return value.repeat(size, 1, 1)  # (batch * heads, 1, T)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1 and size > 1:
        return value.expand(size, *value.shape[1:])
    if isinstance(value, tuple):
        return tuple(_for_batch(part, size) for part in value)
    return value


def _enter(
    source: Source, skeleton: Skeleton, ids: torch.Tensor, device: torch.device, spill: Callable[[int], Path | None]
) -> tuple[Activations, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Embed (S, T) ids -> hidden states (S, T, D), and record each block's arguments.

    Of the token embedding only the rows of tokens that occur are loaded.
    """
    recorders = [_Recorder(last=i + 1 == len(skeleton.blocks)) for i in range(len(skeleton.blocks))]
    kept = list(skeleton.blocks)
    blocks = skeleton.blocks
    base = skeleton.model.base_model
    for i, recorder in enumerate(recorders):
        blocks[i] = recorder
    embedding = skeleton.model.get_input_embeddings()
    embedding.padding_idx = None  # a row that is perhaps not loaded; it only matters to gradients
    table = embedding.weight
    used, compact = torch.unique(ids, return_inverse=True)
    loaded: list[tuple[str, torch.Tensor]] = []
    for name, parameter in list(base.named_parameters()):
        loaded.append((name, parameter))
        full = source_name(source, skeleton, f"{skeleton.model.base_model_prefix}.{name}")
        value = source.select_rows(full, used.tolist()) if parameter is table else source.tensor(full)
        set_parameter(base, name, value.to(device, DTYPE))
    base.to(device)
    store: Activations | None = None
    with torch.no_grad():
        for i, row in enumerate(compact.to(device)):
            with suppress(_Enough):
                base(input_ids=row[None], use_cache=False)
            hidden = recorders[0].hidden
            if store is None:
                size = len(ids) * hidden.numel() * DTYPE.itemsize
                store = Activations(len(ids), hidden.shape[1], hidden.shape[2], spill(size))
            store.write(i, hidden)
    assert store is not None
    for i, block in enumerate(kept):
        blocks[i] = block
    for name, parameter in loaded:
        set_parameter(base, name, parameter.data)
    return store, [(recorder.args, recorder.kwargs) for recorder in recorders]


def _spill(job: Job, name: str) -> Callable[[int], Path | None]:
    """Where a stream of activations of a given size goes: a file of the work folder beyond the job's limit."""
    return lambda size: job.folder / f"{name}.spill" if size > job.spill_bytes else None


def walk(job: Job, *, exact: bool = False, restore: Restore = lambda _index, _prefix: None) -> Iterator[Block]:
    """Yield the blocks in order, each with its weights; its outputs are computed when the next one is asked for.

    With `exact` the unquantized blocks and their activations are kept beside them. `restore(index, prefix)` may return
    the finished values of a block from an earlier run, by parameter name: it is then passed through, not yielded.
    """
    source = job.source
    device = torch.device(job.device)
    skeleton = open_skeleton(source.config)
    ids, remark = calibration_tokens(source.tokenizer(), job.recipe.calibration, job.recipe.seed)
    job.tell(remark)
    inputs, arguments = _enter(source, skeleton, torch.from_numpy(ids), device, _spill(job, "activations"))
    exact_inputs = None
    if exact:
        exact_inputs = Activations(*inputs.shape, _spill(job, "exact")(inputs.nbytes))
        for start in range(len(inputs)):
            exact_inputs.write(start, inputs.read(start, start + 1))
    few = _few_teller(job, skeleton)
    step = job.progress.step(f"{job.recipe.method}: calibrating blocks", len(skeleton.blocks))
    with closing(inputs), closing(exact_inputs or inputs), step as advance:
        for index, module in enumerate(skeleton.blocks):
            prefix = skeleton.block_prefix(index)
            meta = {name: parameter.data for name, parameter in module.named_parameters()}
            twin = copy.deepcopy(module) if exact else None
            finished = restore(index, prefix) or {}
            for name in meta:
                value = load(source, skeleton, prefix + name).to(device, DTYPE)
                if twin is not None:
                    set_parameter(twin, name, value)
                set_parameter(module, name, finished.get(prefix + name, value).to(device, DTYPE))
            module.to(device)  # its buffers
            if twin is not None:
                twin.to(device)
            linears = {
                name: skeleton.model.get_submodule(name.removesuffix(".weight"))
                for name in skeleton.linears()
                if name.startswith(prefix)
            }
            block = Block(
                index=index,
                prefix=prefix,
                module=module,
                inputs=inputs,
                args=arguments[index][0],
                kwargs=arguments[index][1],
                skeleton=skeleton,
                device=device,
                linears=linears,
                exact=twin,
                exact_inputs=exact_inputs,
                pause_bytes=job.spill_bytes,
                few=few,
            )
            if not finished:
                yield block
            if index + 1 < len(skeleton.blocks):
                block.finish()
            for name, data in meta.items():
                set_parameter(module, name, data)
            advance()


def _few_teller(job: Job, skeleton: Skeleton) -> Callable[[str], None]:
    """Keep one note of the job up to date: how many experts saw too few tokens, those of earlier runs included."""
    every = {expert for name in skeleton.linears() if (expert := expert_of(name))}
    said = f" of {len(every)} experts saw fewer than {FEW_TOKENS} calibration tokens"
    earlier = sum(int(note.partition(" ")[0]) for note in job.notes if said in note)
    found: set[str] = set()

    def tell(name: str) -> None:
        found.add(str(expert_of(name)))
        job.notes[:] = [note for note in job.notes if said not in note]
        job.tell(
            f"{earlier + len(found)}{said}; they are calibrated on what all experts of their block saw. "
            "Give more or more varied text"
        )

    return tell


def importance(job: Job) -> dict[str, torch.Tensor]:
    """Mean squared input of every linear layer in the blocks: weight name -> (K,) float32."""
    found: dict[str, torch.Tensor] = {}
    for block in walk(job):
        stages = block.stages()
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def gather(name: str, x: torch.Tensor, sums: Any = sums, counts: Any = counts) -> None:
            sums[name] = sums.get(name, 0) + x.to(torch.float32).square().sum(0).cpu()
            counts[name] = counts.get(name, 0) + len(x)

        block.collect([names[0] for names in stages], gather)
        for names in stages:
            for name in names:
                found[name] = sums[names[0]] / counts[names[0]]
    return found
