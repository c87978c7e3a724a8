"""torch.ops.kvnb: calls by hand; what it refuses, and how; capture and streams. Generated calls: test_op_properties.py.

Every test of the CPU op runs on the CUDA ops too, where there is a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from programs import python_path
from test_op_properties import ARGUMENTS, CUDA_OPS, by_loop, named, refused

from kvnb import paths


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
@pytest.mark.parametrize("head_sizes", [(36, 20), (32, 32), (64, 64)], ids=str)
@pytest.mark.parametrize("tokens", [3001, 9001, 15_001, 200_001])
def test_a_large_call_is_copied(op, on, tokens, head_sizes, slots_dtype):
    """Large enough for several threads on the CPU. On an A100 or H200, 9,001 tokens of 64 and 64 take four pairs per
    thread, which reach over heads, 15,001 of 32 and 32 two, and the others one."""
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
    ("expanded key_cache", "key_cache", lambda t: t[:1].expand_as(t), "not be expanded or overlap itself"),
    ("expanded value_cache", "value_cache", lambda t: t[:, :1].expand_as(t), "not be expanded"),
    ("expanded heads", "key_cache", lambda t: t[:, :, :1].expand_as(t), "not be expanded"),
    ("overlapping slots", "key_cache", lambda t: t.as_strided(t.shape, (96, 23, 8, 1)), "not be .* or overlap itself"),
    ("overlapping blocks", "value_cache", lambda t: t.as_strided(t.shape, (47, 12, 4, 1)), "not be .* or overlap"),
]
DTYPE_NAMES = {
    torch.float32: "Float",
    torch.float16: "Half",
    torch.float64: "Double",
    torch.complex128: "ComplexDouble",
}
DTYPE_NAMES |= {torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.uint8: "Byte"}


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


def test_one_cache_for_keys_and_values_is_refused(op, on):
    call = arguments(on)
    call |= {"value": call["key"].clone(), "value_cache": call["key_cache"]}
    message = refused(op, call)
    assert message.startswith("value_cache is Float [6, 4, 3, 8]")
    assert "must share no memory with key_cache, which begins 0 bytes earlier: lie apart" in message


def in_buffer(t, begin, *strides):
    return t.as_strided((6, 4, 3, 8), (*strides, 1), begin)


@pytest.mark.parametrize(
    ("buffer", "cut", "begins"),
    [
        ((7, 4, 3, 8), lambda t: (t[:6], t[1:]), "384 bytes earlier"),
        ((7, 4, 3, 8), lambda t: (t[1:], t[:6]), "384 bytes later"),
        ((6, 4, 3, 9), lambda t: (t[..., :8], t[..., 1:]), "4 bytes earlier"),
        ((6, 5, 3, 8), lambda t: (t[:, :4], t[:, 1:]), "96 bytes earlier"),
        ((12, 4, 3, 8), lambda t: (t[:6], t[1::2]), "384 bytes earlier"),
        ((1200,), lambda t: (in_buffer(t, 0, 200, 24, 8), in_buffer(t, 96, 150, 24, 8)), "384 bytes earlier"),
        ((1200,), lambda t: (in_buffer(t, 0, 200, 36, 12), in_buffer(t, 8, 200, 36, 12)), "32 bytes earlier"),
        ((1200,), lambda t: (in_buffer(t, 0, 200, 40, 16), in_buffer(t, 8, 200, 40, 16)), "32 bytes earlier"),
    ],
    ids=[
        "a block on",
        "a block before",
        "an element on",
        "a slot on",
        "pages in each other's way",
        "pages at another stride",
        "rows that reach into the next head's",
        "heads that reach into the next slot's",
    ],
)
def test_caches_that_share_memory_are_refused(op, on, buffer, cut, begins):
    call = arguments(on)
    key_cache, value_cache = cut(torch.zeros(buffer, device=on))
    call |= {"value": call["key"].clone(), "key_cache": key_cache, "value_cache": value_cache}
    message = refused(op, call)
    assert message.startswith("value_cache is Float [6, 4, 3, 8]")
    assert f"must share no memory with key_cache, which begins {begins}" in message


@pytest.mark.parametrize(
    ("buffer", "cut"),
    [
        ((6, 4, 3, 12), lambda t: t.split([8, 4], -1)),
        ((6, 3, 4, 12), lambda t: t.transpose(1, 2).split([4, 8], -1)[::-1]),
        ((6, 2, 4, 3, 8), lambda t: (t[:, 0], t[:, 1, ..., :4])),
        ((6, 5, 2, 3, 4, 8), lambda t: (t[:, 2, 1].transpose(1, 2), t[:, 2, 0].transpose(1, 2)[..., 4:])),
        ((6, 4, 6, 8), lambda t: (t[:, :, ::2], t[:, :, 1::2, :4])),
        ((6, 144), lambda t: (t[:, :96].view(6, 4, 3, 8), t[:, 96:].view(6, 3, 4, 4).transpose(1, 2))),
    ],
    ids=["in rows", "in rows, V first", "in pages", "in pages of a layer", "in heads", "in pages, V transposed"],
)
def test_caches_that_take_turns_in_one_buffer_are_copied(op, on, buffer, cut):
    call = arguments(on)
    call["key_cache"], call["value_cache"] = cut(torch.zeros(buffer, device=on))
    expected = copied(call)
    op(**call)
    assert_caches(call, expected)


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
@pytest.mark.parametrize("argument", ["key", "value", "slot_mapping"])
def test_what_is_read_may_not_lie_in_a_cache(op, on, argument, cache):
    call = arguments(on)
    rows = call[cache].view(-1).view(call[argument].dtype)
    call[argument] = rows[-call[argument].numel() :].view(call[argument].shape)
    assert refused(op, call).endswith(f"must lie apart from {cache}, which is written")


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


A_SLOT_PAST_THE_END = """
import torch
from kvnb import build

def outcome(call):
    try:
        call()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "done"

key, value = torch.ones(2, 2, 1, 8, device="cuda")
key_cache, value_cache = torch.zeros(2, 1, 4, 1, 8, device="cuda")
slots = torch.tensor([3, 4], device="cuda")
copy = build.load().copy
for call in (
    lambda: copy(key, value, key_cache, value_cache, slots),
    lambda: torch.zeros(8, device="cuda"),
    lambda: key_cache[0].index_put_((slots,), key),
    lambda: torch.zeros(8, device="cuda"),
):
    print(outcome(call), flush=True)
"""


@pytest.mark.gpu
def test_a_slot_past_the_end_ends_the_process_of_an_index_copy_not_ours(ops):
    """In a process of its own, whose CUDA context the index copy's device assert leaves unusable."""
    environment = {**os.environ, "PYTHONPATH": python_path(paths.ROOT)}
    command = [sys.executable, "-c", A_SLOT_PAST_THE_END]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 4, said
    *ours, index_copy, next_call = done.stdout.splitlines()
    assert ours == ["done", "done"], said
    assert "device-side assert triggered" in index_copy, said
    assert "device-side assert triggered" in next_call, said


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
@pytest.mark.parametrize("block_size", [4, 10])  # shifts, divisions
@pytest.mark.parametrize("tokens", [20, 240, 1000, 1500, 3200])
def test_each_launch_of_a_chain_sees_what_the_one_before_wrote(cuda_op, tokens, block_size):
    """Back and forth between two caches: what a call writes are the rows that the next one reads, in another order.

    The number of tokens decides when a dependent launch lets the next one in, and how many pairs a thread has.
    """
    heads, size, calls = 8, 128, 200
    order = torch.randperm(tokens, device="cuda")
    rows = torch.rand(2, tokens, heads, size, device="cuda").bfloat16()
    caches = torch.zeros(2, *rows.shape, dtype=rows.dtype, device="cuda")  # [which, K and V, slots, heads, size]
    caches[0] = rows
    flat, blocks = caches.unbind(), caches.view(2, 2, -1, block_size, heads, size).unbind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            cuda_op(*flat[call % 2], *blocks[1 - call % 2], order)
    graph.replay()
    where = torch.arange(tokens, device="cuda")
    for _ in range(calls):
        where = order[where]
    assert torch.equal(flat[calls % 2][:, where], rows)


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
