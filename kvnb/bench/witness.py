"""Can the timers be believed? Claims about them, each held against a witness: rows of one table.

`from_run` takes what a run file shows and `from_counters` what ncu counted, without a GPU. `live` measures the rest on
a GPU in a few minutes; `record` saves that with its provenance, so that it can be shown anywhere:

    python -m kvnb.bench.witness record
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from math import isnan, nan
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from kvnb import machine
from kvnb.bench import counters, stats, timing
from kvnb.bench.timing import Bench, Cell, EagerTimed, GraphTimed, Plan, Stage
from kvnb.copies import REGISTRY, releases
from kvnb.problem.case import CASE_FIELDS, Case

COLUMNS = "claim timer state case copy ours witness unit difference sense bound holds detail".split()
SENSES = {"within": lambda d, bound: abs(d) <= bound, "at most": float.__le__, "at least": float.__ge__}
WITHIN, FROM = 0.05, 10e-6  # share of the profiler's time; judged from this duration (s) on
ALIKE, OF_CELLS = 0.02, 0.95  # two processes' medians: how near, in which share of cells
LEFT = 0.10  # share of a call's bytes that DRAM may see where a state says none, or miss where it says all
VISITS, WATCHED = 10, 3  # WATCHED: of a chain by the profiler, each of thousands of kernels
LOOP, LOOP_WARM_UPS = 100, 3  # LOOP: as vLLM's benchmark_reshape_and_cache_flash.py has it
PROBE = "clock_probe_kernel"  # runs right before each call of timer `call`
STATES_BY_SPEED = (("resident", "DRAM", "at least", 0.0), ("produced", "DRAM", "at least", 0.0),
                   ("produced", "resident", "at most", 0.0), ("cold", "DRAM", "at most", WITHIN))  # fmt: skip
LAUNCH = "limit.launch"  # an empty kernel: what a call adds to it, it adds to every kernel
CASES = (*map(Case, (1, 256, 4096, 16384, 65536)), Case(16384, layout="packed"))  # 8 x 128 bf16
COPIES = ("limit.event", LAUNCH, "kvnb", "vllm.scalar", "torch.index_put", "torch.index_copy_wide", "limit.copy")
UNDER_NVBENCH, NVBENCH_SECONDS = ("kvnb", "vllm.scalar", "torch.index_copy_wide", "limit.copy"), 300  # and releases
TIMINGS = (("graph", "produced"), ("call", "produced"), ("call", "cold"))


def row(claim: str, ours: float = nan, witness: float = nan, sense: str = "", bound: float = nan, *,
        difference: float | None = None, unit: str = "s", **where: str) -> dict:  # fmt: skip
    """A row of COLUMNS; `difference` is ours / witness - 1 unless it is given, and judged where there is a `sense`."""
    difference = float(ours / witness - 1 if difference is None else difference)
    holds = SENSES[sense](difference, float(bound)) if sense and not isnan(difference) else None
    made = {"claim": claim, "ours": ours, "witness": witness, "unit": unit, "difference": difference, "sense": sense}
    return dict.fromkeys(COLUMNS, "") | made | {"bound": bound, "holds": holds} | where


def table(rows: list[dict]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).astype({"holds": "boolean"})


# -- what a file shows


def from_run(samples: pd.DataFrame) -> pd.DataFrame:
    """Noise floors, event pairs, processes against each other, write-back and states, as far as the run holds them."""
    cells = stats.cells(samples).query("status == 'ok' and part == 'write'")
    cells = cells.assign(case=[str(Case(**case)) for case in cells[list(CASE_FIELDS)].to_dict("records")])
    pairs = cells[cells["copy"] == "limit.event"].groupby("state")["seconds"].median()
    rows = [row("noise floor", at.floor, nan, "at most", stats.WIDEST_SAME, difference=at.floor, unit="share",
                timer=at.timer, state=at.state) for at in stats.noise_floor(samples).itertuples()]  # fmt: skip
    rows += [row("empty event pair", pair, timer="call", state=state) for state, pair in pairs.items()]
    return table([*rows, *processes(samples), *states(cells, samples["l2_bytes"].iloc[0], pairs)])


def processes(samples: pd.DataFrame) -> Iterator[dict]:
    """Per timer and state, the share of cells in which two workers' medians agree, over all pairs of workers.

    Judged for `graph` alone: host timers depend on the process, and `call` on where its buffers lie.
    """
    ok = samples[samples["status"] == "ok"]
    for (timer, state), some in ok.groupby(["timer", "state"]):
        cells = some.groupby(["copy", "policy", "part", *CASE_FIELDS, "worker"])["seconds"].median().unstack("worker")
        if off := [(cells[a] / cells[b] - 1).abs().dropna() for a, b in itertools.combinations(cells, 2)]:
            off, share = pd.concat(off), float((pd.concat(off) <= ALIKE).mean())
            longer = (off[off.index.isin(cells.index[cells.min(axis=1) >= FROM])] <= ALIKE).mean()
            detail = f"{len(cells)} cells, half within {off.median():.1%}; from 10 us on {longer:.1%} of cells"
            bound = ("at least", OF_CELLS) if timer == "graph" else ()
            yield row("two processes", share, nan, *bound, difference=share, unit="share", timer=timer, state=state,
                      detail=detail)  # fmt: skip


def states(cells: pd.DataFrame, l2_bytes: int, pairs: pd.Series) -> Iterator[dict]:
    """States by limit.copy's speed in a chain, at the two largest sizes that all states have: against DRAM, bytes over
    time from one to the next, which a launch's cost is not in; against each other, at the larger, where both hold it.

    DRAM's speed is that of the largest copies, which no cache holds. And what write-back costs: a chain, cold, pays for
    it; a flushed call (less an event pair) leaves it to what follows, but holds a launch: it costs their difference, or
    more.
    """
    chain = cells[cells["timer"] == "graph"]
    limits = chain[chain["copy"].str.startswith("limit.copy")]
    dram = 1e9 * limits.loc[limits["bytes_moved"] > 2 * l2_bytes, "gbps"].max()
    problem = [name for name in CASE_FIELDS if name not in ("num_tokens", "cache_bytes")]
    usual = limits[limits["copy"] == "limit.copy"].sort_values("cache_bytes")  # the usual cache is the smallest
    usual = usual.drop_duplicates([*problem, "num_tokens", "state"])
    for _, line in usual.groupby(problem):
        at = line.pivot_table(index=["num_tokens", "bytes_moved", "case"], columns="state", values="seconds")
        at = at.reindex(columns=list(timing.STATES)).dropna().reset_index().tail(2)
        if len(at) < 2:
            continue
        less, more = at.to_dict("records")
        moved = more["bytes_moved"] - less["bytes_moved"]
        for state, other, sense, bound in STATES_BY_SPEED:
            if other == "DRAM":
                case, rise = f"{less['num_tokens']} to {more['case']}", more[state] - less[state]
                ours, against = moved / rise if rise > 0 else nan, dram
            else:
                case, ours, against = more["case"], *(more["bytes_moved"] / more[name] for name in (state, other))
            yield row("states by speed", ours, against, sense, bound, unit="B/s", timer="graph", copy="limit.copy",
                      case=case, state=state, detail=f"against {other}")  # fmt: skip
    cold = cells[(cells["state"] == "cold") & cells["copy"].isin(["kvnb", "limit.copy"])]
    times = cold.pivot_table(index=["case", "copy"], columns="timer", values="seconds")
    for (case, copy), at in times.reindex(columns=["graph", "call"]).query("graph >= @FROM").dropna().iterrows():
        call = at["call"] - pairs.get("cold", nan)
        least = at["graph"] - call
        detail = f"at least {least * 1e6:.2f} us, in which DRAM moves {least * dram / 1e6:.0f} MB"
        yield row("write-back", at["graph"], call, timer="graph", state="cold", case=case, copy=copy, detail=detail)


def from_counters(counted: pd.DataFrame) -> pd.DataFrame:
    """States by the DRAM bytes of a call in a chain, as a share of what it reads and of what it writes."""
    rows = []
    for at in counted[(counted["timer"] == "graph") & counted["dram_read"].notna()].to_dict("records"):
        for way, seen in (("read", at["state"] == "cold"), ("written", at["state"] != "resident")):
            ours, whole = at[f"dram_{way}"] / at["calls"], at["bytes_moved"] / 2
            bound = ("at least", 1 - LEFT) if seen else ("at most", LEFT)
            where = {name: at[name] for name in ("timer", "state", "case", "copy")}
            passes = "unknown" if isnan(at["passes"]) else f"{at['passes']:.0f}"
            detail = way if at["passes"] == 1 else f"{way}; passes: {passes}, and only the first found this state"
            rows.append(row("states by DRAM bytes", ours, whole, *bound, difference=ours / whole, unit="B",
                            detail=detail, **where))  # fmt: skip
    return table(rows)


# -- what needs a GPU


@torch.no_grad()  # as in timing.measure_case
def live(device: torch.device, path: Path | None = None) -> pd.DataFrame:
    """Timers against the profiler, a wait per call, and nvbench, on this GPU; kept at `path` after every case.

    What fails becomes a row that says so. Where the GPU no longer answers, the table ends.
    """
    kept = counters.Record(COLUMNS, device, path)
    todo = [case for case in CASES if not kept.holds(case=str(case))]
    bench, names = timing.Gpu(device) if todo else None, counters.released()
    newest = [name for name in names if releases.numbers(name[6:]) == releases.numbers(names[-1][6:])]  # op and cubin
    for case in tqdm(todo, desc="timers", disable=path is None):
        kept.add(list(of_case(bench, case, [REGISTRY[name] for name in (*COPIES, *newest)])))
        if not responds(bench):
            return kept.table()
    waiting = [at for at in kept.rows if at["claim"] == "nvbench" and at["copy"]]
    kept.rows = [at for at in kept.rows if at["claim"] != "nvbench"]
    kept.add(nvbench(waiting, device))
    if path:
        kept.finish()
    return kept.table()


def of_case(bench: Bench, case: Case, copies: list) -> Iterator[dict]:
    """Rows of every cell of a case. They end early, saying so, where the GPU no longer answers."""
    known: dict[tuple[str, str, str], float] = {}  # copy, timer, state: seconds
    try:
        cells, stage = cells_of(bench, case, copies)
    except Exception as error:  # noqa: BLE001  it costs this case, not the record
        yield failed(bench, error, case=str(case))
        return
    for cell, plan in cells.items():
        where = {"timer": cell.timer, "state": cell.state, "case": str(case), "copy": cell.copy.name}
        try:
            timed = (GraphTimed if cell.timer == "graph" else EagerTimed)(stage, cell, plan)
            seconds = statistics.median(seconds for _ in range(VISITS) for seconds, _ in timed.visit())
            known[cell.copy.name, cell.timer, cell.state] = seconds
            yield from witnessed(timed, seconds, known, where)
            shown = cell.copy.name in UNDER_NVBENCH or cell.copy.name.startswith("vllm==")
            if shown and (cell.timer, cell.state) == ("call", "cold"):
                yield row("nvbench", seconds, **where)  # its witness comes last: `nvbench`
        except Exception as error:  # noqa: BLE001  whatever a copy, or the profiler, raises costs its own cell
            yield failed(bench, error, **where)
            if not responds(bench):
                return


def failed(bench: Bench, error: Exception, **where: str) -> dict:
    said = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    lost = "" if responds(bench) else "; the GPU no longer answers, so what follows was not measured"
    return row("profiler", detail=said + lost, **where)


def responds(bench: Bench) -> bool:
    try:
        bench.synchronize()
    except RuntimeError:
        return False
    return True


def cells_of(bench: Bench, case: Case, copies: list) -> tuple[dict[Cell, Plan], Stage]:
    """The cells that can be timed here, with their plans, and their stage; the clock is at rest."""
    device_events(lambda: None)  # only of graphs captured after its first use does the profiler know the nodes
    cells = [Cell(copy, copy.policies[0], "write", *at) for copy in copies for at in TIMINGS]
    cells = [at for at in cells if not at.copy.reason_against(case, at.policy, at.timer, bench.device.type)]
    plans = {at: timing.plan(case, at.timer, at.state, bench.cache_bytes, timing.bytes_moved(at, case)) for at in cells}
    plans = {cell: plan for cell, plan in plans.items() if isinstance(plan, Plan)}
    stage = Stage(bench, case, list(plans.values()))
    bench.settle()
    return plans, stage


def witnessed(timed: timing.Timed, seconds: float, known: dict, where: dict) -> Iterator[dict]:
    """Rows of a cell just measured. Short ones are shown and not judged: the gap between launches is as long.

    Some kernels run longer while the profiler watches (vLLM's on an H200: up to 7 %; why is not known), so both clocks
    are read then, and what watching costs is a row of its own. `call` is less what it adds to an empty kernel: its time
    of LAUNCH, less the profiler's.
    """
    if where["copy"] == "limit.event":
        yield row("empty event pair", seconds, **where)
        return
    if graph := where["timer"] == "graph":
        watched, theirs, nodes = chain_seconds(timed)
        added, detail = 0.0, f"durations alone {nodes * 1e6:.2f} us, {watched / nodes - 1:+.1%}"
    else:
        watched, theirs = call_seconds(timed)
        if where["copy"] == LAUNCH:
            known["added", "call", where["state"]] = watched - theirs
        added = known.get(("added", "call", where["state"]), nan)
        detail = f"{added * 1e6:.2f} us added; with them {watched / theirs - 1:+.1%}"
    alone = watched - added
    yield row("profiler", alone, theirs, "within" if alone >= FROM else "", WITHIN, detail=detail, **where)
    yield row("watching", watched, seconds, **where)
    chain = known.get((where["copy"], "graph", where["state"]))
    if not graph and chain is not None:
        one = timed.bench.capture([timed.calls[0]])
        for act, detail in ((timed.calls[0], "called from Python"), (one.replay, "as a graph of one call")):
            yield row("a wait per call", chain, waited(timed.bench, act), **where | {"timer": "graph"}, detail=detail)


def device_events(act: Callable[[], object]) -> list[tuple[str, float, float]]:
    """(name, begin, end; in s) of what ran on the GPU during `act`, by torch.profiler (Kineto), in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        act()
        torch.cuda.synchronize()
    ran = [e for e in profiler.events() if e.device_type.name == "CUDA" and not e.name.endswith(" Sync")]
    return sorted(((e.name, e.time_range.start / 1e6, e.time_range.end / 1e6) for e in ran), key=lambda e: e[1])


def chain_seconds(timed: GraphTimed) -> tuple[float, float, float]:
    """Per call of the very graph that is timed, while the profiler watches: `graph`; then as the profiler has it, from
    the first begin to the last end, and the nodes' durations alone.

    Raises RuntimeError where nodes are missing.
    """
    watched: list[float] = []
    device_events(lambda: watched.extend(seconds for _ in range(WATCHED) for seconds, _ in timed.visit()))
    for _ in range(2):  # as in a visit, the first replay is thrown away
        timed.refill()
        timed.bench.synchronize()
        events = device_events(timed.shorter.replay)
    if len(events) != timed.shorter.nodes:
        raise RuntimeError(f"the profiler saw {len(events)} of {timed.shorter.nodes} nodes")
    span = max(end for *_, end in events) - events[0][1]
    alone = sum(end - begin for _, begin, end in events)
    return statistics.median(watched), span / timed.plan.calls, alone / timed.plan.calls


def call_seconds(timed: EagerTimed) -> tuple[float, float]:
    """The median of flushed calls while the profiler watches: `call`; then as the profiler has it, from the begin of a
    call's first kernel to the end of its last."""
    launches = timed.bench.capture([timed.calls[0]]).nodes
    watched: list[float] = []
    events = device_events(lambda: watched.extend(seconds for _ in range(VISITS) for seconds, _ in timed.visit()))
    calls = [events[i + 1 : i + 1 + launches] for i, (name, *_) in enumerate(events) if PROBE in name]
    if not calls or any(len(call) < launches for call in calls):
        raise RuntimeError(f"the profiler saw {len(calls)} clock probes, and not {launches} launches after each")
    return statistics.median(watched), statistics.median(call[-1][2] - call[0][1] for call in calls)


def waited(bench: Bench, act: Callable[[], object]) -> float:
    """The mean of LOOP calls, each waited for: launching and waking up included."""
    for _ in range(LOOP_WARM_UPS):
        act()
    bench.synchronize()
    begin = bench.now()
    for _ in range(LOOP):
        act()
        bench.synchronize()
    return (bench.now() - begin) / LOOP


def nvbench(rows: list[dict], device: torch.device) -> list[dict]:
    """`rows` (calls, cold) with nvbench's times, from a process of its own as it runs once in one; or why not."""
    if not machine.package_version("cuda-bench"):
        return [row("nvbench", detail="not measured: cuda-bench is not installed (pip install cuda-bench)")]
    cases = {str(case): case.fields() for case in CASES}
    calls = json.dumps([(at["copy"], cases[at["case"]]) for at in rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nvbench.json"
        child = [sys.executable, "-m", "kvnb.bench.witness", "serve", str(path), str(device.index or 0), calls]
        try:
            done = counters.run(child, NVBENCH_SECONDS)
            if done.returncode:
                return [row("nvbench", detail=f"failed: {' '.join((done.stdout + done.stderr).split())[-200:]}")]
            from cuda.bench.results import BenchmarkResult

            medians = BenchmarkResult.from_json(path).centers(statistics.median)  # benchmark: state: s, or None
        except Exception as error:  # noqa: BLE001  TimeoutExpired, or a file of another form, costs this claim only
            return [row("nvbench", detail=f"failed: {type(error).__name__}: {str(error)[:200]}")]
    theirs = [next(iter(medians.get(str(number), {}).values()), None) or nan for number in range(len(rows))]
    where = [{name: at[name] for name in ("timer", "state", "case", "copy")} for at in rows]
    return [row("nvbench", at["ours"], its, **place) for at, its, place in zip(rows, theirs, where)]


def _serve(path: str, index: str, calls: str) -> None:
    """The child of `nvbench`."""
    from cuda import bench

    gpu = timing.Gpu(torch.device("cuda", int(index)))
    for number, (name, fields) in enumerate(json.loads(calls)):
        bench.register(partial(_under_nvbench, gpu, REGISTRY[name], Case(**fields))).set_name(str(number))
    bench.run_all_benchmarks(["kvnb", "--jsonbin", path, "--devices", index, "--timeout", "1", "--quiet"])


@torch.no_grad()
def _under_nvbench(gpu: timing.Gpu, copy, case: Case, state) -> None:
    plan = timing.plan(case, "call", "cold", gpu.cache_bytes)
    timed = EagerTimed(Stage(gpu, case, [plan]), Cell(copy, copy.policies[0], "write", "call", "cold"), plan)
    calls = itertools.cycle(timed.calls)
    stream = torch.cuda.ExternalStream(state.get_stream().addressof(), device=gpu.device)

    def launch(_) -> None:
        with torch.cuda.stream(stream):
            next(calls)()

    launch(None)  # whatever a first call on this stream sets up must not wait for nvbench's blocking kernel
    gpu.synchronize()
    state.exec(launch, batched=False)


# -- kept


def record(path: str | Path | None = None, device: str = "auto") -> Path:
    """`live` into `path`, None: counters.recorded_path; a record that was cut off is gone on with. Returns the path.

    Raises ValueError where the device is not there, or a partial record is of another machine, and counters.CutOff
    where the GPU stopped answering: what there is stays, and the next call measures the cases that follow.
    """
    return counters.recorded("timers", live, path, device)


if __name__ == "__main__":
    counters.main(record, _serve)
