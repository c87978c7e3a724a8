"""The gate: it rejects every wrong copy and names the first wrong row, and lets nothing but padding into null slots."""

from __future__ import annotations

import os
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnb.bench import check as gate
from kvnb.bench.check import Expectation, WrongCopy, bits, check
from kvnb.copies import REGISTRY, Copy, wrong
from kvnb.problem import inputs
from kvnb.problem.case import Case

CASE = wrong.CASE
HEAVY = [name for name, case in wrong.CASES.items() if case is wrong.BIG]
ROW = r"(key|value)_cache slot \d+ \(block \d+, offset \d+\) head \d+"


def bent(bend, policies=("skip", "null_slot", "null_block", "null_blocks"), family="yours") -> Copy:
    """A copy that writes correctly, then calls `bend(inputs, slot_mapping, key, value)`."""

    def bind(made: inputs.Inputs):
        right = REGISTRY["kvnb"].bind(made)

        def step(slot_mapping):
            write = right(slot_mapping)
            return lambda key, value: (write(key, value), bend(made, slot_mapping, key, value))

        return step

    return Copy("bent", family, policies, bind, ("cpu", "cuda"))


# --------------------------------------------------------------------------------------------------- the wrong copies


@pytest.mark.parametrize("name", [name for name in wrong.WRONG if name not in HEAVY])
def test_a_wrong_copy_is_rejected_by_name_and_row(name, device):
    with pytest.raises(WrongCopy) as caught:
        check(wrong.WRONG[name], wrong.CASES[name], device)
    assert re.match(rf"wrong\.{name}: call \d: {ROW} should ", str(caught.value)), caught.value
    assert "policy skip" in str(caught.value)


@pytest.mark.parametrize("name", HEAVY)
def test_a_wrong_copy_that_shows_in_a_large_cache_only_is_rejected(name, device):
    if device == "cpu" and not os.environ.get("KVNB_BIG"):
        pytest.skip("needs 9 GB and half a minute: KVNB_BIG=1 runs it")
    with pytest.raises(WrongCopy, match=ROW):
        check(wrong.WRONG[name], wrong.CASES[name], device)


@pytest.mark.parametrize("at", [0, 15, 16, 31, 32, 35, 36])  # of 16 elements at once, 4 in the last part, 1 in no word
def test_storages_are_compared_to_their_last_byte(at, monkeypatch):
    monkeypatch.setattr(gate, "COMPARED_WORDS", 4)
    one = torch.arange(37, dtype=torch.int16)
    assert gate._same_bits(one, one.clone())
    assert not gate._same_bits(one, one.index_fill(0, torch.tensor([at]), -1))


@pytest.mark.parametrize("case", [CASE, Case(**CASE.fields() | {"layout": "NHD", "source": "contiguous"})], ids=str)
def test_the_right_copy_passes_where_the_wrong_ones_fail(case, device):
    check(bent(lambda *_: None), case, device)


def test_every_wrong_copy_says_what_it_does_wrong():
    assert len(wrong.WRONG) >= 12
    assert all(copy.title != copy.name for copy in wrong.WRONG.values())
    assert not set(wrong.WRONG) & set(REGISTRY)


def test_a_copy_that_does_not_support_the_case_is_refused():
    with pytest.raises(ValueError, match="torch.index_copy cannot be checked here: flat rows exist in NHD only"):
        check(REGISTRY["torch.index_copy"], CASE, "cpu")


# ------------------------------------------------------------------------------------------------ what a message says


def flip(row: torch.Tensor) -> None:
    """Change the lowest bit of a row's last element."""
    bits(row)[-1] ^= 1


def rejection(copy: Copy, case: Case = CASE, policy: str | None = None) -> str:
    with pytest.raises(WrongCopy) as caught:
        check(copy, case, "cpu", policy)
    return str(caught.value)


def test_one_bit_in_a_row_of_another_token_is_found_and_named():
    untouched = CASE.num_slots - 1
    block, offset = divmod(untouched, CASE.block_size)

    def bend(made, slot_mapping, key, value):
        flip(made.value_cache[block, offset, 1])

    message = rejection(bent(bend))
    place = f"value_cache slot {untouched} (block {block}, offset {offset}) head 1"
    assert message.startswith(
        f"bent: call 0: {place} should be untouched, but was written; 1 rows of value_cache are wrong"
    )
    assert message.endswith(f"({CASE}, policy skip)")


def test_one_bit_in_a_written_row_is_found_and_named():
    def bend(made, slot_mapping, key, value):
        slot = int(slot_mapping[4])
        if slot >= 0:
            flip(made.key_cache[slot // CASE.block_size, slot % CASE.block_size, 2])

    message = rejection(bent(bend))
    assert re.search(r"head 2 should hold token 4, but 1 of its 20 elements differ; 1 rows", message), message


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_copy_that_is_wrong_in_one_of_its_calls_is_found(nth):
    calls = []

    def bend(made, slot_mapping, key, value):
        calls.append(len(slot_mapping))
        if len(calls) == nth + 1:
            flip(made.key_cache[0, 0, 0])

    assert f"call {nth}: key_cache slot 0" in rejection(bent(bend))
    assert calls == [13, 13, 9][: nth + 1]  # the last slot_mapping is a third shorter than key


def test_negative_zero_is_not_zero():
    made = inputs.make(CASE, "cpu")
    mine = Expectation(made)
    mine.apply([(made.keys[0], made.values[0], torch.full((13,), -1))])
    mine.key_cache[1, 0, 0] = -0.0
    made.key_cache[1, 0, 0] = 0.0
    with pytest.raises(WrongCopy, match="slot 12"):
        mine.compare()
    made.key_cache[1, 0, 0] = -0.0
    mine.compare()


# ------------------------------------------------------------------------------------------------------- null slots

PADDED = Case(20, 2, 8, block_size=6, cache_bytes=1 << 15, padding=0.4, layout="HND")


def padding_of(made, slot_mapping, rows, policy):
    """Rows of padded tokens, `[padded, heads, head_size]`: those that the policy sends to null slots."""
    null = {"null_slot": 1, "null_block": PADDED.block_size, "null_blocks": PADDED.null_blocks * PADDED.block_size}[
        policy
    ]
    return rows[: len(slot_mapping)][slot_mapping < null]


@pytest.mark.parametrize("policy", ["null_slot", "null_block", "null_blocks"])
def test_a_null_slot_may_hold_any_mix_of_padded_rows(policy):
    def bend(made, slot_mapping, key, value):
        padded = padding_of(made, slot_mapping, key, policy)
        made.key_cache[0, 0, :, ::2] = padded[0][:, ::2]
        made.key_cache[0, 0, :, 1::2] = padded[-1][:, 1::2]

    check(bent(bend), PADDED, "cpu", policy)


@pytest.mark.parametrize("policy", ["null_slot", "null_block", "null_blocks"])
def test_a_null_slot_may_not_hold_an_element_of_nobodys(policy):
    def bend(made, slot_mapping, key, value):
        made.key_cache[0, 0, 1, 3] = 1e30

    message = rejection(bent(bend), PADDED, policy)
    assert "key_cache slot 0 (block 0, offset 0) head 1" in message


@pytest.mark.parametrize("policy", ["null_slot", "null_block", "null_blocks"])
def test_a_null_slot_may_not_hold_a_written_tokens_row(policy):
    def bend(made, slot_mapping, key, value):
        made.value_cache[0, 0] = value[int(slot_mapping.argmax())]

    assert "value_cache slot 0" in rejection(bent(bend), PADDED, policy)


@pytest.mark.parametrize(
    ("policy", "first_closed"), [("skip", 0), ("null_slot", 1), ("null_block", 6), ("null_blocks", 6 * 8)]
)
def test_padding_may_go_no_further_than_its_policy_says(policy, first_closed):
    assert PADDED.null_blocks == 8

    def bend(made, slot_mapping, key, value):
        some = key[int(slot_mapping.argmin())]
        made.key_cache[first_closed // PADDED.block_size, first_closed % PADDED.block_size] = some

    assert f"key_cache slot {first_closed} " in rejection(bent(bend), PADDED, policy)


def test_without_padding_nothing_may_be_written_to_the_null_block():
    def bend(made, slot_mapping, key, value):
        made.key_cache[0, 0] = key[0]

    assert "key_cache slot 0 " in rejection(bent(bend), Case(**PADDED.fields() | {"padding": 0.0}), "null_slot")


@pytest.mark.parametrize("together", [1, 2, 5])
@pytest.mark.parametrize("policy", ["skip", "null_slot", "null_block", "last_slot", "remap"])
def test_sets_written_together_are_expected_as_one_by_one(monkeypatch, policy, together):
    case = Case(13, 3, 20, block_size=12, padding=0.25, cache_bytes=1 << 17)
    made = inputs.make(case, "cpu", policy=policy, source_sets=3, slot_count=5)
    sources = [0, 1, 2, 0, 1]
    monkeypatch.setattr("kvnb.bench.check.TOGETHER_BYTES", together * case.num_tokens * case.token_bytes)
    at_once, one_by_one = Expectation(made), Expectation(made)
    with monkeypatch.context() as only:
        only.setattr(Expectation, "apply", None)  # at once, then
        at_once.apply_sets(made.keys, made.values, made.slots, sources)
    one_by_one.apply((made.keys[i], made.values[i], row) for i, row in zip(sources, made.slots, strict=True))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(at_once.storage, one_by_one.storage, strict=True))
    assert all(a is b or torch.equal(a, b) for a, b in zip(at_once.calls[0], one_by_one.calls[0], strict=True))


# ------------------------------------------------------------------------------------------------------------- limits


def test_a_limit_that_copies_nothing_is_rejected():
    idle = Copy("limit.copy.idle", "limit", ("skip",), lambda made: lambda slots: lambda key, value: None, ("cpu",))
    with pytest.raises(WrongCopy, match="no region of the key storage holds the last rows"):
        check(idle, CASE, "cpu")


def test_a_limit_that_forgets_values_is_rejected():
    memcpy = REGISTRY["limit.copy.memcpy"]

    def bind(made):
        write = memcpy.bind(made)(None)
        return lambda slots: lambda key, value: write(key, key)

    with pytest.raises(WrongCopy, match="no region of the value storage"):
        check(Copy("limit.copy.half", "limit", ("skip",), bind, ("cpu",)), Case(8, 2, 16, cache_bytes=1 << 14), "cpu")


# ------------------------------------------------------------------------------------------------------ the reference


@settings(max_examples=60)
@given(
    layout=st.sampled_from(["NHD", "HND", "packed"]),
    source=st.sampled_from(["contiguous", "qkv"]),
    policy=st.sampled_from(["skip", "null_slot", "null_block", "null_blocks", "last_slot", "remap", "filter"]),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 9), st.integers(1, 7)),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_reference_is_a_python_loop(layout, source, policy, sizes, padding, seed):
    tokens, heads, head_size, block_size = sizes
    cache_bytes = 40 * block_size * heads * head_size * 4
    case = Case(
        tokens,
        heads,
        head_size,
        block_size=block_size,
        cache_bytes=cache_bytes,
        layout=layout,
        source=source,
        padding=padding,
        seed=seed,
    )
    made = inputs.make(case, "cpu", policy=policy)
    mine, [key], [value], [slot_mapping] = Expectation(made), made.keys, made.values, made.slots
    mine.apply([(key, value, slot_mapping)])
    reserved = {"null_slot": 1, "null_block": block_size, "null_blocks": case.null_blocks * block_size}.get(policy, 0)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= (reserved if padding else 0):
            for cache, rows in ((made.key_cache, key), (made.value_cache, value)):
                bits(cache)[slot // block_size, slot % block_size] = bits(rows)[token]
    for by_reference, by_loop in zip(mine.storage, made.storage, strict=True):
        assert torch.equal(bits(by_reference), bits(by_loop))


def test_later_calls_write_over_earlier_ones_and_reset_forgets_both():
    made = inputs.make(CASE, "cpu", source_sets=2)
    mine = Expectation(made)
    step = REGISTRY["kvnb"].bind(made)
    for key, value in zip(made.keys, made.values, strict=True):
        step(made.slots[0])(key, value)
    mine.apply(zip(made.keys, made.values, (made.slots[0], made.slots[0]), strict=True))
    mine.compare()
    mine.reset()
    mine.compare()
    assert torch.equal(bits(made.storage[0]), bits(inputs.make(CASE, "cpu").storage[0]))
