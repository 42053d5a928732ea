"""Tensors go when the last name for them goes: none waits for the garbage collector, which does not see their size."""

import gc

import pytest
import torch
from gguf_files import slow_but
from tiny_llama import converted

REFINED = {"refine": True, "refine_steps": 2, "tune_steps": 2}
CASES = {
    "gptq": ("gptq", 4, {}),
    "gptq refined": ("gptq", 4, REFINED),
    "gptq auto": ("gptq", "auto", {"target_bpw": 8.0}),
    "awq": ("awq", 4, {}),
    "int8": ("int8", None, {}),
    "gguf": ("gguf", "Q4_K_M", {"rounding": "gptq"}),
    "gguf auto": ("gguf", "auto", {"target_bpw": 10.0, "rounding": "gptq"}),
}
QUICK = ("gptq refined", "awq", "gguf auto")


@pytest.fixture
def left():
    """What gives the tensors, of those made since the test's beginning, that only the garbage collector can free."""

    def find():
        gc.collect()
        tensors = [thing for thing in gc.garbage if issubclass(type(thing), torch.Tensor) and id(thing) not in before]
        return [tensor for tensor in tensors if tensor.device.type != "meta"]

    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield find
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_no_tensor_waits_for_the_garbage_collector(case, tiny_llama, tmp_path, left):
    method, bits, options = CASES[case]
    converted(tiny_llama, tmp_path / "out", method, bits, **options)
    assert [tuple(tensor.shape) for tensor in left()] == []
