"""Small integers in bytes: packed is what they take, unpacked is what they were."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trisect.models.linear import BITS, pack, unpack


@given(st.sampled_from(BITS), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1 << 30))
def test_unpacking_gives_back_what_was_packed_in_exactly_its_bits(bits: int, rows: int, eights: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (rows, 8 * eights), generator=generator)
    packed = pack(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, eights * bits)
    assert torch.equal(unpack(packed, bits), values.to(torch.uint8))


def test_the_first_value_is_in_the_lowest_bits() -> None:
    values = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]])
    whole = sum(value << 3 * place for place, value in enumerate(values[0].tolist()))
    assert bytes(pack(values, 3)[0].tolist()) == whole.to_bytes(3, "little")
    assert pack(values[:, :2], 4).tolist() == [[0x21]]
