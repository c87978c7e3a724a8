"""The tensors of a case: shapes, strides per layout, shared storage, poison, and the same bytes from the same seed."""

from __future__ import annotations

import pytest
import torch

from kvnb.problem import inputs, slots
from kvnb.problem.case import ITEMSIZE, LAYOUTS, SOURCES, Case

SIZES = {"num_kv_heads": 3, "head_size": 20, "value_head_size": 12, "block_size": 5, "cache_bytes": 40_000}


def storage_bytes(made: inputs.Inputs) -> list[bytes]:
    return [flat.view(torch.uint8).numpy().tobytes() for flat in made.storage]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_logical_shapes_do_not_depend_on_layout_or_source(layout, source):
    case = Case(7, layout=layout, source=source, **SIZES)
    made = inputs.make(case, "cpu", source_sets=2, slot_count=4)
    assert made.key_cache.shape == (case.num_blocks, 5, 3, 20)
    assert made.value_cache.shape == (case.num_blocks, 5, 3, 12)
    assert [key.shape for key in made.keys] == [(7, 3, 20)] * 2
    assert [value.shape for value in made.values] == [(7, 3, 12)] * 2
    assert made.slots.shape == (4, 7)
    assert made.device == torch.device("cpu")


def test_strides_of_nhd():
    made = inputs.make(Case(7, **SIZES), "cpu")
    assert made.key_cache.stride() == (5 * 3 * 20, 3 * 20, 20, 1)
    assert made.value_cache.stride() == (5 * 3 * 12, 3 * 12, 12, 1)


def test_strides_of_hnd():
    made = inputs.make(Case(7, layout="HND", **SIZES), "cpu")
    assert made.key_cache.stride() == (3 * 5 * 20, 20, 5 * 20, 1)
    assert made.value_cache.stride() == (3 * 5 * 12, 12, 5 * 12, 1)


def test_packed_keeps_k_and_v_side_by_side_in_one_storage():
    made = inputs.make(Case(7, layout="packed", **SIZES), "cpu")
    [flat] = made.storage
    assert made.key_cache.stride() == made.value_cache.stride() == (3 * 5 * 32, 32, 5 * 32, 1)
    assert made.key_cache.data_ptr() == flat.data_ptr()
    assert made.value_cache.data_ptr() == flat.data_ptr() + 20 * flat.element_size()
    assert made.key_cache.untyped_storage().data_ptr() == made.value_cache.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_are_all_of_their_storage(layout):
    case = Case(7, layout=layout, **SIZES)
    made = inputs.make(case, "cpu")
    assert sum(flat.nbytes for flat in made.storage) == case.num_blocks * case.block_bytes
    for flat in made.storage:
        flat.zero_()
    made.key_cache.fill_(1)
    made.value_cache.fill_(1)
    assert all(flat.eq(1).all() for flat in made.storage)


def test_qkv_sources_are_slices_of_one_projection():
    made = inputs.make(Case(7, source="qkv", **SIZES), "cpu")
    [key], [value] = made.keys, made.values
    row = inputs.QUERY_GROUP * 3 * 20 + 3 * 20 + 3 * 12
    assert key.stride() == (row, 20, 1)
    assert value.stride() == (row, 12, 1)
    assert value.storage_offset() - key.storage_offset() == 3 * 20
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def test_transposed_sources_keep_the_rows_of_a_head_together():
    made = inputs.make(Case(7, source="transposed", **SIZES), "cpu")
    assert (made.keys[0].stride(), made.values[0].stride()) == ((20, 7 * 20, 1), (12, 7 * 12, 1))


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_the_same_seed_gives_the_same_bytes(dtype):
    def bits(seed: int) -> list[list[int]]:
        made = inputs.make(Case(7, dtype=dtype, seed=seed, padding=0.3, **SIZES), "cpu", source_sets=2, slot_count=2)
        return [t.contiguous().flatten().view(torch.uint8).tolist() for t in (*made.keys, *made.values, made.slots)]

    assert bits(1) == bits(1)
    assert all(one != other for one, other in zip(bits(1), bits(2), strict=True))
    key, other_key = bits(1)[:2]
    assert key != other_key  # source sets differ


def test_the_seed_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    inputs.make(Case(7, **SIZES), "cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_poison_differs_in_every_8_bytes(layout, dtype):
    made = inputs.make(Case(7, layout=layout, dtype=dtype, **SIZES), "cpu")
    for flat in made.storage:
        words = inputs.as_words(flat)
        assert words.numel() == flat.nbytes // 8
        assert words.unique().numel() == words.numel()
        assert words.count_nonzero() == words.numel()


@pytest.mark.parametrize("bytes_before", [0, 255])
def test_poison_reaches_a_tail_shorter_than_8_bytes(bytes_before):
    flat = torch.full((13,), bytes_before, dtype=torch.uint8)
    inputs.poison((flat,))
    again = torch.zeros_like(flat)
    inputs.poison((again,))
    assert torch.equal(flat, again)


def test_k_and_v_are_poisoned_differently():
    made = inputs.make(Case(7, **SIZES | {"value_head_size": 20}), "cpu")
    first, second = (inputs.as_words(flat) for flat in made.storage)
    assert not (first == second).any()


def test_poison_reaches_all_of_a_storage_longer_than_its_pattern():
    words = torch.zeros(2 * inputs.POISON_WORDS + 5, dtype=torch.int64)
    inputs.poison((words,))
    assert words.count_nonzero() == words.numel()
    assert not (words[1:] == words[:-1]).any()


def test_poisoning_again_restores_every_byte():
    made = inputs.make(Case(7, **SIZES), "cpu")
    before = storage_bytes(made)
    made.key_cache.zero_()
    made.value_cache.zero_()
    inputs.poison(made.storage)
    assert storage_bytes(made) == before


def test_another_policy_keeps_the_tensors_and_moves_the_padding():
    case = Case(7, padding=0.5, **SIZES)
    unplaced = slots.sets(case, 1)
    made = inputs.make(case, "cpu", policy="skip")
    moved = made.under("null_slot", unplaced)
    assert moved.key_cache is made.key_cache
    assert moved.policy == "null_slot"
    assert torch.equal(moved.slots, unplaced.clamp(min=0))
    assert torch.equal(made.slots, unplaced)
