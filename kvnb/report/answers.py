"""The only maker of sentences and tables with numbers: notebooks, pages, README, terminal and alt texts take them here.

Everything is about one run on one machine. The headline is part `write`, no padding, state `produced`, timer `graph`
(a CPU run: `wall`). Layouts come in the order of LAYOUTS: packed, as vLLM calls it now, first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from math import isnan
from pathlib import Path

import numpy as np
import pandas as pd

from kvnb import paths
from kvnb.bench import results, stats
from kvnb.copies import releases
from kvnb.copies.releases import numbers as age
from kvnb.problem.case import CASE_FIELDS, Case
from kvnb.problem.models import MODELS
from kvnb.problem.slots import POLICIES
from kvnb.report.words import (
    DEPENDENT,
    ISSUE,
    LABELS,
    OURS,
    USUAL,
    VLLM,
    cell_name,
    count,
    disturbances,
    duration,
    hardware,
    interval,
    label,
    line_name,
    mean,
    neither,
    release,
    speedup,
    times,
)

BEST, PLAIN = "fastest PyTorch", "fastest plain PyTorch"  # in each cell, the fastest copy of these families
GROUPS = {BEST: ("torch", "compile"), PLAIN: ("torch",)}
PEERS = ("flashinfer", "sglang", "vllm")  # installed packages
LAYOUTS = ("packed", "NHD", "HND")
LINE = ["layout", "num_kv_heads", "head_size", "value_head_size", "block_size", "dtype", "source", "slots", "cache"]
EIGHT = {"num_kv_heads": 8, "head_size": 128, "value_head_size": 128}
REGIMES = ("decode", "mixed", "prefill")
LAYERS = 32  # that share one `step` in the step figure: Llama-3.1-8B's
NOTE = (
    "A speedup of 2 says that a copy takes half the other's time. The fastest PyTorch copy is chosen anew in each "
    "case, compiled ones included (plain: without them). FASTER and SLOWER need an interval beyond the margin, which "
    "is 2 % or the run's noise floor where that is larger; a noise floor above "
    f"{100 * stats.WIDEST_SAME:.0f} % hides what is smaller, and SAME is not said then. vllm.scalar is {VLLM}: no "
    "verdict on vLLM rests on it."
)


def recorded(*grids: str) -> dict[str, Path]:
    """GPU folder -> its newest recorded run of the first of these grids that it has: else full, or quick."""
    folders = sorted(path.name for path in paths.RECORDED.glob("*/"))
    newest = {name: [results.newest(name, grid) for grid in grids or ("full", "quick")] for name in folders}
    return {name: next(filter(None, found)) for name, found in newest.items() if any(found)}


def find_runs(runs: str | Iterable[str | Path] = "newest", grid: str = "") -> list[Path]:
    """The run files given, or for "newest" the newest local one and the newest recorded one of each GPU; of a `grid`,
    the recorded ones only. Raises ValueError where there is none, saying how to measure one.
    """
    if runs != "newest":
        return [Path(run) for run in runs]
    local = [] if grid else sorted(paths.LOCAL.glob("*.parquet"), key=lambda path: path.lstat().st_mtime, reverse=True)
    local = list(itertools.islice((path for path in local if results.first(path)["grid"] != "padding"), 1))
    if found := [*local, *recorded(*[grid] * bool(grid)).values()]:
        return found
    if grid:
        raise ValueError(f"no run of grid {grid} in data/recorded: `make record GRID={grid}` measures one on a GPU")
    raise ValueError("no run in data/local or data/recorded: measure one first (02_measure, or `make measure`)")


# -- what a run holds


class Run:
    """The samples of one run, and what sentences, tables and figures take from them. Raises ValueError for several."""

    def __init__(self, samples: pd.DataFrame) -> None:
        if (runs := samples["run_id"].nunique()) != 1:
            raise ValueError(f"these samples are of {runs} runs: load the file of one")
        samples = _by_default(samples)
        self.samples, self.first = samples, samples.iloc[0]
        self.machine = hardware(self.first)
        self.title = f"{self.machine}, torch {self.first['torch']}, {self.first['utc'][:10]}"
        self.timer = "graph" if self.first["gpu"] else "wall"
        self.about = f"{self.machine}, torch {self.first['torch']}, timer {self.timer}, state produced"
        self.where = {"part": "write", "padding": 0, "timer": self.timer, "state": "produced"}
        self.layouts = [layout for layout in LAYOUTS if layout in set(samples["layout"])]
        self.copies = sorted({*samples.loc[samples["family"] != "limit", "copy"]} - {OURS})
        self.yours = sorted(samples.loc[samples["family"] == "yours", "copy"].unique())
        self.every_cell = _with_cache(stats.cells(samples))
        timed = self.cells()["copy"].unique()
        self.releases = sorted((copy for copy in timed if release(copy)), key=age)  # of vLLM, oldest first
        self.shipped = self.releases[-1] if self.releases else None  # what vLLM ships, by the newest of them
        self.line = self._line()
        self._family = dict(samples[["copy", "family"]].drop_duplicates().itertuples(index=False))
        self.versions = dict(samples[["copy", "copy_version"]].drop_duplicates().itertuples(index=False))
        self._head = cache(lambda timer: stats.Timed(rows_of(samples, self.where | {"timer": timer})))
        self.speedups = cache(self._speedups)

    def cells(self, **where: object) -> pd.DataFrame:
        """Finished cells whose columns equal `where`: the headline's, unless `where` says otherwise."""
        return rows_of(self.every_cell, self.where | {"status": "ok"} | where)

    def against(self, other: str) -> pd.DataFrame:
        """`speedups` of kvnb."""
        return self.speedups(OURS, other)

    def _line(self) -> dict:
        """The line (columns LINE) that figures show: most like 8x128 bfloat16 packed, then with most sizes."""
        table = self.cells()
        usual = {**EIGHT, **USUAL, "layout": self.layouts[0]}
        like = (table[list(usual)] == pd.Series(usual)).sum(axis=1)
        lines = table.assign(like=like).groupby(LINE).agg({"like": "first", "num_tokens": "nunique"})
        best = lines.sort_values(["like", "num_tokens"], kind="stable").index[-1:]
        return dict(zip(LINE, best[0] if len(best) else [None] * len(LINE)))

    def _speedups(self, a: str, b: str, timer: str = "") -> pd.DataFrame:
        """stats.compare of a with b in the headline's cells (or those of another timer); may be empty.

        For a key of GROUPS stands its fastest copy in each cell; columns `a` and `b` name the copies.
        """
        head, place = self._head(timer or self.timer), [*LINE, "num_tokens"]
        if group := next((name for name in (a, b) if name in GROUPS), None):
            names = sorted(name for name in head.copies if self._family[name] in GROUPS[group])
            pairs = [(name if a == group else a, name if b == group else b) for name in names]
            tables = [table for pair in pairs if len(table := self.speedups(*pair, timer))]
            rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COMPARED)
            each = rows.groupby(stats.PLACE, sort=False)["speedup"]
            return rows.loc[each.idxmax() if a == group else each.idxmin()].sort_values(place, ignore_index=True)
        if {a, b} <= set(head.copies):
            return _with_cache(stats.compare(head, a, b)).sort_values(place, ignore_index=True)
        return pd.DataFrame(columns=COMPARED)


def _by_default(samples: pd.DataFrame) -> pd.DataFrame:
    """Of each copy, what was measured under its default policy: the first of POLICIES that the run has it under."""
    default = samples.groupby("copy")["policy"].agg(lambda held: min(held.unique(), key=POLICIES.index))
    return samples[samples["policy"] == samples["copy"].map(default)]


COMPARED = [*stats.PLACE, "cache", "speedup", "low", "high", "a", "b", "margin", "doubt", "verdict", "reason"]


def _with_cache(table: pd.DataFrame) -> pd.DataFrame:
    """With a column `cache`: Case.large_cache."""
    cases = table[list(CASE_FIELDS)].drop_duplicates()
    caches = [Case(**case).large_cache for case in cases.to_dict("records")]
    return table.merge(cases.assign(cache=caches), on=list(CASE_FIELDS), how="left")


@cache
def load(path: str | Path) -> Run:
    """The run in a file: a complete one never changes."""
    return Run(results.load(path))


def rows_of(table: pd.DataFrame, where: dict) -> pd.DataFrame:
    """The rows whose columns equal `where`."""
    return table[(table[list(where)] == pd.Series(where)).all(axis=1)]


def by_layout(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(layout, its rows), in the order of LAYOUTS."""
    return [(layout, here) for layout in LAYOUTS if len(here := rows[rows["layout"] == layout])]


# -- sentences


def by_regime(rows: pd.DataFrame) -> str:
    """`1.20 [1.19, 1.21] FASTER in decode, ...`; empty where there are no rows."""
    regimes = [(regime, rows_of(rows, {"regime": regime})) for regime in REGIMES]
    told = [f"{speedup(here, cells=False)} in {regime}" for regime, here in regimes if len(here)]
    return ", ".join(told)


def headline(run: Run) -> str:
    return f"{run.about}. {answer(run)} {certainty(run)}"


def answer(run: Run) -> str:
    """The issue's second TODO in two sentences: does PyTorch's copy outperform the hand-written kernel?

    First against the kernel that vLLM ships, where the run holds it, then against kvnb: how often the fastest PyTorch
    copy does, the fastest that is not compiled, and the issue's own line.
    """
    named = {run.shipped: f"the kernel that vLLM ships ({run.shipped})", OURS: f"our hand-written kernel ({OURS})"}
    kernels = [name for name in named if name and len(run.speedups(BEST, name))]
    if not kernels:
        return "No answer, as no case holds both a hand-written kernel and a PyTorch copy."
    told = [f"beats {named[name]} {_outcome(run, name, whole=name == kernels[0])}" for name in kernels]
    every = f"{_lead(run, kernels[0])}: the {BEST} copy of each case, chosen afterwards, {told[0]}."
    return " It ".join([every, *(f"{text}." for text in told[1:])])


def _lead(run: Run, name: str) -> str:
    """How PyTorch fares against a kernel in a few words, compiled and plain; a run without vLLM's kernel says whose."""
    against, words = "" if run.shipped else f"Against {OURS}, ", []
    for rows in (run.speedups(name, group) for group in (BEST, PLAIN)):
        often = _often(rows["verdict"])
        won = (rows["verdict"] == "SLOWER").groupby(rows["regime"]).mean() > 0.5
        mostly = [regime for regime in REGIMES if won.get(regime, False)]
        some = 0 < len(mostly) < len(won) and often in ("Mostly", "In part", "Seldom")
        words.append(f"In {' and '.join(mostly)}" if some else often)
    compiled, plain = words
    lead = compiled if compiled == plain else f"Compiled, {compiled.lower()}; plain, {plain.lower()}"
    return against + (lead[0].lower() + lead[1:] if against else lead)


def _outcome(run: Run, name: str, whole: bool) -> str:
    """How often PyTorch beats a kernel, by how much at most where that is seldom; its pace, `whole`: that of each."""
    told, compiled = [], "compile" in set(run.speedups(BEST, name)["a"].map(run._family))
    for copy, what in ((BEST, ""), (PLAIN, "without torch.compile "), (ISSUE, f"the issue's own line, {ISSUE}, ")):
        rows = run.speedups(copy, name)
        if copy == PLAIN and not compiled:
            continue
        if rows.empty:
            told.append(f"{what}was not measured")
            continue
        won = rows[rows["verdict"] == "FASTER"].sort_values("speedup", kind="stable")
        most = f", by up to {interval(won.iloc[-1])} times" if 0 < len(won) <= len(rows) / 4 else ""
        text = f"{what}in {len(won) or 'none'} of {len(rows) if told else count(len(rows), 'case')}{most}"
        told.append(text + f" ({_pace(rows, in_words=not told)})" * (whole or not told))
    return "; ".join(told)


def _often(verdicts: pd.Series) -> str:
    """How often PyTorch outperforms a kernel, in a word or two; `verdicts` are the kernel's."""
    won, lost, same = ((verdicts == word).mean() for word in ("SLOWER", "FASTER", "SAME"))
    if won + lost + same <= 0.5:
        return "Not decided"
    often = "Yes" if won == 1 else "Mostly" if won > 0.5 else "In part" if won >= 0.25 else "Seldom"
    return often if won else "No" if lost else "No, they are level"


def _score(rows: pd.DataFrame) -> str:
    """How b fares against a: `in 12 of 98 cases (all NHD, torch.compile), by up to 1.22 [1.19, 1.23] times, ...`."""
    rows = rows.sort_values("speedup", kind="stable")
    wins, losses = (rows[rows["verdict"] == word] for word in ("SLOWER", "FASTER"))
    kinds = [" and ".join(wins[name].value_counts().index) for name in ("layout", "b") if wins[name].nunique() < 3]
    where = f" (all {', '.join(kinds)})" if len(wins) and kinds else ""
    top = worst = ""
    if len(wins):
        best = wins.iloc[0]
        turned = {"speedup": 1 / best["speedup"], "low": 1 / best["high"], "high": 1 / best["low"]}
        top = f", by up to {interval(turned)} times{'' if where else f' ({best.b})'},"
    if len(losses):
        worst = f", by up to {interval(losses.iloc[-1])}"
    open_ = len(rows) - len(wins) - len(losses)
    rest = f"; {open_} are level or not decided" if open_ and len(wins) + len(losses) else ""
    won, lost = len(wins) or "none", len(losses) or "none"
    return f"in {won} of {count(len(rows), 'case')}{where}{top} and loses in {lost}{worst}{rest}"


def _pace(rows: pd.DataFrame, in_words: bool) -> str:
    """Of the first layout: `packed: 1.45 [1.44, 1.47] times as fast in decode, 1.96 [1.95, 1.98] in prefill`."""
    layout, here = by_layout(rows)[0]
    means = {row["regime"]: row for row in stats.summarise(here, ["regime"]).to_dict("records")}
    told = [f"{interval(row)}{neither(row)} in {regime}"
            for regime, row in means.items() if regime != "mixed" or len(means) == 1]  # fmt: skip
    text = ", ".join(told)
    return f"{layout}: {text.replace(' in ', ' times as fast in ', 1)}" if in_words else text


def scope(run: Run) -> str:
    """What `answer` holds for, where the kernel that vLLM ships wins all the same, and how it goes eagerly."""
    if all(run.speedups(BEST, name).empty for name in (run.shipped, OURS)):
        return ""
    how = "in CUDA graphs" if run.timer == "graph" else "call by call"
    told = [f"This holds {how} (timer {run.timer}), with caches as a server leaves them (state produced)."]
    rows = run.speedups(run.shipped, BEST)
    if rows["verdict"].eq("FASTER").any():
        told.append(f"{run.shipped} is {_wins(rows, run.shipped, BEST, 'case')}.")
    elif len(rows):
        told.append(f"{run.shipped} is nowhere faster than {the(BEST)}.")
    return " ".join([*told, *_eagerly(run)])


def _eagerly(run: Run) -> list[str]:
    """How the fastest PyTorch copy fares when every copy is called from Python: a sentence, or none."""
    if run.timer != "graph":
        return []
    eager = {name: run.speedups(BEST, name, "eager") for name in (run.shipped, OURS) if name}
    timed = {name: rows for name, rows in eager.items() if len(rows)}
    if not timed:
        return []
    told = [f"{name} in {(rows['verdict'] == 'FASTER').sum() or 'none'} of {count(len(rows), 'case')} "
            f"({_pace(rows, in_words=True)})" for name, rows in timed.items()]  # fmt: skip
    text = f"Called eagerly (timer eager), {the(BEST)} beats {' and '.join(told)}"
    if "compile" in set(run.cells(timer="eager")["family"]):
        compiled = [*timed.values()][-1]["a"].map(run._family).eq("compile").sum()
        text += f", and is a compiled one in {compiled or 'none'} of them"
    for name in eager.keys() - timed.keys():
        tried = rows_of(run.every_cell, {"copy": name, "timer": "eager"})["reason"]
        text += f"; {name} has no time there" + "".join(f" ({why})" for why in tried[tried != ""].unique()[:1])
    return [f"{text}."]


def certainty(run: Run) -> str:
    """What the intervals rest on, which differences are not called, and which copies have no time."""
    if not (run.samples["status"] == "ok").any():
        return "Nothing was timed."
    told = brackets(run.samples, pd.concat([run.speedups(name, BEST) for name in (run.shipped or OURS, OURS)]))
    cells = run.every_cell[run.every_cell["family"].isin([*GROUPS[BEST], "peer"])]
    timed = cells[cells["status"] == "ok"]
    absent = sorted(set(cells.loc[cells["status"] != "unsupported", "copy"]) - set(timed["copy"]))
    told += f" Without a time in this run: {', '.join(absent)}." * bool(absent)
    return told + " No compiled copy was timed." * ("compile" not in set(timed["family"]))


def brackets(samples: pd.DataFrame, rows: pd.DataFrame) -> str:
    """What the intervals of `rows`, speedups from `samples`, rest on, and which differences are not called."""
    rounds, workers = samples.loc[samples["status"] == "ok", ["round", "worker"]].nunique()
    few = " (not 3: they are too short)" * (workers < 3)
    told = f"In brackets: 95 % intervals, from {count(workers, 'worker')}{few} of up to {count(rounds, 'round')}."
    if rows.empty:
        return told
    margin, doubt = rows["margin"].max(), "".join(f": {doubt}" for doubt in rows["doubt"].unique() if doubt)
    hidden, none = "A noise floor of {:,.0%} hides smaller differences", "A difference below {:.1%} counts as none"
    return f"{told} {(hidden if margin > stats.WIDEST_SAME else none).format(margin)}{doubt}."


def the(copy: str) -> str:
    """A copy's name within a sentence."""
    return f"the {copy} copy" if copy in GROUPS else label(copy)


def sentences(run: Run) -> list[str]:
    """For each regime in turn: where PyTorch wins, where the kernel that vLLM ships does, and where kvnb."""
    rivals_of = {BEST: (run.shipped, OURS), run.shipped: (BEST, OURS), OURS: (run.shipped, BEST, ISSUE)}
    told = []
    for regime, name in itertools.product(REGIMES, filter(None, rivals_of)):
        here = {"regime": regime}
        clauses = [_wins(rows_of(run.speedups(name, b), here), name, b) for b in rivals_of[name] if b]
        if name == BEST and run.timer != "wall":
            eagerly = [_wins(rows_of(run.speedups(name, b, "eager"), here), name, b) for b in rivals_of[name] if b]
            clauses += [f"with timer eager, {clause}" for clause in eagerly if clause]
        if any(clauses):
            who = "PyTorch" if name == BEST else name
            told.append(f"{regime.capitalize()}, {who}: {'; '.join(filter(None, clauses))}.")
    return told


def _wins(rows: pd.DataFrame, name: str, rival: str, noun: str = "cell") -> str:
    """How often a copy is FASTER than a rival, and how much: kvnb by layout, the others where they are."""
    if rows.empty:
        return ""
    won = rows[rows["verdict"] == "FASTER"].sort_values("speedup", kind="stable")
    told = f"faster than {the(rival)} in {len(won) or 'none'} of {count(len(rows), noun)}"
    if name == OURS:
        return f"{told}: {', '.join(f'{layout} {speedup(here)}' for layout, here in by_layout(rows))}"
    ends = dict.fromkeys(interval(won.iloc[place]) for place in (0, -1)) if len(won) else ()
    return f"{told}, by {' to '.join(ends)} times: {_places(rows, name)}" if ends else told


def _places(rows: pd.DataFrame, name: str) -> str:
    """Where rows are FASTER: `NHD 3 of 31 (8x64, 8x80 at 1 token, torch.compile; 8x96 at 32 tokens, torch.scatter)`.

    Where they mostly are, the spellings and no shapes (`packed 26 of 26 (torch.compile 20, torch.scatter 6)`): those
    that are left are in the rival's own sentence.
    """
    told = []
    for layout, here in by_layout(rows):
        won = here[here["verdict"] == "FASTER"]
        if len(won):
            words = _spellings(won, name) if len(won) > len(here) / 2 else _shapes(here, name)
            told.append(f"{layout} {len(won)} of {len(here)}" + f" ({words})" * bool(words))
    return ", ".join(told)


def _spellings(won: pd.DataFrame, name: str) -> str:
    """`torch.compile 20, torch.scatter 6`; empty for a copy of one spelling."""
    counts = won["a"].value_counts() if name in GROUPS else {}
    return ", ".join(f"{spelling} {n}" for spelling, n in counts.items())


def _shapes(rows: pd.DataFrame, name: str) -> str:
    """Lines of one layout that are FASTER at the same sizes, by the same spellings, together; most first."""
    lines = {}
    for _, line in rows.groupby(LINE):
        won, sizes = line[line["verdict"] == "FASTER"], sorted(line["num_tokens"])
        if len(won):
            spelling = f", {'/'.join(won['a'].value_counts().index)}" if name in GROUPS else ""
            lines.setdefault(f"{_sizes(won['num_tokens'], sizes)}{spelling}", []).append(line_name(line.iloc[0]))
    most_first = sorted(lines.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{', '.join(names)} at {where}" for where, names in most_first)


def _sizes(won: Iterable[int], measured: list[int]) -> str:
    """`32 to 256 tokens` where every measured size between is among them, else each."""
    won = sorted(won)
    between = [size for size in measured if won[0] <= size <= won[-1]]
    *others, last = (f"{size:,}" for size in won)
    all_of = between == won and len(won) > 2
    return f"{others[0]} to {last} tokens" if all_of else ", ".join([*others, count(won[-1], "token")])


def note(runs: Iterable[Run]) -> str:
    """NOTE, and what no run here can say about vLLM."""
    silent = not any(run.shipped for run in runs)
    return NOTE + " Until vLLM's wheels are measured, nothing else here says what vLLM does." * silent


# -- tables


def verdict_table(run: Run, copies: Iterable[str] = ()) -> pd.DataFrame:
    """Layout, copy, and per regime kvnb's speedup over it as a geometric mean: `2.10 [2.05, 2.15] FASTER (...)`."""
    return _verdicts(run, OURS, copies or main_copies(run))


def main_copies(run: Run, kernel: str = OURS) -> list[str]:
    """What a hand-written kernel is compared with first: kvnb with all, the kernel that vLLM ships with PyTorch's."""
    asked = [BEST, ISSUE, "torch.compile", PLAIN]
    main = [run.shipped, *asked, "triton", *PEERS, "vllm.scalar", *run.yours] if kernel == OURS else asked
    return [copy for copy in main if copy and len(run.speedups(kernel, copy))]


def issue_table(run: Run) -> pd.DataFrame:
    """The issue's question: `verdict_table` of the kernel that vLLM ships; empty where the run does not hold it."""
    return _verdicts(run, run.shipped or "vLLM", main_copies(run, run.shipped) if run.shipped else [])


def width_table(run: Run) -> pd.DataFrame:
    """The issue's question by layout and KV heads (of 128, all else USUAL): per regime, the speedup of the kernel that
    vLLM ships over the fastest PyTorch copy, and which is that most often. Empty where the run does not hold it.
    """
    same, told = USUAL | {"head_size": 128, "value_head_size": 128}, []
    for layout, there in by_layout(rows_of(run.speedups(run.shipped, BEST), same)):
        for heads, here in there.groupby("num_kv_heads"):
            regimes = {regime: _with_spelling(cells) for regime, cells in here.groupby("regime")}
            told.append({"layout": layout, "KV heads": heads} | regimes)
    table = pd.DataFrame(told, columns=["layout", "KV heads", *REGIMES])
    return table.dropna(axis="columns", how="all").fillna("not measured")


def _with_spelling(rows: pd.DataFrame) -> str:
    """`0.68 [0.67, 0.69] SLOWER, but 1 of 3 FASTER; torch.compile (2 of 3)`."""
    told, spellings = mean(rows), rows["b"].value_counts()
    odd, most = contrary(rows, told["verdict"]), spellings[spellings == spellings.max()]
    often = f" ({most.iloc[0]} of {len(rows)}{' each' * (len(most) > 1)})" if len(spellings) > 1 else ""
    return f"{interval(told)} {told['verdict']}{f', but {odd}' if odd else ''}; {', '.join(most.index)}{often}"


def contrary(rows: pd.DataFrame, verdict: str) -> str:
    """How many say the contrary of their mean's verdict, `2 of 9 SLOWER`; where that decides nothing, that lose."""
    other = "FASTER" if verdict == "SLOWER" else "SLOWER"
    odd = (rows["verdict"] == other).sum()
    return f"{odd} of {len(rows)} {other}" if odd and len(rows) > 1 else ""


def _verdicts(run: Run, kernel: str, copies: Iterable[str]) -> pd.DataFrame:
    rows, title = [], f"{kernel}'s speedup over"
    for layout, copy in itertools.product(run.layouts, copies):
        regimes = rows_of(run.speedups(kernel, copy), {"layout": layout}).groupby("regime")
        rows.append({"layout": layout, title: label(copy)} | {regime: speedup(cells) for regime, cells in regimes})
    table = pd.DataFrame(rows, columns=["layout", title, *REGIMES]).dropna(subset=list(REGIMES), how="all")
    return table.dropna(axis="columns", how="all").fillna("not measured")


def limits_table(run: Run) -> pd.DataFrame:
    """Copies on one line: at the fewest tokens in empty launches, at the most in GB/s and % of limit.copy."""
    table = _drawn(run.cells(**run.line), run).sort_values("num_tokens")
    launch = table.loc[table["copy"] == "limit.launch", "seconds"].median()
    copies = table[~table["copy"].str.match(r"limit\.(launch|event)")].groupby("copy")
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


def scattered(run: Run) -> str:
    """What rows that are scattered cost: at random slots, and in whole blocks in random order where a run has both,
    against slot order in one long block.

    These are different cases, so that the ratio of their times has no interval. Empty where a run has no rows in slot
    order.
    """
    cells = run.cells().replace({"copy": {"limit.copy.memcpy": "limit.copy"}}).query("copy in [@OURS, 'limit.copy']")
    same = ["copy", "num_tokens", *(name for name in LINE if name not in ("slots", "block_size"))]
    cells = cells.sort_values("seconds", kind="stable")
    usual = {name: USUAL[name] for name in ("slots", "block_size")}
    order = cells.query("slots == 'prefill' and block_size == num_tokens").drop_duplicates(same)
    blocks = rows_of(cells, usual | {"slots": "prefill"}).drop_duplicates(same)
    rows = rows_of(cells, usual).drop_duplicates(same)
    for other, suffix in ((order, "_in_order"), (blocks, "_in_blocks")):
        how = "inner" if suffix == "_in_order" else "left"
        rows = rows.merge(other[[*same, "seconds"]], how, on=same, suffixes=("", suffix))
    told = []
    for row in rows.sort_values(["num_tokens", "copy"]).to_dict("records"):
        apart, ordered, within = row["seconds"], row["seconds_in_order"], row["seconds_in_blocks"]
        less = f", {duration(within)} with whole blocks of {row['block_size']} in random order"
        less = less if row["copy"] == OURS and not isnan(within) else ""
        ratio = f"{times(apart / ordered)} times as long"
        told.append(f"{row['copy']} {duration(apart)} against {duration(ordered)}, {ratio}{less} ({cell_name(row)})")
    return f"Rows at random slots against rows in slot order: {'; '.join(told)}." if told else ""


def beyond_limit(run: Run) -> str:
    """Where kvnb, launched plainly, is faster than limit.copy all the same, and why; empty where it is nowhere."""
    rows = run.cells(copy=OURS).query("limit_percent.notna()")
    past, room = rows[rows["limit_percent"] > 100], run.first["l2_bytes"] * 3 / 4  # as limits.cu chooses its shape
    if past.empty:
        return ""
    most, small = past.loc[past["limit_percent"].idxmax()], (past["bytes_moved"] <= room).sum() * bool(run.first["gpu"])
    many = "All" if small == len(past) else f"{small} of them"
    why = (
        f" {many} move at most {room / 1e6:.0f} MB, three quarters of L2: what is copied stays there, and from one "
        "wave of threads up to that size limit.copy's own shape is not the best at every size."
    )
    return (
        f"{OURS} itself, launched plainly, passes 100 % too: in {len(past)} of {count(len(rows), 'cell')}, up to "
        f"{most['limit_percent']:.0f} % ({cell_name(most)}).{why if small else ''}"
    )


def placed(run: Run) -> str:
    """What memory does to one kernel under two names, and so to any two copies; empty without graphs of both.

    A verdict on a kernel over itself comes of an interval that is drawn over workers: each of them repeats it.
    """
    again, rows = stats.NOISE[0], run.against(stats.NOISE[0])
    if rows.empty or run.timer != "graph":
        return ""
    far, beyond = rows.loc[(rows["speedup"] - 1).abs().idxmax()], rows["verdict"].isin(["FASTER", "SLOWER"]).sum()
    so = ": workers repeat it, so that a single FASTER or SLOWER by so little can be placement" if beyond else ""
    return (
        "Within a case placement moves a copy too, as each has its slots and its graph elsewhere in memory "
        f"({run.machine}, grid {run.first['grid']}): {again}, the same kernel as {OURS}, takes up to "
        f"{abs(far['speedup'] - 1):.1%} {'more' if far['speedup'] > 1 else 'less'} time ({cell_name(far)}), and its "
        f"interval lies beyond the margin of {rows['margin'].max():.1%} in {beyond or 'none'} of "
        f"{count(len(rows), 'case')}{so}."
    )


def worth(run: Run) -> pd.DataFrame:
    """What kvnb saves in a decode step over vLLM's kernel, BEST and ISSUE (negative: loses), against the weights' time.

    Saved per step: the difference x layers. Weights: weight_bytes over the largest GB/s of limit.copy in the run, as if
    one device held the model; no step takes less. A row per model, measured decode size of its heads, and rival.
    """
    rivals = pd.concat([run.against(b).assign(rival=b) for b in (run.shipped, BEST, ISSUE) if b])
    rivals["rival"] = rivals["rival"].mask(rivals["rival"] == BEST, rivals["b"] + " (fastest)").map(label)
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


def noise_floors(run: Run) -> str:
    """`1.8% (graph, produced), ...`"""
    told = [f"{row.floor:.1%} ({row.timer}, {row.state}{', of disturbed rounds' * row.disturbed})"
            for row in stats.noise_floor(run.samples).itertuples()]  # fmt: skip
    return ", ".join(told) or "not measured"


def provenance(run: Run) -> pd.DataFrame:
    """Machine, versions, method and noise of the run: columns what, value."""
    first, done = run.first, run.samples[run.samples["status"] == "ok"]
    failed = not_ok(run).groupby("status")["cells"].sum()
    facts = {
        "machine": run.machine,
        "driver, CUDA": f"{first['driver']}, {first['cuda']}" if first["gpu"] else "no GPU",
        "torch, Python": f"{first['torch']}, {first['python']}",
        "kvnb": f"{first['kvnb_commit']}{' with uncommitted changes' if first['dirty'] else ''}",
        "run": f"{first['run_id']}, grid {first['grid']}, {first['utc']}",
        "samples": f"{len(done):,}: {done['worker'].nunique()} workers x up to {done['round'].nunique()} rounds",
        "noise floor": noise_floors(run),
        "disturbed": disturbances(run.samples),
        "cells without a time": ", ".join(f"{n} {status}" for status, n in failed.items()) or "none",
    }
    return pd.DataFrame(facts.items(), columns=["what", "value"])


# -- what vLLM's releases did: runs that hold several of them, such as grid `releases`


CALL = ("layout", "source")
SOURCES = {"contiguous": "contiguous rows", "qkv": "slices of the fused projection", "transposed": "transposed heads"}
SAME, DEFAULT = "the same problem: NHD, contiguous rows", "as called: by each release's default backend"


def release_facts(copy: str) -> dict:
    """registers (per thread of a release's kernel, bfloat16, sm_90; None: not known), and the layout and source of its
    default backend's call (empty: not known), with the backend's file at that release and a note."""
    call = releases.DEFAULT_CALLS.get(release(copy))
    known = call._asdict() if call else dict.fromkeys(("layout", "source", "backend", "note"), "")
    return known | {"registers": releases.REGISTERS.get(release(copy))}


def registers(copy: str) -> str:
    """Registers per thread of a release's kernel, in words."""
    number = release_facts(copy)["registers"]
    return "not known" if number is None else str(number)


def release_times(run: Run) -> pd.DataFrame:
    """Cells of vLLM's releases at 8x128, oldest first: `panel` SAME or DEFAULT."""
    tables = []
    for panel, copy in itertools.product((SAME, DEFAULT), run.releases):
        tables.append(run.cells(copy=copy, **USUAL | EIGHT | _call(panel, copy)).assign(panel=panel))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*run.cells(), "panel"])
    return table[table.groupby(["panel", "num_tokens"])["copy"].transform("nunique") > 1]


def _call(panel: str, copy: str) -> dict:
    """Layout and source of a release in a panel."""
    facts = release_facts(copy)
    return {"layout": "NHD", "source": "contiguous"} if panel == SAME else {name: facts[name] for name in CALL}


def release_table(run: Run) -> pd.DataFrame:
    """Per problem and release: what of its wheel ran (its own op, or that op as a cubin), registers, layout and
    source of the call, and the time at each number of tokens."""
    cells, rows, everything = release_times(run), [], set(run.every_cell["copy"])
    for panel, copy in itertools.product((SAME, DEFAULT), run.releases):
        ran_as = "op" if f"{copy}.cubin" in everything else "cubin"
        row = {"problem": panel.split(":")[0], "release": release(copy), "ran as": ran_as, "registers": registers(copy)}
        row |= {"called with": ", ".join(_call(panel, copy).values()).strip(", ")}
        line = rows_of(cells, {"panel": panel, "copy": copy}).sort_values("num_tokens")
        rows.append(row | {f"{cell.num_tokens:,}": duration(cell.seconds) for cell in line.itertuples()})
    table = pd.DataFrame(rows, columns=[*dict.fromkeys(itertools.chain(["problem"], *rows))])
    return table.replace({"called with": {"": "not known"}}).fillna("not measured")


def release_calls(run: Run) -> pd.DataFrame:
    """Where the default call of each release is read from: its backend's file in vLLM's repository at that tag."""
    facts = {copy: release_facts(copy) for copy in run.releases}
    rows = [(copy, f"v{release(copy)}: {fact['backend']}", fact["note"]) for copy, fact in facts.items()]
    return pd.DataFrame(rows, columns=["release", "its default backend's call is in", "note"])


def release_steps(run: Run) -> pd.DataFrame:
    """What each release changed: speedup over the release before, a row per panel, copy and size.

    Where the default call changed too, the two times are of two cases: their ratio has no interval and no verdict.
    """
    tables = []
    for before, copy in itertools.pairwise(run.releases):
        for panel in (SAME, DEFAULT):
            old, new = (USUAL | _call(panel, name) for name in (before, copy))
            if old == new:
                steps = rows_of(run.speedups(copy, before), new)
            else:
                size = [*EIGHT, "num_tokens"]
                was = run.cells(copy=before, **old).set_index(size)["seconds"]
                steps = run.cells(copy=copy, **new).join(was.rename("was"), on=size).dropna(subset="was")
                steps = steps.assign(a=copy, b=before, speedup=steps["was"] / steps["seconds"], low=np.nan, high=np.nan)
            tables.append(steps.reindex(columns=COMPARED).assign(panel=panel))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*COMPARED, "panel"])


def release_failures(run: Run) -> pd.DataFrame:
    """What vLLM's releases write wrongly, or refuse as their kernels cannot do it, by layout and source: in words,
    status, releases (oldest first), cells, and the first reason.

    What kvnb is refused too is a state that no copy is given, and a release that another timer has a time of in that
    very case can do it: neither is a matter of its kernel.
    """
    cells = run.every_cell[run.every_cell["copy"].str.startswith("vllm==")]
    case = ["copy", *CASE_FIELDS]
    never = cells["status"].eq("unsupported").groupby([cells[name] for name in case]).transform("all")
    given = ~cells["reason"].isin(run.every_cell.loc[run.every_cell["copy"] == OURS, "reason"])
    bad, rows = cells[cells["status"].eq("wrong") | (never & given)], []
    for layout, there in by_layout(bad):
        for (source, status), here in there.groupby(["source", "status"]):
            named = ", ".join(sorted(here["copy"].unique(), key=lambda copy: (age(copy), copy)))
            rows.append((f"{layout}, {SOURCES[source]}", status, named, len(here), here["reason"].iloc[0]))
    return pd.DataFrame(rows, columns=["problem", "status", "releases", "cells", "first reason"])


def release_headline(run: Run) -> str:
    """Which release helped whom and hurt whom: newest against oldest, the worst step and the best."""
    if len(run.releases) < 2:
        return f"{run.about}: no answer, as this run holds fewer than two releases of vLLM."
    oldest, newest = run.releases[0], run.releases[-1]
    steps = rows_of(release_steps(run), {"panel": SAME})
    since = rows_of(run.speedups(newest, oldest), {**USUAL, **EIGHT, "layout": "NHD"})
    since = by_regime(since) or "not measured"
    told = [f"the speedup of {newest} over {oldest} for the same 8x128 NHD problem is {since}"]
    for verdict, word in (("SLOWER", "hurt"), ("FASTER", "helped")):
        rows = steps[steps["verdict"] == verdict].sort_values("speedup", ascending=verdict == "SLOWER", kind="stable")
        if rows.empty:
            told.append(f"No release {word} anyone here")
            continue
        row = rows.iloc[0]
        step = f"{interval(row)} over {row['b']}, {cell_name(row)}; registers per thread "
        step += f"{registers(row['b'])} to {registers(row['a'])}"
        told.append(f"The release that {word} most was {row['a']} ({step})")
    return f"{run.about}: {'. '.join(told)}."


def release_sentences(run: Run) -> list[str]:
    """A sentence per problem and release that hurt or helped someone, hurt first; then those that changed nothing."""
    told, quiet = [], {}
    for (panel, copy), rows in release_steps(run).groupby(["panel", "a"], sort=False):
        words = {"SLOWER": [], "FASTER": [], "": []}  # whom it hurt, whom it helped, what cannot be judged
        for (heads, head_size, regime), here in rows.groupby(["num_kv_heads", "head_size", "regime"], sort=False):
            whom, total = f"{regime} of {heads}x{head_size}", stats.summarise(here, ["regime"]).iloc[0]
            if here["low"].isna().any():
                words[""].append(f"{times(total['speedup'])} in {whom}")
            elif total["verdict"] in words:
                words[total["verdict"]].append(f"{whom} {speedup(here)}")
        another = f"now called with {', '.join(_call(panel, copy).values())}, and a speedup from case to case of"
        verbs = {"SLOWER": "hurt", "FASTER": "helped", "": another}
        clauses = [f"{verbs[key]} {', '.join(whom)}" for key, whom in words.items() if whom]
        problem = panel.split(":")[0].capitalize()
        if clauses:
            text = f"{problem}, {copy} over {rows['b'].iloc[0]}: {'; '.join(clauses)}."
            told.append((panel != SAME, not words["SLOWER"], text))
        else:
            quiet.setdefault(problem, []).append(copy)
    still = [f"{problem}: no mean clears the margin with {', '.join(names)}." for problem, names in quiet.items()]
    return [text for *_, text in sorted(told, key=lambda row: row[:2])] + still


def _by_problem(rows: pd.DataFrame, first: dict) -> list[dict]:
    """A row per line of `rows`, which are of Run.speedups: `first`, the problem, and the speedup in each regime."""
    told = []
    for line, here in rows.groupby(LINE):
        row = first | {"problem": line_name(dict(zip(LINE, line)), layout=True)}
        told.append(row | {regime: speedup(cells) for regime, cells in here.groupby("regime")})
    return told


def op_and_cubin(run: Run) -> pd.DataFrame:
    """Where a run holds a release as its op and as its cubin: the op's speedup over the cubin, per line and regime."""
    rows = []
    for copy, timer in itertools.product(run.releases, (run.timer, "call")):
        rows += _by_problem(run.speedups(copy, f"{copy}.cubin", timer), {"release": copy, "timer": timer})
    return pd.DataFrame(rows, columns=["release", "timer", "problem", *REGIMES]).fillna("not measured")


def op_from_python(run: Run) -> pd.DataFrame:
    """Where a run calls a release's op from Python (timers host and eager): its speedup over kvnb and the fastest
    PyTorch copy, per line and regime."""
    rows = []
    for copy, timer, other in itertools.product(run.releases, ("host", "eager"), (OURS, BEST)):
        first = {"release": copy, "timer": timer, "over": label(other)}
        rows += _by_problem(run.speedups(copy, other, timer), first)
    return pd.DataFrame(rows, columns=["release", "timer", "over", "problem", *REGIMES]).fillna("not measured")


def peers_table(run: Run) -> pd.DataFrame:
    """The speedup of both our kernels over the op of each installed package that the run holds, per line and regime."""
    rows = []
    for ours, peer in itertools.product((OURS, DEPENDENT), PEERS):
        rows += _by_problem(run.speedups(ours, peer), {"speedup of": ours, "over": peer})
    return pd.DataFrame(rows, columns=["speedup of", "over", "problem", *REGIMES]).fillna("not measured")


def peers(run: Run) -> str:
    """In how many cells each installed package's op beats our kernels, losses of ours first; empty without any."""
    told = []
    for ours, peer in itertools.product((OURS, DEPENDENT), PEERS):
        if len(rows := run.speedups(peer, ours)):
            won = rows[rows["verdict"] == "FASTER"].sort_values("speedup", kind="stable")
            most = "".join(f", up to {interval(row)} times ({cell_name(row)})" for _, row in won.tail(1).iterrows())
            told.append((won.empty, f"{peer} is faster than {ours} in {len(won)} of {count(len(rows), 'cell')}{most}"))
    told = "; ".join(text for _, text in sorted(told, key=lambda item: item[0]))
    ran = [run.versions[peer].partition(", ")[2] for peer in PEERS if len(run.cells(copy=peer))]
    installed = ", ".join(filter(None, ran)) or "the run does not say which"
    return f"{run.about}: {told}. Installed: {installed}." if told else ""


def agreement(run: Run) -> str:
    """Whether op and cubin of a release agree, in one sentence."""
    pairs = [rows for copy in run.releases if len(rows := run.speedups(copy, f"{copy}.cubin"))]
    if not pairs:
        return f"{run.about}: not measured, as no release is in this run both as its op and as its cubin."
    rows = pd.concat(pairs)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in rows["verdict"].value_counts().items())
    ends = f"from {times(rows['speedup'].min())} to {times(rows['speedup'].max())}"
    names, cells = ", ".join(rows["a"].unique()), count(len(rows), "cell")
    return f"{run.about}: for {names}, the op's speedup over the cubin is {ends} in {cells} ({counts})."


# -- what figures show, and their alt texts


FIGURES = {  # title, the column that is drawn, and what a run needs for it
    "latency": ("Time of one copy of K and V", "seconds", "a finished cell"),
    "limit": ("Percent of the speed of limit.copy", "limit_percent", "cells that move 32 MB"),
    "heads": (f"Speedup of kvnb over the {BEST} copy", "speedup", "a PyTorch copy"),
    "eager": ("Time in a CUDA graph and eagerly", "seconds", "copies timed in both ways"),
    "step": ("Time per layer, by layers that share a step", "seconds", "a copy whose step was timed"),
    "releases": ("Time of one copy of K and V, by vLLM release", "seconds", "two releases of vLLM"),
}
PANELS = ("limit", "step")  # figures with a panel per layout


def figure_data(figure: str, run: Run, layout: str = "") -> pd.DataFrame:
    """The rows that a figure draws, `panel` saying where; empty where the run has none. `layout`: not run.line's."""
    line = run.line | ({"layout": layout} if layout else {})
    if figure == "releases":
        return release_times(run)
    if figure == "heads":
        return rows_of(run.against(BEST), {name: value for name, value in line.items() if name != "num_kv_heads"})
    any_layout = {name: value for name, value in line.items() if name != "layout"}
    if figure == "latency":
        table = run.cells(**line).assign(panel="").query("copy != @stats.EVENT")
    elif figure == "limit":
        table = run.cells(**any_layout).query("family != 'limit' and limit_percent.notna()")
        table = table.assign(panel=table["layout"])
    elif figure == "eager":
        table = pd.concat([run.cells(timer=timer, **line).assign(panel=timer) for timer in ("graph", "eager")])
        table = table[(table["family"] != "limit") & (table.groupby("copy")["timer"].transform("nunique") == 2)]
    else:
        table = _step_costs(run.cells(**any_layout), run.cells(part="step", **any_layout))
    # limit.copy stands for the faster of itself and its memcpy form
    table = _drawn(table, run).replace({"copy": {"limit.copy.memcpy": "limit.copy"}})
    table = table.sort_values("seconds", kind="stable").drop_duplicates(["panel", "num_tokens", "copy"])
    return table.sort_values(["num_tokens", "copy"], kind="stable")


def _drawn(table: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Without what would only be seen twice: kvnb's second name, and vLLM's kernels other than the newest."""
    older = table["copy"].str.startswith("vllm==") & (table["copy"] != run.shipped)
    return table[(table["copy"] != stats.NOISE[0]) & ~older]


def _step_costs(write: pd.DataFrame, step: pd.DataFrame) -> pd.DataFrame:
    """Rows of `write` with a `step`: seconds per layer with the step in every call, and with one for LAYERS layers."""
    keys = ["layout", "num_tokens", "copy"]
    both = write.merge(step[[*keys, "seconds"]], on=keys, suffixes=("", "_step")).assign(low=np.nan, high=np.nan)
    every, shared = both["seconds"] + both["seconds_step"], both["seconds"] + both["seconds_step"] / LAYERS
    every = both.assign(seconds=every, panel=both["layout"] + ", in every call")
    return pd.concat([every, both.assign(seconds=shared, panel=both["layout"] + f", shared by {LAYERS} layers")])


def alt(figure: str, run: Run, layout: str = "") -> str:
    """Alt text of a figure, from the rows that it draws; where there are none, what is missing."""
    table, (title, column, needs) = figure_data(figure, run, layout), FIGURES[figure]
    if table.empty:
        return f"{title}: nothing to draw, as this run lacks {needs}."
    if figure == "heads":
        told = f"{title} on {run.machine}, {layout or run.line['layout']}: {speedup(table)}"
        return f"Heat map by tokens and heads. {told}; the {BEST} copy wins {_score(table)}."
    lines = "num_tokens" if figure == "releases" else "copy"
    read, each = duration if column == "seconds" else "{:.0f} %".format, []
    for (panel, line), points in table.groupby(["panel", lines], sort=lines == "copy"):
        ends = " to ".join(map(read, dict.fromkeys([points[column].iloc[0], points[column].iloc[-1]])))
        name, most = label(line), ""
        if lines == "num_tokens":
            name, most, panel = count(line, "token"), f", at most {read(points[column].max())}", panel.split(":")[0]
        each.append(f"{name}{panel and f' ({panel})'} {ends}{most}")
    name = line_name(run.line | {"layout": layout or run.line["layout"]}, layout=figure not in PANELS)
    what = f"{name}, {table['num_tokens'].min():,} to {table['num_tokens'].max():,} tokens"
    if figure == "releases":
        each_has = ", ".join(f"{copy} {registers(copy)}" for copy in sorted(table["copy"].unique(), key=age))
        what = f"8x128, by release with registers per thread {each_has}"
    return f"Line chart. {title} on {run.machine}, {what}: {_found(table, column)}{', '.join(each)}."


def _found(table: pd.DataFrame, column: str) -> str:
    """A line chart's finding: the fastest copy at the fewest and at the most tokens, of its panel listed first."""
    panels, order = sorted(table["panel"].unique()), {layout: place for place, layout in enumerate(LAYOUTS)}
    panel = min(panels, key=lambda name: order.get(name.split(",")[0], 0))
    copies, told = table[(table["family"] != "limit") & (table["panel"] == panel)], []
    if copies["copy"].nunique() < 2:
        return ""
    for tokens in dict.fromkeys((copies["num_tokens"].min(), copies["num_tokens"].max())):
        here = copies[copies["num_tokens"] == tokens].set_index("copy")[column]
        told.append(f"{label(here.idxmin() if column == 'seconds' else here.idxmax())} at {count(tokens, 'token')}")
    return f"fastest{panel and f' ({panel})'} is {', and '.join(told)}; "
