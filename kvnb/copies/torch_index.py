"""PyTorch's spellings of the copy, stock ATen: index_put, index_copy, scatter; narrow, 16 bytes wide, and packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnb.copies.base import NULL, Copy
from kvnb.problem.case import Case

if TYPE_CHECKING:
    from torch import Tensor

    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

WIDE_BYTES = 16  # torch.complex128: the widest element that ATen moves
NULL_SLOT = 0
ON_STEP = ("remap", "filter")  # policies that PyTorch copies carry out themselves, once per step
POLICIES = (*NULL, *ON_STEP)


def placed(slot_mapping: Tensor, policy: str) -> tuple[Tensor, Tensor | None]:
    """(slots, kept): slot_mapping as an index copy may use it, and the tokens it stands for (None: the first)."""
    import torch

    if policy == "remap":
        return torch.where(slot_mapping < 0, NULL_SLOT, slot_mapping), None
    if policy == "filter":
        kept = (slot_mapping >= 0).nonzero().squeeze(1)  # its length depends on data: waits for the GPU
        return slot_mapping[kept], kept
    return slot_mapping, None


def tokens_of(rows: Tensor, count: int, kept: Tensor | None) -> Tensor:
    """The rows that slots stand for, `[count, ...]`: slot_mapping may be shorter than key."""
    if kept is not None:
        return rows[kept]
    return rows if rows.shape[0] == count else rows[:count]


def flat_rows(t: Tensor) -> Tensor:
    """`[num_tokens, heads, head_size]` as `[num_tokens, heads * head_size]`; a cache as `[num_slots, ...]`."""
    return t.view(-1 if t.dim() == 4 else t.shape[0], t.shape[-2] * t.shape[-1])


def indexed(inputs: Inputs, by_block: bool, write_rows) -> Step:
    """`write_rows(index, key, value)` once per layer, on the rows that slots stand for. The index comes from `step`:
    slots for flat rows, or block and offset for the logical cache, whatever its strides."""
    policy, size = inputs.policy, inputs.case.block_size

    def step(slot_mapping):
        slots, kept = placed(slot_mapping, policy)
        index, count = (slots // size, slots % size) if by_block else (slots,), slots.shape[0]

        def write(key, value):
            write_rows(index, tokens_of(key, count, kept), tokens_of(value, count, kept))

        return write

    return step


def _bind(inputs: Inputs, assign, see=lambda rows: rows) -> Step:
    """`assign(cache, index, rows)` for K and for V, both seen through `see`, and flat where the layout is NHD."""
    by_block = inputs.case.layout != "NHD"
    view = see if by_block else lambda t: see(flat_rows(t))
    key_cache, value_cache = view(inputs.key_cache), view(inputs.value_cache)

    def write_rows(index, key, value):
        assign(key_cache, index, view(key))
        assign(value_cache, index, view(value))

    return indexed(inputs, by_block, write_rows)


def _index_put(cache, index, rows):
    cache[index] = rows


def _index_copy(cache, index, rows):
    cache.index_copy_(0, index[0], rows)


def _scatter(cache, index, rows):
    cache.scatter_(0, index[0][:, None].expand_as(rows), rows)


def _wide():
    """The view of rows as 16-byte elements."""
    import torch

    return lambda rows: rows.view(torch.complex128)


def bind_index_put(inputs: Inputs) -> Step:
    """The issue's spelling: `cache[slot_mapping] = rows`; HND and packed: `cache[block, offset] = rows`"""
    return _bind(inputs, _index_put)


def bind_index_copy(inputs: Inputs) -> Step:
    """`cache.index_copy_(0, slot_mapping, rows)` on flat rows"""
    return _bind(inputs, _index_copy)


def bind_index_put_wide(inputs: Inputs) -> Step:
    """index_put with rows and cache seen as 16-byte elements (`view(torch.complex128)`): stock PyTorch"""
    return _bind(inputs, _index_put, _wide())


def bind_index_copy_wide(inputs: Inputs) -> Step:
    """index_copy_ with rows and cache seen as 16-byte elements: stock PyTorch"""
    return _bind(inputs, _index_copy, _wide())


def bind_scatter(inputs: Inputs) -> Step:
    """`cache.scatter_(0, slot_mapping expanded over the row, rows)` on flat rows"""
    return _bind(inputs, _scatter)


def bind_index_put_packed(inputs: Inputs) -> Step:
    """K and V in one launch: packed cache and projection seen as `[..., head, 2, head_size]`"""
    case = inputs.case
    heads, head_size = case.num_kv_heads, case.head_size
    cache = inputs.storage[0].view(case.num_blocks, heads, case.block_size, 2, head_size).permute(0, 2, 1, 3, 4)
    between = heads * head_size  # elements from a token's K to its V in the projection

    def write_rows(index, key, value):
        cache[index] = key.as_strided((key.shape[0], heads, 2, head_size), (key.stride(0), head_size, between, 1))

    return indexed(inputs, True, write_rows)


def rows_as_they_lie(case: Case, policy: str, timer: str) -> str | None:
    """What holds for every spelling: NHD takes flat rows, and `filter` no graph."""
    if case.layout == "NHD" and case.source == "transposed":
        return "heads of a transposed source lie apart: they cannot be viewed as [num_tokens, row]"
    if policy == "filter" and timer == "graph":
        return "filter's length depends on data: it waits for the GPU and cannot be captured"
    return None


def nhd_only(case: Case, policy: str, timer: str) -> str | None:
    if case.layout != "NHD":
        return f"flat rows exist in NHD only: a {case.layout} cache cannot be viewed as [num_slots, row]"
    return rows_as_they_lie(case, policy, timer)


def _wide_rows(case: Case, policy: str, timer: str) -> str | None:
    for row in case.row_bytes:
        if row % WIDE_BYTES:
            return f"rows of {row} bytes cannot be seen as {WIDE_BYTES}-byte elements"
    return rows_as_they_lie(case, policy, timer)


def _wide_flat_rows(case: Case, policy: str, timer: str) -> str | None:
    return nhd_only(case, policy, timer) or _wide_rows(case, policy, timer)


def _one_fused_row(case: Case, policy: str, timer: str) -> str | None:
    if case.layout != "packed" or case.head_size != case.value_head_size:
        return "needs the packed layout with K and V heads of one size"
    if case.source != "qkv":
        return "needs K and V as slices of one projection (source qkv): two tensors are not one view"
    return None


def indexes_in_step(case: Case, policy: str) -> bool:
    return case.layout != "NHD" or policy in ON_STEP


def on_step_policy(case: Case, policy: str) -> bool:
    return policy in ON_STEP


BOTH = ("cuda", "cpu")
COPIES = (
    Copy(
        "torch.index_put",
        "torch",
        (*POLICIES, "last_slot"),
        bind_index_put,
        BOTH,
        supports=rows_as_they_lie,
        steps=indexes_in_step,
    ),
    Copy("torch.index_copy", "torch", POLICIES, bind_index_copy, BOTH, supports=nhd_only, steps=on_step_policy),
    Copy("torch.scatter", "torch", POLICIES, bind_scatter, BOTH, supports=nhd_only, steps=on_step_policy),
    Copy(
        "torch.index_put_wide", "torch", POLICIES, bind_index_put_wide, BOTH, supports=_wide_rows, steps=indexes_in_step
    ),
    Copy(
        "torch.index_copy_wide",
        "torch",
        POLICIES,
        bind_index_copy_wide,
        BOTH,
        supports=_wide_flat_rows,
        steps=on_step_policy,
    ),
    Copy(
        "torch.index_put_packed",
        "torch",
        (*NULL, "remap"),
        bind_index_put_packed,
        BOTH,
        supports=_one_fused_row,
        steps=indexes_in_step,
    ),
)
