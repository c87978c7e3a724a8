"""Two runs side by side: another GPU, commit or torch. B's speedup over A in every cell that both timed.

Within a run copies take turns in the same rounds, and a speedup is a median of ratios. Rounds of two runs have nothing
in common: here it is a ratio of medians, and its interval draws the workers and rounds of each side by themselves. It
also holds what else changed between the runs: board, allocations, clocks. What is known of that widens the margin.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from kvnb import paths
from kvnb.bench import results, stats
from kvnb.problem.case import CASE_FIELDS, GRIDS, Case, regime_of
from kvnb.report.answers import REGIMES, by_regime, rows_of
from kvnb.report.words import OURS, cell_name, count, duration, hardware, interval, label, speedup

TIMED = ["timer", "state"]
CELL = [*CASE_FIELDS, "part", *TIMED, "copy", "policy"]  # what two cells must share
LAUNCH, MEMCPY = "limit.launch", "limit.copy.memcpy"
CLOCK = "{1:,.0f} MHz (9 of 10 samples: {0:,.0f} to {2:,.0f})"


def speedups(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """CELL, seconds_a, seconds_b, speedup (of B: time in A / time in B), low, high for every cell in both.

    `a`, `b`: as stats.by_round has them. Intervals: 95 %, by the bootstrap of stats, each side drawn by itself.
    """
    (cells_a, drawn_a), (cells_b, drawn_b) = _resampled(a), _resampled(b)
    both = cells_a.reset_index().merge(cells_b.reset_index(), on=CELL, suffixes=("_a", "_b"))
    # One seed draws alike on both sides, and draws are independent of each other: A's draw i meets B's draw i - 1.
    ratios = drawn_a[both.pop("index_a")] / np.roll(drawn_b, 1, axis=1)[both.pop("index_b")]
    low, high = np.percentile(ratios, [2.5, 97.5], axis=1)
    return both.assign(speedup=both["seconds_a"] / both["seconds_b"], low=low, high=high)


def _resampled(rounds: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
    """CELL and seconds (the median of a cell's rounds), and medians of draws of them `[cells, stats.RESAMPLES]`."""
    cells, bootstrap = stats.resampled(rounds, CELL, "seconds")
    seconds, drawn = np.empty(len(cells)), np.empty((len(cells), stats.RESAMPLES))
    for some, medians, draws in bootstrap:
        seconds[some], drawn[some] = medians, draws
    return cells.assign(seconds=seconds), drawn


class Side:
    """One run: its samples, medians by round, first row (what holds for all) and copies: name -> copy_version."""

    def __init__(self, path: Path) -> None:
        if ".parts" in (path.suffix, path.parent.suffix):
            raise ValueError(f"{path} is of a run that is not finished: the command that began it goes on with it")
        self.path, self.samples = path, results.load(path)
        if (runs := self.samples["run_id"].nunique()) != 1:
            raise ValueError(f"{path} holds {runs} runs: give the file of one")
        self.first, self.rounds = self.samples.iloc[0].fillna(""), stats.by_round(self.samples)
        self.hardware = hardware(self.first)
        here = path.resolve()
        self.name = here.relative_to(paths.ROOT).as_posix() if here.is_relative_to(paths.ROOT) else path.name
        self.launches = self.samples.drop_duplicates(CELL).set_index(CELL)["launches"]
        self.copies = self.samples[["copy", "copy_version"]].drop_duplicates().set_index("copy")["copy_version"]
        if len(twice := self.copies.index[self.copies.index.duplicated()]):
            raise ValueError(f"{path} holds two versions of {twice[0]}: it was resumed after an edit; measure it anew")

    def facts(self) -> pd.Series:
        """What is said of a run: file, grid, machine, commit, and the clock with the spread that a median hides."""
        told = pd.Series({"file": self.name, **self.first[["grid", *results.MACHINE_FIELDS]].astype(str)})
        clock = self.samples["sm_clock_mhz"].quantile([0.05, 0.5, 0.95])
        return told if clock.isna().any() else pd.concat([told, pd.Series({"SM clock": CLOCK.format(*clock)})])


class Comparison:
    """B against A. Of one run alone: its facts and noise, from which a comparison with it begins, and no cells.

    `where`: the part, timer and state that means are of. Raises ValueError, saying what to do, for files that cannot
    be read or compared.
    """

    def __init__(self, *files: str | Path) -> None:
        self.sides = {name: Side(Path(file)) for name, file in zip("AB", files)}
        self.a, self.b = self.sides["A"], self.sides.get("B")
        self.where = {"part": "write", "timer": "graph" if self.a.first["gpu"] else "wall", "state": "produced"}
        self.matched = pd.DataFrame(columns=[*CELL, "seconds_a", "seconds_b", "speedup", "low", "high", "regime"])
        if self.b:
            _refuse(self.a, self.b)
            matched = speedups(self.a.rounds, self.b.rounds)
            self.matched = matched.assign(regime=matched["num_tokens"].map(regime_of))
            if rows_of(matched, self.where).empty:  # then of what most cells were timed in
                self.where = dict(zip(self.where, matched[[*self.where]].value_counts().index[0]))

    @property
    def named(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.where.items())

    def agree(self, *columns: str) -> bool:
        """Whether two runs are of the same hardware and driver, and agree in these columns too."""
        told = {(side.hardware, *side.first[["driver", *columns]]) for side in self.sides.values()}
        return bool(self.b) and len(told) == 1

    @property
    def same_memcpy(self) -> bool:
        """Whether the copy that we did not write is the same: the driver's, or on a CPU torch's."""
        return self.agree(*([] if self.a.first["gpu"] else ["torch"]))

    @property
    def same_code(self) -> bool:
        """Whether kvnb is the same machine code on the same hardware in both, so that its difference is noise."""
        return self.agree("cuda", "torch") and self.a.copies.get(OURS) == self.b.copies.get(OURS)

    def differences(self) -> pd.DataFrame:
        """what, A, B: the facts in which runs differ, and the copies whose sources do. Of one run: all facts."""
        facts = pd.DataFrame({name: side.facts() for name, side in self.sides.items()}).fillna("")
        rows = [*facts[(facts.nunique(axis=1) > 1) | (not self.b)].rename({"utc": "begun"}).itertuples(name=None)]
        copies = pd.DataFrame({name: side.copies for name, side in self.sides.items()}).dropna()
        changed = copies[copies.nunique(axis=1) > 1].groupby([*self.sides], sort=False)
        rows += [(f"sources of {', '.join(same.index)}", *versions) for versions, same in changed]
        return pd.DataFrame(rows, columns=["what", *self.sides])

    @cached_property
    def margins(self) -> pd.DataFrame:
        """Per timer and state: noise floor of each run; `again`, `memcpy`: how far from 1 intervals across the runs
        reach, in nine of ten cells, where only noise is between them (NaN: more is); `launch`: limit.launch's gap, s.

        again: kvnb in one run over kvnb.again in the other, both the same code. memcpy: the driver's own copy.
        """
        columns = dict.fromkeys([*"AB", "again", "memcpy"], pd.Series(dtype=float))
        columns |= {name: floors["floor"] for name, floors in self._floors.items()}
        known = pd.DataFrame(columns | {"launch": self._gaps().groupby(TIMED).median()}).rename_axis(TIMED)
        asked = pd.MultiIndex.from_tuples({*self.matched[TIMED].itertuples(index=False, name=None)}, names=TIMED)
        return known.reindex(known.index.union(asked))

    @cached_property
    def doubts(self) -> pd.Series:
        """Per timer and state: what `margins` lack, as column doubt of stats.compare says it."""
        told = pd.Series("", self.margins.index, object, name="doubt")
        for name, floors in self._floors.items():
            told[self.margins[name].isna() & (name in self.sides)] += f"; {stats.NO_FLOOR} ({name})"
            told[floors["disturbed"].reindex(told.index).eq(True)] += f"; {stats.DISTURBED_FLOOR} ({name})"
        return told.str.removeprefix("; ")

    @cached_property
    def _floors(self) -> dict[str, pd.DataFrame]:
        """Those of A, B, again and memcpy that can be known, as stats.noise_floor has them, by timer and state."""
        floors = {name: stats.noise_floor(side.samples) for name, side in self.sides.items()}
        if self.same_code:
            floors["again"] = self._reach(stats.NOISE, stats.NOISE[::-1])
        if self.same_memcpy:
            floors["memcpy"] = self._reach((MEMCPY, MEMCPY))
        return {name: table.set_index(TIMED) for name, table in floors.items()}

    def _reach(self, *pairs: tuple[str, str]) -> pd.DataFrame:
        """stats.reach of copies across the runs: the one in A, the one in B."""
        skip = [side.rounds.query("policy == 'skip'") for side in self.sides.values()]
        named = [[run[run["copy"] == name].assign(copy="") for run, name in zip(skip, pair)] for pair in pairs]
        used = [[stats.undisturbed(run, CELL) for run in pair] for pair in named]
        return stats.reach(pd.concat([speedups(*pair) for pair in used]), pd.concat(itertools.chain(*used)))

    def _gaps(self) -> pd.Series:
        """By case, timer and state: how many seconds an empty launch takes more or less in B."""
        launch = self.matched[self.matched["copy"] == LAUNCH].set_index([*CASE_FIELDS, *TIMED])
        return (launch["seconds_b"] - launch["seconds_a"]).abs().astype(float).rename("gap")

    @cached_property
    def cells(self) -> pd.DataFrame:
        """`speedups` with regime, and margin, verdict and reason by the rule of stats.compare.

        The margin is the largest of 2 %, of `margins` and, on the same hardware and driver, of what an empty launch
        differs by in that very case, times the launches of a call, as a share of the cell's time.
        """
        table, floors = self.matched, self.margins.drop(columns="launch").max(axis=1).rename("floor")
        least = table[["seconds_a", "seconds_b"]].min(axis=1)
        gap = table.join(self._gaps(), on=[*CASE_FIELDS, *TIMED]).join(self.a.launches, on=CELL)
        share = gap["gap"] * gap["launches"] / least * self.agree()
        margin = np.fmax(table.join(floors, on=TIMED)["floor"], share).fillna(0).clip(lower=stats.LEAST_MARGIN)
        table = table.join(self.doubts, on=TIMED).assign(margin=margin, disturbed=False)
        table = self._withhold_disturbed(stats.judged(table))
        pair = table.loc[table["copy"] == stats.EVENT, ["seconds_a", "seconds_b"]].median().max()
        return stats.withhold_short(table, least, pair)

    def _withhold_disturbed(self, table: pd.DataFrame) -> pd.DataFrame:
        """By the rule of stats.compare, where a cell was disturbed in either run."""
        if not self.b:
            return table
        each = {name: stats.disturbances(side.rounds, CELL) for name, side in self.sides.items()}
        both = pd.concat([found.assign(told=found["told"] + f" of {name}") for name, found in each.items()])
        found = both.groupby(level=CELL).agg({"told": ", ".join, "few": "any"})
        some = found.index.to_frame(index=False)
        clean = [side.rounds[side.rounds["disturbed"] == ""].merge(some, on=CELL) for side in self.sides.values()]
        return stats.withhold_disturbed(table, speedups(*clean), found)

    # -- what is said of it

    def headline(self) -> str:
        """What differs, how many cells do, and kvnb by regime; of one run alone, what would give a second."""
        if not self.b:
            alone = f"{self.a.name} is the only run of grid {self.a.first['grid']} on {self.a.hardware} here"
            return f"Nothing to compare yet: {alone}. `make record` measures another; `kvnb compare A B` takes any two."
        what = self.differences()["what"].str.replace(r"sources of .*", "sources of copies", regex=True)
        differ = ", ".join(what[~what.isin(["file", "begun", "SM clock"])].unique())
        rows = rows_of(self.cells, self.where)
        counts = ", ".join(f"{word} in {(rows['verdict'] == word).sum():,}" for word in stats.VERDICTS)
        timed = f"{count(len(rows), 'cell')} timed in both ({self.named})"
        files = f"A is {self.a.name}, B is {self.b.name}; they differ in {differ or 'when they ran'}"
        ours = by_regime(rows_of(rows, {"copy": OURS})) or "not in both"
        return f"{files}. Of {timed}, B is {counts}. {OURS}: {ours}."

    def caution(self) -> str:
        """What the margins know of the noise between the runs, and what they do not."""
        if not self.b:
            return "The margin of a comparison begins with this run's noise floors."
        here = self.margins.loc[tuple(self.where[name] for name in TIMED)]
        told = f"Rounds of two runs are not paired, so each side is drawn by itself. The margin ({self.named}) is the "
        floors = ", ".join(f"{here[side]:.1%} in {side}" for side in "AB" if here[side] >= 0)
        doubt = self.doubts[tuple(self.where[name] for name in TIMED)]
        told += f"largest of 2 %; the noise floors ({'; '.join(filter(None, (floors, doubt)))})"
        if not self.agree():
            return f"{told}. Hardware or driver differ: what they do is in the speedups, and in no margin."
        known = {"memcpy": f"{MEMCPY} across the runs ({here['memcpy']:.1%})"}
        known |= {"again": f"kvnb.again of one over kvnb of the other ({here['again']:.1%})"}
        known |= {"launch": f"an empty launch's difference (median {duration(here['launch'])}) as a share of a cell"}
        told += "".join(f"; {text}" for name, text in known.items() if here[name] > 0)
        other = "kvnb is other code in B, so kvnb.again across the runs is no measure of noise."
        return f"{told}. {'' if self.same_code else other}".strip()

    def means(self) -> pd.DataFrame:
        """Per copy and policy, kvnb first and limits last, by regime: `2.10 [2.05, 2.15] FASTER (9 cells from ...)`."""
        rows, table = rows_of(self.cells, self.where), []
        order = (rows["copy"] != OURS) + rows["copy"].str.startswith("limit.").astype(int)
        for (_, copy, policy), here in rows.groupby([order, rows["copy"], rows["policy"]]):
            told = {regime: speedup(cells) for regime, cells in here.groupby("regime")}
            table.append({"copy": label(copy), "policy": policy} | told)
        return pd.DataFrame(table, columns=["copy", "policy", *REGIMES]).fillna("not in both")

    def extremes(self, n: int = 5) -> pd.DataFrame:
        """The n cells in which B is slowest against A, then the n in which it is fastest: two of a copy, no limits."""
        rows = rows_of(self.cells, self.where).sort_values("speedup", kind="stable")
        rows = rows[~rows["copy"].str.startswith("limit.").astype(bool)]
        slow, fast = rows.groupby("copy").head(2).head(n), rows.groupby("copy").tail(2).tail(n)
        rows = pd.concat([slow, fast[~fast.index.isin(slow.index)]])
        told = [(row["copy"], row["policy"], _cell(row), *(duration(row[f"seconds_{side}"]) for side in "ab"),
                 interval(row), row["verdict"]) for row in rows.to_dict("records")]  # fmt: skip
        return pd.DataFrame(told, columns=["copy", "policy", "cell", "A", "B", "speedup", "verdict"])

    def counts(self) -> pd.DataFrame:
        """Per timer, state and part: how many cells have each verdict, their median margin, and `margins`."""
        cells, margins = self.cells.groupby([*TIMED, "part"]), self.margins.map("{:.1%}".format)
        margins["launch"] = self.margins["launch"].map(duration)
        table = cells["verdict"].value_counts().unstack(fill_value=0).reindex(columns=stats.VERDICTS, fill_value=0)
        table["median margin"] = cells["margin"].median().map("{:.1%}".format)
        table = table.reset_index().join(margins, on=TIMED).replace("nan.*", "", regex=True)
        table.insert(0, "cells", table.pop("timer") + " " + table.pop("state") + " " + table.pop("part"))
        return table.rename_axis(columns=None)

    def unmatched(self) -> pd.DataFrame:
        """Cells with a time in one run only: only in, cells, why, copies, and cases, three of them by name."""
        table = []
        for only, side, other in (("A", self.a, self.b), ("B", self.b, self.a)) if self.b else ():
            cells = side.rounds[CELL].drop_duplicates().merge(self.matched[CELL], how="left", indicator="found")
            bad = other.samples.loc[other.samples["status"] != "ok", [*CELL, "status"]].drop_duplicates(CELL)
            cases = other.samples[[*CASE_FIELDS]].drop_duplicates().assign(case="")
            cells = cells.query("found == 'left_only'").merge(bad, how="left").merge(cases, how="left")
            known, has = cells["copy"].isin(other.copies.index), cells["case"].notna()
            reasons = np.select([~known, ~has], ["no such copy", "no such case"], "not timed so")
            for why, here in cells.groupby(cells["status"].fillna(pd.Series(reasons, cells.index))):
                each = [*here.drop_duplicates([*CASE_FIELDS]).to_dict("records")]
                named = f"{len(each)}: {'; '.join(map(_cell, each[:3]))}{' ...' * (len(each) > 3)}"
                table.append((only, len(here), f"{why} in the other", ", ".join(sorted({*here["copy"]})), named))
        return pd.DataFrame(table, columns=["only in", "cells", "why", "copies", "cases"])

    def told(self) -> str:
        """All of it for a terminal."""
        means = self.means().melt(["copy", "policy"], var_name="regime", value_name="speedup of B over A")
        tables = {
            "What differs": self.differences(),
            "By copy and regime: geometric mean [95 % interval] (cells from smallest to largest)": means,
            "Where B is slowest and fastest": self.extremes(),
            "Verdicts": self.counts().iloc[:, :6],
            "In one run only": self.unmatched(),
        }
        differ, *others = (f"{title}\n{_text(table)}\n" for title, table in tables.items())
        return "\n".join([differ, textwrap.fill(f"{self.headline()} {self.caution()}", 118) + "\n", *others])


def _text(table: pd.DataFrame) -> str:
    short = table.astype(str).map(lambda text: textwrap.shorten(text, 72, placeholder=" ..."))
    rows = [[*table.columns], *short.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines) if len(table) else "none"


def _cell(row: dict) -> str:
    padding = f", {row['padding']:.0%} padding" if row["padding"] else ""
    return cell_name({**row, "cache": Case(**{field: row[field] for field in CASE_FIELDS}).large_cache}) + padding


def _refuse(a: Side, b: Side) -> None:
    """Raise ValueError where two runs cannot be compared."""
    if a.first["run_id"] == b.first["run_id"]:
        raise ValueError(f"{a.path} and {b.path} are one run, {a.first['run_id']}: give two")
    kinds = ["a GPU" if side.first["gpu"] else "a CPU" for side in (a, b)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{a.path} was timed on {kinds[0]}, {b.path} on {kinds[1]}: give two runs of one kind")
    if a.rounds[CELL].merge(b.rounds[CELL].drop_duplicates()).empty:
        grids = " and ".join(f"{side.path} (grid {side.first['grid']})" for side in (a, b))
        raise ValueError(f"no cell was timed in both {grids}: give runs of one grid, or measure one again")


def find(a: str | None = None, b: str | None = None, files: Iterable[Path] | None = None) -> list[Path]:
    """The two run files given; else the two newest runs of one grid on one GPU or CPU model, older first, among `files`
    (local and recorded ones); else the newest alone. Raises ValueError where one is given, or there is no run.
    """
    if a and b:
        return [Path(a), Path(b)]
    if a or b:
        raise ValueError("a, b: give two run files, or neither")
    recorded = (paths.RECORDED.glob(f"*/????-??-??_{grid}_*.parquet") for grid in GRIDS)
    files = [*(itertools.chain(paths.LOCAL.glob("*.parquet"), *recorded) if files is None else files)]
    if not files:
        raise ValueError("no run in data/local or data/recorded: `make measure` measures one")
    runs = pd.DataFrame([results.first(path) for path in files]).assign(path=files)
    runs = runs.drop_duplicates("run_id").sort_values("utc")
    alike = runs.groupby(["grid", runs["gpu"].where(runs["gpu"] != "", runs["cpu"])])["path"]
    several = runs[alike.transform("size") > 1]
    newest = (several if len(several) else runs)["path"].iloc[-1]
    return next([*here.tail(2)] for _, here in alike if newest in set(here))
