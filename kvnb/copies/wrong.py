"""Copies that are wrong in one way each. The check must reject every one; a gate that was never seen shut is no gate.

The idea of keeping wrong solutions as fixtures is gpu-mode/reference-kernels'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnb.copies.base import Copy
from kvnb.problem.case import GIB, MIB, Case

if TYPE_CHECKING:
    from torch import Tensor

    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

# One small problem that shows every mistake but one: odd sizes, packed, qkv slices, padding in the middle.
CASE = Case(13, 3, 20, block_size=12, cache_bytes=1 << 18, layout="packed", source="qkv", padding=0.25)
# K alone has more than 2^31 elements, and some slots lie beyond: what a 32-bit offset cannot reach.
BIG = Case(2048, 1, 64, cache_bytes=4 * GIB + 64 * MIB, dtype="uint8", slots="decode")


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """The right copy, which every wrong one below bends in one place."""
    kept, size = slots >= 0, cache.shape[1]
    cache[slots[kept] // size, slots[kept] % size] = rows[: len(slots)][kept]


def _bent(bend) -> object:
    """A bind whose write calls `bend(inputs, slots, key, value)`."""

    def bind(inputs: Inputs) -> Step:
        return lambda slots: lambda key, value: bend(inputs, slots, key, value)

    bind.__doc__ = bend.__doc__
    return bind


def drops_a_head(inputs, slots, key, value):
    """Leaves the last head out"""
    _write(inputs.key_cache[:, :, :-1], slots, key[:, :-1])
    _write(inputs.value_cache[:, :, :-1], slots, value[:, :-1])


def ignores_padding(inputs, slots, key, value):
    """Writes padded rows to slot 0 although the policy is to skip them"""
    _write(inputs.key_cache, slots.clamp(min=0), key)
    _write(inputs.value_cache, slots.clamp(min=0), value)


def wraps_minus_one(inputs, slots, key, value):
    """Takes -1 as Python does: the last slot"""
    last = inputs.case.num_slots
    _write(inputs.key_cache, slots % last, key)
    _write(inputs.value_cache, slots % last, value)


def packed_as_contiguous(inputs, slots, key, value):
    """Writes K and V as if their caches were contiguous NHD, whatever they are"""
    for cache, rows in ((inputs.key_cache, key), (inputs.value_cache, value)):
        shape = cache.shape
        row = shape[2] * shape[3]
        contiguous = cache.as_strided(shape, (shape[1] * row, row, shape[3], 1))
        _write(contiguous, slots, rows)


def forgets_the_last_token(inputs, slots, key, value):
    """Stops one token early"""
    _write(inputs.key_cache, slots[:-1], key)
    _write(inputs.value_cache, slots[:-1], value)


def overflows_32_bits(inputs, slots, key, value):
    """Computes the element offset in 32 bits, so it wraps beyond 2^31 elements"""
    import torch

    for cache, rows in ((inputs.key_cache, key), (inputs.value_cache, value)):
        flat = inputs.storage[0 if cache is inputs.key_cache else 1]
        row = rows.shape[1] * rows.shape[2]
        offset = (slots.int() * row).long() % flat.numel()
        flat[offset[:, None] + torch.arange(row, device=flat.device)] = rows[: len(slots)].reshape(len(slots), row)


def reads_the_wrong_stride(inputs, slots, key, value):
    """Reads K and V as if tokens lay one behind the other, whatever key.stride(0) is"""
    for cache, rows in ((inputs.key_cache, key), (inputs.value_cache, value)):
        row = rows.shape[1] * rows.shape[2]
        _write(cache, slots, rows.as_strided(rows.shape, (row, rows.shape[2], 1)))


def takes_the_length_of_key(inputs, slots, key, value):
    """Writes key.shape[0] tokens, the ones without a slot to the slots after the last"""
    import torch

    extra = torch.arange(1, 1 + len(key) - len(slots), device=slots.device) + slots.max()
    _write(inputs.key_cache, torch.cat([slots, extra]), key)
    _write(inputs.value_cache, torch.cat([slots, extra]), value)


def swaps_key_and_value(inputs, slots, key, value):
    """Writes V into the K cache and K into the V cache"""
    _write(inputs.key_cache, slots, value)
    _write(inputs.value_cache, slots, key)


def forgets_value(inputs, slots, key, value):
    """Writes K only"""
    _write(inputs.key_cache, slots, key)


def cuts_rows_to_whole_vectors(inputs, slots, key, value):
    """Moves 16 bytes at a time and leaves the rest of a row"""
    whole = key.shape[2] - key.shape[2] % 8
    _write(inputs.key_cache[..., :whole], slots, key[..., :whole])
    _write(inputs.value_cache[..., :whole], slots, value[..., :whole])


def rounds(inputs, slots, key, value):
    """Takes rows through 8-bit floats"""
    import torch

    _write(inputs.key_cache, slots, key.to(torch.float8_e4m3fn).to(key.dtype))
    _write(inputs.value_cache, slots, value)


def clears_the_block(inputs, slots, key, value):
    """Zeroes the rest of a block that it writes to"""
    inputs.key_cache[slots[slots >= 0] // inputs.case.block_size] = 0
    _write(inputs.key_cache, slots, key)
    _write(inputs.value_cache, slots, value)


def bind_keeps_the_first_rows(inputs: Inputs) -> Step:
    """Remembers the rows of its first call and writes them ever after"""
    first = []

    def step(slots):
        def write(key, value):
            first[:] = first or [key, value]
            _write(inputs.key_cache, slots, first[0])
            _write(inputs.value_cache, slots, first[1])

        return write

    return step


BENT = (
    drops_a_head, ignores_padding, wraps_minus_one, packed_as_contiguous, forgets_the_last_token, overflows_32_bits,
    reads_the_wrong_stride, takes_the_length_of_key, swaps_key_and_value, forgets_value, cuts_rows_to_whole_vectors,
    rounds, clears_the_block,
)  # fmt: skip
BINDS = {bend.__name__: _bent(bend) for bend in BENT} | {"keeps_the_first_rows": bind_keeps_the_first_rows}
WRONG = {name: Copy(f"wrong.{name}", "yours", ("skip",), bind, ("cuda", "cpu")) for name, bind in BINDS.items()}
CASES = {name: BIG if name == "overflows_32_bits" else CASE for name in WRONG}  # the problem that shows each mistake
