"""Pack integer codes into int32 words, and unpack them.

GPTQ: at 2, 4 and 8 bits a word holds 32/bits codes, low bits first; at 3 bits three words hold 32 codes as one
little-endian bit string. `qweight` packs along the input dimension, `qzeros` along the output dimension.
AWQ (GEMM): 4 bits along the output dimension, in the order 0, 2, 4, 6, 1, 3, 5, 7 within a word.
compressed-tensors: each row of codes is one little-endian bit string.
"""

from __future__ import annotations

from math import gcd

import torch

from quantkit.errors import UnsupportedError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SLAB_CODES = 1 << 18  # unpacked at a time, so that they stay in the processor's cache


def codes_per_unit(bits: int) -> int:
    """Return the fewest codes that fill whole words: 16, 32, 8, 16 or 4 for 2, 3, 4, 6 or 8 bits."""
    return 32 // gcd(32, bits)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (K, N) along K into int32 (K * bits / 32, N); raise UnsupportedError if K leaves words unfilled."""
    rows, columns = codes.shape
    unit = codes_per_unit(bits)
    if rows % unit:
        raise UnsupportedError(f"{rows} codes do not fill whole 32-bit words of {bits}-bit codes (multiples of {unit})")
    packed = torch.zeros(rows // unit, unit * bits // 32, columns, dtype=torch.int32)
    step = max(1, SLAB_CODES // max(1, unit * columns))
    for words, part in zip(packed.split(step), codes.unflatten(0, (-1, unit)).split(step), strict=True):
        wide = part.to(torch.int32)
        for i in range(unit):
            word, shift = divmod(i * bits, 32)
            words[:, word] |= wide[:, i] << shift
            if shift + bits > 32:
                words[:, word + 1] |= wide[:, i] >> (32 - shift)
    return packed.flatten(0, 1)


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 (K * bits / 32, N) to codes (K, N) uint8; inverse of `pack_rows`."""
    unit = codes_per_unit(bits)
    per, columns = unit * bits // 32, words.shape[1]
    unpacked = torch.empty(len(words) // per, unit, columns, dtype=torch.uint8)
    step = max(1, SLAB_CODES // max(1, unit * columns))
    for codes, part in zip(unpacked.split(step), words.unflatten(0, (-1, per)).split(step), strict=True):
        near = part.contiguous()
        for i in range(unit):
            word, shift = divmod(i * bits, 32)
            # A right shift of a negative word fills with ones from the left.
            value = (near[:, word] >> shift).bitwise_and_((1 << min(bits, 32 - shift)) - 1)
            if shift + bits > 32:
                value |= (near[:, word + 1] << (32 - shift)).bitwise_and_((1 << bits) - 1)
            codes[:, i] = value
    return unpacked.flatten(0, 1)


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (R, N) along N into int32 (R, N * bits / 32)."""
    return pack_rows(codes.T, bits).T.contiguous()


def unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 (R, N * bits / 32) to codes (R, N); inverse of `pack_columns`."""
    return unpack_rows(words.T, bits).T.contiguous()


def words(count: int, bits: int) -> int:
    """Return the number of 32-bit words that hold `count` codes."""
    return -(-count * bits // 32)


def pack_string(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (R, C) into int32 (R, ceil(C * bits / 32)), each row a zero-padded little-endian bit string."""
    columns = codes.shape[1]
    padded = torch.nn.functional.pad(codes, (0, -columns % codes_per_unit(bits)))
    return pack_columns(padded, bits)[:, : words(columns, bits)].contiguous()


def unpack_string(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack int32 words to codes (R, columns) uint8; inverse of `pack_string`."""
    unit = codes_per_unit(bits) * bits // 32
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % unit))
    return unpack_columns(padded, bits)[:, :columns].contiguous()


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes (R, N) into int32 (R, N / 8), in the order of AWQ's GEMM kernel."""
    columns = codes.shape[1]
    if columns % 8:
        raise UnsupportedError(f"{columns} output columns are not a multiple of 8, which AWQ's packing needs")
    ordered = codes.T.unflatten(0, (-1, 8))[:, list(AWQ_ORDER)].flatten(0, 1)
    return pack_rows(ordered, 4).T.contiguous()


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 (R, N / 8) to codes (R, N) uint8; inverse of `pack_awq`."""
    inverse = [AWQ_ORDER.index(i) for i in range(8)]
    return unpack_rows(words.T, 4).unflatten(0, (-1, 8))[:, inverse].flatten(0, 1).T.contiguous()
