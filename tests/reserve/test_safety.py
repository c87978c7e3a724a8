"""What a padded token may do to the cache: each hazard of -1 and of a null slot, and what keeps it away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvnb.copies import REGISTRY
from kvnb.problem.case import Case
from kvnb.problem.inputs import Inputs, make
from kvnb.problem.slots import place_padding
from kvnb.reserve.pool import NULL_BLOCK, Pool

BLOCK = 4
PREFIX = list(range(100, 108))  # two full blocks that both requests begin with


def small(num_tokens: int, **fields) -> Case:
    sizes = {"num_kv_heads": 2, "head_size": 8, "block_size": BLOCK, "dtype": "float32"} | fields
    return Case(num_tokens, cache_bytes=16 * BLOCK * 2 * 2 * 8 * 4, **sizes)


def inputs_of(case: Case, slots: list[int], policy: str) -> Inputs:
    """Inputs whose slot_mapping is `slots`, with -1 for padding, placed under a policy; caches hold zeros."""
    inputs = make(case, "cpu")
    for flat in inputs.storage:
        flat.zero_()
    return replace(inputs, policy=policy, slots=place_padding(torch.tensor([slots]), case, policy))


def write(copy: str, inputs: Inputs) -> None:
    REGISTRY[copy].bind(inputs)(inputs.slots[0])(inputs.keys[0], inputs.values[0])


def test_minus_one_in_index_put_overwrites_the_last_slot():
    inputs = inputs_of(small(3), [9, 10, -1], "last_slot")
    write("torch.index_put", inputs)
    assert torch.equal(inputs.key_cache[-1, -1], inputs.keys[0][2]), "the padded row"
    assert torch.equal(inputs.value_cache[-1, -1], inputs.values[0][2])


@pytest.mark.parametrize("copy", ["torch.index_copy", "torch.index_copy_wide", "torch.scatter"])
def test_minus_one_in_index_copy_and_scatter_raises(copy):
    with pytest.raises((IndexError, RuntimeError), match="index"):
        write(copy, inputs_of(small(3), [9, 10, -1], "last_slot"))


def attention(inputs: Inputs, table: tuple[int, ...], length: int) -> torch.Tensor:
    """What a paged decode kernel does for one request: it reads all of a block table that is padded with zeros, gives
    tokens from `length` on weight zero, and multiplies. Returns `[num_kv_heads, value_head_size]`."""
    blocks = [*table, *[NULL_BLOCK] * (4 - len(table))]
    keys, values = (cache[blocks].flatten(0, 1) for cache in (inputs.key_cache, inputs.value_cache))
    scores = torch.einsum("hd,nhd->hn", torch.ones_like(keys[0]), keys)
    scores = scores.masked_fill(torch.arange(len(keys)) >= length, -torch.inf)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize(
    ("policy", "clear", "finite"),
    [("skip", False, True), ("null_slot", False, False), ("null_block", False, False), ("null_slot", True, True)],
)
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_a_nan_in_a_padded_row_reaches_attention_only_through_a_null_slot_left_as_it_is(policy, clear, finite, layout):
    pool = Pool(16, BLOCK)
    pool.allocate("a", 6)
    case = small(8, layout=layout)
    inputs = inputs_of(case, [*pool.slot_mapping("a"), -1, -1], policy)
    for rows in (*inputs.keys, *inputs.values):
        rows[6:] = torch.nan  # what a captured graph's dummy rows may hold
    write("kvnb", inputs)
    if clear:
        inputs.key_cache[NULL_BLOCK] = inputs.value_cache[NULL_BLOCK] = 0
    assert bool(attention(inputs, pool.blocks("a"), 6).isfinite().all()) == finite


def decode_beside_a_shared_prefix(pool: Pool, copy: str, policy: str) -> tuple[Inputs, list[int]]:
    """Two requests share two blocks and decode a token each, in a batch of two padded to eight. The prefix's slots
    hold ones. Returns the inputs after the write and the shared blocks."""
    assert pool.allocate("a", [*PREFIX, 1]) == 0
    assert pool.allocate("b", [*PREFIX, 2]) == len(PREFIX)
    shared = [block for block in pool.blocks("a") if pool.references(block) == 2]
    assert len(shared) == 2
    for name in "ab":
        pool.append(name, [3])
    slots = pool.slot_mapping("a") + pool.slot_mapping("b") + [-1] * 6
    inputs = inputs_of(small(8), slots, policy)
    inputs.key_cache[shared] = inputs.value_cache[shared] = 1
    write(copy, inputs)
    return inputs, shared


@pytest.mark.parametrize(
    ("copy", "policy"),
    [
        *((copy, policy) for copy in ("kvnb", "torch.index_put") for policy in ("null_slot", "null_block")),
        ("kvnb", "skip"), ("torch.index_put", "remap"), ("torch.index_put", "filter"),
    ],
)  # fmt: skip
def test_a_shared_prefix_block_is_never_written_by_a_padded_token(copy, policy):
    inputs, shared = decode_beside_a_shared_prefix(Pool(16, BLOCK), copy, policy)
    assert (inputs.key_cache[shared] == 1).all() and (inputs.value_cache[shared] == 1).all()


def test_without_a_reserve_the_null_slot_is_a_shared_prefixs_first():
    """The same batch, block 0 handed out: why the null block must be the pool's."""
    inputs, shared = decode_beside_a_shared_prefix(Pool(16, BLOCK, reserve=False), "kvnb", "null_slot")
    assert NULL_BLOCK in shared
    assert not (inputs.key_cache[NULL_BLOCK, 0] == 1).all()
