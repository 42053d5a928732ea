"""A pretended GPU: values lie in main memory, and what a GPU would refuse or wait for is refused or counted.

    with pretended_device() as costs:
        convert(model, "awq", 4, out, device="card")

On the device `card:0` an operation that takes a tensor of the processor raises as CUDA does, and so does `numpy()`.
`costs` counts transfers (calls and bytes each way) and waits: whatever needs a value before the next kernel is started.
Built on torch's Python backends for PrivateUse1 (experimental; torch 2.13).
"""

from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)


class _Module(_DummyBackendModule):
    """What torch asks of a device; for other tests there is none."""

    there = False

    def is_available(self):
        return self.there

    def device_count(self):
        return int(self.there)


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self):
        return _Module.there


REAL = torch.accelerator.current_accelerator(check_available=True)  # beside it none can be pretended
if REAL is None:
    _setup_privateuseone_for_python_backend("card", _Module(), _Hook())
NAME = "card" if REAL is None else REAL.type
CARD, CPU = torch.device(NAME, 0), torch.device("cpu")
ATEN = torch.ops.aten
TRANSFERS = {ATEN.copy_.default, ATEN._to_copy.default}
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default}
WAITS = {ATEN._local_scalar_dense.default, ATEN.equal.default}
costs = Counter()


class OnCard(torch.Tensor):
    """A tensor of the device; `value` holds what is in it."""

    @staticmethod
    def __new__(cls, value):
        made = torch.Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            layout=value.layout, device=CARD, requires_grad=value.requires_grad,
        )  # fmt: skip
        made.value = value.detach()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return carried_out(function, args, kwargs or {})


def carried_out(function, args, kwargs):
    """Compute with the values; refuse what mixes devices, and count what costs."""
    if function is ATEN._has_compatible_shallow_copy_type.default:
        return False  # so that `Module.to` makes new parameters
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in given if isinstance(tensor, OnCard)]
    if ours:
        _refuse_mix(function, args, given)
    asked = kwargs.get("device")
    to_card = bool(ours) if asked is None else torch.device(asked).type == "card"
    if function in TRANSFERS:
        source, target = (args[1], args[0]) if function is ATEN.copy_.default else (args[0], None)
        to_card = to_card if target is None else isinstance(target, OnCard)
        if isinstance(source, OnCard) != to_card:
            way = "to the device" if to_card else "to the processor"
            costs[f"transfers {way}"] += 1
            costs[f"bytes {way}"] += source.numel() * source.element_size()
    costs["waits"] += function in WAITS and bool(ours)

    known = {
        id(getattr(tensor, "value", tensor)): tensor for tensor in given
    }  # what an operation may change and return

    def opened(leaf):
        return leaf.value if isinstance(leaf, OnCard) else leaf

    args, kwargs = tree_map(opened, (args, kwargs))
    if to_card and asked is not None:
        kwargs["device"] = CPU
    kwargs.pop("pin_memory", None)
    shapes = [tensor.value.shape for tensor in ours]
    result = function(*args, **kwargs)
    assert shapes == [tensor.value.shape for tensor in ours], f"{function} resizes in place"

    def closed(leaf):
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, OnCard):
            return leaf
        if id(leaf) in known:
            return known[id(leaf)]
        return OnCard(leaf) if to_card and leaf.device == CPU else leaf

    return tree_map(closed, result)


def _refuse_mix(function, args, given):
    others = [t for t in given if not isinstance(t, OnCard) and t.dim() and t.device.type != "meta"]
    if function in TRANSFERS or not others:
        return
    if function in INDEXING and isinstance(args[0], OnCard):
        return  # CUDA takes indices from the processor, and copies them
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two, card:0 and cpu: {function}"
    )


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return carried_out(function, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What does not come as an operation: names of the device, lists, storages, fused attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(_named, (args, kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, OnCard):
            if function is torch.Tensor.tolist:
                costs["waits"] += 1
                return first.value.tolist()
            if function is torch.Tensor.untyped_storage:
                return first.value.untyped_storage()
            if function is functional.scaled_dot_product_attention:
                return _attention(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == CARD:
            return function(*args, **{**kwargs, "device": CPU}).to(CARD)
        return function(*args, **kwargs)


def _named(leaf):
    if isinstance(leaf, str | torch.device) and str(leaf) == "card":
        return CARD
    return leaf


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The composite one: fused kernels are chosen by device."""
    more = {"scale": scale, "enable_gqa": enable_gqa}
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return ATEN._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, None, **more)[0]


@contextmanager
def pretended_device():
    costs.clear()
    with (
        mock.patch.object(_Module, "there", True),
        mock.patch("torch.inference_mode", torch.no_grad),  # it hands on operations whole, and takes no wrappers
        _Functions(),
        _Dispatch(),
    ):
        yield costs


def some_device():
    """The machine's GPU where it has one, else the pretended one; its name is `NAME`."""
    return pretended_device() if REAL is None else nullcontext()
