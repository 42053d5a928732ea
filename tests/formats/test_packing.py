"""Words worked by hand, and a slow bit string for what is too long to write down."""

import pytest
import torch

import quantkit.formats._packing as packing
from quantkit.errors import UnsupportedError
from quantkit.formats._packing import (
    codes_per_unit,
    pack_awq,
    pack_columns,
    pack_rows,
    unpack_awq,
    unpack_columns,
    unpack_rows,
)

ALL_BITS = [2, 3, 4, 8]
SIGN = 1 << 31


def words(*values: int) -> torch.Tensor:
    """Unsigned 32-bit values as the int32 that hold the same bits."""
    return torch.tensor([value - (value & SIGN) * 2 for value in values], dtype=torch.int32)


def random_codes(bits: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


def packed_as_bit_string(codes: list[int], bits: int) -> list[int]:
    """One long little-endian integer, cut into words of 32 bits."""
    text = "".join(format(code, f"0{bits}b") for code in reversed(codes))
    whole = int(text, 2)
    return [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(len(codes) * bits // 32)]


@pytest.mark.parametrize(
    ("bits", "codes", "word"),
    [
        (2, [0, 1, 2, 3] * 4, 0xE4E4E4E4),
        (4, [1, 2, 3, 4, 5, 6, 7, 8], 0x87654321),
        (4, [15, 0, 0, 0, 0, 0, 0, 9], 0x9000000F),
        (8, [0x01, 0x80, 0xFF, 0x7F], 0x7FFF8001),
    ],
)
def test_words_hold_the_first_code_in_their_low_bits(bits: int, codes: list[int], word: int) -> None:
    column = torch.tensor(codes, dtype=torch.uint8)[:, None]
    assert pack_rows(column, bits).tolist() == words(word)[:, None].tolist()
    assert pack_columns(column.T, bits).tolist() == [words(word).tolist()]


def test_the_bytes_in_the_file_are_little_endian() -> None:
    packed = pack_rows(torch.arange(8, dtype=torch.uint8)[:, None], 4)
    assert packed.numpy().tobytes() == bytes([0x10, 0x32, 0x54, 0x76])


def test_three_bit_codes_cross_the_borders_of_words() -> None:
    codes = torch.zeros(32, 1, dtype=torch.uint8)
    codes[0] = 0b001
    codes[10] = 0b101  # bits 30, 31 and 32
    codes[21] = 0b110  # bits 63, 64 and 65
    codes[31] = 0b100  # bits 93, 94 and 95
    assert pack_rows(codes, 3)[:, 0].tolist() == words(0x40000001, 0x00000001, 0x80000003).tolist()


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("units", [2, 3, 5])
def test_columns_pack_as_bit_strings_however_rows_are_cut(
    bits: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five units of rows, two, three or all are widened together; three leave two for the end."""
    unit = codes_per_unit(bits)
    codes = random_codes(bits, 5 * unit, 7, seed=bits)
    want = [packed_as_bit_string(codes[:, column].tolist(), bits) for column in range(7)]
    monkeypatch.setattr(packing, "SLAB_CODES", units * unit * 7)
    packed = pack_rows(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.T.tolist() == [words(*column).tolist() for column in want]
    assert torch.equal(unpack_rows(packed, bits), codes)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_unpacking_gives_the_codes_back(bits: int) -> None:
    unit = codes_per_unit(bits)
    codes = random_codes(bits, unit * 2, unit * 3, seed=0)
    largest = torch.full((32, 3), (1 << bits) - 1, dtype=torch.uint8)
    assert torch.equal(unpack_rows(pack_rows(codes, bits), bits), codes)
    assert torch.equal(unpack_columns(pack_columns(codes, bits), bits), codes)
    assert (pack_rows(largest, bits) == -1).all()
    assert torch.equal(unpack_rows(pack_rows(largest, bits), bits), largest)


def test_awq_words_hold_even_columns_before_odd_ones() -> None:
    packed = pack_awq(torch.arange(8, dtype=torch.uint8)[None])
    assert packed.tolist() == words(0x75316420)[None].tolist()


def test_awq_packs_each_eight_columns_of_each_row() -> None:
    codes = random_codes(4, 3, 24, seed=0)
    packed = pack_awq(codes)
    for row in range(3):
        for word in range(3):
            eight = codes[row, word * 8 : word * 8 + 8].tolist()
            expected = sum(eight[column] << (4 * place) for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
            assert int(packed[row, word]) & 0xFFFFFFFF == expected
    assert torch.equal(unpack_awq(packed), codes)


@pytest.mark.parametrize(("bits", "rows", "unit"), [(2, 24, 16), (3, 16, 32), (4, 12, 8), (8, 6, 4)])
def test_codes_that_do_not_fill_words_are_refused(bits: int, rows: int, unit: int) -> None:
    codes = torch.zeros(rows, 4, dtype=torch.uint8)
    message = rf"{rows} codes do not fill whole 32-bit words of {bits}-bit codes \(multiples of {unit}\)"
    with pytest.raises(UnsupportedError, match=message):
        pack_rows(codes, bits)
    with pytest.raises(UnsupportedError, match=message):
        pack_columns(codes.T, bits)


def test_columns_that_do_not_fill_awq_words_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="12 output columns are not a multiple of 8"):
        pack_awq(torch.zeros(2, 12, dtype=torch.uint8))
