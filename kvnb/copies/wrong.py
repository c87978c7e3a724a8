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
    """The right copy of one side, which every wrong one below bends in one place."""
    kept, size = slots >= 0, cache.shape[1]
    cache[slots[kept] // size, slots[kept] % size] = rows[: len(slots)][kept]


def _bent(bend) -> object:
    """A bind whose write calls `bend(cache, slots, rows, storage)` for K and for V."""

    def bind(inputs: Inputs) -> Step:
        caches, storage = (inputs.key_cache, inputs.value_cache), inputs.storage

        def step(slots):
            def write(key, value):
                for side, rows in enumerate((key, value)):
                    bend(caches[side], slots, rows, storage[side % len(storage)])

            return write

        return step

    bind.__doc__ = bend.__doc__
    return bind


def drops_a_head(cache, slots, rows, storage):
    """Leaves the last head out"""
    _write(cache[:, :, :-1], slots, rows[:, :-1])


def ignores_padding(cache, slots, rows, storage):
    """Writes padded rows to slot 0 although the policy is to skip them"""
    _write(cache, slots.clamp(min=0), rows)


def wraps_minus_one(cache, slots, rows, storage):
    """Takes -1 as Python does: the last slot"""
    _write(cache, slots % (cache.shape[0] * cache.shape[1]), rows)


def packed_as_contiguous(cache, slots, rows, storage):
    """Writes into the cache as if it were contiguous NHD, whatever it is"""
    row = cache.shape[2] * cache.shape[3]
    _write(cache.as_strided(cache.shape, (cache.shape[1] * row, row, cache.shape[3], 1)), slots, rows)


def forgets_the_last_token(cache, slots, rows, storage):
    """Stops one token early"""
    _write(cache, slots[:-1], rows)


def overflows_32_bits(cache, slots, rows, storage):
    """Computes the element offset in 32 bits, so it wraps beyond 2^31 elements"""
    import torch

    row = rows.shape[1] * rows.shape[2]
    offset = (slots.int() * row).long() % storage.numel()
    storage[offset[:, None] + torch.arange(row, device=storage.device)] = rows[: len(slots)].reshape(len(slots), row)


def reads_the_wrong_stride(cache, slots, rows, storage):
    """Reads the source as if tokens lay one behind the other, whatever its stride"""
    _write(cache, slots, rows.as_strided(rows.shape, (rows.shape[1] * rows.shape[2], rows.shape[2], 1)))


def takes_the_length_of_key(cache, slots, rows, storage):
    """Writes key.shape[0] tokens, the ones without a slot to the slots after the last"""
    import torch

    extra = torch.arange(1, 1 + len(rows) - len(slots), device=slots.device) + slots.max()
    _write(cache, torch.cat([slots, extra]), rows)


def cuts_rows_to_whole_vectors(cache, slots, rows, storage):
    """Moves 16 bytes at a time and leaves the rest of a row"""
    whole = rows.shape[2] - rows.shape[2] % 8
    _write(cache[..., :whole], slots, rows[..., :whole])


def rounds(cache, slots, rows, storage):
    """Takes rows through 8-bit floats"""
    import torch

    _write(cache, slots, rows.to(torch.float8_e4m3fn).to(rows.dtype))


def clears_the_block(cache, slots, rows, storage):
    """Zeroes the rest of a block that it writes to"""
    cache[slots[slots >= 0] // cache.shape[1]] = 0
    _write(cache, slots, rows)


def bind_swaps_key_and_value(inputs: Inputs) -> Step:
    """Writes V into the K cache and K into the V cache"""
    return lambda slots: (
        lambda key, value: (
            _write(inputs.key_cache, slots, value),
            _write(inputs.value_cache, slots, key),
        )
    )


def bind_forgets_value(inputs: Inputs) -> Step:
    """Writes K only"""
    return lambda slots: lambda key, value: _write(inputs.key_cache, slots, key)


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
    reads_the_wrong_stride, takes_the_length_of_key, cuts_rows_to_whole_vectors, rounds, clears_the_block,
)  # fmt: skip
BINDS = {bend.__name__: _bent(bend) for bend in BENT} | {
    "swaps_key_and_value": bind_swaps_key_and_value,
    "forgets_value": bind_forgets_value,
    "keeps_the_first_rows": bind_keeps_the_first_rows,
}
WRONG = {name: Copy(f"wrong.{name}", "yours", ("skip",), bind, ("cuda", "cpu")) for name, bind in BINDS.items()}
CASES = {name: BIG if name == "overflows_32_bits" else CASE for name in WRONG}  # the problem that shows each mistake
