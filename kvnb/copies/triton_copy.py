"""Our Triton kernel: a program per token and tile of its row."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvnb.copies.base import Copy
from kvnb.problem.case import Case

if TYPE_CHECKING:
    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

TILE = 1024  # most elements of K, and of V, that a program moves: 8 per thread at 4 warps, 16 bytes in bf16


@cache
def _kernel():
    """The kernel, made on first use: nothing imports triton before."""
    global tl
    import triton
    import triton.language as tl

    @triton.jit
    def copy_kernel(
        key, value, key_cache, value_cache, slots,
        key_token, key_head, value_token, value_head,
        key_block, key_slot, key_cache_head, value_block, value_slot, value_cache_head,
        BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
        LONGEST: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token, eviction_policy="evict_last").to(tl.int64)  # every layer reads the slots again
        element = tl.program_id(1) * TILE + tl.arange(0, TILE)
        head, within = element // LONGEST, element % LONGEST
        in_key = (head < HEADS) & (within < KEY_SIZE)
        in_value = (head < HEADS) & (within < VALUE_SIZE)
        k = tl.load(key + token * key_token + head * key_head + within, mask=in_key)
        v = tl.load(value + token * value_token + head * value_head + within, mask=in_value)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            tl.store(key_cache + block * key_block + offset * key_slot + head * key_cache_head + within, k, mask=in_key)
            tl.store(
                value_cache + block * value_block + offset * value_slot + head * value_cache_head + within,
                v,
                mask=in_value,
            )

    return copy_kernel


def bind_triton(inputs: Inputs) -> Step:
    """Our Triton kernel: one launch, a program per token and tile of the row, negative slots skipped"""
    import triton

    kernel, case = _kernel(), inputs.case
    key_cache, value_cache = inputs.key_cache, inputs.value_cache
    longest = max(case.head_size, case.value_head_size)
    elements = case.num_kv_heads * longest
    tile = min(TILE, triton.next_power_of_2(elements))
    tiles = triton.cdiv(elements, tile)
    cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3])
    warps = max(1, tile * case.itemsize // (16 * 32))  # a 16-byte vector per thread
    sizes = (case.block_size, case.num_kv_heads, case.head_size, case.value_head_size, longest, tile)

    def step(slot_mapping):
        grid = (slot_mapping.shape[0], tiles)

        def write(key, value):
            sources = (*key.stride()[:2], *value.stride()[:2])
            kernel[grid](
                key, value, key_cache, value_cache, slot_mapping, *sources, *cache_strides, *sizes, num_warps=warps
            )

        return write

    return step


def _has_triton(case: Case, policy: str, timer: str) -> str | None:
    from importlib.util import find_spec

    return None if find_spec("triton") else "triton is not installed"


COPIES = (Copy("triton", "triton", ("skip",), bind_triton, supports=_has_triton),)
