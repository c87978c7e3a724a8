"""Can the timers be believed? Claims about them, each held against a witness: rows of one table.

`from_run` takes what a run file shows and `from_counters` what ncu counted, without a GPU. `live` measures the rest on
a GPU in a few minutes; `record` saves that with its provenance, so that it can be shown anywhere.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from math import isnan, nan
from pathlib import Path

import pandas as pd
import torch

from kvnb import machine, paths
from kvnb.bench import counters, stats, timing
from kvnb.bench.timing import Bench, Cell, EagerTimed, GraphTimed, Plan, Stage
from kvnb.copies import REGISTRY
from kvnb.problem.case import CASE_FIELDS, Case

COLUMNS = "claim timer state case copy ours witness unit difference sense bound holds detail".split()
SENSES = {"within": lambda d, bound: abs(d) <= bound, "at most": float.__le__, "at least": float.__ge__}
WITHIN, FROM = 0.05, 10e-6  # share of the profiler's time; judged from this duration (s) on
ALIKE, OF_CELLS = 0.02, 0.95  # two processes' medians: how near, in which share of cells
LEFT = 0.10  # share of a call's bytes that DRAM may see where a state says none, or miss where it says all
VISITS, LOOP, LOOP_WARM_UPS = 10, 100, 3  # LOOP: as vLLM's benchmark_reshape_and_cache_flash.py has it
PROBE = "clock_probe_kernel"  # runs right before each call of timer `call`
STATES_BY_SPEED = (("resident", "DRAM", "at least", 0.0), ("produced", "DRAM", "at least", 0.0),
                   ("produced", "resident", "at most", 0.0), ("cold", "DRAM", "at most", WITHIN))  # fmt: skip
CLAIMS = {
    "noise floor": f"a copy against itself, under another name, differs by at most {stats.WIDEST_SAME:.0%}",
    "two processes": f"their medians lie within {ALIKE:.0%} of each other in {OF_CELLS:.0%} of cells",
    "profiler": f"from 10 us on, `graph`, and `call` less an event pair, are within {WITHIN:.0%} of the profiler",
    "states by speed": "in a chain, `resident` and `produced` outrun DRAM, `produced` not `resident`, `cold` not DRAM",
    "states by DRAM bytes": f"in a chain, DRAM sees a call's bytes where its state says so, else at most {LEFT:.0%}",
    "empty event pair": "what two events with nothing between them cost",
    "write-back": "what a chain pays for writing lines back, and a flushed call leaves to what follows",
    "a wait per call": "`graph` against a loop that waits for the GPU after every call",
    "nvbench": "`call` cold against nvbench's cold measurement, which flushes by writing",
}
FEW, PAIR = "few sets: partly in L2", "with the event pair"
INCLUDES = pd.DataFrame(
    [
        ("graph", "no", "between nodes", "of all but the last calls", "sets rotate", "a replay / K, or a slope"),
        ("call", "no: full queue", PAIR, "left to what follows", "a flush by reading", "one call"),
        ("host", "yes", "not waited for", "no", FEW, f"{timing.BATCH_CALLS} calls / {timing.BATCH_CALLS}"),
        ("eager", "yes", "where the host is slower", "yes", FEW, "N calls and one wait, / N"),
        ("wall", "yes (CPU)", "none", "yes", FEW, "N calls / N"),
        ("profiler", "no", "no", "as the timer's", "as the timer's", "begin to end of kernels"),
        ("a wait per call", "yes, and waking up", "yes", "yes", "one set: in L2", f"mean of {LOOP} calls"),
        ("nvbench, cold", "no: full queue", PAIR, "some of the flush's", "a flush by writing", "one call"),
    ],
    columns=["timer", "host dispatch", "launch gap", "write-back", "cache state by", "a sample is"],
)

CASES = (*map(Case, (1, 256, 4096, 16384, 65536)), Case(16384, layout="packed"))  # 8 x 128 bf16
COPIES = ("limit.event", "kvnb", "vllm.scalar", "torch.index_put", "torch.index_copy_wide", "limit.copy")  # and vllm==X
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
    """Per timer and state, the share of cells in which two workers' medians agree, over all pairs of workers."""
    ok = samples[samples["status"] == "ok"]
    for (timer, state), some in ok.groupby(["timer", "state"]):
        cells = some.groupby(["copy", "policy", "part", *CASE_FIELDS, "worker"])["seconds"].median().unstack("worker")
        if off := [(cells[a] / cells[b] - 1).abs().dropna() for a, b in itertools.combinations(cells, 2)]:
            off, share = pd.concat(off), float((pd.concat(off) <= ALIKE).mean())
            longer = (off[off.index.isin(cells.index[cells.min(axis=1) >= FROM])] <= ALIKE).mean()
            detail = f"{len(cells)} cells, half within {off.median():.1%}; from 10 us on {longer:.1%} of cells"
            yield row("two processes", share, nan, "at least", OF_CELLS, difference=share, unit="share", timer=timer,
                      state=state, detail=detail)  # fmt: skip


def states(cells: pd.DataFrame, l2_bytes: int, pairs: pd.Series) -> Iterator[dict]:
    """States by limit.copy's speed in a chain: bytes / time from one size to the next, which a launch's cost is not in.

    DRAM's speed is that of the largest copies, which no cache holds. And what write-back costs: a chain, cold, pays for
    it; a flushed call (less an event pair) leaves it to what follows.
    """
    chain = cells[cells["timer"] == "graph"]
    limits = chain[chain["copy"].str.startswith("limit.copy")]
    dram = 1e9 * limits.loc[limits["bytes_moved"] > 2 * l2_bytes, "gbps"].max()
    small = limits[(limits["copy"] == "limit.copy") & (limits["bytes_moved"] <= 2 * l2_bytes / timing.RESIDENT_SHARE)]
    for _, line in small.groupby([name for name in CASE_FIELDS if name not in ("num_tokens", "cache_bytes")]):
        ends = {state: at.sort_values("num_tokens").tail(2) for state, at in line.groupby("state") if len(at) > 1}
        rise = {state: at[["bytes_moved", "seconds"]].diff().iloc[1] for state, at in ends.items()}
        speed = {state: at["bytes_moved"] / at["seconds"] if at["seconds"] > 0 else nan for state, at in rise.items()}
        for state, other, sense, bound in STATES_BY_SPEED if len(speed) == len(timing.STATES) else ():
            where = {"case": f"{ends[state]['num_tokens'].iloc[0]} to {ends[state]['case'].iloc[1]}", "state": state}
            yield row("states by speed", speed[state], speed.get(other, dram), sense, bound, unit="B/s", timer="graph",
                      copy="limit.copy", detail=f"against {other}", **where)  # fmt: skip
    cold = cells[(cells["state"] == "cold") & cells["copy"].isin(["kvnb", "limit.copy"])]
    times = cold.pivot_table(index=["case", "copy"], columns="timer", values="seconds")
    for (case, copy), at in times.reindex(columns=["graph", "call"]).query("graph >= @FROM").dropna().iterrows():
        call = at["call"] - pairs.get("cold", nan)
        detail = f"{(at['graph'] - call) * 1e6:.2f} us, in which DRAM moves {(at['graph'] - call) * dram / 1e6:.0f} MB"
        yield row("write-back", at["graph"], call, timer="graph", state="cold", case=case, copy=copy, detail=detail)


def from_counters(counted: pd.DataFrame) -> pd.DataFrame:
    """States by the DRAM bytes of a call in a chain, as a share of what it reads and of what it writes."""
    rows = []
    for at in counted[(counted["timer"] == "graph") & counted["dram_read"].notna()].to_dict("records"):
        for way, seen in (("read", at["state"] == "cold"), ("written", at["state"] != "resident")):
            ours, whole = at[f"dram_{way}"] / at["calls"], at["bytes_moved"] / 2
            bound = ("at least", 1 - LEFT) if seen else ("at most", LEFT)
            where = {name: at[name] for name in ("timer", "state", "case", "copy")}
            detail = way if at["passes"] == 1 else f"{way}, in {at['passes']} passes: only the first found this state"
            rows.append(row("states by DRAM bytes", ours, whole, *bound, difference=ours / whole, unit="B",
                            detail=detail, **where))  # fmt: skip
    return table(rows)


# -- what needs a GPU


def live(device: torch.device) -> pd.DataFrame:
    """Timers against the profiler, a wait per call, and nvbench, on this GPU. What fails becomes a row that says so."""
    device_events(lambda: None)  # only of graphs captured after its first use does the profiler know the nodes
    bench, rows, cold = timing.Gpu(device), [], {}
    copies = [REGISTRY[name] for name in (*COPIES, *(name for name in REGISTRY if name.startswith("vllm==")))]
    for case in CASES:
        cells, stage = cells_of(bench, case, copies)
        known: dict[tuple[str, str, str], float] = {}  # copy, timer, state: seconds
        for cell, plan in cells.items():
            where = {"timer": cell.timer, "state": cell.state, "case": str(case), "copy": cell.copy.name}
            try:
                timed = (GraphTimed if cell.timer == "graph" else EagerTimed)(stage, cell, plan)
                seconds = statistics.median(seconds for _ in range(VISITS) for seconds, _ in timed.visit())
                known[cell.copy.name, cell.timer, cell.state] = seconds
                rows += witnessed(timed, seconds, known, where)
            except (RuntimeError, AssertionError) as error:  # AssertionError: the copy is wrong
                rows.append(row("profiler", detail=f"failed: {str(error).partition(chr(10))[0]}", **where))
        cold |= {(case, copy): s for (copy, *at), s in known.items() if at == ["call", "cold"] and copy in COPIES[1:]}
    return table([*rows, *nvbench(cold, device)]).assign(**counters.provenance(device))


def cells_of(bench: Bench, case: Case, copies: list) -> tuple[dict[Cell, Plan], Stage]:
    """The cells that can be timed here, with their plans, and their stage; the clock is at rest."""
    cells = [Cell(copy, copy.policies[0], "write", *at) for copy in copies for at in TIMINGS]
    cells = [at for at in cells if not at.copy.reason_against(case, at.policy, at.timer, bench.device.type)]
    plans = {at: timing.plan(case, at.timer, at.state, bench.cache_bytes, timing.bytes_moved(at, case)) for at in cells}
    plans = {cell: plan for cell, plan in plans.items() if isinstance(plan, Plan)}
    stage = Stage(bench, case, list(plans.values()))
    bench.settle()
    return plans, stage


def witnessed(timed: timing.Timed, seconds: float, known: dict, where: dict) -> Iterator[dict]:
    """Rows of a cell just measured. Short calls are shown and not judged: the gap between launches is as long."""
    if where["copy"] == "limit.event":
        yield row("empty event pair", seconds, **where)
        return
    graph, theirs = where["timer"] == "graph", (chain_seconds if where["timer"] == "graph" else call_seconds)(timed)
    pair = 0.0 if graph else known.get(("limit.event", "call", where["state"]), nan)
    sense, detail = "within" if seconds >= FROM else "", "" if graph else f"with the pair {seconds / theirs - 1:+.1%}"
    yield row("profiler", seconds - pair, theirs, sense, WITHIN, detail=detail, **where)
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


def chain_seconds(timed: GraphTimed) -> float:
    """Durations of the nodes of the very graph that is timed, per call. Raises RuntimeError where some are missing."""
    for _ in range(2):  # as in a visit, the first replay is thrown away
        timed.refill()
        timed.bench.synchronize()
        events = device_events(timed.shorter.replay)
    if len(events) != timed.shorter.nodes:
        raise RuntimeError(f"the profiler saw {len(events)} of {timed.shorter.nodes} nodes")
    return sum(end - begin for _, begin, end in events) / timed.plan.calls


def call_seconds(timed: EagerTimed) -> float:
    """From the begin of a call's first kernel to the end of its last, the median of flushed calls."""
    launches = timed.bench.capture([timed.calls[0]]).nodes
    events = device_events(lambda: [list(timed.visit()) for _ in range(VISITS)])
    calls = [events[i + 1 : i + 1 + launches] for i, (name, *_) in enumerate(events) if PROBE in name]
    if not calls or any(len(call) < launches for call in calls):
        raise RuntimeError(f"the profiler saw {len(calls)} clock probes, and not {launches} launches after each")
    return statistics.median(call[-1][2] - call[0][1] for call in calls)


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


def nvbench(cold: dict[tuple[Case, str], float], device: torch.device) -> list[dict]:
    """`call` cold against nvbench's, in a process of its own as nvbench runs once in one; or why there is none."""
    if not machine.package_version("cuda-bench"):
        return [row("nvbench", detail="not measured: cuda-bench is not installed (pip install cuda-bench)")]
    with tempfile.TemporaryDirectory() as folder:
        path, calls = Path(folder) / "nvbench.json", [(copy, case.fields()) for case, copy in cold]
        child = [sys.executable, "-m", "kvnb.bench.witness", str(path), str(device.index or 0), json.dumps(calls)]
        done = subprocess.run(child, cwd=paths.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return [row("nvbench", detail=f"failed: {' '.join((done.stdout + done.stderr).split())[-200:]}")]
        from cuda.bench.results import BenchmarkResult

        medians = BenchmarkResult.from_json(path).centers(statistics.median)  # benchmark: state: s, or None
    theirs = [next(iter(medians[str(number)].values())) or nan for number in range(len(cold))]
    return [row("nvbench", ours, its, timer="call", state="cold", case=str(case), copy=copy)
            for ((case, copy), ours), its in zip(cold.items(), theirs)]  # fmt: skip


def _serve(path: str, index: str, calls: str) -> None:
    """The child of `nvbench`."""
    from cuda import bench

    gpu = timing.Gpu(torch.device("cuda", int(index)))
    for number, (name, fields) in enumerate(json.loads(calls)):
        bench.register(partial(_under_nvbench, gpu, REGISTRY[name], Case(**fields))).set_name(str(number))
    bench.run_all_benchmarks(["kvnb", "--jsonbin", path, "--devices", index, "--timeout", "1", "--quiet"])


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


# -- kept and shown


def record(path: str | Path, device: str = "auto") -> Path:
    """`live`, saved to `path` with its provenance: `data/recorded/<gpu>/<date>_timers_<sha7>.parquet`, for one."""
    return counters.save(live(machine.resolve_device(device)), path)


def seen(device: str, choice: str, gpu: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(`live`, counters.measure) of a device if `choice` is yes, or auto on a GPU; else what is recorded of `gpu`.

    Raises ValueError for yes without a GPU. A table that was never recorded is empty.
    """
    here = machine.resolve_device(device)
    if choice == "yes" and here.type != "cuda":
        raise ValueError(f"live = 'yes' needs a CUDA GPU, and device is {here}: 'no' shows the newest record")
    if choice != "no" and here.type == "cuda":
        return live(here), counters.measure(here)
    return _recorded("timers", gpu, COLUMNS), _recorded("counters", gpu, counters.COLUMNS)


def _recorded(name: str, gpu: str, columns: list[str]) -> pd.DataFrame:
    files = sorted(paths.RECORDED.glob(f"*/????-??-??_{name}_*.parquet"), key=lambda file: file.name, reverse=True)
    tables = (made for made in map(pd.read_parquet, files) if (made["gpu"] == gpu).all())
    return next(tables, pd.DataFrame(columns=[*columns, *counters.PROVENANCE]))


def told(rows: pd.DataFrame) -> list[str]:
    """A sentence for each claim that has a bound, those that do not hold first, then what was not measured."""
    said = []
    for claim, judged in rows[rows["holds"].notna()].groupby("claim", sort=False):
        broken = judged[~judged["holds"].astype(bool)]
        where = ["/".join(filter(None, (at.timer, at.state, at.copy, at.case))) for at in broken.itertuples()]
        not_in = f"; not in {', '.join(where[:4])}{f' and {len(where) - 4} more' * (len(where) > 4)}" if where else ""
        holds = f"holds in {len(judged) - len(broken)} of {len(judged)}{not_in}"
        said.append((not where, f"**{claim}**: {CLAIMS[claim]}: {holds}."))
    absent = [claim for claim in CLAIMS if claim not in set(rows["claim"])]
    said += [(True, f"**{claim}**: {CLAIMS[claim]}: not measured; on a GPU, this notebook does.") for claim in absent]
    return [text for _, text in sorted(said, key=lambda item: item[0])]


def shown(rows: pd.DataFrame, claim: str) -> pd.DataFrame:
    """The rows of a claim as a notebook shows them: units in the cells, empty columns left out."""
    read = pd.DataFrame(map(_read, rows[rows["claim"] == claim].to_dict("records")))
    return read.loc[:, (read != "").any()]


def _read(at: dict) -> dict:
    scale, unit = {"s": (1e6, "us"), "B": (1e-6, "MB"), "B/s": (1e-12, "TB/s"), "share": (100, "%")}[at["unit"]]
    numbers = {name: "" if isnan(at[name]) else f"{at[name] * scale:.2f} {unit}" for name in ("ours", "witness")}
    off = "" if isnan(at["difference"]) or at["unit"] == "share" else f"{at['difference']:+.1%}"
    judged = {"difference": off, "bound": f"{at['sense']} {at['bound']:.0%}" if at["sense"] else ""}
    holds = "" if pd.isna(at["holds"]) else "yes" if at["holds"] else "no"
    return {name: at[name] for name in COLUMNS[1:5]} | numbers | judged | {"holds": holds, "detail": at["detail"]}


if __name__ == "__main__":
    _serve(*sys.argv[1:])
