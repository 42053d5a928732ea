"""4-bit codes of a 16-value table with a scale per block of values, as packed by bitsandbytes (NF4, FP4).

Paper: Dettmers et al., QLoRA, arXiv:2305.14314 (section 3: NF4 and double quantization).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATES = {kind: f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
CODES, NESTED_CODES = 16, 256
HALF = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)  # of FP4: sign, 2 bits of exponent, 1 of mantissa
# Engines always compute with these tables, even if a file has others.
TABLES = {
    "nf4": (  # the paper's appendix E
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*HALF, *(-value for value in HALF)),
}
LARGEST_BLOCK = 1 << 16  # values of a run
PIECE = 1 << 20  # values unpacked at a time


@dataclass(frozen=True)
class NormalFloatWeight:
    """A weight packed by bitsandbytes: `packed` uint8 [N*K/2, 1], two codes per byte, first one high; other `parts`.

    absmax, the block scales: float32 [N*K/64], or with double quantization uint8 codes of the table nested_quant_map
    float32 [256], scaled by nested_absmax float32 [ceil(N*K/64/256)], plus an offset. quant_map: float32 [16]. One of
    `STATES`: uint8, JSON with block size, dtype, shape and nested offset.
    """

    packed: torch.Tensor
    parts: Mapping[str, torch.Tensor]

    @property
    def kind(self) -> str:
        """Return the code table's name, ``nf4`` or ``fp4``."""
        return next((kind for kind, state in STATES.items() if state in self.parts), "nf4")

    @property
    def shape(self) -> tuple[int, int]:
        """Return the weight's shape (N, K) from the state; raise ValueError if it is invalid."""
        rows, columns = self._state()["shape"]
        return rows, columns

    def dense(self) -> torch.Tensor:
        """Dequantize to float32 (N, K) without bitsandbytes; raise ValueError for inconsistent parts."""
        import torch

        state = self._state()
        shape, block = torch.Size(state["shape"]), state["blocksize"]
        values = self._part("quant_map", "float32", CODES)
        if not torch.allclose(values, torch.tensor(TABLES[self.kind]), rtol=0, atol=1e-6):
            raise ValueError(f"its quant_map is not the table of {self.kind}")
        runs = -(-shape.numel() // block)
        if "nested_blocksize" in state:
            nested = state["nested_blocksize"]
            scale = self._part("nested_absmax", "float32", -(-runs // nested)).repeat_interleave(nested)[:runs]
            table = self._part("nested_quant_map", "float32", NESTED_CODES)
            absmax = table[self._part("absmax", "uint8", runs).to(torch.int64)] * scale + state["nested_offset"]
        else:
            absmax = self._part("absmax", "float32", runs)
        packed, count = self.packed.reshape(-1), shape.numel()
        dense = torch.empty(count, dtype=torch.float32)
        step = max(1, PIECE // (2 * block)) * 2 * block  # whole runs, and whole bytes
        for start in range(0, count, step):
            stop = min(start + step, count)
            part = packed[start // 2 : -(-stop // 2)]
            codes = torch.stack([part >> 4, part & 15], 1).reshape(-1)[: stop - start].to(torch.int64)
            scales = absmax[start // block : -(-stop // block)].repeat_interleave(block)[: stop - start]
            torch.mul(values[codes], scales, out=dense[start:stop])
        return dense.reshape(shape)

    def _state(self) -> dict[str, Any]:
        state = json.loads(bytes(self._part(STATES[self.kind], "uint8").tolist()).decode("utf-8"))
        if not isinstance(state, dict) or state.get("quant_type") != self.kind:
            raise ValueError(f"its quant_state is not of {self.kind}")
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(_is_count(n) for n in shape):
            raise ValueError(f"its quant_state has the shape {shape!r:.200}")
        if str(self.packed.dtype) != "torch.uint8" or self.packed.numel() != -(-math.prod(shape) // 2):
            raise ValueError(f"{self.packed.numel()} bytes of {self.packed.dtype} are not codes for the shape {shape}")
        if len(self.packed) != self.packed.numel():  # bitsandbytes transposes a single row
            raise ValueError(f"its codes have the shape {tuple(self.packed.shape)}, and not one column")
        for key in ("blocksize", "nested_blocksize"):
            if (key == "blocksize" or key in state) and not (_is_count(state.get(key)) and state[key] <= LARGEST_BLOCK):
                raise ValueError(f"its quant_state has the {key} {state.get(key)!r:.200}")
        offset = state.get("nested_offset", 0.0)
        if not isinstance(offset, int | float) or not math.isfinite(offset):
            raise ValueError(f"its quant_state has the nested_offset {offset!r:.200}")
        if "nested_blocksize" in state and "nested_offset" not in state:
            raise ValueError("its quant_state has no nested_offset")
        return state

    def _part(self, name: str, dtype: str, count: int | None = None) -> torch.Tensor:
        """Return a part, flattened; raise ValueError for a missing part, or another dtype or `count`."""
        part = self.parts.get(name)
        if part is None:
            raise ValueError(f"its {name} is missing")
        if str(part.dtype) != f"torch.{dtype}" or part.numel() != (part.numel() if count is None else count):
            raise ValueError(f"its {name} has {part.numel()} values of {part.dtype}, not {count} of {dtype}")
        return part.reshape(-1)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
