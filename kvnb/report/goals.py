"""What our kernel has to reach, as a table of goals, and what the record says of each (`kvnb goals`).

Goals are about an H200: timer `graph`, speedups within one run and state. Those over any copy hold in every case and
state of the record, float16 and float32 too; all others are of bfloat16, state `produced`, no padding. One whose cells
no run holds is "not measured".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pandas as pd

from kvnb.bench import stats
from kvnb.paths import short_commit
from kvnb.problem.case import CASE_FIELDS
from kvnb.report import answers
from kvnb.report.answers import DEPENDENT, OURS, Run

SHIPPED = "vllm==0.33.0"
DEPENDENTLY = (DEPENDENT, "sglang")  # copies launched dependently
PLAINLY, ANY, LIMIT = "any copy launched plainly", "any copy", "limit.copy"  # rivals that several copies can be
PRODUCED = {"state": "produced", "dtype": "bfloat16", "padding": 0}
SIZE = ["num_kv_heads", "head_size"]
ODD_SIZES = ((8, 80), (8, 96), (8, 192), (8, 256), (16, 128))  # heads, head size
EVENLY = 0.97  # within 3 %


@dataclass(frozen=True)
class Goal:
    """`value` ("speedup", "percent" of b's speed, "us above" b) of copy a over b in the cells `where` (column -> value,
    or a range [low, high)), as `statistic` ("mean": geometric; "worst": cell), at least `needed`; "us above": at most.

    Values "layouts" and "neighbours" compare a with itself, by its speed as a share of b's in the same cell, so that
    what an allocation or a size costs any copy is not charged to a: a layout's mean share over the best other
    layout's, and that of `size` over its worse neighbour's, each per regime.
    """

    name: str
    needed: float
    value: str = "speedup"
    statistic: str = "worst"
    a: str = OURS
    b: str = SHIPPED
    where: dict = field(default_factory=dict)
    size: tuple[int, int] = ()  # heads, head size

    @property
    def most(self) -> bool:
        return self.value == "us above"


def _goals() -> Iterable[Goal]:
    for heads, *needed in ((8, 1.5, 2.2), (1, 1.4, 2.6), (32, 1.5, 1.12)):
        for regime, layout in (("decode", "packed"), ("decode", "NHD"), ("prefill", "packed"), ("prefill", "NHD")):
            line = {**PRODUCED, **answers.USUAL, "layout": layout, "num_kv_heads": heads, "head_size": 128}
            name = f"{OURS} over {SHIPPED}, {heads}x128 {layout}, {regime}"
            yield Goal(name, needed[regime == "prefill"], statistic="mean", where=line | {"regime": regime})
    for layout in ("packed", "NHD"):
        line = {**PRODUCED, "layout": layout, "num_kv_heads": 128, "head_size": 128}
        yield Goal(f"{OURS} over {SHIPPED}, 128x128 {layout}", 0.98, where=line)
    yield Goal(f"{OURS} over {PLAINLY}", 0.98, b=PLAINLY)
    yield Goal(f"{DEPENDENT} over {ANY}", 0.98, a=DEPENDENT, b=ANY)
    for layout in ("packed", "NHD"):
        for name, needed, sizes in (("128 MB and more", 94, (128e6, np.inf)), ("32 to 128 MB", 93, (32e6, 128e6))):
            cells = PRODUCED | {"layout": layout, "bytes_moved": sizes}
            yield Goal(f"{OURS}, percent of {LIMIT}, {name}, {layout}", needed, "percent", b=LIMIT, where=cells)
    for a, b in ((OURS, "limit.launch"), (DEPENDENT, "limit.launch.dependent")):
        for layout in ("packed", "NHD"):
            cells = PRODUCED | {"layout": layout, "num_tokens": 1}
            yield Goal(f"one token, us of {a} above {b}, {layout}", 0.65, "us above", a=a, b=b, where=cells)
    usual = PRODUCED | answers.USUAL
    yield Goal("NHD, HND and packed within 3 % of each other", EVENLY, "layouts", b=LIMIT, where=usual | answers.EIGHT)
    for size in ODD_SIZES:
        name = "{}x{} no worse than its neighbours".format(*size)
        yield Goal(name, EVENLY, "neighbours", b=LIMIT, where=usual, size=size)


GOALS = tuple(_goals())


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """A row per goal: goal, bound, needed, measured, low, high (95 % interval, where there is one), worst, cells, met.

    `runs`: of one GPU. A case that several of them hold counts once in a mean, as in the first of them; `worst` says
    which one's it is, by grid and commit.
    """
    runs, rows = list(runs), []
    for goal in GOALS:
        found = [cells.assign(name=cells["name"] + f", {run.first['grid']} {short_commit(run.first['kvnb_commit'])}")
                 for run in runs if len(cells := _cells(goal, run))]  # fmt: skip
        row = {"goal": goal.name, "bound": "at most" if goal.most else "at least", "needed": goal.needed}
        lacking = {"cells": 0, "met": "not measured"}
        rows.append(row | (_outcome(goal, pd.concat(found, ignore_index=True)) if found else lacking))
    columns = ["goal", "bound", "needed", "measured", "low", "high", "worst", "cells", "met"]
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(("measured", "low", "high"), float))
    return table.assign(worst=table["worst"].astype(object).fillna(""))


def told(found: pd.DataFrame) -> pd.DataFrame:
    """`table` in words, three digits each, four where three hide whether a goal is met: goal, needed, measured with its
    interval, worst, cells, met."""
    words = found[["needed", "measured", "low", "high"]].map(answers.times)
    hidden = (words["measured"] == words["needed"]) & (found["measured"] != found["needed"])
    words[hidden] = found[hidden][[*words]].map("{:.4g}".format)
    measured, ends = words["measured"], " [" + words["low"] + ", " + words["high"] + "]"
    columns = {
        "goal": found["goal"],
        "needed": found["bound"] + " " + words["needed"],
        "measured": (measured + ends.where(found["low"].notna(), "")).where(found["measured"].notna(), ""),
    }
    return pd.DataFrame(columns | {name: found[name] for name in ("worst", "cells", "met")})


def _outcome(goal: Goal, cells: pd.DataFrame) -> dict:
    if goal.statistic == "mean":
        cells = cells.drop_duplicates(list(CASE_FIELDS))
        found = dict(zip(("measured", "low", "high"), np.exp(np.log(cells[["value", "low", "high"]]).mean())))
    else:
        worst = cells.loc[cells["value"].idxmax() if goal.most else cells["value"].idxmin()]
        found = {"measured": worst["value"], "low": worst["low"], "high": worst["high"], "worst": worst["name"]}
    met = found["measured"] <= goal.needed if goal.most else found["measured"] >= goal.needed
    return found | {"cells": len(cells), "met": "yes" if met else "no"}


# -- the cells of a goal: value, low, high, name


def _cells(goal: Goal, run: Run) -> pd.DataFrame:
    tables = [_compared(run, goal.a, b, goal.most) for b in _rivals(goal, run)]
    if not tables:
        return pd.DataFrame()
    rows = pd.concat(tables, ignore_index=True)
    for column, wanted in goal.where.items():
        value = rows[column]
        rows = rows[value.ge(wanted[0]) & value.lt(wanted[1]) if isinstance(wanted, tuple) else value == wanted]
    if goal.b == LIMIT:  # the faster of those that there are
        rows = rows.loc[rows.groupby(stats.PLACE)["value"].idxmin()]
    if goal.value in ("layouts", "neighbours"):
        return _evenness(goal, rows)
    names = [f"{row['b']}, {answers.cell_name(row)}, {row['state']}" for row in rows.to_dict("records")]
    numbers = rows[["value", "low", "high"]] * (100 if goal.value == "percent" else 1)
    return rows.assign(name=names, **numbers)


def _rivals(goal: Goal, run: Run) -> list[str]:
    """The copies of a run that a goal's b can be."""
    copies = sorted(_graphs(run).copies)
    if goal.a not in copies:
        return []
    if goal.b in (PLAINLY, ANY):
        left_out = (goal.a, "limit.") if goal.b == ANY else (OURS, "limit.", *DEPENDENTLY)
        return [copy for copy in copies if not copy.startswith(left_out)]
    return [copy for copy in copies if copy == goal.b or (goal.b == LIMIT and copy.startswith(LIMIT))]


@cache
def _graphs(run: Run) -> stats.Timed:
    return stats.Timed(run.samples[(run.samples["timer"] == "graph") & (run.samples["part"] == "write")])


@cache
def _compared(run: Run, a: str, b: str, above: bool) -> pd.DataFrame:
    """PLACE, b, bytes_moved, value, low, high: the speedup of a over b, or by how many us a lasts longer (`above`)."""
    if above:
        rounds = _graphs(run).rounds.query("copy in [@a, @b]")
        rounds = rounds.pivot(index=[*stats.PLACE, "worker", "round"], columns="copy", values="seconds")
        longer = (1e6 * (rounds[a] - rounds[b])).dropna().rename("us").reset_index()
        rows = stats.intervals(longer, stats.PLACE, "us").rename(columns={"median": "value"}).assign(b=b)
    else:
        rows = stats.compare(_graphs(run), a, b).rename(columns={"speedup": "value"})
    moved = run.every_cell.loc[run.every_cell["copy"] == a, [*stats.PLACE, "bytes_moved", "cache"]]
    return rows.merge(moved.drop_duplicates(stats.PLACE), on=stats.PLACE)


def _evenness(goal: Goal, rows: pd.DataFrame) -> pd.DataFrame:
    """Per regime (and layout), mean shares of limit.copy: a layout's over the best other's, or `size` over its lowest
    neighbour's: the next powers of two in heads at head size 128, or in head size. `low` and `high` are from the ends
    of both intervals, further apart than those of their quotient would be."""
    if goal.value == "layouts":
        pairs = {one: [other for other in answers.LAYOUTS if other != one] for one in answers.LAYOUTS}
        columns, index, hardest = "layout", ["regime"], max
    else:
        along = 0 if goal.size[1] == 128 else 1
        sizes = sorted(set(rows[SIZE].itertuples(index=False, name=None)))
        sizes = [size for size in sizes if size[1 - along] == goal.size[1 - along] and size[along].bit_count() == 1]
        smaller, larger = ([size for size in sizes if size < goal.size], [size for size in sizes if size > goal.size])
        pairs = {goal.size: smaller[-1:] + larger[:1]}
        columns, index, hardest = SIZE, ["layout", "regime"], min
    ends, found = ["value", "low", "high"], []
    shares = [rows.pivot(index=[*index, "num_tokens"], columns=columns, values=end) for end in ends]
    for one, others in pairs.items():
        if others and {one, *others} <= set(shares[0]):
            means = [np.exp(np.log(share[[one, *others]].dropna()).groupby(level=index).mean()) for share in shares]
            value, low, high = (mean.to_dict("index") for mean in means)
            for place in value:
                other = hardest(others, key=value[place].get)
                over = zip((value, low, high), (value, high, low))
                ratios = [mine[place][one] / theirs[place][other] for mine, theirs in over]
                found.append([*ratios, " ".join([one] * (columns == "layout") + np.atleast_1d(place).tolist())])
    return pd.DataFrame(found, columns=[*ends, "name"])
