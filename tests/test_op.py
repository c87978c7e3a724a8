"""torch.ops.kvnb: any layout, dtype and size, bit for bit against a Python loop; malformed calls; capture and streams.

Every test of the CPU op runs on the CUDA ops too, on the same generated problems, where there is a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    "bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int16", "float32", "int32",
    "float64", "int64", "complex64",
)  # fmt: skip
HEAD_SIZES = st.sampled_from([1, 2, 3, 8, 16, 20, 64, 80, 96, 128]) | st.integers(1, 40)
ARGUMENTS = ("key", "value", "key_cache", "value_cache", "slot_mapping")


# ----------------------------------------------------------------------------------------------------------- problems


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
def strides(draw, sizes: tuple[int, ...], row: int, unit: int) -> tuple[tuple[int, ...], int]:
    """Strides of `sizes` in any order of memory, with gaps of whole `unit`s, around contiguous rows; total elements."""
    found, extent = [0] * len(sizes), row
    for axis in reversed(draw(st.permutations(range(len(sizes))))):
        extent += draw(st.sampled_from([0, 0, 0, 1, 5, 8])) * unit
        found[axis], extent = extent, extent * sizes[axis]
    return tuple(found), extent


@st.composite
def problems(draw) -> Problem:
    dtype = draw(st.sampled_from(DTYPES))
    itemsize = getattr(torch, dtype).itemsize
    unit = draw(st.sampled_from([1, 16 // itemsize]))  # elements that sizes, gaps and offsets are multiples of
    head_sizes = HEAD_SIZES if unit == 1 else st.integers(1, 9).map(unit.__mul__)
    key_size = draw(head_sizes)
    row = {"key": key_size, "value": draw(st.just(key_size) | head_sizes)}
    heads, blocks, block_size = (
        draw(st.integers(1, 9)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 3, 7, 12, 16])),
    )
    slots = draw(slot_lists(blocks * block_size, slots_dtype := draw(st.sampled_from(["int32", "int64"]))))
    tokens = len(slots) + draw(st.integers(0, 3))
    views, storages = {}, []

    def store(elements: int) -> tuple[int, int]:
        """A new storage for that many elements, which begin up to 15 bytes into it: (its number, the offset)."""
        offset = draw(st.integers(0, 15)) // itemsize // unit * unit
        storages.append(-(-(offset + elements + draw(st.integers(0, 3))) * itemsize // 8) * 8)
        return len(storages) - 1, offset

    def side_by_side(names, sizes):
        """K and V in one row of one storage."""
        steps, extent = draw(strides(sizes, row["key"] + row["value"], unit))
        number, offset = store(extent)
        for name, at in zip(names, (0, row["key"]), strict=True):
            views[name] = View(number, (*sizes, row[name.split("_")[0]]), (*steps, 1), offset + at)

    def apart(names, sizes):
        for name in names:
            size = row[name.split("_")[0]]
            steps, extent = draw(strides(sizes, size, unit))
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

    sources = draw(st.sampled_from([apart, apart, side_by_side, sliced_from_a_projection, expanded]))
    sources(("key", "value"), (tokens, heads))
    draw(st.sampled_from([apart, side_by_side]))(("key_cache", "value_cache"), (blocks, block_size, heads))
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


def assert_as_by_loop(op, problem: Problem, device: str) -> None:
    expected = problem.storage_bytes()
    by_loop(**problem.tensors(expected))
    found = [storage.to(device) for storage in problem.storage_bytes()]
    op(**problem.tensors(found))
    for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
        wrong = (mine != theirs.cpu()).nonzero().flatten().tolist()
        assert not wrong, f"bytes {wrong[:20]} of storage {number} differ"


CUDA_OPS = [pytest.param((name, "cuda"), marks=pytest.mark.gpu) for name in ("copy", "copy_dependent", "vllm_scalar")]


def named(ops, name: str):
    if name == "copy_dependent" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs sm_90 or later")
    return getattr(ops, name)


@pytest.fixture(scope="session", params=[("copy", "cpu"), *CUDA_OPS], ids="-".join)
def op_and_device(request, ops):
    name, device = request.param
    return named(ops, name), device


@pytest.fixture(scope="session")
def op(op_and_device):
    return op_and_device[0]


@pytest.fixture(scope="session")
def on(op_and_device) -> str:
    """The device type that `op` runs on."""
    return op_and_device[1]


@pytest.fixture(scope="session", params=CUDA_OPS, ids="-".join)
def cuda_op(request, ops):
    return named(ops, request.param[0])


@settings(max_examples=200)
@given(problem=problems())
def test_any_problem_is_copied_as_by_a_loop(op, on, problem):
    assert_as_by_loop(op, problem, on)


# ---------------------------------------------------------------------------------------------------- one call by hand


def arguments(device: str = "cpu", tokens: int = 5, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A sound call: 3 heads of 8 and 4, 6 blocks of 4 slots; written are slots 3, 17 and the last, 23."""
    made = {
        "key": torch.rand(tokens, 3, 8),
        "value": torch.rand(tokens, 3, 4),
        "key_cache": torch.rand(6, 4, 3, 8),
        "value_cache": torch.rand(6, 4, 3, 4),
        "slot_mapping": torch.tensor([3, -1, 17, -1, 23]),
    }
    return {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in made.items()}


def copied(call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caches as `call` must leave them, on the CPU."""
    call = {name: t.cpu().clone() for name, t in call.items()}
    by_loop(**call)
    return {name: call[name] for name in ("key_cache", "value_cache")}


def assert_caches(call: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, cache in expected.items():
        assert torch.equal(call[name].cpu(), cache), name


def test_a_slot_past_the_end_is_never_written(op, on):
    """The cache is the front of a larger storage: a write past its end would show there."""
    call, larger = arguments(on), torch.zeros(10, 4, 3, 8, device=on)
    call["key_cache"] = larger[:6]
    call["slot_mapping"] = torch.tensor([24, 25, 39, 2**40, 23], device=on)
    op(**call)
    assert torch.equal(larger[5, 3], call["key"][4])
    assert larger.count_nonzero() == 3 * 8


@pytest.mark.parametrize(
    "empty", ["no tokens", "no slots asked for", "no blocks", "no heads", "no elements", "all padding"]
)
def test_an_empty_call_does_nothing(op, on, empty):
    call = arguments(on)
    sources, caches, every = ("key", "value"), ("key_cache", "value_cache"), ARGUMENTS[:4]
    cut = {
        "no tokens": {name: call[name][:0] for name in (*sources, "slot_mapping")},
        "no slots asked for": {"slot_mapping": call["slot_mapping"][:0]},
        "no blocks": {name: call[name][:0] for name in caches},
        "no heads": {name: call[name][..., :0, :] for name in every},
        "no elements": {name: call[name][..., :0] for name in every},
        "all padding": {"slot_mapping": torch.full_like(call["slot_mapping"], -1)},
    }[empty]
    before = {name: call[name].cpu().clone() for name in caches}
    assert op(**{**call, **cut}) is None
    assert_caches(call, before)


def test_values_without_elements_leave_keys_to_be_copied(op, on):
    call = arguments(on)
    call |= {name: call[name][..., :0] for name in ("value", "value_cache")}
    expected = copied(call)
    op(**call)
    assert_caches(call, expected)


def test_keys_without_elements_leave_values_to_be_copied(op, on):
    call = arguments(on)
    call |= {name: call[name][..., :0] for name in ("key", "key_cache")}
    expected = copied(call)
    op(**call)
    assert_caches(call, expected)


def test_opcheck_passes(op, on):
    torch.library.opcheck(op.default, tuple(arguments(on)[name] for name in ARGUMENTS))


def test_the_schema_says_that_caches_are_written(op):
    assert [a.name for a in op.default._schema.arguments] == list(ARGUMENTS)
    written = [a.name for a in op.default._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["key_cache", "value_cache"]


@pytest.mark.parametrize("slots_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("head_sizes", [(36, 20), (64, 64)], ids=str)
@pytest.mark.parametrize("tokens", [3001, 15_001, 200_001])
def test_a_large_call_is_copied(op, on, tokens, head_sizes, slots_dtype):
    """Large enough for several threads on the CPU. On GPUs from an A100 on, 15,001 tokens of 64 and 64 take four pairs
    per thread, which reach over heads; the others one."""
    if on == "cpu" and tokens > 100_000:
        pytest.skip("as large as is needed on the CPU: 15,001 tokens")
    generator = torch.Generator(on).manual_seed(0)

    def random(*sizes):
        return torch.randint(-(2**15), 2**15, sizes, dtype=torch.int16, device=on, generator=generator)

    blocks = tokens // 12 + 5
    key, value = (random(tokens, 7, size)[:, 1:6] for size in head_sizes)
    key_cache, value_cache = random(blocks, 12, 5, head_sizes[0]), random(blocks, 5, 12, head_sizes[1]).transpose(1, 2)
    slots = torch.randperm(blocks * 12, device=on, generator=generator)[: tokens - 1]
    slots[::7] = -1
    expected = key_cache.clone(), value_cache.clone()
    kept = slots >= 0
    for cache, rows in zip(expected, (key, value), strict=True):
        cache[slots[kept] // 12, slots[kept] % 12] = rows[:-1][kept]
    op(key, value, key_cache, value_cache, slots.to(slots_dtype))
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


# ---------------------------------------------------------------------------------------------------- malformed calls

AXES = r"\[num_tokens, num_kv_heads, (value_)?head_size\]"
CACHE_AXES = r"\[num_blocks, block_size, num_kv_heads, head_size\]"
# name of the test, argument that is wrong, how, what the message says that it must do
MALFORMED = [
    ("key rank", "key", lambda t: t.flatten(1), f"have 3 dimensions, {AXES}"),
    ("value rank", "value", lambda t: t[0], f"have 3 dimensions, {AXES}"),
    ("key_cache rank", "key_cache", lambda t: t.flatten(0, 1), f"have 4 dimensions, {CACHE_AXES}"),
    ("value_cache rank", "value_cache", lambda t: t[None], f"have 4 dimensions, {CACHE_AXES}"),
    ("slot_mapping rank", "slot_mapping", lambda t: t[None], r"be \[n\] with n at most num_tokens = 5"),
    ("slot_mapping rank 0", "slot_mapping", lambda t: t[0], r"be \[n\] with n at most num_tokens = 5"),
    ("value dtype", "value", lambda t: t.half(), "have key's dtype, Float"),
    ("key_cache dtype", "key_cache", lambda t: t.to(torch.int32), "have key's dtype, Float"),
    ("value_cache dtype", "value_cache", lambda t: t.double(), "have key's dtype, Float"),
    ("slot_mapping float", "slot_mapping", lambda t: t.float(), "be int64 or int32"),
    ("slot_mapping int16", "slot_mapping", lambda t: t.short(), "be int64 or int32"),
    ("slot_mapping uint8", "slot_mapping", lambda t: t.byte(), "be int64 or int32"),
    ("key of 16-byte elements", "key", lambda t: t.to(torch.complex128), "have elements of 1, 2, 4 or 8 bytes"),
    ("value tokens", "value", lambda t: t[:4], r"begin with key's \[num_tokens, num_kv_heads\] = \[5, 3\]"),
    ("value heads", "value", lambda t: t[:, :2], r"begin with key's \[num_tokens, num_kv_heads\] = \[5, 3\]"),
    ("key_cache heads", "key_cache", lambda t: t[:, :, :2], r"end in \[num_kv_heads, head_size\] = \[3, 8\]"),
    ("key_cache head size", "key_cache", lambda t: t[..., :7], r"end in \[num_kv_heads, head_size\] = \[3, 8\]"),
    ("value_cache head size", "value_cache", lambda t: t.repeat(1, 1, 1, 2), r"end in .* = \[3, 4\]"),
    (
        "value_cache blocks",
        "value_cache",
        lambda t: t[:5],
        r"begin with key_cache's \[num_blocks, block_size\] = \[6, 4\]",
    ),
    ("value_cache block size", "value_cache", lambda t: t[:, :2], r"begin with key_cache's .* = \[6, 4\]"),
    ("longer slot_mapping", "slot_mapping", lambda t: t.repeat(2)[:6], r"be \[n\] with n at most num_tokens = 5"),
    ("slot_mapping stride", "slot_mapping", lambda t: t.repeat_interleave(2)[::2], "be contiguous"),
    ("key stride", "key", lambda t: t.repeat_interleave(2, -1)[..., ::2], "have stride 1 in its last dimension"),
    ("value stride", "value", lambda t: t.mT.contiguous().mT, "have stride 1 in its last dimension"),
    ("key_cache stride", "key_cache", lambda t: t.mT.contiguous().mT, "have stride 1 in its last dimension"),
    ("value_cache stride", "value_cache", lambda t: t.mT.contiguous().mT, "have stride 1 in its last dimension"),
    ("expanded key_cache", "key_cache", lambda t: t[:1].expand_as(t), "not be expanded: its rows would share memory"),
    ("expanded value_cache", "value_cache", lambda t: t[:, :1].expand_as(t), "not be expanded"),
    ("expanded heads", "key_cache", lambda t: t[:, :, :1].expand_as(t), "not be expanded"),
]
DTYPE_NAMES = {
    torch.float32: "Float",
    torch.float16: "Half",
    torch.float64: "Double",
    torch.complex128: "ComplexDouble",
}
DTYPE_NAMES |= {torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.uint8: "Byte"}


def refused(op, call: dict[str, torch.Tensor], error=ValueError) -> str:
    """The message with which `op` refuses `call`; not a byte of any argument has changed."""
    before = {name: t.detach().clone() for name, t in call.items()}
    with pytest.raises(error) as caught:
        op(**call)
    for name, t in call.items():
        assert t.is_meta or torch.equal(t, before[name]), f"{name} was written"
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "bend", "must"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED]
)
def test_a_malformed_call_is_refused_by_name(op, on, argument, bend, must):
    call = arguments(on)
    call[argument] = bend(call[argument])
    message = refused(op, call)
    was = (
        f"{DTYPE_NAMES[call[argument].dtype]} {list(call[argument].shape)} with strides {list(call[argument].stride())}"
    )
    assert message.startswith(f"{argument} is {was} on {on}"), message
    assert re.search(f", must {must}", message), message
    assert "/" not in message
    assert "csrc" not in message
    assert ".cpp" not in message
    assert "\n" not in message


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_meta_tensor_is_refused_by_torch(op, on, argument):
    """The dispatcher sends a call with any meta tensor to an implementation for meta tensors, which there is not."""
    call = arguments(on)
    call[argument] = call[argument].to("meta")
    refused(op, call, NotImplementedError)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_on_another_device_is_refused(cuda_op, argument):
    call = arguments("cuda")
    call[argument] = call[argument].cpu()
    message = refused(cuda_op, call)
    blamed = "value" if argument == "key" else argument  # key is what the others are held against
    assert message.startswith(f"{blamed} is ")
    assert "must be on key's device" in message


# -------------------------------------------------------------------------------------------- what only a GPU can show


@pytest.mark.gpu
def test_a_captured_graph_replays_with_new_contents(cuda_op):
    call = arguments("cuda")
    cuda_op(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_op(**call)
    fresh = arguments("cuda")
    fresh["slot_mapping"] = torch.tensor([-1, 0, 22, 5, -1], device="cuda")
    for name in ARGUMENTS:
        call[name].copy_(fresh[name])
    graph.replay()
    assert_caches(call, copied(fresh))


@pytest.mark.gpu
def test_the_current_stream_is_used(cuda_op):
    """The source is filled on the same side stream, behind a busy wait: an op on another stream would copy old rows."""
    call, stream = arguments("cuda"), torch.cuda.Stream()
    fresh = {**call, "key": torch.rand_like(call["key"])}
    expected = copied(fresh)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        call["key"].copy_(fresh["key"])
        cuda_op(**call)
    stream.synchronize()
    assert_caches(call, expected)


@pytest.mark.gpu
def test_the_tensors_device_is_used_not_the_current_one(cuda_op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    call = arguments("cuda:1")
    expected = copied(call)
    with torch.cuda.device(0):
        cuda_op(**call)
        assert torch.cuda.current_device() == 0
    assert_caches(call, expected)


@pytest.mark.gpu
def test_a_cache_beyond_2_31_elements_with_its_last_slot(cuda_op):
    blocks = 2**31 // (16 * 64) + 3
    cache = torch.zeros(blocks, 16, 1, 64, dtype=torch.uint8, device="cuda")
    last = blocks * 16 - 1
    assert cache.numel() > 2**31
    key = torch.randint(1, 255, (3, 1, 64), dtype=torch.uint8, device="cuda")
    small = torch.zeros(blocks, 16, 1, 1, dtype=torch.uint8, device="cuda")
    cuda_op(key, key[..., :1], cache, small, torch.tensor([0, last, 2**25 - 1], device="cuda"))
    for token, slot in enumerate((0, last, 2**25 - 1)):
        assert torch.equal(cache[slot // 16, slot % 16], key[token])
        assert torch.equal(small[slot // 16, slot % 16], key[token, :, :1])
    assert cache.count_nonzero() == 3 * 64
    assert small.count_nonzero() == 3


@pytest.mark.gpu
def test_more_vectors_than_a_launch_can_count(ops):
    """Rows of 1,025 single bytes, so that their vectors outnumber a 32-bit index: the copy takes two launches."""
    tokens, width = 2**21 + 3, 1025
    if torch.cuda.mem_get_info()[0] < 4 * tokens * width:
        pytest.skip(f"needs {4 * tokens * width >> 30} GiB of free GPU memory")
    key = torch.randint(1, 255, (tokens, 1, width), dtype=torch.uint8, device="cuda")
    cache = torch.zeros(tokens, 1, 1, width, dtype=torch.uint8, device="cuda")
    small = torch.zeros(tokens, 1, 1, 1, dtype=torch.uint8, device="cuda")
    slots = torch.arange(tokens - 1, -1, -1, device="cuda")
    ops.copy(key, key[..., :1], cache, small, slots)
    for begin in range(0, tokens, 2**18):
        end = min(begin + 2**18, tokens)
        assert torch.equal(cache[tokens - end : tokens - begin, 0].flip(0), key[begin:end])
    assert torch.equal(small[:, 0].flip(0), key[..., :1])


# --------------------------------------------------------------------------------------------------- what timers call


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 4096, 1 << 20, (1 << 22) + 48, (1 << 24) + 48])
def test_contiguous_copy_copies_both(ops, size):
    key, value = (torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda") for n in (size, 3 * size))
    key_to, value_to = torch.zeros(size + 16, dtype=torch.uint8, device="cuda"), torch.zeros_like(value)
    ops.contiguous_copy(key_to[:size], key, value_to, value)
    assert torch.equal(key_to[:size], key)
    assert torch.equal(value_to, value)
    assert not key_to[size:].any()


@pytest.mark.gpu
def test_contiguous_copy_refuses_what_16_byte_accesses_cannot_reach(ops):
    flat = torch.zeros(4, 64, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="key_to is .* must be contiguous, 16-byte aligned"):
        ops.contiguous_copy(flat[0, 1:17], flat[1, :16], flat[2], flat[3])
    with pytest.raises(ValueError, match="value_to is .* must be as long as value_from"):
        ops.contiguous_copy(flat[0], flat[1], flat[2, :16], flat[3])


@pytest.mark.gpu
def test_flush_reads_and_leaves_no_trace(ops):
    buffer, sink = (
        torch.zeros(1 << 24, dtype=torch.uint8, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    ops.flush(buffer, sink)
    assert sink.item() == 0
    buffer[-1] = 1
    ops.flush(buffer, sink)
    assert sink.item() != 0, "the buffer's last bytes were not read"


@pytest.mark.gpu
def test_clock_probe_gives_cycles_and_nanoseconds(ops):
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    ops.clock_probe(out, 100_000)
    cycles, nanoseconds = out.tolist()
    assert nanoseconds >= 100_000
    assert 0.1 < cycles / nanoseconds < 5  # GHz
    with pytest.raises(ValueError, match="out is .* must be a contiguous int64 tensor of 2 elements"):
        ops.clock_probe(out[:1], 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_empty_can_be_captured(ops, dependent):
    anywhere, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    ops.empty(anywhere, dependent)
    with torch.cuda.graph(graph):
        ops.empty(anywhere, dependent)
    graph.replay()
    torch.cuda.synchronize()
