"""Read and write codebook indices, signs and scales of ggml's IQ2 and IQ3 blocks.

A block holds 256 consecutive weights of a row. Each 4 or 8 weights share one codebook entry (a "point"), each weight
has a sign, and each 16 or 32 share a scale: weight = scale * sign * point. Types with `even` signs store 7 of 8 signs:
the number of minus signs is even. The codebooks are read from ggml by unpacking blocks that list every index.
Layouts: block_iq2_xxs .. block_iq3_s in ggml-common.h, dequantize_row_* in ggml-quants.c. Not supported: IQ1_S, IQ1_M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.kquants import BLOCK, Bytes, Floats

Indices = NDArray[np.uint16]
SIGN_RUN = 8  # weights per sign group
ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)


@dataclass(frozen=True)
class Codebook:
    """The block layout and codebook of one IQ2 or IQ3 type."""

    name: str
    size: int  # weights of a point
    points: int  # in the table
    run: int  # weights that share a scale
    nbytes: int  # of a block
    even: bool
    # (blocks, indices (n, 256 / size), signs (n, 32), a bit per weight that is set for minus); changes blocks in place.
    pack: Callable[[Bytes, Indices, Bytes], None]

    @cached_property
    def table(self) -> Floats:
        """Return the codebook (points, size) float32: non-negative magnitudes, to be multiplied by `scales`."""
        each = BLOCK // self.size
        blocks = np.zeros((-(-self.points // each), self.nbytes), np.uint8)
        blocks[:, :2] = ONE
        indices = np.resize(np.arange(self.points, dtype=np.uint16), (len(blocks), each))
        self.pack(blocks, indices, np.zeros((len(blocks), BLOCK // SIGN_RUN), np.uint8))
        return ggml.dequantize(self.name, blocks, BLOCK).reshape(-1, self.size)[: self.points]

    def scales(self, packed: Bytes) -> Floats:
        """Return the scales, float32 (rows, columns / run), of packed rows, uint8 (rows, bytes)."""
        rows, columns = len(packed), packed.shape[1] // self.nbytes * BLOCK
        first = self.with_points(
            packed, np.zeros((rows, columns // self.size), np.uint16), np.zeros((rows, columns // SIGN_RUN), np.uint8)
        )
        return ggml.dequantize(self.name, first, columns)[:, :: self.run] / self.table[0, 0]

    def with_points(self, packed: Bytes, indices: Indices, signs: Bytes) -> Bytes:
        """Return a copy of packed rows with new indices (rows, columns / size) and sign bits (rows, columns / 8)."""
        blocks = packed.reshape(-1, self.nbytes).copy()
        self.pack(blocks, indices.reshape(len(blocks), -1), signs.reshape(len(blocks), -1))
        return blocks.reshape(packed.shape)

    def without_factors(self, packed: Bytes, columns: int) -> tuple[Floats, Floats]:
        """Return the block factors (rows, columns / 256), and the values (rows, columns) with every factor set to 1."""
        blocks = packed.reshape(-1, self.nbytes).copy()
        factors = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        blocks[:, :2] = ONE
        return factors.reshape(len(packed), -1), ggml.dequantize(self.name, blocks.reshape(packed.shape), columns)

    def with_factors(self, packed: Bytes, factors: Floats) -> Bytes:
        """Return a copy of packed rows with new block factors (rows, columns / 256), which must be exact in float16."""
        blocks = packed.reshape(-1, self.nbytes).copy()
        blocks[:, :2] = factors.astype(np.float16).reshape(-1, 1).view(np.uint8)
        return blocks.reshape(packed.shape)


def _words(parts: Bytes) -> NDArray[np.uint32]:
    return np.ascontiguousarray(parts).view("<u4")


def _with_signs(words: NDArray[np.uint32], signs: Bytes) -> Bytes:
    """Pack `signs` (n, 32) into words (n, 8), four groups of 7 bits per word; keep each word's 4-bit scale."""
    sevens = (signs.reshape(len(signs), 8, 4) & np.uint8(127)).astype(np.uint32) << np.arange(0, 28, 7, dtype=np.uint32)
    made = (words & np.uint32(15 << 28)) | np.bitwise_or.reduce(sevens, axis=2)
    return made.astype("<u4").view(np.uint8)


def _pack_2_xxs(blocks: Bytes, indices: Indices, signs: Bytes) -> None:
    """Write IQ2_XXS indices and signs: per 32 weights four index bytes, then one word of signs and scale."""
    parts = blocks[:, 2:66].reshape(-1, 8, 8)
    words = _with_signs(_words(parts[:, :, 4:]).reshape(-1, 8), signs)
    made = np.concatenate([indices.astype(np.uint8).reshape(-1, 8, 4), words.reshape(-1, 8, 4)], axis=2)
    blocks[:, 2:66] = made.reshape(-1, 64)


def _pack_2_xs(blocks: Bytes, indices: Indices, signs: Bytes) -> None:
    """Write IQ2_XS indices and signs: per 8 weights 16 bits, a 9-bit index and 7 signs."""
    numbers = indices | ((signs & np.uint8(127)).astype(np.uint16) << np.uint16(9))
    blocks[:, 2:66] = numbers.astype("<u2").view(np.uint8)


def _pack_2_s(blocks: Bytes, indices: Indices, signs: Bytes) -> None:
    """Write IQ2_S indices and signs: the low 8 index bits, all signs, then the high 2 index bits."""
    blocks[:, 2:34] = indices & np.uint16(255)
    blocks[:, 34:66] = signs
    high = (indices >> np.uint16(8)).reshape(-1, 8, 4) << np.arange(0, 8, 2, dtype=np.uint16)
    blocks[:, 66:74] = np.bitwise_or.reduce(high, axis=2)


def _pack_3_xxs(blocks: Bytes, indices: Indices, signs: Bytes) -> None:
    """Write IQ3_XXS indices and signs: all index bytes, then words of signs and scale."""
    blocks[:, 2:66] = indices
    blocks[:, 66:98] = _with_signs(_words(blocks[:, 66:98]), signs)


def _pack_3_s(blocks: Bytes, indices: Indices, signs: Bytes) -> None:
    """Write IQ3_S indices and signs: the low 8 index bits, the ninth index bits, then all signs."""
    blocks[:, 2:66] = indices & np.uint16(255)
    high = (indices >> np.uint16(8)).reshape(-1, 8, 8) << np.arange(8, dtype=np.uint16)
    blocks[:, 66:74] = np.bitwise_or.reduce(high, axis=2)
    blocks[:, 74:106] = signs


CODEBOOKS = {
    kind.name: kind
    for kind in (
        Codebook("IQ2_XXS", 8, 256, 32, 66, True, _pack_2_xxs),
        Codebook("IQ2_XS", 8, 512, 16, 74, True, _pack_2_xs),
        Codebook("IQ2_S", 8, 1024, 16, 82, False, _pack_2_s),
        Codebook("IQ3_XXS", 4, 256, 32, 98, True, _pack_3_xxs),
        Codebook("IQ3_S", 4, 512, 32, 110, False, _pack_3_s),
    )
}
