"""torch.ops.kvnb on generated calls: sound ones bit for bit against a Python loop, malformed ones refused by name.

The same strategies run on the CPU op, on the CUDA ops where there is a GPU, and, as `python test_op_properties.py N`,
under compute-sanitizer. Whole storages are compared, gaps between rows included.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import test_kernel_on_host as host
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import python_path

SOUND = {"cpu": 600, "cuda": 2000}  # generated calls; on a GPU each by every CUDA op
MALFORMED_CALLS = 500
SANITIZED = 300
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    "bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16", "int16", "uint16",
    "float32", "int32", "float64", "int64", "complex64",
)  # fmt: skip
HEAD_SIZES = st.sampled_from([1, 2, 3, 8, 16, 20, 64, 80, 96, 128]) | st.integers(1, 40)
ARGUMENTS = ("key", "value", "key_cache", "value_cache", "slot_mapping")
CUDA_OPS = [pytest.param((name, "cuda"), marks=pytest.mark.gpu) for name in ("copy", "copy_dependent", "vllm_scalar")]


library = host.library


def named(ops, name: str):
    if name == "copy_dependent" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs sm_90 or later")
    return getattr(ops, name)


def ops_on(device: str) -> dict[str, Callable]:
    """Every op that copies on this device type, by name."""
    from kvnb import build

    ops, names = build.load(), ["copy"]
    if device == "cuda":
        names += ["vllm_scalar", *["copy_dependent"] * (torch.cuda.get_device_capability() >= (9, 0))]
    return {name: getattr(ops, name) for name in names}


# -------------------------------------------------------------------------------------------------------- sound calls


@dataclass(frozen=True)
class View:
    """A tensor inside a storage: which storage, and sizes, strides and offset in elements."""

    storage: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Problem:
    """A call: `views` by argument name, the bytes of each storage, and what slot_mapping says."""

    dtype: str
    views: dict[str, View]
    storages: tuple[int, ...]
    slots: tuple[int, ...]
    slots_dtype: str
    seed: int

    def storage_bytes(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in self.storages]

    def tensors(self, storages: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The call's arguments as views of `storages`, on their device."""
        dtype, device = getattr(torch, self.dtype), storages[0].device
        made = {
            name: storages[view.storage].view(dtype).as_strided(view.sizes, view.strides, view.offset)
            for name, view in self.views.items()
        }
        made["slot_mapping"] = torch.tensor(self.slots, dtype=getattr(torch, self.slots_dtype), device=device)
        return made


@st.composite
def strides(draw, sizes: tuple[int, ...], row: int, unit: int, gaps: tuple) -> tuple[tuple[int, ...], int]:
    """Strides of `sizes` in any order of memory, with gaps of whole `unit`s, around contiguous rows; total elements."""
    found, extent = [0] * len(sizes), row
    for axis in reversed(draw(st.permutations(range(len(sizes))))):
        extent += draw(st.sampled_from(gaps)) * unit
        found[axis], extent = extent, extent * sizes[axis]
    return tuple(found), extent


@st.composite
def problems(draw) -> Problem:
    """Any call. Two kinds have kernels of their own, and are drawn more often: regular calls, of powers of two, without
    gaps, K and V alike; and rows of 16-byte vectors whose two caches lie unlike."""
    kind = draw(st.sampled_from(["any", "any", "regular", "unlike"]))
    regular = kind == "regular"
    gaps = (0,) if regular else (0, 0, 0, 1, 5, 8)
    dtype = draw(st.sampled_from(DTYPES))
    itemsize = getattr(torch, dtype).itemsize
    unit = 16 // itemsize if kind != "any" else draw(st.sampled_from([1, 16 // itemsize]))  # of sizes, gaps and offsets
    head_sizes = HEAD_SIZES if unit == 1 else st.integers(1, 9).map(unit.__mul__)
    key_size = draw(st.sampled_from([1, 2, 4, 8]).map(unit.__mul__) if regular else head_sizes)
    row = {"key": key_size, "value": key_size if kind != "any" else draw(st.just(key_size) | head_sizes)}
    heads = draw(st.sampled_from([1, 2, 4, 8]) if regular else st.integers(1, 9))
    blocks = draw(st.integers(1, 5))
    block_size = draw(st.sampled_from([1, 2, 4, 16] if regular else [1, 2, 3, 7, 12, 16]))
    slots = draw(slot_lists(blocks * block_size, slots_dtype := draw(st.sampled_from(["int32", "int64"]))))
    tokens = len(slots) + draw(st.integers(0, 3))
    views, storages = {}, []

    def store(elements: int) -> tuple[int, int]:
        """A new storage for that many elements, which begin up to 15 bytes into it: (its number, the offset)."""
        offset = draw(st.integers(0, 15)) // itemsize // unit * unit
        storages.append(-(-(offset + elements + draw(st.integers(0, 3))) * itemsize // 8) * 8)
        return len(storages) - 1, offset

    def by_turns(names, sizes):
        """K and V in one storage, in rows [K | V], pages [K's rows | V's rows] and the like: some axes step over both,
        the others over what is K's or V's."""
        axes = range(len(sizes))
        common = set(axes) if regular else draw(st.just(set(axes)) | st.sets(st.sampled_from(axes)))
        each, extents = {}, []
        for name in names:
            within = tuple(1 if axis in common else size for axis, size in enumerate(sizes))
            each[name], extent = draw(strides(within, row[name.split("_")[0]], unit, gaps))
            extents.append(extent)
        over = tuple(size if axis in common else 1 for axis, size in enumerate(sizes))
        frames, extent = draw(strides(over, sum(extents), unit, gaps))
        number, at = store(extent)
        for name, its in draw(st.permutations([*zip(names, extents, strict=True)])):
            steps = (frames[axis] if axis in common else each[name][axis] for axis in axes)
            views[name] = View(number, (*sizes, row[name.split("_")[0]]), (*steps, 1), at)
            at += its

    def apart(names, sizes):
        alike = draw(strides(sizes, key_size, unit, gaps)) if regular else None
        for name in names:
            size = row[name.split("_")[0]]
            steps, extent = alike or draw(strides(sizes, size, unit, gaps))
            number, offset = store(extent)
            views[name] = View(number, (*sizes, size), (*steps, 1), offset)

    def sliced_from_a_projection(names, sizes):
        token = draw(st.integers(0, 40)) * unit + heads * (row["key"] + row["value"])
        number, offset = store(tokens * token)
        for name, at in zip(names, (0, heads * row["key"]), strict=True):
            views[name] = View(number, (*sizes, row[name]), (token, row[name], 1), offset + at)

    def expanded(names, sizes):
        """One row for every token: a source may share memory with itself."""
        for name in names:
            number, offset = store(heads * row[name])
            views[name] = View(number, (*sizes, row[name]), (0, row[name], 1), offset)

    sources, caches = [apart, apart, by_turns, sliced_from_a_projection, expanded], [apart, by_turns]
    if kind == "unlike":
        sources, caches = [sliced_from_a_projection], [apart]
    draw(st.sampled_from(sources))(("key", "value"), (tokens, heads))
    draw(st.sampled_from(caches))(("key_cache", "value_cache"), (blocks, block_size, heads))
    return Problem(dtype, views, tuple(storages), slots, slots_dtype, draw(st.integers(0, 2**31)))


@st.composite
def slot_lists(draw, num_slots: int, dtype: str) -> tuple[int, ...]:
    """Different slots, the cache's last among them as often as not, with padding and slots past the end anywhere."""
    limits = torch.iinfo(getattr(torch, dtype))
    real = draw(
        st.lists(
            st.integers(0, num_slots - 1) | st.just(num_slots - 1), unique=True, min_size=1, max_size=min(num_slots, 12)
        )
    )
    never = st.sampled_from([-1, -1, -2, -num_slots, limits.min, num_slots, num_slots + 1, limits.max])
    return tuple(draw(st.permutations(real + draw(st.lists(never, max_size=4)))))


def by_loop(key, value, key_cache, value_cache, slot_mapping) -> None:
    """The copy, said as plainly as possible."""
    num_blocks, block_size, num_heads, _ = key_cache.shape
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_blocks * block_size:
            for head in range(num_heads):
                for cache, rows in ((key_cache, key), (value_cache, value)):
                    bits = INTEGER[rows.element_size()]
                    cache.view(bits)[slot // block_size, slot % block_size, head] = rows.view(bits)[token, head]


def assert_as_by_loop(ops: dict[str, Callable], problem: Problem, device: str) -> None:
    expected = problem.storage_bytes()
    by_loop(**problem.tensors(expected))
    for name, op in ops.items():
        found = [storage.to(device) for storage in problem.storage_bytes()]
        op(**problem.tensors(found))
        for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            wrong = (mine != theirs.cpu()).nonzero().flatten().tolist()
            assert not wrong, f"{name}: bytes {wrong[:20]} of storage {number} differ"


def copy_generated(device: str, number: int, ops: dict[str, Callable] | None = None, same: bool = False) -> int:
    """Copy that many generated problems, the `same` every time or others, with every op of the device; returns how many
    were, each as it must be."""
    ops, seen = ops or ops_on(device), Counter()

    @settings(max_examples=number, deadline=None, derandomize=same, suppress_health_check=[HealthCheck.too_slow])
    @given(problem=problems())
    def each(problem):
        assert_as_by_loop(ops, problem, device)
        seen["right"] += 1

    each()
    return seen["right"]


def test_any_problem_is_copied_as_by_a_loop(device, record_property):
    assert copy_generated(device, SOUND[device]) >= SOUND[device]
    record_property("trust", f"{SOUND[device]:,} generated calls of the op on {device}, whole caches bit for bit")


def test_the_same_calls_reach_every_kernel(library):
    """On the CPU, where the library says which it launched, by how long its plan is. How many of 200 random calls reach
    one varies a lot."""
    plans, names = Counter(), dict.fromkeys((host.LINE, host.APART), "compact")
    names |= {host.DIVIDED: "divided", host.FAST: "fast", host.GENERAL: "general"}

    def copy_on_host(key, value, key_cache, value_cache, slot_mapping):
        sides = host.rows_of(key, key_cache), host.rows_of(value, value_cache)
        wide, (blocks, block_size, heads, _) = slot_mapping.dtype == torch.int64, key_cache.shape
        tokens, slots = slot_mapping.numel(), slot_mapping.data_ptr()
        problem = host.Problem(*sides, slots, wide, tokens, heads, block_size, blocks * block_size, key.element_size())
        assert library.kvnb_copy_cuda(ctypes.byref(problem), ctypes.c_bool(False), None) == 0
        plans[names[library.last_plan()]] += 1

    number = 200
    assert copy_generated("cpu", number, {"host": copy_on_host}, same=True) >= number
    assert len(plans) == 4 and min(plans.values()) >= number // 50, plans


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [False, True], ids=["sound calls", "a read past the end, to see it seen"])
def test_no_access_leaves_its_allocation(ops, beyond, record_property):
    """Every tensor has an allocation of its own, whose ends compute-sanitizer knows."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"])
    if not (sanitizer := shutil.which("compute-sanitizer", path=path)):
        pytest.skip("compute-sanitizer is not here: it comes with the CUDA toolkit")
    asked = [sys.executable, __file__, "beyond" if beyond else str(SANITIZED)]
    places = {"PYTHONPATH": python_path(Path(__file__).parents[1])}
    environment = {**os.environ, **places, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if beyond:
        assert "Invalid __global__ read" in said, said[-3000:]
        assert done.returncode != 0
        return
    assert done.returncode == 0, said[-3000:]
    assert f"{SANITIZED} right" in said and "ERROR SUMMARY: 0 errors" in said, said[-3000:]
    record_property("trust", f"{SANITIZED:,} generated calls under compute-sanitizer")


def copy_from_beyond() -> None:
    """A call whose keys are said to be twice as long as their allocation is."""
    rows = torch.zeros(4, 1, 16, dtype=torch.uint8, device="cuda")
    claim = {"shape": (8, 1, 16), "typestr": "|u1", "data": (rows.data_ptr(), False), "version": 3}
    key = torch.as_tensor(type("Claim", (), {"__cuda_array_interface__": claim})(), device="cuda")
    key_cache, value_cache = (torch.zeros(2, 4, 1, 16, dtype=torch.uint8, device="cuda") for _ in range(2))
    value = torch.zeros(8, 1, 16, dtype=torch.uint8, device="cuda")
    ops_on("cuda")["copy"](key, value, key_cache, value_cache, torch.arange(8, device="cuda"))
    torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------- malformed calls


@dataclass(frozen=True)
class Bend:
    """One way to spoil argument `name` of a sound call: what becomes of it, whom the message then names, and how.

    Where it is to share memory with another argument, the whole call is that of problem `instead`.
    """

    name: str
    what: Callable[[torch.Tensor], object]
    blamed: str
    says: str
    error: type[Exception] = ValueError
    instead: Problem | None = None


MISSING = object()
NOT_TENSORS = (7, "rows", [[1.0]], {})


def bends_of(name: str, problem: Problem, device: str, n: int) -> dict[str, Bend]:
    """The ways that there are for this argument in this problem, by title; `n` decides sizes and dtypes."""
    found = {"None": Bend(name, lambda t: None, name, "is None, must be a tensor")}
    found["missing"] = Bend(name, lambda t: MISSING, name, f"missing value for argument '{name}'", RuntimeError)
    says = f"Expected a value of type 'Tensor' for argument '{name}'"
    found["no tensor"] = Bend(name, lambda t: NOT_TENSORS[n % len(NOT_TENSORS)], name, says, RuntimeError)
    found |= _ranks_and_devices(name, device)
    return found | (_slots(problem, n) if name == "slot_mapping" else _rows(name, problem, n))


def _ranks_and_devices(name: str, device: str) -> dict[str, Bend]:
    says = "must be [n] with n at most" if name == "slot_mapping" else "must have"
    found = {"an axis less": Bend(name, lambda t: t[0], name, says)}
    found["an axis more"] = Bend(name, lambda t: t[None], name, says)
    if device == "cuda":
        blamed = "value" if name == "key" else name
        found["on the CPU"] = Bend(name, lambda t: t.cpu(), blamed, "must be on key's device")
    return found


def _slots(problem: Problem, n: int) -> dict[str, Bend]:
    others = [dtype for dtype in (*DTYPES, "complex128") if dtype not in ("int32", "int64")]
    other = getattr(torch, others[n % len(others)])
    longer = problem.views["key"].sizes[0] + 1 + n % 5
    ways = {
        "dtype": (lambda t: t.new_zeros(t.shape, dtype=other), "be int64 or int32"),
        "longer than key": (lambda t: t.new_zeros(longer), "be [n] with n at most num_tokens"),
        "apart": (lambda t: torch.stack([t, t], 1)[:, 0], "be contiguous"),
    }
    if len(problem.slots) == 1:
        del ways["apart"]
    return {title: Bend("slot_mapping", what, "slot_mapping", says) for title, (what, says) in ways.items()}


# whom the message names where an axis of an argument has another length: what is held against what
HELD = {
    "key": ("value", "value", "key_cache"),
    "value": ("value", "value", "value_cache"),
    "key_cache": ("value_cache", "value_cache", "key_cache", "key_cache"),
    "value_cache": ("value_cache",) * 4,
}


def _rows(name: str, problem: Problem, n: int) -> dict[str, Bend]:
    sizes = problem.views[name].sizes
    others = [dtype for dtype in DTYPES if dtype != problem.dtype]
    other = getattr(torch, others[n % len(others)])
    blamed = "value" if name == "key" else name
    found = {"dtype": Bend(name, lambda t: t.new_zeros(t.shape, dtype=other), blamed, "must have key's dtype")}
    if name == "key":
        wide = torch.complex128
        found["wide"] = Bend(name, lambda t: t.new_zeros(t.shape, dtype=wide), name, "elements of 1, 2, 4 or 8 bytes")
    for axis, held in enumerate(HELD[name]):
        length = [n % sizes[axis], sizes[axis] + 1 + n % 3][n // 7 % 2]
        shape = [*sizes[:axis], length, *sizes[axis + 1 :]]
        says = "begin with key" if axis < 2 else "end in"
        found[f"axis {axis}"] = Bend(name, lambda t, shape=shape: t.new_zeros(shape), held, says)
    if sizes[-1] > 1:
        spread = Bend(name, lambda t: t.new_zeros(*t.shape, 2)[..., 0], name, "have stride 1 in its last dimension")
        found["apart"] = spread
    found |= _shares(name, problem, n)
    return found | (_overlaps(name, problem, n) if name.endswith("cache") else {})


def _shares(name: str, problem: Problem, n: int) -> dict[str, Bend]:
    """Begun in a row of a cache: a source's; the other cache, with strides of its own or alike, there or a step on."""
    found, mine = {}, problem.views[name]
    for other in (cache for cache in ("key_cache", "value_cache") if cache != name):
        theirs, at, left = problem.views[other], 0, n
        for size, stride in zip(theirs.sizes, theirs.strides, strict=True):
            at, left = at + left % size * stride, left // size
        ways = {f"in {other}": (mine.strides, at)}
        if name.endswith("cache") and mine.sizes[-1] <= theirs.sizes[-1]:
            ways[f"in {other}, alike"] = theirs.strides, at
            if theirs.sizes[n % 3] > 1:
                ways[f"in {other}, a step on"] = theirs.strides, theirs.strides[n % 3]
        for title, (steps, begin) in ways.items():
            view = View(theirs.storage, mine.sizes, steps, theirs.offset + begin)
            blamed = "value_cache" if name.endswith("cache") else name
            says = "must share no memory with key_cache" if name.endswith("cache") else "must lie apart from "
            found[title] = Bend(name, lambda t: t, blamed, says, instead=_moved(problem, name, view))
    return found


def _moved(problem: Problem, name: str, view: View) -> Problem:
    """The problem with that argument elsewhere, in a storage that has room for it."""
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True))
    needed = -(-(last + 1) * getattr(torch, problem.dtype).itemsize // 8) * 8
    storages = [max(size, needed) if at == view.storage else size for at, size in enumerate(problem.storages)]
    return replace(problem, views=problem.views | {name: view}, storages=tuple(storages))


def _overlaps(name: str, problem: Problem, n: int) -> dict[str, Bend]:
    """An axis whose stride is shorter than a row."""
    sizes, steps, found = problem.views[name].sizes, problem.views[name].strides, {}
    for axis in (axis for axis in range(3) if sizes[axis] > 1):
        strides = [*steps[:axis], n % sizes[-1], *steps[axis + 1 :]]
        overlap = Bend(name, lambda t, s=strides: t.as_strided(t.shape, s), name, "not be expanded or overlap itself")
        found[f"axis {axis} overlaps"] = overlap
    return found


@st.composite
def malformed_calls(draw, device: str) -> tuple[Problem, str, str, int]:
    """(a sound problem, the argument to spoil, the title of a bend, the bend's number)"""
    problem, name, number = draw(problems()), draw(st.sampled_from(ARGUMENTS)), draw(st.integers(0, 999))
    titles = list(bends_of(name, problem, device, number))
    titles += 3 * [title for title in titles if title.startswith("in ")]  # memory shared, in ways that differ most
    return problem, name, titles[draw(st.integers(0, 99)) % len(titles)], number


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """What lies in a tensor's storage, gaps and all."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).cpu().clone()


def refused(op, call: dict[str, object], error: type[Exception] = ValueError) -> str:
    """The message with which `op` refuses `call`; not a byte of any argument's storage has changed."""
    tensors = {name: t for name, t in call.items() if isinstance(t, torch.Tensor) and not t.is_meta}
    before = {name: bytes_of(t) for name, t in tensors.items()}
    with pytest.raises(error) as caught:
        op(**call)
    for name, t in tensors.items():
        assert torch.equal(bytes_of(t), before[name]), f"{name} was written"
    return str(caught.value)


def assert_refused(ops: dict[str, Callable], device: str, problem: Problem, bend: Bend) -> None:
    problem = bend.instead or problem
    storages = [storage.to(device) for storage in problem.storage_bytes()]
    sound = problem.tensors(storages)
    call = {**sound, bend.name: bend.what(sound[bend.name])}
    call = {name: thing for name, thing in call.items() if thing is not MISSING}
    for op in ops.values():
        message = refused(op, call, bend.error)
        assert bend.says in message, message
        if bend.error is ValueError:
            assert message.startswith(f"{bend.blamed} is "), message
    for mine, theirs in zip(problem.storage_bytes(), storages, strict=True):
        assert torch.equal(mine, theirs.cpu()), "a byte was written"


def test_a_malformed_call_is_refused_by_name_and_writes_nothing(device, record_property):
    ops, seen = ops_on(device), Counter()

    @settings(max_examples=MALFORMED_CALLS)
    @given(call=malformed_calls(device))
    def each(call):
        problem, name, title, number = call
        assert_refused(ops, device, problem, bends_of(name, problem, device, number)[title])
        seen[name, title] += 1

    each()
    assert sum(seen.values()) >= MALFORMED_CALLS
    assert {name for name, _ in seen} == set(ARGUMENTS)
    record_property("trust", f"{MALFORMED_CALLS:,} malformed calls on {device}, each refused by name, no byte written")


if __name__ == "__main__":
    if sys.argv[1] == "beyond":
        copy_from_beyond()
    else:
        print(copy_generated("cuda", int(sys.argv[1])), "right")
