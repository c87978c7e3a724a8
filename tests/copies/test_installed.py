"""Installed peers: each adapter against a stand-in with its package's documented rules, and the real ones on GPUs."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvnb.bench.check import WrongCopy, check
from kvnb.copies import installed
from kvnb.problem import inputs
from kvnb.problem.case import LAYOUTS, Case

SOURCES = ("contiguous", "qkv")  # transposed heads are for the gate to judge, not promised
PEERS = {copy.name: copy for copy in installed.COPIES}
CASE = Case(13, 3, 64, block_size=12, cache_bytes=1 << 19, padding=0.25)
JIT, JIT_BEFORE = installed.SGLANG_HOMES


def on_cpu(name: str) -> installed.Installed:
    """The copy, allowed on the CPU: what is installed in these tests runs there."""
    return replace(PEERS[name], devices=("cpu",))


def install(monkeypatch, name: str, **contents) -> None:
    """Put a module with these contents, and the packages it lies in, where import and find_spec find them."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=depth < len(parts))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(contents)


def uninstall(monkeypatch, *packages: str) -> None:
    real = installed.find_spec
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in packages else real(name))


# ----------------------------------------------------------------------------------------------------------- stand-ins


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    """FlashInfer's page arithmetic (page.cuh) and its checks (page.cu)."""
    key_cache, value_cache = paged_kv_cache
    table = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert all(t.dtype == torch.int32 and t.is_contiguous() and t.dim() == 1 for t in table)
    assert len(batch_indices) == len(positions) == len(append_key) == len(append_value)
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == append_key.stride(2) == 1
    if kv_layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    page_size = key_cache.shape[1]
    within = kv_indptr[batch_indices] * page_size + positions
    assert (within >= 0).all()
    page, entry = kv_indices[within // page_size].long(), (within % page_size).long()
    key_cache[page, entry], value_cache[page, entry] = append_key, append_value


def store_cache(k, v, k_cache, v_cache, indices, *, size_limit: int = 0, reserved_skip_index: int = 0) -> None:
    """SGLang's since #32477: out of bounds is fatal, writes to the reserved slot are left out."""
    kept = indices != reserved_skip_index
    store_cache_before(k[kept], v[kept], k_cache, v_cache, indices[kept])


def store_cache_before(k, v, k_cache, v_cache, indices) -> None:
    assert k.dim() == k_cache.dim() == 2 and k.stride(1) == k_cache.stride(1) == 1
    assert len(k) == len(v) == len(indices)
    assert ((indices >= 0) & (indices < len(k_cache))).all()
    k_cache[indices], v_cache[indices] = k, v


def store_kv_cache(k_cache, v_cache, out_loc, k, v) -> None:
    store_cache_before(k, v, k_cache, v_cache, out_loc)


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """vLLM's: negative slots are skipped, slot_mapping counts, V lies as K does."""
    assert kv_cache_dtype == "auto" and k_scale.dtype == v_scale.dtype == torch.float32
    assert key_cache.stride() == value_cache.stride() and slot_mapping.dtype == torch.int64
    real = slot_mapping >= 0
    slots, size = slot_mapping[real], key_cache.shape[1]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[slots // size, slots % size] = rows[: len(slot_mapping)][real]


@pytest.fixture
def packages(monkeypatch):
    """All three packages, as stand-ins."""
    install(monkeypatch, "flashinfer", append_paged_kv_cache=append_paged_kv_cache)
    install(monkeypatch, JIT, store_cache=store_cache)
    install(monkeypatch, "vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash)
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_writes_the_right_bits(packages, name, layout, source):
    copy, case = on_cpu(name), replace(CASE, layout=layout, source=source)
    for policy in copy.policies:
        if name == "sglang" and layout != "NHD":
            assert "flat rows exist in NHD only" in copy.reason_on(case, policy, "cpu")
        else:
            check(copy, case, "cpu", policy)


def test_what_only_some_peers_can_write(packages):
    check(on_cpu("vllm"), replace(CASE, dtype="float32", head_size=20, value_head_size=20), "cpu")
    check(on_cpu("sglang"), replace(CASE, head_size=20, value_head_size=12, dtype="int8"), "cpu")
    check(on_cpu("flashinfer"), replace(CASE, dtype="float8_e4m3fn"), "cpu")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flashinfer", {"head_size": 96, "value_head_size": 96}, r"K and V heads of one size of \(64, 128, 256, 512\)"),
        ("flashinfer", {"value_head_size": 128}, "K and V heads of one size of"),
        ("flashinfer", {"dtype": "float32"}, "takes bfloat16, float16, float8_e4m3fn"),
        ("flashinfer", {"num_kv_heads": 129, "cache_bytes": 1 << 25}, "one block: 1032 threads here, 1024 at most"),
        ("flashinfer", {"num_tokens": 0}, "its grid for no tokens"),
        ("sglang", {"layout": "packed"}, "a packed cache cannot be viewed"),
        ("vllm", {"value_head_size": 128}, "K and V heads of one size in bfloat16, float16, float32"),
        ("vllm", {"dtype": "int8"}, "in bfloat16, float16, float32 only"),
        ("vllm", {"head_size": 20, "value_head_size": 20}, "16-byte vectors: rows of 120 bytes are not aligned"),
        ("vllm", {"head_size": 20, "value_head_size": 20, "num_kv_heads": 4, "layout": "HND"}, "rows of 40 bytes"),
    ],
)
def test_what_a_peer_cannot_write_is_refused_with_the_reason(packages, name, change, reason):
    copy = PEERS[name]
    with pytest.raises(ValueError, match=reason):
        check(replace(copy, devices=("cpu",)), replace(CASE, **change), "cpu")


def test_a_padded_entry_reaches_no_peer_that_does_not_take_it(packages):
    assert PEERS["vllm"].policies[0] == "skip"
    for name in ("flashinfer", "sglang"):
        assert "skip" not in PEERS[name].policies
        assert "policy skip is not one of its policies" in PEERS[name].reason_against(CASE, "skip", "graph", "cuda")


def test_the_page_table_lasts_and_a_step_makes_int32_once(monkeypatch):
    calls = []
    install(monkeypatch, "flashinfer", append_paged_kv_cache=lambda *arguments: calls.append(arguments))
    made = inputs.make(CASE, "cpu", policy="null_slot", slot_count=2)
    step = PEERS["flashinfer"].bind(made)
    writes = [step(made.slots[0]), step(made.slots[1])]
    for write in (*writes, writes[0]):
        write(made.keys[0], made.values[0])
    first, second, again = calls
    assert all(a is b for a, b in zip(first[4:8], second[4:8]))  # caches and page table
    assert all(a is b for a, b in zip(first[2:8], again[2:8]))  # and the step's arrays, for every layer
    assert torch.equal(second[3], made.slots[1].int()) and not second[2].any()
    table = [list(range(CASE.num_blocks)), [0, CASE.num_blocks], [CASE.block_size]]  # every page, of one request, full
    assert [part.tolist() for part in first[5:8]] == table
    assert PEERS["flashinfer"].steps(CASE, "null_slot") and not PEERS["sglang"].steps(CASE, "null_slot")


# ----------------------------------------------------------------------------------------------- SGLang's many releases


@pytest.mark.parametrize("home", [JIT, JIT_BEFORE])
@pytest.mark.parametrize("store", [store_cache, store_cache_before])
def test_sglangs_kernel_is_found_in_both_homes_and_writes_slot_0(monkeypatch, home, store):
    install(monkeypatch, home, store_cache=store)
    check(on_cpu("sglang"), CASE, "cpu", "null_slot")
    made = inputs.make(CASE, "cpu", policy="null_slot")
    before = made.key_cache[0, 0].clone()
    PEERS["sglang"].bind(made)(made.slots[0])(made.keys[0], made.values[0])
    assert not torch.equal(before, made.key_cache[0, 0])


def test_the_slot_that_sglang_skips_as_shipped_would_be_found(monkeypatch):
    def skips_the_first(k, v, k_cache, v_cache, indices):
        store_cache(k, v, k_cache, v_cache, indices, reserved_skip_index=int(indices[0]))

    install(monkeypatch, JIT, store_cache=skips_the_first)
    with pytest.raises(WrongCopy, match="sglang: call 0"):
        check(on_cpu("sglang"), replace(CASE, padding=0.0), "cpu")


def test_sgl_kernels_op_stands_in_and_says_so(monkeypatch):
    uninstall(monkeypatch, "sglang")
    install(monkeypatch, "sgl_kernel")
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace(store_kv_cache=store_kv_cache), raising=False)
    with pytest.warns(UserWarning, match="sgl_kernel's store_kv_cache stands for it"):
        check(on_cpu("sglang"), CASE, "cpu")


def test_an_sglang_without_the_kernel_is_an_error_that_says_where_it_was_sought(monkeypatch):
    install(monkeypatch, "sglang")
    uninstall(monkeypatch, "sgl_kernel")
    with pytest.raises(ImportError, match=f"neither {JIT} nor {JIT_BEFORE} nor sgl_kernel stores: install another"):
        check(on_cpu("sglang"), CASE, "cpu")


def test_what_sglang_lacks_itself_is_not_taken_for_another_release(monkeypatch, tmp_path):
    package = tmp_path / "sglang" / "jit_kernel"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "kvcache.py").write_text("import tvm_ffi_that_is_missing\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ModuleNotFoundError, match="tvm_ffi_that_is_missing"):
            check(on_cpu("sglang"), CASE, "cpu")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]  # not monkeypatch's: it would put the stand-in back


# ------------------------------------------------------------------------------------------------- absence and identity


@pytest.mark.parametrize("name", PEERS)
def test_an_absent_package_is_the_reason(monkeypatch, name):
    uninstall(monkeypatch, "flashinfer", "sglang", "sgl_kernel", "vllm")
    assert PEERS[name].reason_on(CASE, PEERS[name].policies[0], "cuda") == f"{name} is not installed"
    assert "runs on cuda, not on cpu" in PEERS[name].reason_on(CASE, PEERS[name].policies[0], "cpu")


def test_nothing_is_imported_before_it_is_bound():
    peers = "flashinfer", "sglang", "sgl_kernel", "vllm", "torch"
    asks = "[copy.supports(Case(4), 'null_slot', 'graph') for copy in installed.COPIES]"
    code = f"""
import sys
from kvnb.copies import installed
from kvnb.problem.case import Case
{asks}
[(copy.title, copy.version) for copy in installed.COPIES]
print(sorted(set({peers}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_release_installed_is_part_of_title_and_version(monkeypatch):
    copy, seen = PEERS["flashinfer"], set()
    for release in ("not installed", "flashinfer-python 0.7.4", "flashinfer-python 0.7.5"):
        monkeypatch.setattr(installed, "_releases", lambda names, release=release: release)
        assert copy.title.endswith(f" ({release})")
        assert copy.version.endswith(f", {release}")
        seen.add(copy.version)
    assert len(seen) == 3
    told = "FlashInfer's append_paged_kv_cache: a block for a token at a time, addresses through a page table"
    assert copy.title_in("23715aa3ec, flashinfer-python 0.7.3") == f"{told} (flashinfer-python 0.7.3)"
    assert copy.title_in("23715aa3ec") == f"{told} (of a version that the run does not say)"


def test_releases_are_read_from_what_is_installed(monkeypatch, tmp_path):
    for name, version in (("sglang", "0.5.23"), ("sgl_kernel", "0.3.21")):
        about = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed._releases.cache_clear()
    assert installed._releases(("sglang", "sgl-kernel", "never-heard-of")) == "sglang 0.5.23, sgl-kernel 0.3.21"
    installed._releases.cache_clear()


# ------------------------------------------------------------------------------------------------------------- the real


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PEERS)
def test_the_installed_op_writes_the_right_bits(name, layout):
    copy, checked = PEERS[name], 0
    for source in SOURCES:
        for case in (CASE, Case(1024, 8, 128, cache_bytes=1 << 24, padding=0.1), Case(1, 1, 128, cache_bytes=1 << 20)):
            case = replace(case, layout=layout, source=source)
            if copy.reason_on(case, copy.policies[0], "cuda") is None:
                for policy in copy.policies:
                    check(copy, case, "cuda", policy)
                    checked += 1
    if not checked:
        pytest.skip(copy.reason_on(replace(CASE, layout=layout), copy.policies[0], "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["write", "step"])
@pytest.mark.parametrize("name", PEERS)
def test_the_installed_op_is_timed_in_a_graph(name, part):
    from kvnb.bench import timing

    copy, case = PEERS[name], Case(64, 8, 128, cache_bytes=1 << 26)
    reason = copy.reason_on(case, copy.policies[0], "cuda")
    if reason or (part == "step" and not copy.steps(case, copy.policies[0])):
        pytest.skip(reason or "nothing is launched per step")
    cells = [timing.Cell(copy, copy.policies[0], part, "graph", "produced")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        rows = timing.measure_case(timing.Gpu(torch.device("cuda")), case, cells, rounds=1, seed=0)
    assert [(row["status"], row["reason"]) for row in rows] == [("ok", "")] * len(rows)
    assert {row["launches"] for row in rows} == {2 if part == "step" else 1}
