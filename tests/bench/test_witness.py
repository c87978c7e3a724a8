"""Every claim on a run, a profiler, a clock that are made up, on both sides of its bound."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
import torch
from test_timing import CASE, L2, FakeGpu, cell

from kvnb.bench import counters, results, timing, witness
from kvnb.bench.witness import row
from kvnb.problem.case import Case

US = 1e-6


@pytest.mark.parametrize(
    ("sense", "bound", "inside", "outside"),
    [("within", 0.05, (1.049, 0.951), (1.051, 0.949)), ("at most", 0.05, (1.049, 0.5), (1.051, 9)),
     ("at least", 0.0, (1.001, 9), (0.999, 0.5))],
)  # fmt: skip
def test_bounds_hold_on_their_side(sense, bound, inside, outside):
    holds = [row("profiler", ours, 1.0, sense, bound)["holds"] for ours in (*inside, *outside)]
    assert holds == [True, True, False, False]


def test_without_a_bound_or_a_witness_nothing_is_judged():
    assert row("write-back", 2.0, 1.0)["holds"] is None
    assert row("profiler", 1.0, float("nan"), "within", 0.05)["holds"] is None


# ------------------------------------------------------------------------------------------------------------ a run


def run_of(cells: list[tuple], by_worker=(1.0, 1.0, 1.0)) -> pd.DataFrame:
    """Samples of (copy, case, timer, state, seconds), worker w's `by_worker[w]` times as long."""
    rows = []
    for copy, case, timer, state, seconds in cells:
        family = "limit" if copy.startswith("limit") else "kernel"
        moved = 0 if copy == "limit.event" else case.bytes_moved
        place = {"copy": copy, "family": family, "timer": timer, "state": state, "bytes_moved": moved}
        place |= {"policy": "skip", "part": "write", "status": "ok", "reason": "", "throttled": "", "sample": 0}
        fixed = {"run_id": "r", "grid": "full", "l2_bytes": 60_000_000, "round": 0, **case.fields(), **place}
        rows += [fixed | {"worker": w, "seconds": seconds * slower} for w, slower in enumerate(by_worker)]
    return pd.DataFrame(rows, columns=results.SCHEMA.names)


def claims(rows: pd.DataFrame, claim: str) -> dict:
    some = rows[rows["claim"] == claim]
    return {(at.state, at.copy, at.detail.split(",")[0]): at.holds for at in some.itertuples()}


@pytest.mark.parametrize(("slower", "holds"), [(1.019, True), (1.021, False)])
def test_two_processes_agree_in_95_of_100_cells(slower, holds):
    samples = run_of([("kvnb", Case(1 + n), "graph", "produced", 20 * US) for n in range(40)], (1.0, slower))
    [judged] = claims(witness.from_run(samples), "two processes").values()
    assert judged == holds


@pytest.mark.parametrize(("apart", "holds"), [(2, True), (3, False)])
def test_two_processes_may_differ_in_one_cell_of_twenty(apart, holds):
    samples = run_of([("kvnb", Case(1 + n), "graph", "produced", 20 * US) for n in range(40)], (1.0, 1.0))
    samples.loc[(samples["num_tokens"] <= apart) & (samples["worker"] == 1), "seconds"] *= 1.5
    [judged] = claims(witness.from_run(samples), "two processes").values()
    assert judged == holds


@pytest.mark.parametrize(("timer", "judged"), [("graph", True), ("call", False), ("host", False), ("wall", False)])
def test_two_processes_are_judged_by_graph_and_shown_for_the_others(timer, judged):
    samples = run_of([("kvnb", Case(1 + n), timer, "produced", 20 * US) for n in range(40)], (1.0, 1.1))
    rows = witness.from_run(samples)
    [at] = rows[rows["claim"] == "two processes"].to_dict("records")
    assert (at["ours"], not pd.isna(at["holds"]), at["sense"] != "") == (0.0, judged, judged)


@pytest.mark.parametrize(("again", "holds"), [(1.09, True), (1.11, False)])
def test_a_noise_floor_above_what_hides_everything_fails(again, holds):
    at = (Case(9), "graph", "cold")
    samples = run_of([("kvnb", *at, 9 * US), ("kvnb.again", *at, 9 * US / again)])
    [judged] = claims(witness.from_run(samples), "noise floor").values()
    assert judged == holds


DRAM = 4e12  # B/s


def chains(resident: float, produced: float, cold: float) -> pd.DataFrame:
    """limit.copy: 1 us and the bytes at these speeds (B/s); a large one at DRAM's."""
    speeds = {"resident": resident, "produced": produced, "cold": cold}
    cells = [("limit.copy", case := Case(tokens), "graph", state, US + case.bytes_moved / speed)
             for state, speed in speeds.items() for tokens in (256, 1024)]  # fmt: skip
    return run_of([*cells, ("limit.copy", case := Case(65536), "graph", "produced", case.bytes_moved / DRAM)])


@pytest.mark.parametrize(
    ("speeds", "broken"),
    [((9e12, 6e12, 3.9e12), []), ((3.9e12, 6e12, 3.9e12), ["resident against DRAM", "produced against resident"]),
     ((9e12, 3.9e12, 3.9e12), ["produced against DRAM"]), ((9e12, 9.1e12, 3.9e12), ["produced against resident"]),
     ((9e12, 6e12, 4.3e12), ["cold against DRAM"])],
)  # fmt: skip
def test_states_show_in_the_speed_of_a_chain(speeds, broken):
    judged = claims(witness.from_run(chains(*speeds)), "states by speed")
    assert len(judged) == 4
    assert [f"{state} {against}" for (state, _, against), holds in judged.items() if not holds] == broken


def test_a_speed_that_noise_turned_negative_is_not_judged():
    samples = chains(9e12, 6e12, 3.9e12)
    samples.loc[(samples["state"] == "cold") & (samples["num_tokens"] == 1024), "seconds"] = 0.5 * US
    assert claims(witness.from_run(samples), "states by speed")["cold", "limit.copy", "against DRAM"] is pd.NA


def test_speed_is_from_one_size_to_the_next_in_the_usual_cache():
    samples = chains(9e12, 6e12, 3.9e12)
    larger = samples[(samples["state"] == "produced") & (samples["num_tokens"] == 1024)]
    both = pd.concat([samples, larger.assign(cache_bytes=64 << 30, seconds=1.0)])
    pd.testing.assert_frame_equal(witness.from_run(both).query("claim == 'states by speed'").reset_index(drop=True),
                                  witness.from_run(samples).query("claim == 'states by speed'").reset_index(drop=True))


def test_states_are_compared_at_sizes_that_all_of_them_have():
    samples = chains(9e12, 6e12, 3.9e12)
    larger = samples[(samples["state"] == "produced") & (samples["num_tokens"] == 1024)]
    more = pd.concat([samples, larger.assign(num_tokens=2048, bytes_moved=2 * larger["bytes_moved"], seconds=2 * US)])
    rows = witness.from_run(more).query("claim == 'states by speed'")
    pd.testing.assert_frame_equal(rows, witness.from_run(samples).query("claim == 'states by speed'"))
    [against] = rows[rows["detail"] == "against resident"].to_dict("records")
    moved = Case(1024).bytes_moved
    assert against["ours"] == pytest.approx(moved / (US + moved / 6e12))
    assert against["witness"] == pytest.approx(moved / (US + moved / 9e12))
    assert against["case"] == str(Case(1024))


def test_what_a_run_does_not_hold_is_not_claimed():
    quick = run_of([("limit.copy", Case(n), "graph", "produced", n * US) for n in (256, 1024, 65536)])
    assert set(witness.from_run(quick)["claim"]) == {"two processes"}


def test_write_back_is_what_a_chain_takes_longer_than_a_call_without_its_events():
    case = Case(16384)
    call, graph = (case, "call", "cold"), (case, "graph", "cold")
    at = [("limit.event", *call, 1 * US), ("kvnb", *call, 34 * US), ("kvnb", *graph, 36 * US)]
    rows = witness.from_run(run_of([*at, ("limit.copy", *graph, case.bytes_moved / DRAM)]))
    [back] = rows[rows["claim"] == "write-back"].to_dict("records")
    assert (back["ours"], back["witness"]) == pytest.approx((36 * US, 33 * US))
    assert back["detail"] == "at least 3.00 us, in which DRAM moves 12 MB"
    assert rows.loc[rows["claim"] == "empty event pair", "ours"].tolist() == pytest.approx([1 * US])


@pytest.mark.parametrize(
    ("state", "read", "written", "holds"),
    [("cold", 95, 95, [True, True]), ("cold", 85, 95, [False, True]), ("produced", 5, 95, [True, True]),
     ("produced", 15, 85, [False, False]), ("resident", 5, 5, [True, True]), ("resident", 5, 15, [True, False])],
)  # fmt: skip
def test_states_show_in_dram_bytes(state, read, written, holds):
    at = {"timer": "graph", "state": state, "case": "c", "copy": "limit.copy", "bytes_moved": 200, "passes": 1}
    counted = pd.DataFrame([at | {"calls": 7, "dram_read": 7.0 * read, "dram_written": 7.0 * written}])
    assert witness.from_counters(counted)["holds"].tolist() == holds
    for passes, told in ((3.0, "3"), (float("nan"), "unknown")):
        detail = witness.from_counters(counted.assign(passes=passes))["detail"].iloc[0]
        assert detail == f"read; passes: {told}, and only the first found this state"


# -------------------------------------------------------------------------------------------------- a profiler, a clock


@pytest.fixture
def gpu(monkeypatch):
    """A FakeGpu and its profiler: `gpu.kernel` seconds for each write of K or V, a gap of 1 us after each."""
    fake = FakeGpu()
    fake.kernel, fake.lost_events = 5 * US, 0

    def device_events(act):
        begun, events, now = len(fake.log), [], 0.0
        act()
        for what, writes in fake.log[begun:]:
            for name in [witness.PROBE] if what == "probe" else [what] * len(writes):
                events.append((name, now, now + fake.kernel))
                now += fake.kernel + US
        return events[fake.lost_events :]

    monkeypatch.setattr(witness, "device_events", device_events)
    monkeypatch.setattr(timing, "Gpu", lambda device: fake)
    return fake


def test_only_what_ran_on_the_gpu_is_taken_from_the_profiler_in_order(monkeypatch):
    def event(name, device, begin):
        times = SimpleNamespace(start=begin, end=begin + 2)  # us
        return SimpleNamespace(name=name, device_type=getattr(torch.autograd.DeviceType, device), time_range=times)

    made = [event("second", "CUDA", 7.0), event("cudaLaunchKernel", "CPU", 1.0), event("first", "CUDA", 5.0),
            event("Context Sync", "CUDA", 9.0)]  # fmt: skip
    monkeypatch.setattr("torch.profiler.profile", lambda activities: nullcontext(SimpleNamespace(events=lambda: made)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran = []
    events = witness.device_events(lambda: ran.append(True))
    assert [name for name, *_ in events] == ["first", "second"] and ran == [True]
    assert events[0][1:] == pytest.approx((5 * US, 7 * US))


def timed(gpu: FakeGpu, timer: str, copy: str = "torch.index_copy") -> timing.Timed:
    at = cell(copy, timer)
    plan = timing.plan(CASE, timer, at.state, L2)
    kind = timing.GraphTimed if timer == "graph" else timing.EagerTimed
    return kind(timing.Stage(gpu, CASE, [plan]), at, plan)


def of_a_visit(gpu: FakeGpu, made: timing.Timed) -> list[str]:
    begun = len(gpu.log)
    list(made.visit())
    return [what for what, _ in gpu.log[begun:]]


def test_a_chain_and_a_call_span_their_launches(gpu):
    with gpu:
        made = timed(gpu, "graph")
        nodes, calls = made.shorter.nodes, made.plan.calls
        assert nodes == 2 * calls  # K and V: two launches
        begun = len(gpu.log)
        watched, span, alone = witness.chain_seconds(made)
        ran = [what for what, _ in gpu.log[begun:] if what in ("copy_", "replay")]
        assert ran[-4:] == ["copy_", "replay"] * 2
        assert len(ran) == 4 + witness.WATCHED * sum(what in ("copy_", "replay") for what in of_a_visit(gpu, made))
        assert watched == pytest.approx(next(made.visit())[0])
        assert (span, alone) == pytest.approx(((nodes * 6 - 1) * US / calls, 2 * 5 * US))
        call = timed(gpu, "call")
        watched, span = witness.call_seconds(call)
        assert watched == pytest.approx(next(call.visit())[0])
        assert span == pytest.approx(2 * 5 * US + US)


@pytest.mark.parametrize("timer", ["graph", "call"])
def test_a_profiler_that_misses_kernels_is_an_error(gpu, timer):
    with gpu:
        made = timed(gpu, timer)
        gpu.lost_events = 10**6 if timer == "call" else 1
        with pytest.raises(RuntimeError, match="the profiler saw"):
            (witness.chain_seconds if timer == "graph" else witness.call_seconds)(made)


@pytest.mark.parametrize(("theirs", "holds"), [(20.5 * US, True), (19.5 * US, True), (22 * US, False), (18e-6, False)])
def test_graph_is_held_against_the_profiler_from_10_us_on(gpu, theirs, holds, monkeypatch):
    """Both while it watches: what that costs is told beside it, and not judged."""
    monkeypatch.setattr(witness, "chain_seconds", lambda timed: (timed, theirs, 16 * US))
    where = {"timer": "graph", "state": "produced", "case": "c", "copy": "x"}
    judged, cost = witness.witnessed(20 * US, 18 * US, {}, where)
    assert judged["holds"] is holds and judged["detail"] == "durations alone 16.00 us, +25.0%"
    assert (cost["claim"], cost["holds"], cost["difference"]) == ("watching", None, pytest.approx(2 / 18))
    short, _ = witness.witnessed(9 * US, 9 * US, {}, where)
    assert short["holds"] is None


@pytest.mark.parametrize(("seconds", "holds"), [(21 * US, True), (21.9 * US, True), (22.1e-6, False), (19.9e-6, False)])
def test_call_is_held_against_the_profiler_less_what_it_adds_to_an_empty_kernel(gpu, seconds, holds, monkeypatch):
    theirs = {"limit.launch": (1.8 * US, 0.8 * US), "x": (seconds, 20 * US)}
    where = {"timer": "call", "state": "cold", "case": "c", "copy": "x"}
    monkeypatch.setattr(witness, "call_seconds", lambda timed: theirs[timed])
    known = {}
    empty, _ = witness.witnessed("limit.launch", 1.7 * US, known, where | {"copy": "limit.launch"})
    assert empty["holds"] is None and empty["ours"] == pytest.approx(0.8 * US)
    judged, _ = witness.witnessed("x", 19 * US, known, where)
    assert judged["holds"] is holds and judged["ours"] == pytest.approx(seconds - 1 * US)
    assert judged["detail"].startswith("1.00 us added; with them ")
    unknown, _ = witness.witnessed("x", seconds, {}, where)
    assert unknown["holds"] is None


def test_a_wait_per_call_costs_a_launch_and_the_wait(gpu):
    from test_timing import COLD, COST, HOST

    with gpu:
        call = timed(gpu, "call").calls[0]
        gpu.flush()
        gpu.synchronize()
        seconds = witness.waited(gpu, call)
    kernel = COST["aten::index_copy_"] / 1e9
    assert 2 * kernel + HOST / 1e9 <= seconds < 2 * kernel + 3 * HOST / 1e9 < COLD / 1e9


class CudaError(Exception):
    """cuda-core's own is no RuntimeError either."""


@pytest.fixture
def few(gpu, monkeypatch):
    """`live` on two cases and two copies; `chain_seconds` raises what `gpu.errors` yields, if anything."""
    monkeypatch.setattr(witness, "CASES", (CASE, replace(CASE, num_tokens=2)))
    monkeypatch.setattr(witness, "COPIES", ("torch.index_copy", "torch.index_put"))
    monkeypatch.setattr(witness, "UNDER_NVBENCH", ("torch.index_put",))
    monkeypatch.setattr(witness.machine, "package_version", lambda name: "")
    gpu.errors = iter(())

    def chain_seconds(made):
        assert not torch.is_grad_enabled()
        if error := next(gpu.errors, None):
            gpu.lost = error == "lost"
            raise error if isinstance(error, Exception) else RuntimeError(error)
        return 11 * US, 10 * US, 9 * US

    monkeypatch.setattr(witness, "chain_seconds", chain_seconds)
    with gpu:
        yield gpu


def test_live_is_a_table_of_every_claim_that_needs_a_gpu(few, monkeypatch):
    done = []  # the profiler must be there before a graph is captured
    for name in ("device_events", "Stage"):
        act = getattr(witness, name)
        monkeypatch.setattr(witness, name, lambda *them, name=name, act=act: done.append(name) or act(*them))
    few.errors = iter([CudaError("no such kernel\nmore"), ImportError("no cuda.core")])
    rows = witness.live(torch.device("cpu"))
    told = rows.loc[rows["detail"].str.startswith("failed"), "detail"].tolist()
    assert told == ["failed: CudaError: no such kernel", "failed: ImportError: no cuda.core"]
    assert {*rows["claim"]} == {"profiler", "watching", "a wait per call", "nvbench"}
    assert rows["case"].nunique() == 3  # nvbench's row has none
    assert "not installed" in rows["detail"].iloc[-1]
    assert few.settled == 2 and done[:2] == ["device_events", "Stage"]


def test_a_case_that_cannot_be_staged_is_a_row(few, monkeypatch):
    staged = witness.Stage

    def stage(bench, case, plans):
        if case == CASE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return staged(bench, case, plans)

    monkeypatch.setattr(witness, "Stage", stage)
    first, *others = witness.live(torch.device("cpu")).to_dict("records")
    assert (first["case"], first["detail"]) == (str(CASE), "failed: OutOfMemoryError: CUDA out of memory")
    assert not any("failed" in at["detail"] for at in others)


def test_a_lost_gpu_ends_the_table_and_the_record_goes_on_with_the_next_case(few, tmp_path):
    path = tmp_path / "2026-12-01_timers_0123abc.parquet"
    few.errors = iter([None, "lost"])
    with pytest.raises(counters.CutOff, match=r"timers_0123abc.parquet.partial holds what there is"):
        witness.record(path, "cpu")
    rows = pd.read_parquet(f"{path}.partial")
    assert {*rows["case"]} == {str(CASE)} and {*rows["copy"]} == {"torch.index_copy", "torch.index_put"}
    assert rows["detail"].iloc[-1].startswith("failed: RuntimeError: lost; the GPU no longer answers")
    few.lost, few.errors = False, iter(())
    assert witness.record(path, "cpu") == path
    whole = pd.read_parquet(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert whole.iloc[: len(rows)]["detail"].tolist() == rows["detail"].tolist()
    assert not whole.iloc[len(rows) :]["detail"].str.startswith("failed").any()
    assert {*whole["case"]} == {*map(str, witness.CASES), ""}  # the last: nvbench is not installed


def test_a_killed_record_keeps_its_cases_and_nvbench_comes_last(few, monkeypatch, tmp_path):
    path, died, run = tmp_path / "timers.parquet", iter([True]), []

    def nvbench(rows, device):
        if next(died, False):
            raise KeyboardInterrupt
        run.append([(at["case"], at["copy"], at["ours"] > 0) for at in rows])
        return [row("nvbench", at["ours"], 1.0, case=at["case"], copy=at["copy"]) for at in rows]

    monkeypatch.setattr(witness, "nvbench", nvbench)
    with pytest.raises(KeyboardInterrupt):
        witness.record(path, "cpu")
    settled = few.settled
    witness.record(path, "cpu")
    assert few.settled == settled  # no case is measured again
    assert run == [[(str(case), "torch.index_put", True) for case in witness.CASES]]
    rows = pd.read_parquet(path)
    assert rows.loc[rows["claim"] == "nvbench", "witness"].tolist() == [1.0, 1.0]


def test_of_the_releases_the_newest_is_witnessed_as_op_and_as_cubin(few, monkeypatch):
    shipped = [f"vllm=={version}" for version in ("0.33.0", "0.4.2", "0.33.0.cubin", "0.25.0")]
    for name in shipped:
        monkeypatch.setitem(witness.REGISTRY, name, replace(witness.REGISTRY["torch.index_copy"], name=name))
    rows = witness.live(torch.device("cpu"))
    assert {*rows["copy"]} & {*shipped} == {"vllm==0.33.0", "vllm==0.33.0.cubin"}


def test_nvbench_has_a_process_of_its_own_and_its_failure_is_a_row(monkeypatch):
    cases = witness.CASES[:3]
    cold = [row("nvbench", (4 + n) * US, timer="call", state="cold", case=str(case), copy=copy)
            for n, (case, copy) in enumerate(zip(cases, ("kvnb", "triton", "limit.copy")))]  # fmt: skip
    monkeypatch.setattr(witness.machine, "package_version", lambda name: "0.3.0")
    done, asked = SimpleNamespace(returncode=1, stdout="", stderr="ImportError: no libcuda"), []
    monkeypatch.setattr(counters, "run", lambda command, seconds: asked.append(command) or done)
    [failed] = witness.nvbench(cold, torch.device("cpu"))
    assert failed["detail"] == "failed: ImportError: no libcuda"
    assert json.loads(asked[0][-1])[1] == ["triton", cases[1].fields()] and asked[0][3] == "serve"
    done.returncode = 0
    read = SimpleNamespace(centers=lambda estimator: {"0": {"Device=0": 5 * US}, "1": {"Device=0": None}})
    for name in ("cuda", "cuda.bench", "cuda.bench.results"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["cuda.bench.results"].BenchmarkResult = SimpleNamespace(from_json=lambda path: read)
    rows = witness.nvbench(cold, torch.device("cpu"))
    assert [(at["copy"], at["ours"]) for at in rows] == [("kvnb", 4 * US), ("triton", 5 * US), ("limit.copy", 6 * US)]
    assert rows[0]["witness"] == 5 * US and rows[0]["difference"] == pytest.approx(-0.2)
    assert rows[1]["witness"] != rows[1]["witness"] and rows[2]["witness"] != rows[2]["witness"]  # skipped; missing

    def late(command, seconds):
        raise subprocess.TimeoutExpired("nvbench", seconds)

    monkeypatch.setattr(counters, "run", late)
    [failed] = witness.nvbench(cold, torch.device("cpu"))
    assert failed["detail"].startswith("failed: TimeoutExpired") and "300" in failed["detail"]


def test_under_nvbench_every_call_is_warmed_up_and_runs_on_its_stream(gpu, monkeypatch):
    registered, streams, ran = [], [], {}

    class Benchmark(SimpleNamespace):
        def set_name(self, name):
            self.name = name

    def execute(launch, batched):
        assert not torch.is_grad_enabled()
        begun = len(gpu.log)
        for _ in range(3):
            launch(None)
        ran[len(ran)] = (batched, len([what for what, _ in gpu.log[begun:] if what == "index_copy_"]))

    def run_all(argv):
        assert argv[1:] == ["--jsonbin", "out.json", "--devices", "0", "--timeout", "1", "--quiet"]
        for benchmark in registered:
            benchmark.fn(SimpleNamespace(get_stream=lambda: SimpleNamespace(addressof=lambda: 7), exec=execute))

    fake = ModuleType("cuda")
    fake.bench = SimpleNamespace(register=lambda fn: registered.append(Benchmark(fn=fn)) or registered[-1],
                                 run_all_benchmarks=run_all)  # fmt: skip
    monkeypatch.setitem(sys.modules, "cuda", fake)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: address)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: streams.append(stream) or nullcontext())
    with gpu:
        witness._serve("out.json", "0", json.dumps([("torch.index_copy", CASE.fields())] * 2))
    assert [benchmark.name for benchmark in registered] == ["0", "1"]
    assert ran == {0: (False, 6), 1: (False, 6)}  # K and V
    assert streams == [7] * 8  # the warm-up, then three, twice


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_on_a_gpu_a_graph_and_a_call_lie_near_the_profiler(monkeypatch):
    monkeypatch.setattr(witness, "CASES", (Case(16384),))
    monkeypatch.setattr(witness, "COPIES", ("limit.event", "limit.launch", "kvnb"))
    rows = witness.live(torch.device("cuda"))
    assert not rows["detail"].str.startswith("failed").any(), rows["detail"].tolist()
    assert {"profiler", "watching", "a wait per call", "empty event pair"} <= {*rows["claim"]}
