"""The only maker of sentences and tables with numbers: notebooks, pages, README, terminal and alt texts take them here.

Everything is about one run on one machine. The headline is part `write`, no padding, state `produced`, timer `graph`
(a CPU run: `wall`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from kvnb import paths
from kvnb.bench import results, stats
from kvnb.problem.case import regime_of
from kvnb.problem.models import MODELS

OURS, ISSUE = "kvnb", "torch.index_put"  # ISSUE: the spelling of vLLM issue #4698
BEST, PYTORCH = "fastest PyTorch", ("torch", "compile")  # BEST: in each cell, the fastest copy of these families
VLLM = "vLLM's 2024 design, rewritten"
LABELS = {"vllm.scalar": f"vllm.scalar ({VLLM})", ISSUE: f"{ISSUE} (the issue's)"}
MAIN = (BEST, ISSUE, "torch.compile", "triton", "vllm.scalar")  # of verdict tables that have to be short
LINE = ["layout", "num_kv_heads", "head_size", "value_head_size", "block_size", "dtype", "source", "slots"]
USUAL = {"dtype": "bfloat16", "source": "contiguous", "slots": "random", "block_size": 16}  # not spelt out in names
REGIMES = ("decode", "mixed", "prefill")
LAYERS = 32  # that share one `step` in the step figure: Llama-3.1-8B's
NOTE = (
    f"A speedup of 2 says that kvnb takes half the time. The {BEST} copy is chosen anew in each cell, compiled ones "
    "included. FASTER and SLOWER need an interval beyond the margin, which is 2 % or the run's noise floor where that "
    f"is larger; a noise floor above {100 * stats.WIDEST_SAME:.0f} % hides what is smaller, and SAME is not said then. "
    f"vllm.scalar is {VLLM}: until vLLM's wheels are measured, no verdict is drawn on vLLM."
)


def recorded() -> dict[str, Path]:
    """GPU folder -> its newest recorded run: grid full, or quick where there is no full one."""
    folders = sorted(path.name for path in paths.RECORDED.glob("*/"))
    newest = {name: results.newest(name, "full") or results.newest(name, "quick") for name in folders}
    return {name: path for name, path in newest.items() if path}


def find_runs(runs: str | Iterable[str | Path] = "newest") -> list[Path]:
    """The run files given, or for "newest" the newest local one and the newest recorded one of each GPU.

    Raises ValueError where there is none, saying how to measure one.
    """
    if runs != "newest":
        return [Path(run) for run in runs]
    local = sorted(paths.LOCAL.glob("*.parquet"), key=lambda path: path.stat().st_mtime)[-1:]
    if found := [*local, *recorded().values()]:
        return found
    raise ValueError("no run in data/local or data/recorded: measure one first (02_measure, or `make measure`)")


# -- what a run holds


class Run:
    """The samples of one run, and what sentences, tables and figures take from them. Raises ValueError for several."""

    def __init__(self, samples: pd.DataFrame) -> None:
        if (runs := samples["run_id"].nunique()) != 1:
            raise ValueError(f"these samples are of {runs} runs: load the file of one")
        self.samples, self.first = samples, samples.iloc[0]
        self.machine = self.first["gpu"] or f"{self.first['cpu']}, {_count(self.first['threads'], 'thread')}"
        self.timer = "graph" if self.first["gpu"] else "wall"
        self.where = {"part": "write", "padding": 0, "timer": self.timer, "state": "produced"}
        self.layouts = list(samples["layout"].unique())
        self.copies = sorted({*samples.loc[samples["family"] != "limit", "copy"]} - {OURS})
        self.yours = sorted(samples.loc[samples["family"] == "yours", "copy"].unique())
        self.every_cell = stats.cells(samples)
        self.line = self._line()
        self.against = cache(self._against)

    def cells(self, **where: object) -> pd.DataFrame:
        """Finished cells whose columns equal `where`: the headline's, unless `where` says otherwise."""
        return rows_of(self.every_cell, self.where | {"status": "ok"} | where)

    def _line(self) -> dict:
        """The line (columns LINE) that figures show: most like 8x128 bfloat16 NHD, then with most sizes."""
        table = self.cells()
        usual = {"layout": "NHD", "num_kv_heads": 8, "head_size": 128, "value_head_size": 128, **USUAL}
        like = (table[list(usual)] == pd.Series(usual)).sum(axis=1)
        lines = table.assign(like=like).groupby(LINE).agg({"like": "first", "num_tokens": "nunique"})
        best = lines.sort_values(["like", "num_tokens"]).index[-1:]
        return dict(zip(LINE, best[0] if len(best) else [None] * len(LINE)))

    def _against(self, other: str) -> pd.DataFrame:
        """stats.compare of kvnb with `other` (a copy or BEST) in the headline's cells, `b` naming it; may be empty."""
        head = rows_of(self.samples, self.where)
        if {OURS, other} <= set(head["copy"]):
            return stats.compare(head, OURS, other).sort_values([*LINE, "num_tokens"], ignore_index=True)
        names = head.loc[head["family"].isin(PYTORCH), "copy"].unique() if other == BEST else []
        if tables := [table for name in sorted(names) if len(table := self.against(name))]:
            rows = pd.concat(tables, ignore_index=True)
            fastest = rows.loc[rows.groupby(stats.PLACE, sort=False)["speedup"].idxmin()]
            return fastest.sort_values([*LINE, "num_tokens"], ignore_index=True)
        return pd.DataFrame(columns=[*stats.PLACE, "a", "b", "speedup", "low", "high", "margin", "verdict"])


@cache
def load(path: str | Path) -> Run:
    """The run in a file: a complete one never changes."""
    return Run(results.load(path))


def rows_of(table: pd.DataFrame, where: dict) -> pd.DataFrame:
    """The rows whose columns equal `where`."""
    return table[(table[list(where)] == pd.Series(where)).all(axis=1)]


# -- how numbers and names read


def label(copy: str) -> str:
    return LABELS.get(copy, copy)


def times(ratio: float) -> str:
    """Three digits; `z` keeps a rounded -0.00 from showing its sign."""
    return f"{ratio:z.{2 if abs(ratio) < 10 else 1 if abs(ratio) < 100 else 0}f}"


def duration(seconds: float) -> str:
    """Three digits, in us, ms or s."""
    scale, unit = next(((s, u) for s, u in ((1e6, "us"), (1e3, "ms")) if abs(seconds) * s < 1000), (1, "s"))
    return f"{times(seconds * scale)} {unit}"


def line_name(row: dict | pd.Series, layout: bool = False) -> str:
    """`8x128`, then what is unusual about the line, then its layout."""
    value = f"/{row['value_head_size']}" if row["value_head_size"] != row["head_size"] else ""
    words = {"slots": "{} slots", "block_size": "blocks of {}"}
    odd = [words.get(name, "{}").format(row[name]) for name, usual in USUAL.items() if row[name] != usual]
    return " ".join([f"{row['num_kv_heads']}x{row['head_size']}{value}", *odd, *[row["layout"]] * layout])


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _speedup(rows: pd.DataFrame, cells: bool = True) -> str:
    """Geometric mean of `against` rows: `2.10 [2.05, 2.15] FASTER (9 cells from 0.60 to 3.10, 2 SLOWER)`."""
    mean = stats.summarise(rows.assign(all=""), ["all"]).iloc[0]
    told = f"{times(mean['speedup'])} [{times(mean['low'])}, {times(mean['high'])}] {mean['verdict']}"
    spread = f" from {times(mean['smallest'])} to {times(mean['largest'])}" if len(rows) > 1 else ""
    lost = (rows["verdict"] == "SLOWER").sum()
    return f"{told} ({_count(len(rows), 'cell')}{spread}{f', {lost} SLOWER' if lost else ''})" if cells else told


# -- sentences


def _losses(rows: pd.DataFrame) -> str:
    """How often and how much PyTorch is faster, for the beginning of a sentence; empty where it never is."""
    lost = rows[rows["verdict"] == "SLOWER"]
    if lost.empty:
        return ""
    worst = lost.loc[lost["speedup"].idxmin()]
    where = f"{worst['b']}, {_count(worst['num_tokens'], 'token')} of {line_name(worst, layout=True)}"
    much = f"by up to {times(1 / worst['speedup'])} times ({where})"
    return f"PyTorch is faster in {len(lost)} of {_count(len(rows), 'cell')}, {much}, "


def flips(rows: pd.DataFrame) -> list[tuple[int, str]]:
    """(tokens, text) wherever the verdict of `against` turns to or from SLOWER along lines of sizes."""
    found: dict[tuple[int, str], list[str]] = {}
    for _, line in rows.sort_values("num_tokens").groupby(LINE, sort=True):
        sizes, slower = [0, *line["num_tokens"]], [False, *(line["verdict"] == "SLOWER")]
        for i in range(1, len(sizes)):
            if slower[i] != slower[i - 1]:
                where = f"between {sizes[i - 1]:,} and {sizes[i]:,} tokens" if i > 1 else "from the fewest tokens on"
                turn = f"turns to {'PyTorch' if slower[i] else 'kvnb'} {where}"
                found.setdefault((sizes[i], turn), []).append(line_name(line.iloc[0]))
    return [(tokens, f"{turn} for {_some(names)}") for (tokens, turn), names in sorted(found.items())]


def _some(names: list[str], most: int = 2) -> str:
    """The shortest names, and how many more there are."""
    names = sorted(names, key=len)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def headline(run: Run) -> str:
    """The issue's second TODO answered in two sentences: does PyTorch's copy outperform the hand-written kernel?"""
    best, issue = run.against(BEST), run.against(ISSUE)
    where = f"{run.machine}, timer {run.timer}, state produced"
    if best.empty:
        return f"{where}: no answer, as no cell holds both kvnb and a PyTorch copy."
    ours, theirs = (
        ", ".join(f"{_speedup(cells, cells=False)} in {regime}" for regime, cells in rows.groupby("regime"))
        for rows in (best, issue)
    )
    margin = best["margin"].max()
    noise = f"a noise floor of {margin:,.0%} hides smaller differences" if margin > stats.WIDEST_SAME else ""
    won = f"{(best['verdict'] == 'FASTER').sum()} of {_count(len(best), 'cell')}"
    first = f"{_losses(best) or 'PyTorch is faster in no cell, '}kvnb in {won}"
    first += f"; its speedup over the {BEST} copy is {ours}"
    second = f"Over {ISSUE}, the spelling of the issue, it is {theirs or 'not measured'}"
    return f"{where}, {noise or f'margin {margin:.1%}'}: {first}. {second}.{_reservations(run)}"


def _reservations(run: Run) -> str:
    """What the headline must not hide: copies without any time, and too few workers."""
    cells = run.every_cell[run.every_cell["family"].isin(PYTORCH)]
    absent = sorted(set(cells["copy"]) - set(cells.loc[cells["status"] == "ok", "copy"]))
    text = f" Without a time in this run: {', '.join(absent)}." if absent else ""
    workers = int(run.samples["worker"].max()) + 1
    return text + (f" Only {_count(workers, 'worker')}, not 3: the intervals are too short." if workers < 3 else "")


def sentences(run: Run) -> list[str]:
    """One sentence per regime and layout, those with losses first: kvnb against BEST and ISSUE, and where it flips."""
    told = []
    for layout in run.layouts:
        best, issue = (rows_of(run.against(other), {"layout": layout}) for other in (BEST, ISSUE))
        for regime, cells in best.groupby("regime"):
            theirs = rows_of(issue, {"regime": regime})
            theirs = _speedup(theirs) if len(theirs) else "not measured"
            turns = [text for tokens, text in flips(best) if regime_of(tokens) == regime]
            ours = f"kvnb's speedup over the {BEST} copy, mostly {cells['b'].mode()[0]}, is {_speedup(cells)}"
            losses = _losses(cells).removesuffix(", ")
            text = "; ".join(filter(None, [losses, f"{ours}, over {ISSUE} {theirs}", *turns]))
            told.append(f"{regime.capitalize()}, {layout}: {text}.")
    return sorted(told, key=lambda text: "PyTorch is faster" not in text)


def summary_markdown(run: Run) -> str:
    """Headline, sentences, verdict table and note, for README."""
    table = verdict_table(run)
    lines = ["| " + " | ".join(row) + " |" for row in [table.columns, ["---"] * len(table.columns), *table.to_numpy()]]
    return "\n".join([headline(run), "", *[f"- {text}" for text in sentences(run)], "", *lines, "", NOTE])


# -- tables


def verdict_table(run: Run, copies: Iterable[str] = ()) -> pd.DataFrame:
    """Layout, copy, and per regime kvnb's speedup over it as a geometric mean: `2.10 [2.05, 2.15] FASTER (...)`."""
    rows = []
    for layout, copy in itertools.product(run.layouts, copies or (*MAIN, *run.yours)):
        regimes = rows_of(run.against(copy), {"layout": layout}).groupby("regime")
        rows.append({"layout": layout, "copy": label(copy)} | {regime: _speedup(cells) for regime, cells in regimes})
    table = pd.DataFrame(rows, columns=["layout", "copy", *REGIMES]).dropna(subset=list(REGIMES), how="all")
    return table.dropna(axis="columns", how="all").fillna("not measured")


def limits_table(run: Run) -> pd.DataFrame:
    """Copies on one line: at the fewest tokens in empty launches, at the most in GB/s and % of limit.copy."""
    table = run.cells(**run.line).sort_values("num_tokens")
    launch = table.loc[table["copy"] == "limit.launch", "seconds"].median()
    copies = table[~table["copy"].str.match(r"limit\.(launch|event)|kvnb\.again")].groupby("copy")
    least, most = copies.head(1).set_index("copy").sort_index(), copies.tail(1).set_index("copy").sort_index()
    columns = {
        "copy": least.index.map(label),
        "fewest tokens": least["num_tokens"].map("{:,}".format),
        "take": least["seconds"].map(duration),
        "in empty launches": (least["seconds"] / launch).map(times),
        "most tokens": most["num_tokens"].map("{:,}".format),
        "need": most["seconds"].map(duration),
        "GB/s": most["gbps"].map("{:,.0f}".format),
        "% of limit.copy": most["limit_percent"].map("{:.1f}".format),
    }
    return pd.DataFrame(columns).replace("nan", "").reset_index(drop=True)


def worth(run: Run) -> pd.DataFrame:
    """What kvnb saves in a decode step over BEST and ISSUE (negative: loses), against the time to read the weights.

    Saved per step: the difference x layers. Weights: weight_bytes over the largest GB/s of limit.copy in the run, as if
    one device held the model; no step takes less. A row per model, measured decode size of its heads, and rival.
    """
    best, issue = run.against(BEST), run.against(ISSUE)
    rivals = pd.concat([best.assign(rival=best["b"] + " (fastest)"), issue.assign(rival=ISSUE)])
    bytes_per_s = 1e9 * run.cells()["gbps"][run.cells()["copy"].str.startswith("limit.copy")].max()
    tables = []
    for model in MODELS:
        heads = {"num_kv_heads": model.num_kv_heads, "head_size": model.head_size, "value_head_size": model.head_size}
        cells = rows_of(rivals, run.line | heads | {"regime": "decode"})
        ours = cells["num_tokens"].map(run.cells(copy=OURS, **run.line | heads).set_index("num_tokens")["seconds"])
        saved, weights = ours * (cells["speedup"] - 1), model.weight_bytes / bytes_per_s
        columns = {
            "model": model.name,
            "tokens": cells["num_tokens"],
            "rival": cells["rival"],
            "verdict": cells["verdict"],
            "saved per layer": saved.map(duration),
            "saved per step": (saved * model.layers).map(duration),
            "weights": duration(weights),
            "share": (saved * model.layers / weights).map("{:z.1%}".format),
        }
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables).replace("nan.*", "not measured", regex=True)


def not_ok(run: Run) -> pd.DataFrame:
    """Cells without a time, counted by status and reason; reasons that differ in numbers only are one, the first."""
    bad = run.every_cell[run.every_cell["status"] != "ok"].replace({"copy": LABELS})
    groups = bad.groupby(["status", bad["reason"].str.replace(r"\d[\d.,]*", "#", regex=True)])
    table = groups.agg(cells=("copy", "size"), copies=("copy", lambda copies: ", ".join(sorted(set(copies)))),
                       first_reason=("reason", "first"))  # fmt: skip
    return table.droplevel(1).reset_index().rename(columns={"first_reason": "first reason"})


def provenance(run: Run) -> pd.DataFrame:
    """Machine, versions, method and noise of the run: columns what, value."""
    first, done = run.first, run.samples[run.samples["status"] == "ok"]
    floors = [f"{row.floor:.1%} ({row.timer}, {row.state})" for row in stats.noise_floor(run.samples).itertuples()]
    failed = not_ok(run).groupby("status")["cells"].sum()
    known = done["throttled"].dropna()
    facts = {
        "machine": run.machine,
        "driver, CUDA": f"{first['driver']}, {first['cuda']}" if first["gpu"] else "no GPU",
        "torch, Python": f"{first['torch']}, {first['python']}",
        "kvnb": f"{first['kvnb_commit']}{' with uncommitted changes' if first['dirty'] else ''}",
        "run": f"{first['run_id']}, grid {first['grid']}, {first['utc']}",
        "samples": f"{len(done):,}: {done['worker'].nunique()} workers x up to {done['round'].nunique()} rounds",
        "noise floor": ", ".join(floors) or "not measured",
        "throttled": f"{(known != '').mean():.1%} of samples" if len(known) else "not known",
        "cells without a time": ", ".join(f"{n} {status}" for status, n in failed.items()) or "none",
    }
    return pd.DataFrame(facts.items(), columns=["what", "value"])


# -- what figures show, and their alt texts


FIGURES = {  # title, the column that is drawn, and what a run needs for it
    "latency": ("Time of one copy of K and V", "seconds", "a finished cell"),
    "limit": ("Percent of the speed of limit.copy", "limit_percent", "cells that move 32 MB"),
    "heads": (f"Speedup of kvnb over the {BEST} copy", "speedup", "a PyTorch copy"),
    "eager": ("Time in a CUDA graph and eagerly", "seconds", "copies timed in both ways"),
    "step": ("Time per layer, by layers that share a step", "seconds", "a copy whose step was timed"),
}


def figure_data(figure: str, run: Run) -> pd.DataFrame:
    """The rows that a figure draws, `panel` saying where; empty where the run has none."""
    if figure == "heads":
        return rows_of(run.against(BEST), {name: value for name, value in run.line.items() if name != "num_kv_heads"})
    any_layout = {name: value for name, value in run.line.items() if name != "layout"}
    if figure == "latency":
        table = run.cells(**run.line).assign(panel="").query("copy != 'limit.event'")
    elif figure == "limit":
        table = run.cells(**any_layout).query("family != 'limit' and limit_percent.notna()")
        table = table.assign(panel=table["layout"])
    elif figure == "eager":
        table = pd.concat([run.cells(timer=timer, **run.line).assign(panel=timer) for timer in ("graph", "eager")])
        table = table[(table["family"] != "limit") & (table.groupby("copy")["timer"].transform("nunique") == 2)]
    else:
        table = _step_costs(run.cells(**any_layout), run.cells(part="step", **any_layout))
    # limit.copy stands for the faster of itself and its memcpy form
    table = table[table["copy"] != stats.NOISE[0]].replace({"copy": {"limit.copy.memcpy": "limit.copy"}})
    table = table.sort_values("seconds", kind="stable").drop_duplicates(["panel", "num_tokens", "copy"])
    return table.sort_values(["num_tokens", "copy"], kind="stable")


def _step_costs(write: pd.DataFrame, step: pd.DataFrame) -> pd.DataFrame:
    """Rows of `write` with a `step`: seconds per layer with the step in every call, and with one for LAYERS layers."""
    keys = ["layout", "num_tokens", "copy"]
    both = write.merge(step[[*keys, "seconds"]], on=keys, suffixes=("", "_step")).assign(low=np.nan, high=np.nan)
    every, shared = both["seconds"] + both["seconds_step"], both["seconds"] + both["seconds_step"] / LAYERS
    every = both.assign(seconds=every, panel=both["layout"] + ", in every call")
    return pd.concat([every, both.assign(seconds=shared, panel=both["layout"] + f", shared by {LAYERS} layers")])


def alt(figure: str, run: Run) -> str:
    """Alt text of a figure, from the rows that it draws; where there are none, what is missing."""
    table, (title, column, needs) = figure_data(figure, run), FIGURES[figure]
    if table.empty:
        return f"{title}: nothing to draw, as this run lacks {needs}."
    if figure == "heads":
        return f"Heat map by tokens and heads. {title} on {run.machine}: {_losses(table)}{_speedup(table)}."
    read = duration if column == "seconds" else "{:.0f} %".format
    each = []
    for (panel, copy), line in table.groupby(["panel", "copy"]):
        ends = dict.fromkeys([line[column].iloc[0], line[column].iloc[-1]])
        each.append(f"{label(copy)}{panel and f' ({panel})'} {' to '.join(map(read, ends))}")
    sizes = f"{line_name(run.line)}, {table['num_tokens'].min():,} to {table['num_tokens'].max():,} tokens"
    return f"Line chart. {title} on {run.machine}, {sizes}: {', '.join(each)}."
