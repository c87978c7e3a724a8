"""slot_mapping: unique, away from the reserved blocks, in rotation; padding under each policy; refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvnb.problem import slots
from kvnb.problem.case import SLOT_PATTERNS, Case


@st.composite
def cases(draw, **fixed) -> Case:
    """Small cases of any size that fits, exactly full caches among them."""
    tokens, block_size = draw(st.integers(0, 60)), draw(st.integers(1, 17))
    blocks = -(-tokens // block_size) + 3 + draw(st.integers(0, 30))
    itemsize_and_row = 2 * 2  # bfloat16, one head of one element in K and in V
    drawn = {"slots": draw(st.sampled_from(SLOT_PATTERNS)), "padding": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))}
    sizes = {"num_kv_heads": 1, "head_size": 1, "block_size": block_size}
    cache_bytes = blocks * block_size * itemsize_and_row + draw(st.integers(0, 3))
    return Case(tokens, cache_bytes=cache_bytes, seed=draw(st.integers(0, 99)), **sizes, **drawn | fixed)


def real(row: torch.Tensor) -> list[int]:
    return row[row >= 0].tolist()


@given(case=cases(), count=st.integers(1, 7))
def test_a_set_holds_each_slot_once_and_none_of_the_reserved_blocks(case, count):
    sets = slots.sets(case, count)
    assert sets.shape == (count, case.num_tokens)
    assert sets.dtype == torch.int64
    assert sets.is_contiguous()
    for row in sets:
        used = real(row)
        assert len(used) == len(set(used)) == case.written_tokens
        assert all(slot >= case.null_blocks * case.block_size for slot in used), "a null block was drawn"
        assert all(slot < (case.num_blocks - 1) * case.block_size for slot in used), "the last block was drawn"
        slots.validate(row, case.num_slots, case.num_tokens)


@given(case=cases(padding=0.0), count=st.integers(1, 7))
def test_a_slot_comes_back_only_when_too_few_others_are_left_for_a_set(case, count):
    """Sets are drawn from one permutation until it cannot serve another whole set."""
    usable = (case.num_blocks - 1 - case.null_blocks) * case.block_size
    runs = {"prefill": case.num_tokens, "mixed": case.num_tokens // 2}.get(case.slots, 0)
    taken_per_set = case.num_blocks_for(runs) * case.block_size + case.num_tokens - runs  # runs take whole blocks
    per_pass = max(1, usable // max(1, taken_per_set))
    sets = slots.sets(case, count)
    for begin in range(0, count, per_pass):
        together = real(sets[begin : begin + per_pass].flatten())
        assert len(together) == len(set(together))


@given(case=cases(slots="decode", padding=0.0))
def test_decode_uses_as_many_blocks_as_there_are_tokens_while_they_last(case):
    [row] = slots.sets(case, 1)
    free = case.num_blocks - 1 - case.null_blocks
    assert (row // case.block_size).unique().numel() == min(case.num_tokens, free)


@given(case=cases(slots="prefill", padding=0.0))
def test_prefill_fills_blocks_from_their_beginning(case):
    [row] = slots.sets(case, 1)
    positions = torch.arange(case.num_tokens)
    assert torch.equal(row % case.block_size, positions % case.block_size)
    assert (row // case.block_size).unique().numel() == case.num_blocks_for(case.num_tokens)


@given(case=cases(slots="mixed", padding=0.0))
def test_mixed_begins_as_prefill(case):
    [row] = slots.sets(case, 1)
    half = case.num_tokens // 2
    assert torch.equal(row[:half] % case.block_size, torch.arange(half) % case.block_size)


@pytest.mark.parametrize("pattern", SLOT_PATTERNS)
def test_the_seed_decides_the_sets(pattern):
    one, same, other = (Case(64, slots=pattern, cache_bytes=1 << 26, padding=0.25, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(slots.sets(one, 3), slots.sets(same, 3))
    assert not torch.equal(slots.sets(one, 3), slots.sets(other, 3))


def test_padding_lies_elsewhere_in_every_set():
    case = Case(64, cache_bytes=1 << 26, padding=0.25)
    where = {tuple((row < 0).tolist()) for row in slots.sets(case, 4)}
    assert len(where) == 4


# ------------------------------------------------------------------------------------------------------------- policies

CASE = Case(10, num_kv_heads=1, head_size=1, block_size=3, cache_bytes=4 * 3 * 20)  # 20 blocks of 3 slots
UNPLACED = torch.tensor([-1, 30, -1, -1, 31, -1, -1, 40, -1, -1])
PLACED = {
    "skip": [-1, 30, -1, -1, 31, -1, -1, 40, -1, -1],
    "last_slot": [-1, 30, -1, -1, 31, -1, -1, 40, -1, -1],
    "remap": [-1, 30, -1, -1, 31, -1, -1, 40, -1, -1],
    "filter": [-1, 30, -1, -1, 31, -1, -1, 40, -1, -1],
    "null_slot": [0, 30, 0, 0, 31, 0, 0, 40, 0, 0],
    "null_block": [0, 30, 1, 2, 31, 0, 1, 40, 2, 0],
    "null_blocks": [0, 30, 1, 2, 31, 3, 4, 40, 5, 6],
}


def test_padding_at_the_tail_is_the_end_of_every_set():
    case = Case(64, cache_bytes=1 << 26, padding=0.25, padded="tail")
    assert (slots.sets(case, 3) < 0).tolist() == [[False] * 48 + [True] * 16] * 3
    scattered = slots.sets(Case(64, cache_bytes=1 << 26, padding=0.25), 3)
    assert (scattered < 0).sum(dim=1).tolist() == [16] * 3
    assert (scattered[:, :48] < 0).any()


@pytest.mark.parametrize("policy", slots.POLICIES)
def test_where_each_policy_sends_padding(policy):
    assert slots.place_padding(UNPLACED, CASE, policy).tolist() == PLACED[policy]
    both = slots.place_padding(torch.stack([UNPLACED, UNPLACED]), CASE, policy)
    assert both.tolist() == [PLACED[policy]] * 2  # each set on its own


@given(case=cases(padding=1.0), policy=st.sampled_from(slots.NULL_POLICIES))
def test_null_policies_stay_in_their_null_slots(case, policy):
    placed = slots.place_padding(slots.sets(case, 2), case, policy)
    limit = {"null_slot": 1, "null_block": case.block_size, "null_blocks": case.null_blocks * case.block_size}[policy]
    for row in placed:
        counts = torch.bincount(row, minlength=limit)
        assert len(counts) == limit
        assert counts.max() - counts.min() <= 1, "padding is not spread evenly"


def test_an_unknown_policy_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="policy 'nul' is not one of skip, null_slot"):
        slots.place_padding(UNPLACED, CASE, "nul")


# ------------------------------------------------------------------------------------------------------------ validate


def test_a_slot_past_the_end_is_named_with_position_value_and_limit():
    with pytest.raises(
        ValueError, match=r"slot_mapping\[2\] = 64 lies past the last slot: the cache has 64 slots, 0 to 63"
    ):
        slots.validate(torch.tensor([63, -1, 64, 65]), num_slots=64, num_tokens=4)


def test_a_slot_named_twice_is_named():
    with pytest.raises(ValueError, match="slot_mapping names slot 5 more than once"):
        slots.validate(torch.tensor([-1, 5, 3, -1, 5], dtype=torch.int32), num_slots=64, num_tokens=5)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.uint8])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=f"slot_mapping is {dtype}, must be torch.int64 or torch.int32"):
        slots.validate(torch.zeros(3, dtype=dtype), num_slots=64, num_tokens=3)


@pytest.mark.parametrize("shape", [(5,), (2, 5), ()])
def test_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[.*\], must be \[n\] with n at most 4 tokens"):
        slots.validate(torch.zeros(shape, dtype=torch.int64), num_slots=64, num_tokens=4)


@pytest.mark.parametrize("slot_mapping", [[], [-1, -1], [0, 63, -5], [1, 2]])
def test_a_sound_mapping_passes(slot_mapping):
    slots.validate(torch.tensor(slot_mapping, dtype=torch.int64), num_slots=64, num_tokens=4)
