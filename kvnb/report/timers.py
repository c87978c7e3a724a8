"""What 06_timers says of the claims about our timers, and how it shows what stands for them."""

from __future__ import annotations

from math import isnan

import pandas as pd

from kvnb import machine, paths
from kvnb.bench import counters, results, stats, timing, witness
from kvnb.bench.witness import ALIKE, COLUMNS, FROM, LEFT, LOOP, OF_CELLS, WITHIN
from kvnb.report.answers import Run

CLAIMS = {
    "noise floor": f"a copy against itself, under another name, differs by at most {stats.WIDEST_SAME:.0%}",
    "two processes": f"their medians of `graph` lie within {ALIKE:.0%} of each other in {OF_CELLS:.0%} of cells",
    "profiler": f"from 10 us on, `graph`, and `call` less what its events add, are within {WITHIN:.0%} of "
    "what the profiler saw from the first begin to the last end, both while it watches",
    "watching": "what a timer shows while the profiler watches, against without it",
    "states by speed": "in a chain, `resident` and `produced` outrun DRAM, `produced` not `resident`, `cold` not DRAM",
    "states by DRAM bytes": f"in a chain, DRAM sees a call's bytes where its state says so, else at most {LEFT:.0%}",
    "empty event pair": "what two events with nothing between them cost",
    "write-back": "what a chain pays for writing lines back, and a flushed call leaves to what follows",
    "a wait per call": "`graph` against a loop that waits for the GPU after every call",
    "nvbench": "`call` cold against nvbench's cold measurement, which flushes by writing",
}
LIVE, COUNTED = "the profiler, waits and nvbench", "the counters"  # what tables are for
UNWRITTEN = "a flushed call left unwritten, by ncu"
FEW, PAIR = "few sets: partly in L2", "with the event pair"
INCLUDES = pd.DataFrame(
    [
        ("graph", "no", "between nodes", "of all but the last calls", "sets rotate", "a replay / K, or a slope"),
        ("call", "no: full queue", PAIR, "left to what follows", "a flush by reading", "one call"),
        ("host", "yes", "not waited for", "no", FEW, f"{timing.BATCH_CALLS} calls / {timing.BATCH_CALLS}"),
        ("eager", "yes", "where the host is slower", "yes", FEW, "N calls and one wait, / N"),
        ("wall", "yes (CPU)", "none", "yes", FEW, "N calls / N"),
        ("profiler", "no", "between nodes", "as the timer's", "as the timer's", "first begin to last end, / K"),
        ("a wait per call", "yes, and waking up", "yes", "yes", "one set: in L2", f"mean of {LOOP} calls"),
        ("nvbench, cold", "no: full queue", PAIR, "some of the flush's", "a flush by writing", "one call"),
    ],
    columns=["timer", "host dispatch", "launch gap", "write-back", "cache state by", "a sample is"],
)


def seen(device: str, choice: str, gpu: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(witness.live, counters.measure) of a device if `choice` is yes, or auto on a GPU; else what `gpu` has recorded.

    Raises ValueError for yes without a GPU. A table that was never recorded is empty.
    """
    here = machine.resolve_device(device)
    if choice == "yes" and here.type != "cuda":
        raise ValueError(f"live = 'yes' needs a CUDA GPU, and device is {here}: 'no' shows the newest record")
    if choice != "no" and here.type == "cuda":
        return witness.live(here), counters.measure(here)
    return _recorded("timers", gpu, COLUMNS), _recorded("counters", gpu, counters.COLUMNS)


def _recorded(name: str, gpu: str, columns: list[str]) -> pd.DataFrame:
    found = results.newest(paths.gpu_folder(gpu), name)
    return pd.read_parquet(found) if found else pd.DataFrame(columns=[*columns, *counters.PROVENANCE])


def gathered(run: Run, measured: pd.DataFrame, counted: pd.DataFrame) -> pd.DataFrame:
    """All rows of the claims, of a run and of what `seen` gives; column kvnb: the commit they are of (see `of`)."""
    parts = [witness.from_run(run.samples).assign(kvnb=""), measured[COLUMNS].assign(kvnb=of(measured, run)),
             witness.from_counters(counted).assign(kvnb=of(counted, run))]  # fmt: skip
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def of(made: pd.DataFrame, run: Run) -> str:
    """The commit that a table of `seen` was made with, if with another or on another GPU than the run; else empty."""
    same = made.empty or all(made[name].iloc[0] == run.first[name] for name in ("kvnb_commit", "gpu_uuid"))
    return "" if same else paths.short_commit(made["kvnb_commit"].iloc[0])


def origins(run: Run, measured: pd.DataFrame, counted: pd.DataFrame) -> str:
    """Which kvnb and GPU the answer is of, in a sentence: the run's, then what is not the run's."""
    first = run.first
    told = [f"The run is of kvnb {paths.short_commit(first['kvnb_commit'])}"]
    for name, made in ((LIVE, measured), (COUNTED, counted)):
        if commit := of(made, run):
            at = made.iloc[0]
            kernel = "the same kvnb" if at["kvnb_commit"] == first["kvnb_commit"] else f"kvnb {commit}"
            another = "another " * (at["gpu"] == first["gpu"])
            board = f" on {another}{at['gpu']}" * (at["gpu_uuid"] != first["gpu_uuid"])
            told.append(f"{name} are of {kernel}, measured {'earlier' if at['utc'] < first['utc'] else 'later'}{board}")
    return "; ".join(told) + "."


def provenance(measured: pd.DataFrame, counted: pd.DataFrame) -> pd.DataFrame:
    """Where what is no run was made: a column for each of LIVE and COUNTED that there is, a row (what) for each of
    counters.PROVENANCE."""
    parts = {LIVE: measured, COUNTED: counted}
    made = {name: part.iloc[0][[*counters.PROVENANCE]] for name, part in parts.items() if len(part)}
    return pd.DataFrame(made).astype(str).rename_axis("what").reset_index()


def verdict(rows: pd.DataFrame) -> str:
    """The answer in a line: how many of the claims that have a bound hold in all their rows."""
    judged = rows[rows["holds"].notna()]
    held = judged["holds"].astype(bool).groupby(judged["claim"]).all()
    if not len(held):
        return "Not known: nothing that has a bound was measured."
    lead = "Yes" if held.all() else "Mostly" if held.mean() > 0.5 else "No"
    rows = f"{int(judged['holds'].sum())} of {len(judged)} rows"
    return f"{lead}: {held.sum()} of {len(held)} claims hold in every row that is judged; {rows} hold."


def told(rows: pd.DataFrame) -> list[str]:
    """A sentence for each claim that has a bound, those that do not hold first, then what was not measured."""
    said = []
    for claim, judged in rows[rows["holds"].notna()].groupby("claim", sort=False):
        broken = judged[~judged["holds"].astype(bool)]
        where = ["/".join(filter(None, (at.timer, at.state, at.copy, at.case))) for at in broken.itertuples()]
        not_in = f"; not in {', '.join(where[:4])}{f' and {len(where) - 4} more' * (len(where) > 4)}" if where else ""
        beside = {"profiler": _watched, "two processes": _unjudged}.get(claim)
        holds = f"holds in {len(judged) - len(broken)} of {len(judged)}{not_in}{beside(rows) if beside else ''}"
        said.append((not where, f"**{claim}**: {CLAIMS[claim]}: {holds}."))
    absent = [claim for claim in CLAIMS if claim not in set(rows["claim"])]
    said += [(True, f"**{claim}**: {CLAIMS[claim]}: not measured; on a GPU, this notebook does.") for claim in absent]
    return [text for _, text in sorted(said, key=lambda item: item[0])]


def _long(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `watching` whose calls are as long as those that are judged."""
    return rows[(rows["claim"] == "watching") & (rows["witness"] >= FROM)]


def _watched(rows: pd.DataFrame) -> str:
    """What the profiler's claim leaves out: whose calls take how much longer while it watches."""
    most = _long(rows).sort_values("difference").tail(1).to_dict("records")
    return "".join(f"; watching makes calls take up to {at['difference']:.1%} longer ({at['copy']})" for at in most)


def _unjudged(rows: pd.DataFrame) -> str:
    """What the claim of two processes leaves out: the timers whose medians need not agree, and how often they do."""
    other = rows[(rows["claim"] == "two processes") & rows["holds"].isna()]
    if other.empty:
        return ""
    least, most, names = other["ours"].min(), other["ours"].max(), sorted(other["timer"].unique())
    return f"; not judged: {', '.join(f'`{name}`' for name in names)}, in {least:.0%} to {most:.0%} of cells"


def shown(rows: pd.DataFrame, claim: str) -> pd.DataFrame:
    """The rows of a claim as a notebook shows them: units in the cells, empty columns left out. A commit that all rows
    are of is the table's caption (`plots.table`)."""
    read = pd.DataFrame(map(_read, rows[rows["claim"] == claim].to_dict("records")))
    table = read.loc[:, (read != "").any()]
    if table.get("kvnb", pd.Series()).nunique() == 1:
        table.attrs["caption"] = f"kvnb {table.pop('kvnb').iloc[0]}"
    return table


def write_back(rows: pd.DataFrame, counted: pd.DataFrame, kvnb: str = "") -> pd.DataFrame:
    """`shown` of the write-back, and in column UNWRITTEN what ncu counted of the same call: what it writes, less what
    reached DRAM. `kvnb`: the counters' commit, if not the run's."""
    table, calls = shown(rows, "write-back"), counted[(counted["timer"] == "call") & counted["dram_written"].notna()]
    kernels = calls.groupby(["copy", "case"]).agg({"bytes_moved": "first", "dram_written": "sum"})
    left = kernels["bytes_moved"] / 2 - kernels["dram_written"]
    cells = zip(table["copy"], table["case"]) if len(table) else ()
    told = [f"{left[at] / 1e6:.0f} MB{kvnb and f' ({kvnb})'}" if at in left else "" for at in cells]
    return table.assign(**{UNWRITTEN: told}) if any(told) else table


def watching(rows: pd.DataFrame) -> pd.DataFrame:
    """Per copy and timer, what it costs a call of FROM and more that the profiler watches: median, and the most."""
    cost = _long(rows).groupby(["copy", "timer"])["difference"].agg(["median", "max"])
    cost = cost.map("{:+.1%}".format).astype(object)
    told = (cost["median"] + ", at most " + cost["max"]).unstack("timer").fillna("")
    return told.reset_index().rename_axis(columns=None)


def _read(at: dict) -> dict:
    scale, unit = {"s": (1e6, "us"), "B": (1e-6, "MB"), "B/s": (1e-12, "TB/s"), "share": (100, "%")}[at["unit"]]
    numbers = {name: "" if isnan(at[name]) else f"{at[name] * scale:.2f} {unit}" for name in ("ours", "witness")}
    off = "" if isnan(at["difference"]) or at["unit"] == "share" else f"{at['difference']:+.1%}"
    judged = {"difference": off, "bound": f"{at['sense']} {at['bound']:.0%}" if at["sense"] else ""}
    holds = "" if pd.isna(at["holds"]) else "yes" if at["holds"] else "no"
    last = {"holds": holds, "detail": at["detail"], "kvnb": at.get("kvnb", "")}
    return {name: at[name] for name in COLUMNS[1:5]} | numbers | judged | last


def counts(counted: pd.DataFrame) -> pd.DataFrame:
    """The calls in a table of counters as a notebook shows them; DRAM bytes as shares of those read, and written.

    In flight is what an SM's active threads read in all, or what their registers hold if that is less: some loop.
    """
    calls = counted[counted["timer"].isna() | (counted["timer"] == "call")]
    whole, held = calls["bytes_moved"] / 2e2, calls["warps"] * 32 * calls["registers"] * 4
    columns = {
        "time, us": 1e6 * calls["seconds"], "DRAM read, %": calls["dram_read"] / whole,
        "DRAM written, %": calls["dram_written"] / whole, "L2, MB": calls["l2"] / 1e6, "registers": calls["registers"],
        "threads": calls["threads"], "occupancy, %": calls["occupancy"],
        "in flight, KB per SM": calls["in_flight"].clip(upper=held) / 1e3,
    }  # fmt: skip
    form = {name: "{:,.0f}" if name in ("registers", "threads") else "{:.4g}" for name in columns}
    text = {name: column.astype(float).map(form[name].format).replace("nan", "") for name, column in columns.items()}
    told = calls[["copy", "case"]].assign(**text, why=calls["reason"]).astype(object).fillna("")
    return told if told["why"].any() else told.drop(columns="why")
