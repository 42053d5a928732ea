"""Words worked by hand, and a slow bit string for what is too long to write down."""

import pytest
import torch

from quantkit.errors import UnsupportedError
from quantkit.formats import _bit_packing as packing

SIGN = 1 << 31


def words(*values):
    """Unsigned 32-bit values as the int32 that hold the same bits."""
    return torch.tensor([value - (value & SIGN) * 2 for value in values], dtype=torch.int32)


def random_codes(bits, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


def packed_as_bit_string(codes, bits):
    """One long little-endian integer, cut into words of 32 bits."""
    text = "".join(format(code, f"0{bits}b") for code in reversed(codes))
    whole = int(text, 2)
    return [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(len(codes) * bits // 32)]


@pytest.mark.parametrize(
    ("bits", "codes", "word"),
    [
        (2, [0, 1, 2, 3] * 4, 0xE4E4E4E4),
        (4, [1, 2, 3, 4, 5, 6, 7, 8], 0x87654321),
        (8, [0x01, 0x80, 0xFF, 0x7F], 0x7FFF8001),
    ],
)
def test_words_hold_the_first_code_in_their_low_bits(bits, codes, word):
    column = torch.tensor(codes, dtype=torch.uint8)[:, None]
    assert packing.pack_rows(column, bits).tolist() == words(word)[:, None].tolist()
    assert packing.pack_columns(column.T, bits).tolist() == [words(word).tolist()]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_columns_pack_as_bit_strings_however_rows_are_cut(bits, monkeypatch):
    """Of five units of rows three are widened together, which leaves two for the end."""
    unit = packing.codes_per_unit(bits)
    codes = random_codes(bits, 5 * unit, 7, seed=bits)
    want = [packed_as_bit_string(codes[:, column].tolist(), bits) for column in range(7)]
    monkeypatch.setattr(packing, "SLAB_CODES", 3 * unit * 7)
    packed = packing.pack_rows(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.T.tolist() == [words(*column).tolist() for column in want]
    assert torch.equal(packing.unpack_rows(packed, bits), codes)
    assert torch.equal(packing.pack_columns(codes.T, bits), packed.T)
    assert torch.equal(packing.unpack_columns(packed.T, bits), codes.T)


def test_awq_packs_each_eight_columns_of_each_row():
    codes = random_codes(4, 3, 24, seed=0)
    packed = packing.pack_awq(codes)
    for row in range(3):
        for word in range(3):
            eight = codes[row, word * 8 : word * 8 + 8].tolist()
            expected = sum(eight[column] << (4 * place) for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
            assert int(packed[row, word]) & 0xFFFFFFFF == expected
    assert torch.equal(packing.unpack_awq(packed), codes)


def test_codes_that_do_not_fill_words_are_refused():
    codes = torch.zeros(16, 4, dtype=torch.uint8)
    says = r"16 codes do not fill whole .* 3-bit codes \(multiples of 32\)"
    with pytest.raises(UnsupportedError, match=says):
        packing.pack_rows(codes, 3)
    with pytest.raises(UnsupportedError, match=says):
        packing.pack_columns(codes.T, 3)
    with pytest.raises(UnsupportedError, match="4 output columns are not a multiple of 8"):
        packing.pack_awq(codes)
