"""The gate: a copy is timed only after it wrote the right bits, and nothing else, into whole poisoned caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvnb.copies import limits
from kvnb.copies.base import Copy, writes_rows
from kvnb.problem import inputs as inputs_of
from kvnb.problem.case import Case
from kvnb.problem.inputs import Inputs
from kvnb.problem.slots import KEEPS_NEGATIVE, null_slots

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TOGETHER_BYTES = 1 << 30  # rows that `apply_sets` writes in one go
COMPARED_WORDS = 1 << 27  # of 8 bytes that are compared at once: torch.equal makes a byte of each
Call = tuple[Tensor, Tensor, Tensor]  # key, value, slot_mapping


class WrongCopy(AssertionError):
    """A copy wrote something else than it should; the message names the first wrong row."""


def bits(t: Tensor) -> Tensor:
    """A tensor as integers of its element size: NaNs and signed zeros compare by their bits."""
    return t.view(BITS[t.element_size()])


def check(copy: Copy, case: Case, device: str | torch.device = "cpu", policy: str | None = None) -> None:
    """Run `copy` on `case` and compare the whole caches with the reference, bit for bit, after each of three calls:
    the case's own; other sources and slots; a slot_mapping that is a third shorter than key.

    Raises WrongCopy naming the first wrong row, ValueError where the copy does not support the case.
    """
    policy = policy or copy.policies[0]
    reason = copy.reason_on(case, policy, torch.device(device).type)
    if reason:
        raise ValueError(f"{copy.name} cannot be checked here: {reason}")
    inputs = inputs_of.make(case, device, policy=policy, source_sets=2, slot_count=3)
    expected = Expectation(inputs)
    step = copy.bind(inputs)
    shorter = inputs.slots[2][: case.num_tokens - case.num_tokens // 3]
    calls = zip((0, 1, 0), (inputs.slots[0], inputs.slots[1], shorter), strict=True)
    for number, (source, slot_mapping) in enumerate(calls):
        key, value = inputs.keys[source], inputs.values[source]
        step(slot_mapping)(key, value)
        expected.apply([(key, value, slot_mapping)])
        try:
            expected.compare(copy, call_number=number)
        except WrongCopy as wrong:
            raise WrongCopy(f"{copy.name}: {wrong} ({case}, policy {policy})") from None


class Expectation:
    """The caches as they must be, beside the caches as they are; both poisoned at first."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.storage, self.key_cache, self.value_cache = inputs_of.make_caches(inputs.case, inputs.device)
        self.calls: list[Call] = []
        self.sets: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Poison what is expected, and forget the calls."""
        inputs_of.poison(self.storage)
        self.calls, self.sets = [], []
        self.reset_caches()

    def reset_caches(self) -> None:
        """Poison the caches themselves; what is expected stays, so that several copies can be held against it."""
        inputs_of.poison(self.inputs.storage)

    def apply(self, calls: Iterable[Call]) -> None:
        """Write what `calls` must write, one after another; rows of padding are left to `compare`."""
        for key, value, slot_mapping in calls:
            self.calls = [(key, value, slot_mapping)]
            self.sets.append(slot_mapping)
            self._write(key, value, slot_mapping)

    def apply_sets(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], sets: Tensor, sources: Sequence[int]
    ) -> None:
        """`apply` for slot sets `[calls, num_tokens]` at once: call i takes source set `sources[i]`.

        Sets that share no real slot are written together: hundreds of small calls would take longer than their timing.
        """
        real = sets[self._real(sets)]
        if len(real.unique()) < len(real):
            self.apply((keys[source], values[source], row) for source, row in zip(sources, sets, strict=True))
            return
        self.calls = [(keys[sources[-1]], values[sources[-1]], sets[-1])]
        self.sets += sets.unbind()
        most = max(1, TOGETHER_BYTES // max(1, self.inputs.case.num_tokens * self.inputs.case.token_bytes))
        for begin in range(0, len(sets), most):
            some, taken = sets[begin : begin + most], sources[begin : begin + most]
            if len(some) != len(taken):
                raise ValueError(f"{len(sets)} slot sets and {len(sources)} sources: every call takes one of each")
            rows = (torch.stack([side[source] for source in taken]).flatten(0, 1) for side in (keys, values))
            self._write(*rows, some.reshape(-1))

    def _write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        real = self._real(slot_mapping)
        slots = slot_mapping[real].long()
        block, offset = slots // self.inputs.case.block_size, slots % self.inputs.case.block_size
        for cache, rows in ((self.key_cache, key), (self.value_cache, value)):
            bits(cache)[block, offset] = bits(rows)[: len(slot_mapping)][real]

    def _exempt(self) -> int:
        """How many slots at the cache's beginning may take padding: those of the policy's null slots."""
        case = self.inputs.case
        return null_slots(case, self.inputs.policy) if case.padded_tokens else 0

    def _real(self, slot_mapping: Tensor) -> Tensor:
        return slot_mapping >= (0 if self.inputs.policy in KEEPS_NEGATIVE else self._exempt())

    def compare(self, copy: Copy | None = None, call_number: int = 0) -> None:
        """Raise WrongCopy unless the caches hold what they must, every byte. Null slots may hold any padded row."""
        inputs = self.inputs
        if copy is not None and copy.family == "limit":
            return self._compare_regions(copy)
        self._take_padding()
        if all(_same_bits(mine, real) for mine, real in zip(self.storage, inputs.storage, strict=True)):
            return None
        raise WrongCopy(self._first_wrong_row(call_number))

    def _take_padding(self) -> None:
        """Where padding may have gone, accept an element that some padded row holds, and expect it from here on."""
        inputs, case = self.inputs, self.inputs.case
        slots = list(range(self._exempt()))
        if inputs.policy == "last_slot" and case.padded_tokens:
            slots = [case.num_slots - 1]
        for slot in slots:
            block, offset = divmod(slot, case.block_size)
            for mine, real, which in ((self.key_cache, inputs.key_cache, 0), (self.value_cache, inputs.value_cache, 1)):
                row = bits(real)[block, offset]
                known = bits(mine)[block, offset] == row
                for call in self.calls:
                    padded = ~self._real(call[2])
                    known = known | (bits(call[which])[: len(padded)][padded] == row).any(0)
                bits(mine)[block, offset] = torch.where(known, row, bits(mine)[block, offset])

    def _compare_regions(self, copy: Copy) -> None:
        if not writes_rows(copy.name, copy.family):
            return
        for cut, which in zip(limits.regions(self.inputs), (0, 1), strict=True):
            last = limits.contiguous_bytes(self.calls[-1][which], self.inputs.case.written_tokens)
            alike = cut[(cut[:, :16] == last[:16]).all(1)]  # few: then whole
            if not (alike == last).all(1).any():
                raise WrongCopy(f"{copy.name}: no region of the {('key', 'value')[which]} storage holds the last rows")

    def _first_wrong_row(self, call_number: int) -> str:
        inputs, case = self.inputs, self.inputs.case
        pairs = (("key_cache", self.key_cache, inputs.key_cache), ("value_cache", self.value_cache, inputs.value_cache))
        for name, mine, real in pairs:
            wrong = (bits(mine) != bits(real)).any(-1)
            if not wrong.any():
                continue
            block, offset, head = (int(i) for i in wrong.nonzero()[0])
            slot = block * case.block_size + offset
            rows = int(wrong.sum())
            where = f"{name} slot {slot} (block {block}, offset {offset}) head {head}"
            should = self._should(slot, mine, real, (block, offset, head))
            return f"call {call_number}: {where} {should}; {rows} rows of {name} are wrong"
        return f"call {call_number}: bytes outside every row were changed"

    def _should(self, slot: int, mine: Tensor, real: Tensor, at: tuple[int, int, int]) -> str:
        differ = int((bits(real)[at] != bits(mine)[at]).sum())
        for slot_mapping in reversed(self.sets):
            token = (slot_mapping == slot).nonzero()
            if len(token):
                return f"should hold token {int(token[0])}, but {differ} of its {real.shape[-1]} elements differ"
        return "should be untouched, but was written"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two flat storages hold the same bytes, compared eight at a time."""
    words = inputs_of.as_words(a), inputs_of.as_words(b)
    tail = len(words[0]) * 8 // a.element_size()
    parts = zip(*(side.split(COMPARED_WORDS) for side in words), strict=True)
    return all(torch.equal(*part) for part in parts) and torch.equal(bits(a[tail:]), bits(b[tail:]))
