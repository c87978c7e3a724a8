"""The only maker of sentences and tables with numbers: notebooks, pages, README, terminal and alt texts take them here.

Every function takes the samples of one run on one machine (kvnb.load of one file) and remembers its results per
DataFrame object: do not change one in place. The headline is part `write`, no padding, state `produced`, timer `graph`
(a CPU run: `wall`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import pandas as pd

from kvnb import paths
from kvnb.bench import results, stats
from kvnb.problem.models import MODELS, Model

OURS, ISSUE = "kvnb", "torch.index_put"  # ISSUE: the spelling of vLLM issue #4698
BEST, PYTORCH = "fastest PyTorch", ("torch", "compile")  # BEST: in each cell, the fastest copy of these families
VLLM = "vLLM's 2024 design, rewritten"
LABELS = {"vllm.scalar": f"vllm.scalar ({VLLM})", ISSUE: f"{ISSUE} (the issue's)"}
COLUMNS = (BEST, ISSUE, "torch.compile", "triton", "vllm.scalar")  # of the verdict table: what a page has room for
LINE = ["layout", "num_kv_heads", "head_size", "value_head_size", "block_size", "dtype", "source", "slots"]
USUAL = {"dtype": "bfloat16", "source": "contiguous", "slots": "random", "block_size": 16}  # not spelt out in names
REGIMES = ("decode", "mixed", "prefill")
LAYERS = 32  # that share one `step` in the step figure: Llama-3.1-8B's
NOTE = (
    f"A speedup of 2 says that kvnb takes half the time. The {BEST} copy is chosen anew in each cell, compiled ones "
    f"included. A verdict needs a margin of 2 %, or the run's noise floor where that is larger. vllm.scalar is {VLLM}: "
    "until vLLM's wheels are measured, no verdict is drawn on vLLM."
)


def find_runs(runs: str | Iterable[str | Path] = "newest") -> list[Path]:
    """The run files given, or for "newest" the newest local one and the newest recorded one of each GPU.

    Raises ValueError where there is none, saying how to measure one.
    """
    if runs != "newest":
        return [Path(run) for run in runs]
    found = sorted(paths.LOCAL.glob("*.parquet"), key=lambda path: path.stat().st_mtime)[-1:]
    gpus = sorted(path.name for path in paths.RECORDED.glob("*/"))
    found += [path for gpu in gpus if (path := results.newest(gpu, "full") or results.newest(gpu, "quick"))]
    if not found:
        raise ValueError("no run in data/local or data/recorded: measure one first (02_measure, or `make measure`)")
    return found


# -- what a run holds


class _Run:
    """A DataFrame as a cache key: by identity."""

    def __init__(self, samples: pd.DataFrame) -> None:
        self.samples = samples

    def __hash__(self) -> int:
        return id(self.samples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Run) and self.samples is other.samples


def machine(samples: pd.DataFrame) -> str:
    """GPU or CPU of the run. Raises ValueError for samples of several runs or machines."""
    for name in ("run_id", "gpu_uuid", "cpu"):
        if (values := samples[name].nunique(dropna=False)) != 1:
            raise ValueError(f"these samples hold {values} values of {name}: give those of one run")
    first = samples.iloc[0]
    return first["gpu"] or f"{first['cpu']}, {_count(first['threads'], 'thread')}"


def headline_timer(samples: pd.DataFrame) -> str:
    return "graph" if samples["gpu"].iloc[0] else "wall"


@lru_cache(maxsize=8)
def _cells(run: _Run) -> pd.DataFrame:
    machine(run.samples)
    return stats.cells(run.samples)


def _rows(table: pd.DataFrame, where: dict) -> pd.DataFrame:
    """The rows whose columns equal `where`."""
    return table[(table[list(where)] == pd.Series(where)).all(axis=1)]


def _headline(samples: pd.DataFrame) -> dict:
    return {"part": "write", "padding": 0, "timer": headline_timer(samples), "state": "produced"}


def cells(samples: pd.DataFrame, **where: object) -> pd.DataFrame:
    """Rows of stats.cells that equal `where`; the headline's, unless `where` says otherwise."""
    return _rows(_cells(_Run(samples)), _headline(samples) | where)


def against(samples: pd.DataFrame, other: str) -> pd.DataFrame:
    """stats.compare of kvnb with `other` (a copy or BEST) in the headline's cells, `b` naming it; may be empty."""
    return _against(_Run(samples), other)


@lru_cache(maxsize=256)
def _against(run: _Run, other: str) -> pd.DataFrame:
    machine(run.samples)
    head = _rows(run.samples, _headline(run.samples))
    if other == BEST:
        names = sorted(head.loc[head["family"].isin(PYTORCH), "copy"].unique())
        tables = [table for name in names if len(table := _against(run, name))]
    else:
        tables = [stats.compare(head, OURS, other)] if {OURS, other} <= set(head["copy"]) else []
    if not tables:
        return pd.DataFrame(columns=[*stats.PLACE, "a", "b", "speedup", "low", "high", "margin", "verdict", "reason"])
    rows = pd.concat(tables, ignore_index=True)
    fastest = rows.groupby(stats.PLACE, sort=False)["speedup"].idxmin()
    return rows.loc[fastest].sort_values([*LINE, "num_tokens"], ignore_index=True)


def reference(samples: pd.DataFrame) -> dict:
    """The line (columns LINE) that figures show: most like 8x128 bfloat16 NHD, then with most sizes; {} if none is."""
    table = cells(samples, status="ok")
    table = table[table["family"] != "limit"]
    usual = {"layout": "NHD", "num_kv_heads": 8, "head_size": 128, "value_head_size": 128, **USUAL}
    like = (table[list(usual)] == pd.Series(usual)).sum(axis=1)
    lines = table.assign(like=like).groupby(LINE).agg({"like": "first", "num_tokens": "nunique"})
    return dict(zip(LINE, lines.sort_values(["like", "num_tokens"]).index[-1], strict=True)) if len(lines) else {}


# -- how numbers read


def times(ratio: float) -> str:
    """Three digits; `z` keeps a rounded -0.00 from showing its sign."""
    return f"{ratio:z.{2 if abs(ratio) < 10 else 1 if abs(ratio) < 100 else 0}f}"


def duration(seconds: float) -> str:
    """Three digits, in us, ms or s."""
    if pd.isna(seconds):
        return "not measured"
    scale, unit = next(((s, u) for s, u in ((1e6, "us"), (1e3, "ms")) if abs(seconds) * s < 1000), (1, "s"))
    return f"{times(seconds * scale)} {unit}"


def line_name(row: dict | pd.Series, layout: bool = False) -> str:
    """`8x128`, then what is unusual about the line, then its layout."""
    heads = f"{row['num_kv_heads']}x{row['head_size']}"
    if row["value_head_size"] != row["head_size"]:
        heads += f"/{row['value_head_size']}"
    words = {"slots": "{} slots", "block_size": "blocks of {}"}
    odd = [words.get(name, "{}").format(row[name]) for name, usual in USUAL.items() if row[name] != usual]
    return " ".join([heads, *odd, *[row["layout"]] * layout])


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _mean(rows: pd.DataFrame) -> tuple[pd.Series, str]:
    """Geometric mean of `against` rows, and in words how many cells it is over and how they spread."""
    mean = stats.summarise(rows.assign(all=""), ["all"]).iloc[0]
    spread = f" from {times(mean['smallest'])} to {times(mean['largest'])}" if len(rows) > 1 else ""
    return mean, _count(len(rows), "cell") + spread


def _ratio(rows: pd.DataFrame, whom: str, remark: str = "") -> str:
    mean, spread = _mean(rows)
    interval = f"95 % interval {times(mean['low'])} to {times(mean['high'])}"
    return f"{times(mean['speedup'])} times as fast as {whom} ({mean['verdict']}; {interval}; {spread}{remark})"


def _cell(rows: pd.DataFrame) -> str:
    """`2.10 [2.05, 2.15] FASTER; 9 cells from 0.60 to 3.10, 2 SLOWER`."""
    mean, spread = _mean(rows)
    lost = (rows["verdict"] == "SLOWER").sum()
    lost = f", {lost} SLOWER" if lost else ""
    return f"{times(mean['speedup'])} [{times(mean['low'])}, {times(mean['high'])}] {mean['verdict']}; {spread}{lost}"


# -- sentences


def _losses(rows: pd.DataFrame) -> str:
    """How often and how much PyTorch is faster, for the beginning of a sentence; empty where it never is."""
    lost = rows[rows["verdict"] == "SLOWER"]
    if lost.empty:
        return ""
    worst = lost.loc[lost["speedup"].idxmin()]
    where = f"{worst['b']}, {_count(worst['num_tokens'], 'token')} of {line_name(worst, layout=True)}"
    much = f"by up to {times(1 / worst['speedup'])} times ({where})"
    return f"PyTorch is faster in {len(lost)} of {_count(len(rows), 'cell')}, {much}; "


def flips(rows: pd.DataFrame) -> list[tuple[int, str]]:
    """(tokens, text) wherever the verdict of `against` turns to or from SLOWER along a line of sizes."""
    found = []
    for _, line in rows.sort_values("num_tokens").groupby(LINE, sort=True):
        name, tokens = line_name(line.iloc[0]), line["num_tokens"].tolist()
        slower = line["verdict"].eq("SLOWER").tolist()
        if slower[0]:
            found.append((tokens[0], f"{name} is PyTorch's from {_count(tokens[0], 'token')}"))
        for i in range(1, len(tokens)):
            if slower[i] != slower[i - 1]:
                whose, between = "PyTorch" if slower[i] else "kvnb", f"{tokens[i - 1]:,} and {tokens[i]:,} tokens"
                found.append((tokens[i], f"{name} turns to {whose} between {between}"))
    return found


def headline(samples: pd.DataFrame) -> str:
    """The issue's second TODO answered in two sentences: does PyTorch's copy outperform the hand-written kernel?"""
    best, issue = against(samples, BEST), against(samples, ISSUE)
    where = f"{machine(samples)}, timer {headline_timer(samples)}, state produced"
    if best.empty:
        return f"{where}: no answer, as no cell holds both kvnb and a PyTorch copy."
    first = _losses(best) or "PyTorch is faster in no cell; "
    second = _ratio(issue, f"{ISSUE}, the spelling of the issue") if len(issue) else f"not compared with {ISSUE}"
    first += f"all in all the hand-written kvnb is {_ratio(best, f'the {BEST} copy')}"
    return f"{where}, margin {best['margin'].max():.1%}: {first}. It is {second}."


def sentences(samples: pd.DataFrame) -> list[str]:
    """One sentence per regime and layout, those with losses first: kvnb against BEST and ISSUE, and where it flips."""
    best, issue = against(samples, BEST), against(samples, ISSUE)
    told = []
    for layout in cells(samples)["layout"].unique():
        turns = flips(_rows(best, {"layout": layout}))
        for regime in REGIMES:
            here, there = (_rows(rows, {"layout": layout, "regime": regime}) for rows in (best, issue))
            turned = [text for tokens, text in turns if stats.regime_of(tokens) == regime]
            told.append((not _losses(here), f"{regime.capitalize()}, {layout}: {_sentence(here, there, turned)}"))
    return [text for _, text in sorted(told, key=lambda pair: pair[0])]


def _sentence(best: pd.DataFrame, issue: pd.DataFrame, turned: list[str]) -> str:
    if best.empty:
        return "not measured in this run for both kvnb and a PyTorch copy."
    ours = _ratio(best, f"the {BEST} copy", f"; mostly {best['b'].mode()[0]}")
    theirs = _ratio(issue, ISSUE) if len(issue) else f"{ISSUE} was not measured"
    return f"{_losses(best)}kvnb is {ours} and {theirs}{''.join('; ' + text for text in turned)}."


def summary_markdown(samples: pd.DataFrame) -> str:
    """Headline, sentences, verdict table and note, for README and terminal."""
    table = verdict_table(samples)
    rows = [table.columns, ["---"] * len(table.columns), *table.to_numpy()]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([headline(samples), "", *[f"- {text}" for text in sentences(samples)], "", *lines, "", NOTE])


# -- tables


def verdict_table(samples: pd.DataFrame, columns: Iterable[str] = COLUMNS) -> pd.DataFrame:
    """Regime, layout, and per copy the geometric mean of kvnb's speedup over it: `2.10 [2.05, 2.15] FASTER; ...`."""
    places = [(regime, layout) for regime in REGIMES for layout in cells(samples)["layout"].unique()]
    table = pd.DataFrame(places, columns=["regime", "layout"])
    for other in columns:
        told = {key: _cell(rows) for key, rows in against(samples, other).groupby(["regime", "layout"])}
        table[LABELS.get(other, other)] = [told.get(place, "not measured") for place in places]
    return table


def every_copy(samples: pd.DataFrame) -> pd.DataFrame:
    """Layout, copy, and the cells of verdict_table per regime, for all copies of the run but kvnb and the limits."""
    names = sorted(samples.loc[(samples["family"] != "limit") & (samples["copy"] != OURS), "copy"].unique())
    told = verdict_table(samples, names).melt(["regime", "layout"], var_name="copy", value_name="verdict")
    table = told.pivot(index=["layout", "copy"], columns="regime", values="verdict").reset_index()
    return table.reindex(columns=["layout", "copy", *REGIMES]).rename_axis(columns=None)


def limits_table(samples: pd.DataFrame) -> pd.DataFrame:
    """Copies on the reference line: at the fewest tokens in empty launches, at the most in GB/s and % of limit.copy."""
    table = cells(samples, status="ok", **reference(samples)).sort_values("num_tokens")
    launch = table.loc[table["copy"] == "limit.launch", "seconds"].min()
    table = table[~table["copy"].str.startswith("limit.launch") & (table["copy"] != stats.NOISE[0])]
    rows = []
    for name, line in table.groupby("copy"):
        least, most = line.iloc[0], line.iloc[-1]
        rows.append({
            "copy": LABELS.get(name, name),
            "fewest tokens": f"{least['num_tokens']:,}",
            "take": duration(least["seconds"]),
            "in empty launches": "" if pd.isna(launch) else times(least["seconds"] / launch),
            "most tokens": f"{most['num_tokens']:,}",
            "need": duration(most["seconds"]),
            "GB/s": f"{most['gbps']:,.0f}",
            "% of limit.copy": "" if pd.isna(most["limit_percent"]) else f"{most['limit_percent']:.1f}",
        })  # fmt: skip
    return pd.DataFrame(rows)


def worth(samples: pd.DataFrame, models: Iterable[Model] = MODELS) -> pd.DataFrame:
    """What kvnb saves in a decode step over BEST and ISSUE (negative: loses), against the time to read the weights.

    Saved per step: the difference x layers. Weights: weight_bytes over the largest GB/s of limit.copy in the run, as if
    one device held the model; no step takes less. A row per model, measured decode size of its heads, and rival.
    """
    done = cells(samples, status="ok")
    bandwidth = 1e9 * done.loc[done["copy"].str.startswith("limit.copy"), "gbps"].max()
    rows = []
    for model in models:
        heads = {"num_kv_heads": model.num_kv_heads, "head_size": model.head_size, "value_head_size": model.head_size}
        line = reference(samples) | heads
        seconds = _rows(done, line).set_index(["num_tokens", "copy"])["seconds"]
        weights = model.weight_bytes / bandwidth
        for other in (BEST, ISSUE):
            rivals = _rows(against(samples, other), line | {"regime": "decode"})
            for tokens, name, verdict in rivals[["num_tokens", "b", "verdict"]].itertuples(index=False):
                saved = seconds[tokens, name] - seconds[tokens, OURS]
                rows.append({
                    "model": model.name,
                    "tokens": tokens,
                    "kvnb": duration(seconds[tokens, OURS]),
                    "rival": f"{name} (fastest)" if other == BEST else name,
                    "verdict": verdict,
                    "saved per layer": duration(saved),
                    "saved per step": duration(saved * model.layers),
                    "weights": duration(weights),
                    "share": f"{saved * model.layers / weights:z.1%}".replace("nan%", "not measured"),
                })  # fmt: skip
    return pd.DataFrame(rows)


def not_ok(samples: pd.DataFrame) -> pd.DataFrame:
    """Every cell without a time, counted by copy, status and reason."""
    table = _cells(_Run(samples))
    return table[table["status"] != "ok"].groupby(["copy", "status", "reason"]).size().rename("cells").reset_index()


def provenance(samples: pd.DataFrame) -> pd.DataFrame:
    """Machine, versions, method and noise of the run: columns what, value."""
    first, done = samples.iloc[0], samples[samples["status"] == "ok"]
    floors = [f"{row.floor:.1%} ({row.timer}, {row.state})" for row in stats.noise_floor(samples).itertuples()]
    failed = not_ok(samples).groupby(["status", "reason"])["cells"].sum()
    known = done["throttled"].dropna()
    facts = {
        "machine": machine(samples),
        "driver, CUDA": f"{first['driver']}, {first['cuda']}" if first["gpu"] else "no GPU",
        "torch, Python": f"{first['torch']}, {first['python']}",
        "kvnb": f"{first['kvnb_commit']}{' with uncommitted changes' if first['dirty'] else ''}",
        "run": f"{first['run_id']}, grid {first['grid']}, {first['utc']}",
        "samples": f"{len(done):,}: {done['worker'].nunique()} workers x up to {done['round'].nunique()} rounds",
        "noise floor": ", ".join(floors) or "not measured",
        "throttled": f"{(known != '').mean():.1%} of samples" if len(known) else "not known",
        "cells without a time": "; ".join(f"{n} {key[0]} ({key[1]})" for key, n in failed.items()) or "none",
    }
    return pd.DataFrame(facts.items(), columns=["what", "value"])


# -- what figures show, and their alt texts

MISSING = {
    "latency": "This run holds no finished cell to draw.",
    "limit": f"No cell of this line moves {stats.LIMIT_BYTES / 1e6:.0f} MB, the least that limit.copy is quoted for.",
    "heads": "This run holds no PyTorch copy to compare kvnb with.",
    "eager": "This run was not timed both eagerly and in a CUDA graph.",
    "step": "This run holds no copy whose work per model step was timed on its own.",
}


def figure_data(figure: str, samples: pd.DataFrame) -> pd.DataFrame:
    """The rows that a figure of plots.py draws, on the reference line; empty where the run has none."""
    if figure not in MISSING:
        raise ValueError(f"no figure {figure!r}; there are {', '.join(MISSING)}")
    line = reference(samples)
    table = cells(samples, status="ok", **line)
    if not line:
        return table.iloc[:0]
    if figure == "heads":
        return _rows(against(samples, BEST), {name: line[name] for name in LINE if name != "num_kv_heads"})
    if figure == "limit":
        table = cells(samples, status="ok", **{name: line[name] for name in LINE if name != "layout"})
        table = table[table["limit_percent"].notna() & (table["family"] != "limit")]
    elif figure == "eager":
        table = pd.concat([cells(samples, status="ok", timer=timer, **line) for timer in ("graph", "eager")])
        table = table[(table["family"] != "limit") & (table.groupby("copy")["timer"].transform("nunique") == 2)]
    elif figure == "step":
        table = _step_costs(samples)
    # limit.copy stands for the faster of itself and its memcpy form
    table = table[table["copy"] != stats.NOISE[0]].replace({"copy": {"limit.copy.memcpy": "limit.copy"}})
    table = table.sort_values("seconds", kind="stable").drop_duplicates([*stats.PLACE, "copy", "policy"])
    return table.sort_values([*LINE, "num_tokens", "copy"], kind="stable")


def _step_costs(samples: pd.DataFrame) -> pd.DataFrame:
    """Copies with a `step` row at the largest decode size: seconds per layer, the step in `every` call and `shared`."""
    steps = cells(samples, part="step", status="ok", regime="decode")
    keys = [*LINE, "num_tokens", "copy", "policy"]
    both = steps[[*keys, "seconds"]].merge(cells(samples, status="ok"), on=keys, suffixes=("_step", ""))
    both = both[both["num_tokens"] == both["num_tokens"].max()]
    write, step = both["seconds"], both["seconds_step"]
    return both.assign(every=write + step, shared=write + step / LAYERS)


def alt(figure: str, samples: pd.DataFrame) -> str:
    """Alt text of a figure, from the rows that it draws; where there are none, what is missing."""
    table = figure_data(figure, samples)
    if table.empty:
        return MISSING[figure]
    least, most = table["num_tokens"].min(), table["num_tokens"].max()
    where = f"{line_name(reference(samples))} on {machine(samples)}"
    if figure == "latency":
        ends = table[table["num_tokens"].isin([least, most])].groupby("copy")["seconds"]
        each = [f"{name} {' to '.join(map(duration, seconds))}" for name, seconds in ends]
        start = f"Line chart, log-log: time of one copy of K and V, {where}, from {least:,} to {most:,} tokens"
    elif figure == "limit":
        last = table[table["num_tokens"] == most]
        each = [f"{row['copy']} ({row['layout']}) {row['limit_percent']:.0f} %" for _, row in last.iterrows()]
        start = f"Line charts: percent of the speed of a contiguous copy, {where}, at {most:,} tokens"
    elif figure == "heads":
        ends = [table.loc[table["speedup"].idxmin()], table.loc[table["speedup"].idxmax()]]
        each = [f"{times(row['speedup'])} at {_count(row['num_tokens'], 'token')} of {line_name(row)}" for row in ends]
        each.append(f"SLOWER in {(table['verdict'] == 'SLOWER').sum()} of {_count(len(table), 'cell')}")
        start = f"Heat map: speedup of kvnb over the {BEST} copy, by tokens and heads, on {machine(samples)}"
    elif figure == "eager":
        pairs = table[table["num_tokens"] == least].pivot(index="copy", columns="timer", values="seconds")
        each = [f"{name} {duration(row['graph'])} and {duration(row['eager'])}" for name, row in pairs.iterrows()]
        start = f"Line charts: time in a CUDA graph and eagerly, {where}, at {_count(least, 'token')}"
    else:
        pairs = [(line_name(row, layout=True), row) for _, row in table.iterrows()]
        each = [f"{row['copy']} ({name}) {duration(row['every'])} and {duration(row['shared'])}" for name, row in pairs]
        where = f"{most:,} tokens, {machine(samples)}"
        start = f"Dot chart: time per layer, step in every call and shared by {LAYERS} layers, {where}"
    return f"{start}: {', '.join(each)}."
