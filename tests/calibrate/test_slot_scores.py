"""What sampled queries say of slots: Grams, products with the true score, covariances of keys.

Reference: every sampled query and every key it sees, one after the other, in float64.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trisect.calibrate import scores
from trisect.calibrate.scores import AWAKE, KeyCovariances, PairGrams, QuerySampler, SlotGrams
from trisect.records.parts import Slots

B, T, H, K, D, P, SLOTS = 2, 12, 4, 2, 8, 3, 2
G = H // K
DRAWN = 5
SEED = 7
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
MASKS = ["none", "bool", "float"]


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def heads() -> tuple[Tensor, Tensor]:
    """Rotated queries and keys: three pairs and two channels that do not rotate."""
    generator = drawn()
    q, k = torch.randn(B, T, H, D, generator=generator), torch.randn(B, T, K, D, generator=generator)
    return q, k + 2.0  # far from zero: what all keys share must not count


def rates() -> Tensor:
    return torch.tensor([[0.01, 0.7, 1.3], [0.02, 0.3, 2.0]], dtype=torch.float64)


def some_slots() -> Slots:
    generator = drawn()
    k_map, q_map = (torch.randn(K, P, SLOTS, generator=generator, dtype=torch.complex128) for _ in range(2))
    return Slots(k_map=k_map, q_map=q_map, rates=torch.rand(K, SLOTS, generator=generator).double())


def visible(mask: str) -> Tensor:
    whole = torch.ones(T, T).tril().bool()
    return whole if mask == "none" else whole.triu(-4)


def given_mask(mask: str) -> Tensor | None:
    window = visible(mask)[None, None]
    return {"none": None, "bool": window, "float": torch.where(window, 0.0, -1e9)}[mask]


def looks(mask: str) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """Every sampled query: its head, its position, itself, the keys it sees, their positions and weights."""
    q, k = heads()
    sampler = QuerySampler([], per_window=DRAWN, seed=SEED)
    for window in range(B):
        for m in sampler.positions(window, T).tolist():
            at = visible(mask)[m].nonzero().squeeze(1)
            for head in range(H):
                x, y = q[window, m, head].double(), k[window, at, head // G].double()
                weights = (1 - AWAKE) * (y @ x).softmax(dim=0) + AWAKE / len(y)
                yield head, m, x, y, at, weights


def sampled(mask: str, *readings: object) -> dict[str, Tensor]:
    q, k = heads()
    found, count = QuerySampler(list(readings), per_window=DRAWN, seed=SEED)(q, k, given_mask(mask))
    assert count == B * DRAWN
    return found


def as_pairs(x: Tensor) -> Tensor:
    return torch.complex(x[..., :P], x[..., P : 2 * P])


@pytest.mark.parametrize("mask", MASKS)
def test_slot_moments_are_attention_weighted_covariances(mask: str) -> None:
    slots, theta = some_slots(), rates()
    gram = torch.zeros(H, 2 * SLOTS, 2 * SLOTS, dtype=torch.float64)
    cross = torch.zeros(H, 2 * SLOTS, dtype=torch.float64)
    energy = torch.zeros(H, dtype=torch.float64)
    for head, m, x, y, at, p in looks(mask):
        i = head // G
        still_q = as_pairs(x) * torch.exp(-1j * theta[i] * m)
        still_k = as_pairs(y) * torch.exp(-1j * theta[i] * at.unsqueeze(-1))
        turned = torch.exp(1j * slots.rates[i] * (at - m).unsqueeze(-1))
        product = (still_q @ slots.q_map[i]).conj() * (still_k @ slots.k_map[i]) * turned
        z = torch.cat([product.real, product.imag], dim=-1)
        true = y[:, : 2 * P] @ x[: 2 * P]  # channels that do not rotate are not the slots' to fit
        z, true = z - p @ z, true - p @ true
        gram[head] += z.mT @ (p[:, None] * z)
        cross[head] += z.mT @ (p * true)
        energy[head] += p @ true.square()
    found = sampled(mask, SlotGrams([slots], theta))
    torch.testing.assert_close(found["slots0_gram"], gram, **CLOSE)
    torch.testing.assert_close(found["slots0_cross"], cross, **CLOSE)
    torch.testing.assert_close(found["slots0_energy"], energy, **CLOSE)


@pytest.mark.parametrize("mask", MASKS)
def test_key_covariances_are_taken_in_the_frame_of_the_query(mask: str) -> None:
    theta = rates()
    expected = torch.zeros(K, P, P, dtype=torch.complex128)
    for head, m, _, y, _, p in looks(mask):
        key = as_pairs(y) * torch.exp(-1j * theta[head // G] * m)  # n stays: as the query sees it
        key = key - p.to(key.dtype) @ key
        expected[head // G] += key.mH @ (p[:, None] * key)
    found = sampled(mask, KeyCovariances(theta))["keys"]
    assert found.dtype == torch.complex128
    torch.testing.assert_close(found, expected, **CLOSE)


def test_slots_that_are_pairs_have_the_grams_of_these_pairs() -> None:
    kept = torch.tensor([[0, 2], [1, 2]])
    one_hot = torch.nn.functional.one_hot(kept, P).mT.to(torch.complex128)
    slots = Slots(k_map=one_hot, q_map=one_hot, rates=rates().gather(-1, kept))
    found = sampled("none", SlotGrams([slots], rates()), PairGrams(P))
    whole = found["scores"]
    for head in range(H):
        channels = torch.cat([kept[head // G], kept[head // G] + P])
        pairs = whole[head][channels]
        torch.testing.assert_close(found["slots0_gram"][head], pairs[:, channels], **CLOSE)
        torch.testing.assert_close(found["slots0_cross"][head], pairs[:, :P].sum(dim=-1), **CLOSE)
        torch.testing.assert_close(found["slots0_energy"][head], whole[head, :P, :P].sum(), **CLOSE)


def test_as_many_slots_as_pairs_leave_nothing_to_fit() -> None:
    """Any invertible map, its inverse on the other side, and the pairs' own rates where it mixes none."""
    scale = torch.diag_embed(torch.exp(torch.randn(K, P, generator=drawn(), dtype=torch.complex128)))
    slots = Slots(k_map=scale, q_map=torch.linalg.inv(scale).mH, rates=rates())
    found = sampled("none", SlotGrams([slots], rates()))
    ones = torch.cat([torch.ones(P), torch.zeros(P)]).double()
    torch.testing.assert_close(found["slots0_gram"] @ ones, found["slots0_cross"], **CLOSE)
    torch.testing.assert_close(found["slots0_cross"] @ ones, found["slots0_energy"], **CLOSE)


def test_readings_are_summed_side_by_side_over_the_same_queries() -> None:
    together = sampled("bool", PairGrams(P), KeyCovariances(rates()), SlotGrams([some_slots()] * 2, rates()))
    assert together.keys() == {
        "scores",
        "keys",
        *(f"slots{number}_{name}" for number in (0, 1) for name in ("gram", "cross", "energy")),
    }
    assert together["scores"].equal(sampled("bool", PairGrams(P))["scores"])
    assert together["slots0_gram"].equal(together["slots1_gram"])


@pytest.mark.parametrize("most", [1, 500, 5000, 1 << 26])
def test_how_many_windows_and_heads_are_taken_together_changes_no_sum(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = (PairGrams(P), KeyCovariances(rates()), SlotGrams([some_slots()], rates()))
    expected = sampled("bool", *readings)
    monkeypatch.setitem(scores.MOST_NUMBERS, "cpu", most)
    found = sampled("bool", *readings)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **CLOSE)
