"""csrc/kvnb_copy.cu run by the CPU, one thread after another: its arithmetic, where no GPU is.

Only its loads, stores and hints are replaced: they are PTX. What needs a GPU (the order of loads, capture, streams) is
in test_compile_sources.py and test_op.py.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvnb import paths
from kvnb.bench.check import check
from kvnb.copies import Copy
from kvnb.problem.case import LAYOUTS, SLOT_PATTERNS, SOURCES, Case

LINE = 48  # bytes of parameters that one line of constants holds, and the compact kernel has
APART = 56  # and that it has where the source's heads lie apart
PLAIN = """
template <typename T>
T load(const T* from) { return *from; }
template <typename T>
T load_to_stay(const T* from) { return *from; }
template <typename T>
void store_if(bool condition, T* to, const T& value) { if (condition) *to = value; }

"""


class Rows(ctypes.Structure):
    """kvnb::Rows of csrc/kv_index.h."""

    _fields_ = [
        ("source", ctypes.c_void_p), ("source_token_stride", ctypes.c_int64), ("source_head_stride", ctypes.c_int64),
        ("cache", ctypes.c_void_p), ("block_stride", ctypes.c_int64), ("slot_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64), ("head_bytes", ctypes.c_int64),
    ]  # fmt: skip


class Problem(ctypes.Structure):
    """kvnb::Problem of csrc/launch.h."""

    _fields_ = [
        ("key", Rows), ("value", Rows), ("slots", ctypes.c_void_p), ("slots_are_64bit", ctypes.c_bool),
        ("num_tokens", ctypes.c_int64), ("num_heads", ctypes.c_int64), ("block_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64), ("itemsize", ctypes.c_int64),
    ]  # fmt: skip


def rows_of(source: torch.Tensor, cache: torch.Tensor) -> Rows:
    size = source.element_size()

    def strides(t: torch.Tensor) -> list[int]:
        return [size * t.stride(d) if t.size(d) > 1 else 0 for d in range(t.dim() - 1)]

    return Rows(source.data_ptr(), *strides(source), cache.data_ptr(), *strides(cache), size * source.size(2))


@pytest.fixture(scope="module", params=[(1, 1 << 30), (270_336, 60 << 20)], ids=["four pairs", "as an H200"])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    """The kernel for a GPU that holds so many threads, and so many bytes in its L2."""
    folder, (threads, l2_bytes) = tmp_path_factory.mktemp("host"), request.param
    source = (paths.CSRC / "kvnb_copy.cu").read_text()
    before, ptx, after = source.partition("#define KVNB_ACCESS")
    ptx, mark, after = after.partition("// What the tuned kernel needs.")
    assert ptx and mark
    (folder / "kvnb_copy.cpp").write_text(before + PLAIN + mark + after)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-gnu-unique"]  # what is static is each library's own
    flags += [f"-DHOST_THREADS={threads}", f"-DHOST_L2={l2_bytes}"]
    places = [f"-I{Path(__file__).with_name('host')}", f"-I{paths.CSRC}", "-o", folder / "host.so"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *places, folder / "kvnb_copy.cpp"], check=True)
    loaded = ctypes.CDLL(str(folder / "host.so"))
    loaded.four = threads == 1
    loaded.launches = []
    return loaded


def on_host(library: ctypes.CDLL, slots_dtype: torch.dtype, dependent: bool) -> Copy:
    def bind(inputs):
        """kvnb_copy_cuda, a thread at a time"""
        case = inputs.case

        def step(slot_mapping):
            slots = slot_mapping.to(slots_dtype)

            def write(key, value):
                sides = rows_of(key, inputs.key_cache), rows_of(value, inputs.value_cache)
                problem = Problem(
                    *sides, slots.data_ptr(), slots_dtype == torch.int64, len(slots), case.num_kv_heads,
                    case.block_size, case.num_slots, key.element_size(),
                )  # fmt: skip
                assert library.kvnb_copy_cuda(ctypes.byref(problem), ctypes.c_bool(dependent), None) == 0
                library.launches.append((len(slots), library.last_threads(), library.last_plan()))

            return write

        return step

    return Copy("kvnb on the host", "yours", ("skip",), bind, ("cpu",))


@st.composite
def cases(draw) -> Case:
    """Small problems, most of rows that are whole 16-byte vectors; enough of a row to share among four."""
    wide = draw(st.integers(0, 3)) > 0
    heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12]))
    size = 8 * draw(st.sampled_from([1, 2, 5, 8, 10, 12, 16, 32])) if wide else draw(st.integers(1, 40))
    value_size = size if wide else draw(st.sampled_from([size, draw(st.integers(1, 40))]))
    tokens, block_size = draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 7, 12, 16]))
    blocks = 3 + draw(st.integers(1, 3)) * (4 * tokens + block_size) // block_size + 4 * tokens
    return Case(
        tokens, heads, size, value_size, block_size, blocks * block_size * heads * (size + value_size) * 2,
        layout=draw(st.sampled_from(LAYOUTS)), source=draw(st.sampled_from(SOURCES)),
        slots=draw(st.sampled_from(SLOT_PATTERNS)), padding=draw(st.sampled_from([0.0, 0.25, 0.9])),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


SHORTEST_OF_FOUR = Case(21, 1, 128, cache_bytes=1 << 20)  # rows of 16 vectors
HEADS_APART = Case(21, 4, 64, cache_bytes=1 << 20, source="transposed")


@settings(max_examples=60)
@example(SHORTEST_OF_FOUR, torch.int64, False)
@example(HEADS_APART, torch.int64, False)
@example(HEADS_APART, torch.int32, True)
@given(case=cases(), slots_dtype=st.sampled_from([torch.int64, torch.int32]), dependent=st.booleans())
def test_any_case_is_copied_bit_for_bit(library, case, slots_dtype, dependent):
    library.launches.clear()
    check(on_host(library, slots_dtype, dependent), case, "cpu")
    if case.head_size != case.value_head_size or case.head_size % 8:
        return
    vectors = case.num_kv_heads * case.head_size * 2 // 16
    powers = all(n & (n - 1) == 0 for n in (case.num_kv_heads, case.head_size, case.block_size))
    for tokens, threads, plan in library.launches:
        apart = case.source == "transposed" and case.num_kv_heads > 1 and tokens > 1
        four = library.four and vectors >= 16 and vectors % 4 == 0 and not apart
        each = 4 if four else 1
        assert tokens * vectors // each <= threads <= tokens * vectors // each + 255
        assert (plan == LINE) == (powers and not four and not apart)
        assert (plan == APART) == (powers and apart)


@pytest.mark.parametrize("apart", ["slots", "heads", "blocks", "tokens", "source heads", "one source's heads"])
def test_k_and_v_may_lie_differently(library, apart):
    """Each stride alone differs between K and V; everything else is a power of two."""
    blocks, block_size, heads, size = 5, 4, 2, 16
    wide = {"slots": (5, 4, 4, 16), "heads": (5, 4, 2, 32), "blocks": (5, 8, 2, 16)}.get(apart, (5, 4, 2, 16))
    key_wide = (5, 4, 4, 16) if apart == "heads" else (5, 4, 2, 16)
    key_cache, value_cache = (
        torch.zeros(shape, dtype=torch.bfloat16)[:, :block_size, :heads, :size] for shape in (key_wide, wide)
    )
    fresh = torch.arange(1, 1 + 2 * 9 * heads * size).view(2, 9, heads, size).bfloat16()
    key, value = fresh[0], (fresh[1].repeat(1, 2, 1)[:, :heads] if apart == "tokens" else fresh[1])
    if "source" in apart:
        key, value = (
            torch.zeros(9, 6, size, dtype=torch.bfloat16)[:, ::every][:, :heads].copy_(rows)
            for every, rows in zip((2 if apart == "source heads" else 1, 3), fresh, strict=True)
        )
    slots = torch.tensor([19, 0, 7, -1, 4, 12, 20, 3, 9])
    expected = torch.zeros(2, blocks, block_size, heads, size, dtype=torch.bfloat16)
    for cache, rows in zip(expected, fresh, strict=True):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if 0 <= slot < blocks * block_size:
                cache[slot // block_size, slot % block_size] = row
    sides = rows_of(key, key_cache), rows_of(value, value_cache)
    problem = Problem(*sides, slots.data_ptr(), True, len(slots), heads, block_size, blocks * block_size, 2)
    assert library.kvnb_copy_cuda(ctypes.byref(problem), ctypes.c_bool(False), None) == 0
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])
    assert value_cache._base.count_nonzero() == value_cache.count_nonzero()  # nothing between the rows
