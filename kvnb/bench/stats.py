"""From samples to numbers: medians, intervals, speedups, the noise floor and verdicts.

The unit of replication is a round of a worker: its median. Intervals are 95 % percentile intervals of a seeded
bootstrap that draws workers, then rounds within each, with replacement (hierarchical bootstrap; for why samples of one
burst are not independent see Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). With three
workers they are too short where workers differ more than rounds do: simulated, they cover the truth in 98 % of runs
when workers do not differ, in 84 % when workers spread as much as rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pandas as pd

from kvnb.problem.case import CASE_FIELDS, regime_of

RESAMPLES = 1000
SEED = 4698
LEAST_MARGIN = 0.02  # a difference of 2 % is not worth a verdict
WIDEST_SAME = 0.10  # where the margin is wider, nothing is called SAME: the noise hides it
LIMIT_BYTES = 32_000_000  # percent of limit.copy is quoted from here on
LEAST_EVENT_PAIRS = 3  # timer `call`: no verdict where the faster copy takes less than so many empty event pairs
DRIFT = 0.02  # a clock that is off by less moves no time by more than LEAST_MARGIN
LEAST_CLEAN = 2  # undisturbed rounds of each worker (all, where it has fewer) on which a verdict may rest
CLOCK, UNWATCHED = "clock drift", "throttling not known"  # beside what NVML says, see machine.disturbances
TOGETHER = 64  # groups whose bootstrap is drawn in one go
WITHHELD = ["disturbed", "short"]  # why a cell gives no verdict, though its interval would
VERDICTS = ["FASTER", "SLOWER", "SAME", "UNDECIDED"]
NOISE, EVENT = ("kvnb.again", "kvnb"), "limit.event"  # one copy measured under two names; an empty event pair
NO_FLOOR, DISTURBED_FLOOR = "no noise floor was measured", "the noise floor is of disturbed rounds"
NO_PAIR = "no empty event pair was timed"
PLACE = [
    "run_id",
    "grid",
    *CASE_FIELDS,
    "regime",
    "part",
    "timer",
    "state",
]  # what two copies must share to be compared
CELL = [*PLACE, "copy", "family", "policy"]


@lru_cache(maxsize=64)
def _draws(rounds: tuple[int, ...]) -> np.ndarray:
    """Bootstrap draws `[RESAMPLES, workers * most rounds]`: positions in the workers' rounds, end to end."""
    rng = np.random.default_rng(SEED)
    counts, starts = np.array(rounds), np.cumsum([0, *rounds[:-1]])
    workers = rng.integers(0, len(rounds), (RESAMPLES, len(rounds)))
    within = rng.random((RESAMPLES, len(rounds), counts.max()))
    picked = (within * counts[workers][..., None]).astype(int) + starts[workers][..., None]
    return picked.reshape(RESAMPLES, -1)


def resampled(
    rounds: pd.DataFrame, keys: list[str], value: str
) -> tuple[pd.DataFrame, Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """The groups of `keys`, in the order in which they first appear, and the bootstrap of column `value`, some groups
    at a time: their positions `[some]`, their medians `[some]`, and medians of draws of them `[some, RESAMPLES]`.

    `rounds` has a row per worker and round of each group.
    """
    group = rounds.groupby(keys, sort=False, observed=True).ngroup().to_numpy()
    order = np.lexsort((rounds["round"], rounds["worker"], group))
    values, group, worker = (column[order] for column in (rounds[value].to_numpy(), group, rounds["worker"].to_numpy()))
    first = np.flatnonzero(np.diff(group, prepend=-1))
    turns = np.flatnonzero((np.diff(group, prepend=-1) != 0) | (np.diff(worker, prepend=-1) != 0))
    sizes = np.split(np.diff(turns, append=len(values)), np.searchsorted(turns, first)[1:])
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, rounds_of_workers in zip(range(len(first)), sizes):
        alike.setdefault(tuple(rounds_of_workers.tolist()), []).append(number)

    def bootstrap() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for shape, numbers in alike.items():
            for some in np.array_split(numbers, -(-len(numbers) // TOGETHER)):
                matrix = values[first[some][:, None] + np.arange(sum(shape))]
                yield some, np.median(matrix, axis=1), np.median(matrix[:, _draws(shape)], axis=2)

    return rounds[keys].iloc[order[first]].reset_index(drop=True), bootstrap()


def intervals(rounds: pd.DataFrame, keys: list[str], value: str) -> pd.DataFrame:
    """Median of column `value` and its 95 % interval for every group of `resampled`: keys, median, low, high."""
    named, bootstrap = resampled(rounds, keys, value)
    table = np.empty((len(named), 3))
    for some, medians, drawn in bootstrap:
        table[some] = np.column_stack([medians, *np.percentile(drawn, [2.5, 97.5], axis=1)])
    return named.assign(median=table[:, 0], low=table[:, 1], high=table[:, 2])


def _with_regime(samples: pd.DataFrame) -> pd.DataFrame:
    if "regime" in samples:
        return samples
    regimes = {tokens: regime_of(tokens) for tokens in samples["num_tokens"].unique()}
    return samples.assign(regime=samples["num_tokens"].map(regimes))


def by_round(samples: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of every round: CELL, worker, round, seconds, sm_clock_mhz, disturbed (by what; "": nothing).

    Only of cells whose every row is ok.
    """
    samples = _with_regime(samples)
    bad = samples.loc[samples["status"] != "ok", CELL].drop_duplicates()
    if len(bad):
        samples = samples.merge(bad.assign(bad=True), on=CELL, how="left")
        samples = samples[samples["bad"].isna()]
    grouped = samples.groupby([*CELL, "worker", "round"], sort=False, observed=True)
    each = {"seconds": "median", "sm_clock_mhz": "median", "throttled": "first"}
    rounds = grouped.agg(each).reset_index()
    return rounds.assign(disturbed=_disturbed(rounds)).drop(columns="throttled")


def _disturbed(rounds: pd.DataFrame) -> np.ndarray:
    """What disturbed each round: what NVML said; a clock more than DRIFT off its place's median; nobody watching.

    A round of a GPU is watched where NVML or the timer's clock probe could say that it was not throttled.
    """
    clock, said = rounds["sm_clock_mhz"].astype(float), rounds["throttled"]
    usual = clock.groupby([rounds[name] for name in PLACE], observed=True).transform("median")
    unwatched = said.isna() & clock.isna() & (rounds["timer"] != "wall")
    found = [said.fillna("") != "", (clock / usual - 1).abs() > DRIFT, unwatched]
    return np.select(found, [said.fillna(""), CLOCK, UNWATCHED], "")


def cells(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per cell of a run: CELL, status, reason, n, seconds, low, high (s), gbps, limit_percent, bytes_moved,
    launches, calls, graphs, sm_clock_mhz (median) and throttled (share of samples).

    A cell with any row that is not ok has no time, and keeps its status and reason.
    """
    samples = _with_regime(samples)
    firsts = {name: "first" for name in ("bytes_moved", "launches", "calls", "graphs")}
    grouped = samples.assign(throttled=samples["throttled"].fillna("") != "").groupby(CELL, sort=False, observed=True)
    table = grouped.agg({"seconds": "count", "sm_clock_mhz": "median", "throttled": "mean", **firsts}).rename(
        columns={"seconds": "n"}
    )
    bad = samples[samples["status"] != "ok"].drop_duplicates(CELL).set_index(CELL)[["status", "reason"]]
    table = table.join(bad).fillna({"status": "ok", "reason": ""})
    times = intervals(by_round(samples), CELL, "seconds").rename(columns={"median": "seconds"})
    table = table.join(times.set_index(CELL)).reset_index()
    table["gbps"] = table["bytes_moved"] / table["seconds"] / 1e9
    return table.assign(limit_percent=_limit_percent(table))


def _limit_percent(table: pd.DataFrame) -> pd.Series:
    """100 x the faster limit.copy of the same place / the cell's time; NaN below LIMIT_BYTES and without a limit."""
    limits = table[table["copy"].str.startswith("limit.copy")].groupby(PLACE)["seconds"].min().rename("limit")
    percent = 100 * table.join(limits, on=PLACE)["limit"] / table["seconds"]
    return percent.where((table["bytes_moved"] >= LIMIT_BYTES) & (table["part"] == "write"))


def noise_floor(samples: pd.DataFrame) -> pd.DataFrame:
    """timer, state, floor: how far from 1 the speedup of a copy over itself can be told, as a share; disturbed: whether
    it is of disturbed rounds, for want of others (see `undisturbed`).
    """
    return _floors(by_round(samples))


def _floors(rounds: pd.DataFrame) -> pd.DataFrame:
    pairs = undisturbed(_pairs(rounds[rounds["policy"] == "skip"], *NOISE), PLACE)
    return reach(intervals(pairs, PLACE, "ratio"), pairs)


def reach(same: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    """As noise_floor: nearer to 1 than the floor lie the far ends of nine in ten intervals `same`, of these rounds."""
    far = np.maximum(same["high"], 1 / same["low"]) - 1  # as a margin is used: beyond it, or below its inverse
    floors = far.groupby([same["timer"], same["state"]]).quantile(0.9).rename("floor")
    disturbed = (rounds["disturbed"] != "").groupby([rounds["timer"], rounds["state"]]).any()
    return floors.to_frame().join(disturbed).reset_index()


def _pairs(rounds: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """Every round in which both copies were timed: PLACE, worker, round, ratio (b / a), disturbed (text)."""
    keys = [*PLACE, "worker", "round"]
    pair = rounds[rounds["copy"] == a].merge(rounds[rounds["copy"] == b], on=keys, suffixes=("_a", "_b"))
    for side, name in (("_a", a), ("_b", b)):
        if pair.duplicated(keys).any() and pair["policy" + side].nunique() > 1:
            raise ValueError(f"{name} was measured under several policies: select one before comparing")
    apart = (pair["sm_clock_mhz_a"] / pair["sm_clock_mhz_b"] - 1).abs() > DRIFT
    disturbed = pair["disturbed_a"].where(pair["disturbed_a"] != "", pair["disturbed_b"])
    pair["disturbed"] = disturbed.mask((disturbed == "") & apart, CLOCK)
    return pair[keys].assign(ratio=pair["seconds_b"] / pair["seconds_a"], disturbed=pair["disturbed"])


class Timed:
    """Samples made ready once for many comparisons: medians by round, noise floors, the names of the copies."""

    def __init__(self, samples: pd.DataFrame) -> None:
        self.copies = list(samples["copy"].unique())
        self.rounds = by_round(samples)
        self.floors = _floors(self.rounds).set_index(["timer", "state"])


def compare(samples: pd.DataFrame | Timed, a: str, b: str) -> pd.DataFrame:
    """Speedup of copy `a` over copy `b` (time of b / time of a: 2.1: a is 2.1 times as fast), a row per matching cell.

    Columns: PLACE, a, b, speedup, low, high, margin, doubt (what the margin lacks: NO_FLOOR, DISTURBED_FLOOR or
    nothing), verdict (about a), reason, disturbed and short (whether the verdict is UNDECIDED for that). Raises
    ValueError for a copy that the run does not hold, and where a copy was measured under several policies.
    """
    timed = samples if isinstance(samples, Timed) else Timed(samples)
    for name in (a, b):
        if name not in timed.copies:
            raise ValueError(f"copy {name!r} is not in this run; it holds {', '.join(sorted(timed.copies))}")
    pairs = _pairs(timed.rounds, a, b)
    table = intervals(pairs, PLACE, "ratio").rename(columns={"median": "speedup"}).assign(a=a, b=b)
    known = table.join(timed.floors, on=["timer", "state"])
    table["margin"] = known["floor"].fillna(0).clip(lower=LEAST_MARGIN)
    table["doubt"] = np.select([known["floor"].isna(), known["disturbed"].eq(True)], [NO_FLOOR, DISTURBED_FLOOR], "")
    table = judged(table).assign(disturbed=False)
    if (pairs["disturbed"] != "").any():
        found = disturbances(pairs, PLACE)
        clean = pairs[pairs["disturbed"] == ""].merge(found.index.to_frame(index=False), on=PLACE)
        table = withhold_disturbed(table, intervals(clean, PLACE, "ratio"), found)
    call = timed.rounds[timed.rounds["timer"] == "call"]
    each = call[call["copy"].isin([a, b])].groupby([*PLACE, "copy"], observed=True)["seconds"].median()
    faster = table.join(each.groupby(level=PLACE).min(), on=PLACE)["seconds"]
    return withhold_short(table, faster, call.loc[call["copy"] == EVENT, "seconds"].median())


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """Speedups (columns low, high, margin, doubt) with verdict and reason."""
    rows = [*table[["low", "high", "margin", "doubt"]].itertuples(index=False)]
    words = [verdict(*row[:3]) for row in rows]
    return table.assign(verdict=words, reason=[reason_for(word, *row) for word, row in zip(words, rows)])


def verdict(low: float, high: float, margin: float) -> str:
    """FASTER or SLOWER when the whole interval clears the margin, SAME when it lies inside (a margin of at most
    WIDEST_SAME), else UNDECIDED."""
    if low > 1 + margin:
        return "FASTER"
    if high < 1 / (1 + margin):
        return "SLOWER"
    inside = 1 / (1 + margin) <= low and high <= 1 + margin
    return "SAME" if inside and margin <= WIDEST_SAME else "UNDECIDED"


def reason_for(word: str, low: float, high: float, margin: float, doubt: str = "") -> str:
    where = {"FASTER": "above", "SLOWER": "below", "SAME": "inside", "UNDECIDED": "across the edge of"}[word]
    lost = margin > WIDEST_SAME and word == "UNDECIDED"
    how = f"is lost in a noise floor of {margin:.0%}" if lost else f"lies {where} 1 +- {margin:.1%}"
    return f"[{low:.3f}, {high:.3f}] {how}{doubt and f'; {doubt}'}"


def disturbances(rounds: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """What disturbed rounds (column `disturbed`), for each group of `keys` where something did: told (`software power
    cap in 3 of 30 rounds`), few (whether some worker has fewer than LEAST_CLEAN others, or than all it has).
    """
    clean = rounds["disturbed"] == ""
    touched = rounds[~clean].groupby(keys, sort=False, observed=True)["disturbed"]
    what = touched.agg(lambda said: ", ".join(dict.fromkeys(", ".join(said).split(", "))))
    each = clean.groupby([rounds[name] for name in [*keys, "worker"]], observed=True).agg(["sum", "size"])
    few = (each["sum"] < each["size"].clip(upper=LEAST_CLEAN)).groupby(level=keys).any()
    total = rounds.groupby(keys, sort=False, observed=True).size().reindex(what.index)
    told = [f"{said} in {n} of {of} rounds" for said, n, of in zip(what, touched.size(), total)]
    return pd.DataFrame({"told": pd.Series(told, what.index, object), "few": few.reindex(what.index)})


def undisturbed(rounds: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The rounds to tell noise from: undisturbed ones, of groups of `keys` that have enough of them (see `few`).

    Where no group of a timer and state has, all of these: a floor from them is too high rather than missing.
    """
    clean = rounds["disturbed"] == ""
    if clean.all():
        return rounds
    clean &= ~rounds.join(disturbances(rounds, keys)["few"], on=keys)["few"].eq(True)
    return rounds[clean | ~clean.groupby([rounds["timer"], rounds["state"]]).transform("any")]


def withhold_disturbed(table: pd.DataFrame, alone: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """The table, with UNDECIDED and `disturbed` True unless undisturbed rounds alone, enough of them, give the verdict.

    `alone`: keys, low and high of the same speedups from undisturbed rounds; `found`: by the same keys, `disturbances`.
    """
    keys = [*found.index.names]
    ends = alone.set_index(keys)[["low", "high"]].add_suffix("_alone")
    for row in table.join(found, on=keys, how="inner").join(ends, on=keys).itertuples():
        word = "" if row.few else verdict(row.low_alone, row.high_alone, row.margin)
        if word == row.verdict:
            table.loc[row.Index, "reason"] = f"{row.reason}; {row.told}, the same without"
        else:
            why = f"{row.told}: " + (f"{row.verdict} with them, {word} without" if word else "too few others")
            table.loc[row.Index, ["verdict", "reason", "disturbed"]] = ["UNDECIDED", why, True]
    return table


def withhold_short(table: pd.DataFrame, faster: pd.Series, pair: float) -> pd.DataFrame:
    """Timer `call` judges no times of which one, the `faster` (s, by row), is below LEAST_EVENT_PAIRS empty event pairs
    (s each): what the events add hides the more of a speedup, the shorter the call.
    """
    short = (table["timer"] == "call") & ~(faster >= LEAST_EVENT_PAIRS * pair)
    few = f"less than {LEAST_EVENT_PAIRS} empty event pairs ({1e6 * pair:.2f} us each)"
    why = [f"the faster takes {1e6 * seconds:.2f} us, {few}" if pair > 0 else NO_PAIR for seconds in faster[short]]
    table.loc[short, "verdict"], table.loc[short, "reason"] = "UNDECIDED", why
    return table.assign(short=short)


def summarise(comparison: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Geometric means of speedups per group of `by`: speedup, low, high, smallest, largest, cells, verdict.

    low and high are the geometric means of the cells' interval ends (the cells' errors need not be independent, so
    nothing is gained from their number); the verdict follows from them and the group's largest margin. Where cells were
    disturbed or short (columns of `compare`) it must follow from the others alone too.
    """
    rows = []
    for key, group in comparison.groupby(by, sort=False, observed=True):
        mean = _mean(group)
        ends = {"smallest": group["speedup"].min(), "largest": group["speedup"].max(), "cells": len(group)}
        withheld = group.reindex(columns=WITHHELD, fill_value=False).astype(bool).any(axis=1)
        if withheld.all() or (withheld.any() and _mean(group[~withheld])["verdict"] != mean["verdict"]):
            mean["verdict"] = "UNDECIDED"
        rows.append({**dict(zip(by, key)), **mean, **ends})
    return pd.DataFrame(rows, columns=[*by, "speedup", "low", "high", "smallest", "largest", "cells", "verdict"])


def _mean(group: pd.DataFrame) -> dict:
    mean = {name: float(np.exp(np.log(group[name]).mean())) for name in ("speedup", "low", "high")}
    return mean | {"verdict": verdict(mean["low"], mean["high"], group["margin"].max())}
