"""csrc/kvnb_copy.cu run by the CPU, one thread after another: its arithmetic, where no GPU is.

Only its PTX is replaced: loads, stores, hints and griddepcontrol, which is noted. What needs a GPU (the order of loads,
capture, streams) is in test_compile_sources.py and test_op.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
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

LINE = 48  # bytes of parameters that one line of constants holds, and CompactPlan has
APART, DIVIDED = 56, 96  # ApartPlan, where the source's heads lie apart; DividedPlan, of other sizes
FAST, GENERAL = 120, 192
H200 = (270_336, 60 << 20)  # threads that it holds, and bytes in its L2
LAUNCHES = {  # what the launch allows, what its threads ask for
    "plain": (0, b""),
    "dependent": (1, b"launch_dependents wait "),
    "late": (1, b"wait launch_dependents "),
}
PLAIN = """
template <typename T>
T load(const T* from) { return *from; }
template <typename T>
T load_to_stay(const T* from) { return stays = 1, *from; }
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


@pytest.fixture(scope="module", params=[(1, 1 << 30), H200], ids=["four pairs", "as an H200"])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    """The kernel for a GPU that holds so many threads, and so many bytes in its L2."""
    folder, (threads, l2_bytes) = tmp_path_factory.mktemp("host"), request.param
    source = (paths.CSRC / "kvnb_copy.cu").read_text()
    before, ptx, after = source.partition("#define KVNB_ACCESS")
    ptx, mark, after = after.partition("// What the tuned kernel needs.")
    assert ptx and mark
    after, noted = re.subn(r'asm volatile\("griddepcontrol\.(\w+);".*?\)', r'griddepcontrol += "\1 "', after)
    assert noted == 2
    (folder / "kvnb_copy.cpp").write_text(before + PLAIN + mark + after)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-gnu-unique"]  # what is static is each library's own
    flags += ["-D__CUDA_ARCH__=900", f"-DHOST_THREADS={threads}", f"-DHOST_L2={l2_bytes}"]
    places = [f"-I{Path(__file__).with_name('host')}", f"-I{paths.CSRC}", "-o", folder / "host.so"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *places, folder / "kvnb_copy.cpp"], check=True)
    loaded = ctypes.CDLL(str(folder / "host.so"))
    loaded.four = threads == 1
    loaded.launches = []
    loaded.last_griddepcontrol.restype = ctypes.c_char_p
    return loaded


def last_launch(library: ctypes.CDLL) -> tuple[int, bytes]:
    return library.last_overlaps(), library.last_griddepcontrol()


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
                library.launches.append((len(slots), library.last_threads(), library.last_plan(), last_launch(library)))

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


SHORTEST_OF_FOUR = Case(21, 2, 128, cache_bytes=1 << 20)  # rows of 32 vectors
HEADS_APART = Case(21, 4, 64, cache_bytes=1 << 20, source="transposed")


@settings(max_examples=60)
@example(SHORTEST_OF_FOUR, torch.int64, False)
@example(HEADS_APART, torch.int64, False)
@example(HEADS_APART, torch.int32, True)
@given(case=cases(), slots_dtype=st.sampled_from([torch.int64, torch.int32]), dependent=st.booleans())
def test_any_case_is_copied_bit_for_bit(library, case, slots_dtype, dependent):
    library.launches.clear()
    check(on_host(library, slots_dtype, dependent), case, "cpu")
    assert {launch for *_, launch in library.launches} == {LAUNCHES["dependent" if dependent else "plain"]}
    if case.head_size != case.value_head_size or case.head_size % 8:
        return
    vectors = case.num_kv_heads * case.head_size * 2 // 16
    powers = all(n & (n - 1) == 0 for n in (case.num_kv_heads, case.head_size, case.block_size))
    for tokens, threads, plan, _ in library.launches:
        apart = case.source == "transposed" and case.num_kv_heads > 1 and tokens > 1
        four = library.four and vectors >= 32 and vectors % 4 == 0 and not apart
        each = 4 if four else 1
        assert tokens * vectors // each <= threads <= tokens * vectors // each + 255
        if apart:
            assert plan == (APART if powers else GENERAL)
        else:
            assert plan == (FAST if four else LINE if powers else DIVIDED)


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


@pytest.mark.parametrize("library", [H200], indirect=True, ids=["as an H200"])
@pytest.mark.parametrize(
    ("row", "tokens", "dependent", "launch", "kernel", "block"),
    [
        (16, 18_022, True, "dependent", "compact", 256),  # 1/15 of a wave
        (16, 18_023, True, "late", "compact", 256),
        (16, 18_023, False, "plain", "compact", 128),
        (48, 6_008, True, "late", "divided", 256),
        (48, 6_007, True, "dependent", "divided", 256),
        (48, 6_008, False, "plain", "divided", 128),
        (1, 18_023, True, "late", "general", 256),
        (16, 108_134, True, "late", "compact", 256),  # 2/5
        (16, 108_135, True, "dependent", "compact", 256),
        (16, 162_201, True, "dependent", "compact", 256),  # 3/5
        (16, 162_202, True, "late", "compact", 256),
        (16, 229_785, True, "late", "compact", 256),  # 17/20
        (16, 229_786, True, "dependent", "compact", 256),
        (256, 16_896, False, "plain", "compact", 128),  # one wave
        (256, 16_897, False, "plain", "two", 128),
        (288, 15_019, False, "plain", "two", 128),
        (256, 20_275, True, "dependent", "compact", 256),  # 6/5
        (256, 20_276, True, "dependent", "two", 128),
        (256, 25_344, True, "dependent", "two", 128),  # 3/2
        (256, 25_345, True, "dependent", "compact", 256),
        (256, 25_344, False, "plain", "two", 128),
        (256, 25_345, False, "plain", "compact", 128),
        (240, 18_023, False, "plain", "divided", 128),
        (512, 8_448, False, "plain", "compact", 128),  # one wave
        (512, 8_449, False, "plain", "four", 128),
        (512, 12_144, True, "dependent", "compact", 256),  # 23/16
        (512, 12_145, True, "dependent", "four", 128),
        (512, 17_280, False, "plain", "four", 128),  # 9/16 of L2, sources and rows
        (512, 17_281, False, "plain", "compact", 128),
        (512, 17_281, True, "dependent", "compact", 256),
        (544, 8_000, False, "plain", "two", 128),
    ],
)
def test_how_much_is_copied_decides_how(library, row, tokens, dependent, launch, kernel, block):
    fresh = torch.randint(1, 256, (2, tokens, 1, row), dtype=torch.uint8)
    caches = torch.zeros(2, tokens, 1, 1, row, dtype=torch.uint8)
    slots = torch.arange(tokens).flip(0)
    problem = Problem(*map(rows_of, fresh, caches), slots.data_ptr(), True, tokens, 1, 1, tokens, 1)
    assert library.kvnb_copy_cuda(ctypes.byref(problem), ctypes.c_bool(dependent), None) == 0
    assert torch.equal(caches[:, :, 0].flip(1), fresh)
    assert last_launch(library) == LAUNCHES[launch]
    assert library.last_block() == block
    working = tokens * max(row // 16, 1) // {"four": 4, "two": 2}.get(kernel, 1)
    assert library.last_threads() == -(-working // block) * block
    assert library.last_plan() == {"compact": LINE, "divided": DIVIDED, "general": GENERAL}.get(kernel, FAST)


@pytest.mark.parametrize("library", [H200], indirect=True, ids=["as an H200"])
@pytest.mark.parametrize(
    ("row", "tokens", "dependent", "stay"),
    [
        (512, 8_191, False, True),
        (512, 8_192, False, False),
        (512, 8_191, True, True),
        (512, 8_192, True, False),
        (256, 10_137, False, True),  # 3/5 of a wave
        (256, 10_138, False, False),
        (256, 16_897, False, False),  # two pairs a thread
        (512, 12_672, False, False),  # four
        (256, 50_688, False, False),  # three waves
        (256, 50_689, False, True),
        (272, 9_541, False, True),  # rows found by divisions: 3/5 of a wave
        (272, 9_542, False, False),
        (1280, 2_703, False, True),  # 4/5
        (1280, 2_704, False, False),
        (640, 4_055, False, True),  # 3/5
        (640, 4_056, False, True),
        (640, 4_095, False, True),
        (640, 4_096, False, False),
        (1280, 2_027, True, True),  # 3/5
        (1280, 2_028, True, False),
        (240, 54_067, False, False),  # three waves
        (240, 54_068, False, True),
    ],
)
def test_slots_stay_in_l2_unless_they_are_many(library, row, tokens, dependent, stay):
    """And the copy is of 3/5 of a wave of threads to three; threads of several pairs never load them to stay."""
    fresh = torch.randint(1, 256, (2, tokens, 1, row), dtype=torch.uint8)
    caches = torch.zeros(2, tokens, 1, 1, row, dtype=torch.uint8)
    slots = torch.arange(tokens)
    problem = Problem(*map(rows_of, fresh, caches), slots.data_ptr(), True, tokens, 1, 1, tokens, 1)
    assert library.kvnb_copy_cuda(ctypes.byref(problem), ctypes.c_bool(dependent), None) == 0
    assert torch.equal(caches[:, :, 0], fresh)
    assert library.last_stays() == stay


GIB = 1 << 30
NEAR = {"source": 0, "token": 256, "source head": 32, "cache": 4096, "slot": 256, "head": 32}
FAR = {  # what does not fit the numbers of a tuned kernel; of 16-byte vectors, 64 GiB hold 2^32
    "sources": {"source": 64 * GIB},
    "tokens": {"token": 64 * GIB},
    "tokens, 24 bits": {"token": GIB // 4},
    "heads of the source": {"source head": 64 * GIB},
    "caches": {"cache": 64 * GIB},
    "blocks": {"block": 64 * GIB + 512},
    "blocks inside slots": {"block": 256, "slot": 512},
    "slots": {"slot": 64 * GIB},
    "heads": {"head": 64 * GIB},
    "heads, all together": {"head": 32 * GIB},
    **{  # what fits them, times what does not: of a plan that divides
        "tokens, all together": {"token": 48 * GIB, "block size": 3},
        "slots, all together": {"slot": 32 * GIB, "block size": 3},
        "blocks, all together": {"block": 48 * GIB, "block size": 3, "blocks": 5},
    },
    "2^31 slots": {"block size": 3, "block": 1024, "blocks": 2**31 // 3 + 2},
    "2^32 slots": {"blocks": 2**31 + 2},
}


@pytest.mark.parametrize("library", [H200], indirect=True, ids=["as an H200"])
@pytest.mark.parametrize("sides", ["K and V", "K", "V"])
@pytest.mark.parametrize("far", FAR)
def test_what_lies_far_apart_is_copied_too(library, far, sides):
    """4 heads of 32 bytes. K and V lie side by side, in memory of which only the pages that are touched exist."""
    try:
        mapped = mmap.mmap(-1, 1280 * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    except OSError as error:
        pytest.skip(f"needs 1280 GiB of address space, empty: {error}")
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    blocks, block_size = FAR[far].get("blocks", 2), FAR[far].get("block size", 2)
    slots = torch.tensor([blocks * block_size - 1, 0, 2])
    copies = []
    for side, begin in (("K", 0), ("V", 128)):
        at = NEAR | (FAR[far] if side in sides else {})
        source = memory.as_strided((3, 4, 32), (at["token"], at["source head"], 1), begin + at["source"])
        strides = at.get("block", block_size * at["slot"]), at["slot"], at["head"], 1
        cache = memory.as_strided((blocks, block_size, 4, 32), strides, begin + at["cache"])
        copies.append((source.random_(1, 256), cache))
    problem = Problem(
        *(rows_of(*copy) for copy in copies), slots.data_ptr(), True, 3, 4, block_size, blocks * block_size, 1
    )
    assert library.kvnb_copy_cuda(ctypes.byref(problem), ctypes.c_bool(False), None) == 0
    for source, cache in copies:
        for slot, rows in zip(slots.tolist(), source, strict=True):
            assert torch.equal(cache[slot // block_size, slot % block_size], rows)
