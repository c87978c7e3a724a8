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
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnb import paths
from kvnb.bench.check import check
from kvnb.copies import Copy
from kvnb.problem.case import LAYOUTS, SLOT_PATTERNS, SOURCES, Case

FOUR = 128  # threads of a block where each has four pairs
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


@settings(max_examples=60)
@given(case=cases(), slots_dtype=st.sampled_from([torch.int64, torch.int32]), dependent=st.booleans())
def test_any_case_is_copied_bit_for_bit(library, case, slots_dtype, dependent):
    check(on_host(library, slots_dtype, dependent), case, "cpu")
    vectors = case.num_kv_heads * case.head_size * 2 // 16
    whole = case.head_size == case.value_head_size and case.head_size % 8 == 0 and case.source != "transposed"
    if whole and vectors >= 32 and vectors % 4 == 0 and case.num_tokens > 1:
        assert (library.last_block() == FOUR) == library.four
