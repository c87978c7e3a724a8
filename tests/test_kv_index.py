"""csrc/kv_index.h on the CPU: exact division, 64-bit addresses, and which slots are written."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvnb import paths

LARGEST = 2**31 - 1  # dividends and divisors of Divisor end here
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
I64 = ctypes.c_int64


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    library = tmp_path_factory.mktemp("kv_index") / "probe.so"
    source = Path(__file__).with_name("kv_index_probe.cpp")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [os.environ.get("CXX", "c++"), *flags, f"-I{paths.CSRC}", str(source), "-o", str(library)], check=True
    )
    probe = ctypes.CDLL(str(library))
    probe.probe_cache_row.restype = probe.probe_source_row.restype = I64
    probe.probe_is_written.restype = ctypes.c_bool
    return probe


def quotients(probe, divisor: int, dividends: np.ndarray) -> np.ndarray:
    dividends = np.ascontiguousarray(dividends, np.uint32)
    found = np.empty_like(dividends)
    probe.probe_quotients(ctypes.c_uint32(divisor), dividends.ctypes, found.ctypes, I64(len(dividends)))
    return found


def near_multiples(divisor: int) -> np.ndarray:
    """Dividends where a rounded quotient would be off: beside multiples of the divisor, and at the range's ends."""
    most = LARGEST // divisor
    factors = np.unique(np.concatenate([np.arange(min(most, 300) + 1), most - np.arange(min(most, 300) + 1)]))
    beside = (factors[:, None] * divisor + [-1, 0, 1]).ravel()
    ends = np.concatenate([np.arange(1000), LARGEST - np.arange(1000)])
    return np.unique(np.clip(np.concatenate([beside, ends]), 0, LARGEST))


POWERS = [2**i for i in range(31)]
AWKWARD = [3, 5, 7, 12, 20, 48, 80, 96, 641, 1000, 65537, *(p - 1 for p in POWERS[2:]), *(p + 1 for p in POWERS[1:])]


@pytest.mark.parametrize("divisor", sorted({*POWERS, *AWKWARD, LARGEST - 1, LARGEST}))
def test_division_is_exact_for_every_kind_of_divisor(probe, divisor):
    dividends = near_multiples(divisor)
    np.testing.assert_array_equal(quotients(probe, divisor, dividends), dividends // divisor)


@given(divisor=st.integers(1, LARGEST), dividend=st.integers(0, LARGEST), factor=st.integers(0, LARGEST))
def test_division_is_exact_for_any_divisor(probe, divisor, dividend, factor):
    multiple = factor % (LARGEST // divisor + 1) * divisor
    dividends = np.array([dividend, multiple, max(multiple - 1, 0), LARGEST])
    np.testing.assert_array_equal(quotients(probe, divisor, dividends), dividends // divisor)


STRIDE = st.integers(0, 2**40)


@given(
    at=st.tuples(st.integers(0, 2**20), st.integers(0, 2**12), st.integers(0, 2**8)),
    strides=st.tuples(STRIDE, STRIDE, STRIDE),
)
@example(at=(2**17 - 1, 15, 7), strides=(2**15, 2**11, 2**8))  # past 2^31 bytes: every factor fits 32 bits
@example(at=(2**17 + 1, 15, 7), strides=(2**16, 2**12, 2**8))  # past 2^33 bytes
@example(at=(3, 2**12, 0), strides=(0, 2**20, 0))  # a slot stride alone goes past 2^31
@example(at=(0, 0, 2**8), strides=(0, 0, 2**26))  # HND: a head stride alone does
def test_cache_rows_lie_where_64_bit_arithmetic_puts_them(probe, at, strides):
    expected = sum(i * stride for i, stride in zip(at, strides, strict=True))
    assert probe.probe_cache_row(*map(I64, (*at, *strides))) == expected


@given(token=st.integers(0, 2**22), head=st.integers(0, 2**8), token_stride=STRIDE, head_stride=st.integers(0, 2**36))
@example(token=2**20, head=7, token_stride=6 * 2**11, head_stride=2**8)  # a long prefill of qkv slices
@example(token=2**21, head=0, token_stride=2**13, head_stride=0)
def test_source_rows_lie_where_64_bit_arithmetic_puts_them(probe, token, head, token_stride, head_stride):
    found = probe.probe_source_row(*map(I64, (token, head, token_stride, head_stride)))
    assert found == token * token_stride + head * head_stride


@pytest.mark.parametrize("num_slots", [1, 16, LARGEST, 2**31, 2**40])
def test_only_slots_of_the_cache_are_written(probe, num_slots):
    def written(slot: int) -> bool:
        return probe.probe_is_written(I64(slot), I64(num_slots))

    assert all(written(slot) for slot in (0, num_slots // 2, num_slots - 1))
    beyond = (num_slots, num_slots + 1, num_slots + 2**32, INT64_MAX)
    padding = (-1, -2, -num_slots, -(2**32), INT64_MIN)
    assert not any(written(slot) for slot in (*beyond, *padding))
