"""What bounds a copy: the same bytes moved contiguously, a launch that does nothing, an empty pair of events."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from kvnb import paths
from kvnb.copies.base import Copy
from kvnb.copies.kernels import SOURCES, _dependent, built_for
from kvnb.problem.case import Case

if TYPE_CHECKING:
    from torch import Tensor

    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

MOST_REGIONS = 4096  # regions that steps rotate over
LIMIT_SOURCES = (*SOURCES, paths.CSRC / "capacity.h", paths.CSRC / "limits.cu")


def regions(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The caches' bytes cut into call-sized regions: uint8 `[regions, bytes of all K rows]`, and the same for V.

    A packed storage gives its first half to K and its second to V.
    """
    import torch

    case, storage = inputs.case, inputs.storage
    halves = storage if len(storage) == 2 else storage[0].view(2, -1).unbind()
    rows = case.written_tokens * case.num_kv_heads * case.itemsize
    cut = []
    for half, size in zip(halves, (case.head_size, case.value_head_size), strict=True):
        flat, length = half.view(torch.uint8), max(1, rows * size)
        whole = min(MOST_REGIONS, flat.numel() // length) * length
        cut.append(flat[:whole].view(-1, length))
    return cut[0], cut[1]


def contiguous_bytes(rows: Tensor, written: int) -> Tensor:
    """The bytes of the first `written` tokens' rows, one behind the other: a copy where they lie apart."""
    import torch

    return rows[:written].contiguous().view(-1).view(torch.uint8)


def _bind(inputs: Inputs, copy) -> Step:
    """`copy(key_to, key_from, value_to, value_from)` on flat bytes. Steps take regions in turn, so that calls that
    share a set of slots (state resident) share a region."""
    key_regions, value_regions = (cut.unbind() for cut in regions(inputs))
    written = inputs.case.written_tokens
    flat = {rows.data_ptr(): contiguous_bytes(rows, written) for rows in (*inputs.keys, *inputs.values)}
    number = count()

    def step(slot_mapping):
        i = next(number) % len(key_regions)

        def write(key, value):
            copy(key_regions[i], flat[key.data_ptr()], value_regions[i], flat[value.data_ptr()])

        return write

    return step


def bind_copy(inputs: Inputs) -> Step:
    """The same bytes of K and V, contiguous, in one launch of 16-byte accesses (csrc/limits.cu)"""
    from kvnb import build

    return _bind(inputs, build.load_for("cuda").contiguous_copy.default)


def bind_memcpy(inputs: Inputs) -> Step:
    """The same bytes of K and V, contiguous: two copy_ calls (cudaMemcpyAsync; memcpy on the CPU)"""

    def copy(key_to, key_from, value_to, value_from):
        key_to.copy_(key_from)
        value_to.copy_(value_from)

    return _bind(inputs, copy)


def bind_launch(inputs: Inputs, dependent: bool = False) -> Step:
    """A kernel that does nothing"""
    from kvnb import build

    op, anywhere = build.load_for("cuda").empty.default, inputs.slots
    return lambda slot_mapping: lambda key, value: op(anywhere, dependent)


def bind_launch_dependent(inputs: Inputs) -> Step:
    """A kernel that does nothing, with programmatic dependent launch"""
    return bind_launch(inputs, dependent=True)


def bind_event(inputs: Inputs) -> Step:
    """Nothing at all between two events: what timer `call` measures without a copy"""
    return lambda slot_mapping: lambda key, value: None


def _whole_vectors(case: Case, policy: str, timer: str) -> str | None:
    rows = case.written_tokens * case.num_kv_heads * case.itemsize
    if rows * case.head_size % 16 or rows * case.value_head_size % 16:
        return "the rows are not a multiple of 16 bytes long"
    return built_for("cuda")(case, policy, timer)


ANY = ("skip",)
DEVICE_TIMERS = ("graph", "call")
COPIES = (
    Copy("limit.copy", "limit", ANY, bind_copy, timers=DEVICE_TIMERS, supports=_whole_vectors, sources=LIMIT_SOURCES),
    Copy("limit.copy.memcpy", "limit", ANY, bind_memcpy, ("cuda", "cpu"), timers=(*DEVICE_TIMERS, "wall")),
    Copy("limit.launch", "limit", ANY, bind_launch, supports=built_for("cuda"), sources=LIMIT_SOURCES),
    Copy("limit.launch.dependent", "limit", ANY, bind_launch_dependent, supports=_dependent, sources=LIMIT_SOURCES),
    Copy("limit.event", "limit", ANY, bind_event, timers=("call",)),
)
