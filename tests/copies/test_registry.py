"""The registry: names, versions, reasons, and copies that come from outside the package."""

from __future__ import annotations

import re
import signal
from contextlib import nullcontext

import pytest

from kvnb import copies, paths
from kvnb.copies.base import FAMILIES, TIMERS, Copy
from kvnb.problem.case import Case
from kvnb.problem.slots import POLICIES

CASE = Case(16, cache_bytes=1 << 22)
OWN_COPY = '''
from kvnb.copies import Copy, register


def bind(inputs):
    """Row by row, on the host"""
    def step(slots):
        def write(key, value):
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    at = divmod(slot, inputs.case.block_size)
                    inputs.key_cache[at], inputs.value_cache[at] = key[token], value[token]
        return write
    return step


register(Copy("mine", "yours", ("skip",), bind, devices=("cpu", "cuda")))
'''


@pytest.fixture(autouse=True)
def registry(monkeypatch) -> dict[str, Copy]:
    """The registry; what a test adds is gone after it."""
    monkeypatch.setattr(copies, "REGISTRY", dict(copies.REGISTRY))
    return copies.REGISTRY


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "my_copy.py"
    path.write_text(OWN_COPY)
    return path


def test_the_registry_holds_the_designs_copies(registry):
    kernels = {"kvnb", "kvnb.dependent", "kvnb.again", "vllm.scalar", "triton"}
    spellings = {
        f"torch.{name}" for name in ("index_put", "index_copy", "scatter", "index_put_wide", "index_copy_wide")
    }
    compiled = {"torch.index_put_packed", "torch.compile", "torch.compile_first", "torch.compile_view"}
    limits = {"limit.copy", "limit.copy.memcpy", "limit.launch", "limit.launch.dependent", "limit.event"}
    assert set(registry) >= kernels | spellings | compiled | limits


def test_one_timer_that_serves_is_enough_to_check_a_copy(registry):
    def not_in_graphs(case, policy, timer):
        return "cannot be captured" if timer == "graph" else None

    def nowhere(case, policy, timer):
        return f"not with {timer}"

    one, none = (Copy("mine", "yours", ("skip",), print, supports=supports) for supports in (not_in_graphs, nowhere))
    assert one.reason_against(CASE, "skip", "graph", "cuda") == "cannot be captured"
    assert one.reason_on(CASE, "skip", "cuda") is None
    assert none.reason_on(CASE, "skip", "cuda") == "not with graph"
    assert one.reason_on(CASE, "skip", "cpu") == "runs on cuda, not on cpu"
    for odd in (True, False, 7):
        copy = Copy("mine", "yours", ("skip",), print, supports=lambda *_, odd=odd: odd)
        with pytest.raises(TypeError, match=f"supports returned {odd}: it must say why in words, or None"):
            copy.reason_on(CASE, "skip", "cuda")
    walled = Copy("mine", "yours", ("skip",), print, devices=("cuda", "cpu"), timers=("wall",))
    assert walled.reason_on(CASE, "skip", "cpu") is None
    assert walled.reason_on(CASE, "skip", "cuda") == "none of its timers, wall, runs on cuda"


@pytest.mark.parametrize("name", copies.REGISTRY)
def test_a_copy_is_described_and_complete(registry, name):
    copy = registry[name]
    assert copy.name == name
    assert copy.family in FAMILIES
    assert copy.policies and set(copy.policies) <= set(POLICIES)
    assert copy.timers and set(copy.timers) <= set(TIMERS)
    assert set(copy.devices) <= {"cpu", "cuda"}
    assert copy.title != name and "\n" not in copy.title
    assert all(path.is_file() for path in copy.sources)
    assert re.fullmatch("[0-9a-f]{10}(, .+)?", copy.version)


def test_a_kernels_version_hangs_on_its_own_sources(registry):
    assert {path.name for path in registry["kvnb"].sources} >= {
        "kvnb_copy.cu",
        "cpu_copy.cpp",
        "kv_index.h",
        "capacity.h",
        "bindings.cpp",
    }
    assert {path.name for path in registry["vllm.scalar"].sources} >= {"vllm_scalar.cu", "kv_index.h", "bindings.cpp"}
    assert {path.name for path in registry["limit.copy"].sources} >= {"limits.cu", "capacity.h"}
    assert registry["kvnb"].version == registry["kvnb.again"].version  # one copy under two names
    assert registry["kvnb"].version != registry["vllm.scalar"].version


def test_the_version_changes_with_a_source(tmp_path):
    source = tmp_path / "kernel.cu"
    source.write_text("// one")
    copy = Copy("own", "yours", ("skip",), lambda inputs: None, sources=(source,))
    before = copy.version
    assert copy.version == before
    source.write_text("// two")
    assert copy.version != before


GOOD = {"name": "own", "family": "yours", "policies": ("skip",), "bind": lambda inputs: None}
POLICY_NAMES, NAMED = ", ".join(POLICIES), "a name must be text without spaces, commas and line breaks, and not 'all'"
MALFORMED = [
    ({"family": "other"}, "'own': family 'other' is not one of kernel, torch, compile, triton, peer, limit, yours"),
    ({"family": ["yours"]}, "'own': family ['yours'] is not one of kernel"),
    ({"policies": ("skp",)}, f"'own': policies 'skp' is not one of {POLICY_NAMES}; did you mean skip?"),
    ({"policies": "skip"}, f"'own': policies 'skip' must be a tuple of some of {POLICY_NAMES}"),
    ({"policies": ()}, f"'own': policies () must be a tuple of some of {POLICY_NAMES}"),
    ({"policies": None}, "'own': policies None must be a tuple of some of skip"),
    ({"policies": ("skip", "skip")}, "'own': policies ('skip', 'skip') has skip twice"),
    ({"devices": ("cudda",)}, "'own': devices 'cudda' is not one of cuda, cpu; did you mean cuda?"),
    ({"devices": "cpu"}, "'own': devices 'cpu' must be a tuple of some of cuda, cpu"),
    ({"timers": ("grph",)}, "'own': timers 'grph' is not one of graph, call, host, eager, wall; did you mean graph?"),
    ({"timers": (1,)}, "'own': timers 1 is not one of graph"),
    ({"bind": None}, "'own': bind None must be a function"),
    ({"supports": "no"}, "'own': supports 'no' must be a function"),
    ({"steps": True}, "'own': steps True must be a function"),
    ({"bind": print}, "'own': bind <built-in function print> must be a function of a file"),
    ({"sources": ("gone.cu",)}, "'own': gone.cu must be a file"),
]
UNLISTABLE = (7, None, "", "a,b", "a b", " a", "a\n", "a\u2003b", "a\x00", "all")
MALFORMED += [({"name": name}, f"{name!r}: {NAMED}") for name in UNLISTABLE]


@pytest.mark.parametrize(("wrong", "told"), MALFORMED, ids=str)
def test_a_malformed_copy_is_refused_with_what_is_valid(registry, wrong, told):
    before = dict(registry)
    with pytest.raises(ValueError, match=f"^copy {re.escape(told)}"):
        copies.register(Copy(**GOOD | wrong))
    assert registry == before
    assert copies.register(Copy(**GOOD)) is registry["own"]


def test_what_is_no_copy_is_refused():
    with pytest.raises(ValueError, match=r"register takes a Copy\(name, family, policies, bind\), not 'kvnb'"):
        copies.register("kvnb")


# -------------------------------------------------------------------------------------------------------------- reasons


@pytest.mark.parametrize(
    ("name", "case", "policy", "timer", "device", "reason"),
    [
        ("kvnb.dependent", CASE, "skip", "graph", "cpu", "runs on cuda, not on cpu"),
        (
            "torch.index_put",
            CASE,
            "skip",
            "wall",
            "cpu",
            "policy skip is not one of its policies: null_slot, null_block",
        ),
        ("limit.copy.memcpy", CASE, "skip", "host", "cpu", "timer host says nothing about it"),
        ("torch.index_put", CASE, "filter", "graph", "cuda", "cannot be captured"),
        ("torch.index_copy", Case(16, cache_bytes=1 << 22, layout="HND"), "null_slot", "wall", "cpu", "NHD only"),
        ("torch.index_put_wide", Case(16, 1, 4, cache_bytes=1 << 22), "null_slot", "wall", "cpu", "rows of 8 bytes"),
        ("torch.index_put_packed", CASE, "null_slot", "wall", "cpu", "needs the packed layout"),
        (
            "torch.index_put_packed",
            Case(16, cache_bytes=1 << 22, layout="packed"),
            "null_slot",
            "wall",
            "cpu",
            "source qkv",
        ),
        ("torch.compile", CASE, "filter", "wall", "cpu", "policy filter is not one of its policies"),
        ("torch.compile", Case(256, cache_bytes=64 << 30), "null_slot", "graph", "cuda", "shown up to 16 GiB"),
        ("torch.compile_view", CASE, "null_slot", "wall", "cpu", "shown once, in: 256 tokens"),
        ("limit.copy", Case(1, 1, 1, cache_bytes=1 << 22), "skip", "graph", "cuda", "multiple of 16 bytes"),
    ],
)
def test_why_a_cell_cannot_be_measured(registry, name, case, policy, timer, device, reason):
    assert reason in registry[name].reason_against(case, policy, timer, device)


# ------------------------------------------------------------------------------------------------ copies of other files


def test_a_file_adds_a_copy_that_the_check_accepts(registry, own_file):
    from kvnb.bench.check import check

    assert copies.load_from(own_file) == ["mine"]
    assert registry["mine"].title == "Row by row, on the host"
    assert registry["mine"].file == own_file
    check(registry["mine"], Case(9, 2, 8, cache_bytes=1 << 14, layout="packed", padding=0.3))


def test_a_file_may_be_loaded_again_after_an_edit(registry, own_file):
    copies.load_from(own_file)
    before = registry["mine"].version
    own_file.write_text(OWN_COPY.replace("on the host", "slowly"))
    assert copies.load_from(str(own_file)) == ["mine"]
    assert registry["mine"].title == "Row by row, slowly"
    assert registry["mine"].version != before


def test_a_taken_name_is_refused(registry, own_file):
    own_file.write_text(OWN_COPY.replace('"mine"', '"kvnb"'))
    with pytest.raises(ValueError, match="copy 'kvnb' is registered already; give yours another name"):
        copies.load_from(own_file)
    assert registry["kvnb"].file.is_relative_to(paths.ROOT / "kvnb")


def test_a_file_that_registers_one_name_twice_is_refused(registry, own_file):
    """It may not hide one of its copies; a file that is run again does not."""
    copies.load_from(own_file)
    exec(compile(OWN_COPY, own_file, "exec"), {})  # as a notebook's %run, or a module that is reloaded
    own_file.write_text(f"{OWN_COPY}\n{OWN_COPY}")
    told = rf"copies_from: {own_file} registers copy 'mine' twice; give one of them another name"
    with pytest.raises(ValueError, match=told):
        copies.load_from(own_file)
    own_file.write_text(OWN_COPY + OWN_COPY.replace('"mine"', '"mine.too"'))
    assert copies.load_from(own_file) == copies.load_from(own_file) == ["mine", "mine.too"]


def test_a_file_without_a_copy_is_refused(own_file):
    own_file.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"my_copy\.py registers no copy; end it with kvnb\.copies\.register"):
        copies.load_from(own_file)


@pytest.mark.parametrize("name", ["my_copy", "my_copy.txt"])
def test_a_file_that_python_does_not_import_is_refused(own_file, name):
    path = own_file.rename(own_file.with_name(name))
    with pytest.raises(ValueError, match=rf"copies_from: {path} must be a Python file, with a name that ends in \.py"):
        copies.load_from(path)


@pytest.mark.parametrize("left", ["", "raise OSError"])
def test_a_file_that_sets_what_signals_do_leaves_a_run_that_hears_them(own_file, left):
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in ending]
    sets = "".join(f"signal.signal({number:d}, signal.SIG_IGN)\n" for number in ending)
    own_file.write_text(f"import signal\n{sets}{left}\n{OWN_COPY}")
    try:
        with pytest.raises(ValueError, match="OSError") if left else nullcontext():
            copies.load_from(own_file)
        assert [signal.getsignal(number) for number in ending] == before
    finally:
        for number, handler in zip(ending, before):
            signal.signal(number, handler)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"copies_from: .*nothing\.py does not exist"):
        copies.load_from(tmp_path / "nothing.py")
