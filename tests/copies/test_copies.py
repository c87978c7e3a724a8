"""Every copy of the registry writes the right bits: all layouts, sources and policies that it claims, odd sizes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from kvnb.bench.check import WrongCopy, check
from kvnb.copies import REGISTRY
from kvnb.copies.torch_compile import TRAP, graphs_made
from kvnb.problem.case import ITEMSIZE, LAYOUTS, MIB, SLOT_PATTERNS, SOURCES, Case

COMPILED = ("torch.compile", "torch.compile_first", "torch.compile_view")  # in a test of their own: it takes seconds
ODD = {"num_tokens": 13, "num_kv_heads": 3, "head_size": 20, "block_size": 12, "padding": 0.25, "cache_bytes": 1 << 16}
UNEQUAL = ODD | {"value_head_size": 12, "block_size": 5}
WIDE = ODD | {"num_tokens": 21, "num_kv_heads": 5, "head_size": 24, "cache_bytes": 1 << 17}  # whole 16 bytes
LAYOUTS_OF = dict.fromkeys(("torch.index_copy", "torch.scatter", "torch.index_copy_wide", "sglang"), ("NHD",))
LAYOUTS_OF |= {"torch.index_put_packed": ("packed",)}
DEPENDS_ON_THE_MACHINE = ("kvnb.dependent", "limit.launch.dependent", "triton", "flashinfer", "sglang", "vllm")


def checked(name: str, case: Case, device: str) -> set[str]:
    """Check a copy on a case under each of its policies; returns those it supports. The others give their reason."""
    copy, supported = REGISTRY[name], set()
    for policy in copy.policies:
        reason = copy.reason_on(case, policy, device)
        if reason is None:
            check(copy, case, device, policy)
            supported.add(policy)
            continue
        with pytest.raises(ValueError) as refused:
            check(copy, case, device, policy)
        assert str(refused.value) == f"{name} cannot be checked here: {reason}"
    return supported


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in COMPILED and "==" not in name])
def test_a_copy_writes_the_right_bits(name, layout, device):
    copy, supported = REGISTRY[name], set()
    dtype = "float32" if (name, device) == ("torch.scatter", "cpu") else "bfloat16"
    for sizes, source in ((ODD, "qkv"), (UNEQUAL, "contiguous"), (ODD, "transposed"), (WIDE, "qkv")):
        supported |= checked(name, Case(layout=layout, source=source, dtype=dtype, **sizes), device)
    claimed = device in copy.devices and layout in LAYOUTS_OF.get(name, LAYOUTS)
    if claimed and not supported and name in DEPENDS_ON_THE_MACHINE:
        pytest.skip(copy.reason_on(Case(layout=layout, **WIDE), copy.policies[0], device))
    assert supported == set(copy.policies if claimed else ())


def test_scatter_on_the_cpu_is_caught_in_half_precision():
    """torch.scatter_ there takes rows that it leaves alone through float, which changes the payload of a NaN."""
    with pytest.raises(WrongCopy, match="should be untouched, but was written"):
        check(REGISTRY["torch.scatter"], Case(**ODD), "cpu")
    check(REGISTRY["torch.scatter"], Case(dtype="float32", **ODD), "cpu")


@st.composite
def cases(draw) -> Case:
    """Cases of any shape, in a cache that they may fill but for the reserved blocks."""
    tokens, block_size = draw(st.integers(1, 24)), draw(st.integers(1, 17))
    sizes = {"num_kv_heads": draw(st.integers(1, 9)), "head_size": draw(st.integers(1, 40)), "block_size": block_size}
    sizes["value_head_size"] = draw(st.just(sizes["head_size"]) | st.integers(1, 40))
    names = {"dtype": ITEMSIZE, "layout": LAYOUTS, "source": SOURCES, "slots": SLOT_PATTERNS}
    chosen = {name: draw(st.sampled_from(sorted(values))) for name, values in names.items()}
    token_bytes = Case(0, **sizes, **chosen).token_bytes
    blocks = -(-tokens // block_size) + 3 + draw(st.integers(0, 12))
    padding = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    return Case(
        tokens,
        cache_bytes=blocks * block_size * token_bytes,
        padding=padding,
        seed=draw(st.integers(0, 9)),
        **sizes,
        **chosen,
    )


@settings(max_examples=60)
@given(case=cases(), data=st.data())
def test_any_case_is_written_right(device, case, data):
    rows_apart = case.layout == "NHD" and case.source == "transposed"
    name = data.draw(st.sampled_from(["kvnb"] if rows_apart else ["kvnb", "torch.index_put"]))
    check(REGISTRY[name], case, device, data.draw(st.sampled_from(REGISTRY[name].policies)))


@pytest.mark.parametrize("name", ["torch.compile", "torch.compile_first"])
@pytest.mark.parametrize(("layout", "policy"), [("NHD", "null_slot"), ("packed", "remap")])
def test_the_compiled_copy_writes_the_right_bits(device, layout, policy, name):
    case = Case(37, layout=layout, cache_bytes=4 * MIB) if name == "torch.compile_first" else Case(layout=layout, **ODD)
    if device in REGISTRY[name].devices:
        return check(REGISTRY[name], case, device, policy)
    with pytest.raises(ValueError, match="runs on cuda, not on cpu"):
        check(REGISTRY[name], case, device, policy)


def test_every_regime_is_compiled_anew(device, tmp_path, monkeypatch):
    """Inductor's caches hold a dynamic graph for any size, and the tiling that another process has chosen."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before, graphs = Counter(counters["inductor"]), graphs_made()
    for tokens in (31, 36, 600, 5000):
        check(REGISTRY["torch.compile"], Case(tokens, 1, 24, cache_bytes=MIB), device)
    cached = {name for name in Counter(counters["inductor"]) - before if re.search("cache_(hit|miss)", name)}
    assert graphs_made() - graphs == 3
    assert not cached - {"async_compile_cache_miss"}  # a GPU kernel is new to a table that every compilation empties
    assert not [path for path in tmp_path.rglob("*") if path.name == "fxgraph" or path.suffix == ".best_config"]


def test_the_first_tiling_is_shown_at_one_shape():
    first = REGISTRY["torch.compile_first"]
    assert first.reason_against(Case(256), "null_slot", "graph", "cuda") is None
    for odd in ({"num_kv_heads": 4}, {"head_size": 64}, {"dtype": "float16"}, {"padding": 0.25}):
        assert "8x128 bfloat16 without padding" in first.reason_against(Case(256, **odd), "null_slot", "graph", "cuda")


def test_the_compiled_trap_is_slow_but_right(device):
    check(REGISTRY["torch.compile_view"], Case(TRAP.num_tokens, padding=0.25, cache_bytes=4 * MIB), device)
    assert "shown once" in REGISTRY["torch.compile_view"].reason_against(Case(**ODD), "null_slot", "wall", device)
