"""TODO 1's answer, what a reserved slot costs: its sentences and tables, as answers.py has those of TODO 2.

A run of grid `padding` holds each copy under each of its policies. Here every one is a copy of its own: `kvnb` skips,
`kvnb null_slot` writes padding to slot 0. A cost is a speedup of skipping: of 3, the policy takes 3 times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from kvnb import copies, machine, paths
from kvnb.bench import results, stats
from kvnb.problem import models
from kvnb.report import answers
from kvnb.report.answers import ISSUE, OURS, Run, duration, interval, label, rows_of, speedup, times
from kvnb.reserve import replay

GRID, SLOT, WIDE = "padding", "null_slot", "torch.index_copy_wide"
NULL = (SLOT, "null_block", "null_blocks")
DRAWN = ("skip", *NULL, "last_slot")  # remap writes as null_slot does, and filter has no graph
OTHERS = ("skip", *NULL[1:], "last_slot", "remap")  # beside one null slot
RANKS = (2, 4, 8)  # of context parallelism
HEAVY, RANK = replay.rank_share(1, 1, 4), "a rank's padding in context parallelism of 4"
LOADS = (1.0, 2.0, 3.0)  # of the trace, so that small and large batches come up
USUALLY = 0.95  # of steps have at most the share that is said to occur
BATCHES = (8, 64, 256, 512)  # ends of ranges of decode batches
BLOCK_SIZES = (16, 64, 256)
POOL = f"a pool of {models.POOL_BYTES / models.GIB:.0f} GiB"
ASKED = "What does a reserved slot cost?"
QUESTIONS = ("When it is not free", "When it is free", "What to do")
UNTIMED = "What padding costs in time is not measured"
LACKING = "No run of grid padding is recorded yet (make record GRID=padding)."
POISON = "Zero the null block after warm-up, or skip: attention multiplies what it masks by 0, and 0 x NaN is NaN."
LIVE = {"workers": 1, "rounds": 3}  # a look at this machine; a record takes 3 and 10


# -- what a CPU can say: a trace replayed, and sizes of models


@dataclass(frozen=True)
class Replayed:
    """A trace under LOADS: `shares` as replay.padded_shares has them, of steps that only decode, and `capacity` without
    and with a reserve at load 2, in a pool of twice the blocks of the longest request."""

    name: str
    trace: pd.DataFrame
    shares: pd.DataFrame
    capacity: pd.DataFrame


@cache
def replayed(path: str | None = None) -> Replayed:
    """The trace in a file (replay.read_trace), or the synthetic one, which is the same every time.

    Raises ValueError for a file that is no such trace, and for a trace without a step that only decodes.
    """
    trace = replay.read_trace(path) if path else replay.synthetic_trace()
    steps = pd.concat(replay.replay(trace, load=load, max_num_seqs=BATCHES[-1]).steps for load in LOADS)
    scarce = 2 * -(-int((trace["context"] + trace["generated"]).max()) // 16)
    name = f"{f'trace {Path(path).name}' if path else 'synthetic trace'} of {len(trace):,} requests"
    shares = replay.padded_shares(steps[steps["prefill"] == 0])
    if shares.empty:
        raise ValueError(f"{name}: while requests arrive, no step only decodes; give a longer trace")
    return Replayed(name, trace, shares, replay.capacity(trace, scarce, load=2.0))


def usual_share(shares: pd.DataFrame, tokens: int) -> float:
    """The padded share that USUALLY is not exceeded in batches that vLLM rounds up to `tokens`; 0 where none is."""
    here = shares[(shares["captured"] == next(iter(replay.CAPTURED))) & (shares["rows"] == tokens)]
    return float(here["share"].quantile(USUALLY)) if len(here) else 0.0


def ranges(shares: pd.DataFrame) -> pd.Series:
    """Which range of BATCHES each decode batch lies in."""
    ends = [0, *BATCHES]
    return pd.cut(shares["batch"], ends, labels=[f"{low + 1} to {high}" for low, high in zip(ends, BATCHES)])


def shares_table(shares: pd.DataFrame) -> pd.DataFrame:
    """Per capture list and range of batches: its share of steps, and what is padded in the median, usually, at most."""
    rows = shares.assign(batches=ranges(shares), padded=shares["rows"] - shares["batch"])
    rows["captured"] = pd.Categorical(rows["captured"], replay.CAPTURED)
    told = []
    for (name, batches), here in rows.groupby(["captured", "batches"], observed=True):
        row = {"captured sizes": name, "batches": batches}
        row["steps"] = f"{len(here) / (rows['captured'] == name).sum():.1%}"
        for words, at in (("median", 0.5), (f"{USUALLY:.0%} of steps at most", USUALLY), ("at most", 1)):
            share, padded = here[["share", "padded"]].quantile(at)
            row[words] = f"{share:.1%}, {answers.count(round(padded), 'row')}"
        told.append(row)
    return pd.DataFrame(told)


def held(found: Replayed) -> str:
    """What N and N - 1 blocks hold, in a clause."""
    rows = found.capacity.to_dict("records")
    blocks, mean, lost = (" and ".join(words.format(row[name]) for row in rows) for name, words in (
        ("usable blocks", "{:,}"), ("held in the mean", "{:.2f}"), ("preempted", "{:,}")))  # fmt: skip
    return f"{blocks} blocks hold {mean} requests in the mean and preempt {lost} times ({found.name})"


def memory_rows() -> pd.DataFrame:
    """One block of each model of models.CACHES: model, block_size, tokens, MiB, percent (of POOL), source."""
    return pd.DataFrame(
        {"model": model.name, "block_size": size, "tokens": model.tokens_per_block(size),
         "MiB": model.block_bytes(size) / 2**20, "percent": 100 * model.share(block_size=size), "source": model.source}
        for model in models.CACHES for size in BLOCK_SIZES
    )  # fmt: skip


def memory_table() -> pd.DataFrame:
    """A row per model, a column per block size: tokens where they are more, MiB, percent of POOL."""
    rows = memory_rows()
    cells = [f"{row.tokens:,} tokens: " * (row.tokens > row.block_size) + f"{row.MiB:.3g} MiB, {row.percent:.2g} %"
             for row in rows.itertuples()]  # fmt: skip
    table = rows.assign(cell=cells).pivot(index=["model", "source"], columns="block_size", values="cell")
    table = table.loc[rows["model"].unique()].rename(columns="blocks of {}".format).reset_index("source")
    return table.assign(source=table.pop("source")).rename_axis(columns=None).reset_index()


def memory() -> str:
    """The smallest and largest share of memory_rows, in words."""
    rows = memory_rows().sort_values("percent").iloc[[0, -1]].itertuples()
    return " to ".join(f"{row.percent:.2g} % ({row.model}, {row.tokens:,} tokens)" for row in rows) + f" of {POOL}"


# -- what a run says


class PaddedRun(Run):
    """A run of grid `padding`; a copy under another policy than skip is named `copy policy`."""

    def __init__(self, samples: pd.DataFrame) -> None:
        named = samples["copy"] + " " + samples["policy"]
        super().__init__(samples.assign(copy=named.mask(samples["policy"] == "skip", samples["copy"])))
        del self.where["padding"]
        names = list(self.cells()["copy"].unique())
        writers = [name.removesuffix(f" {SLOT}") for name in names if name.endswith(f" {SLOT}")]
        self.writers = [copy for copy in writers if copy != stats.NOISE[0]]
        self.skippers = [copy for copy in self.writers if copy in names]  # kernels, that can do both
        self.main = [copy for copy in (self.shipped, OURS) if copy in self.skippers]
        self.hand = self.shipped or OURS  # the hand-written kernel that PyTorch is held against
        self.drawn = [*self.main, *[copy for copy in (ISSUE, WIDE) if copy in self.writers]]

    def over(self, a: str, b: str) -> pd.DataFrame:
        """Speedup of a over b where there is padding, slowest first, with `rows` (padded) and `place` in words."""
        cells = self.speedups(a, b).query("padding > 0").sort_values("speedup", kind="stable")
        words = {"scattered": "padded", "tail": "padded at the tail"}
        place = [f"{row['padding']:.0%} {words[row['padded']]}, {answers.cell_name(row)}"
                 for row in cells.to_dict("records")]  # fmt: skip
        return cells.assign(rows=(cells["num_tokens"] * cells["padding"]).round(), place=place)

    def cost(self, copy: str, policy: str = SLOT) -> pd.DataFrame:
        return self.over(copy, f"{copy} {policy}")


@cache
def load(path: str | Path) -> PaddedRun:
    return PaddedRun(results.load(path))


def find_runs(runs: str | Iterable[str | Path] = "newest") -> list[Path]:
    """The run files given, or for "newest" each GPU's newest recorded one of grid padding: none, maybe."""
    return list(answers.recorded(GRID).values()) if runs == "newest" else [Path(run) for run in runs]


def measured(device: str, live: str, runs: Sequence[Path]) -> list[Path]:
    """A short run of grid padding, made now: live "yes", or "auto" on a GPU that none of `runs` was measured on. Its
    path is put out, for the reader and for `measured_in`.

    Raises ValueError for an absent device, and for "yes" on a CPU.
    """
    from kvnb.bench import run

    place = machine.resolve_device(device)
    known = {load(path).first["gpu_uuid"] for path in runs}
    if live == "no" or (live == "auto" and (place.type == "cpu" or machine.gpu_uuid(place) in known)):
        return []
    wheels = sorted(filter(answers.release, copies.REGISTRY), key=answers.age)[-1:]
    names = [*stats.NOISE, *wheels, ISSUE, WIDE, "limit.copy"]
    path = paths.LOCAL / GRID / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.parquet"  # not among those that 03_compare finds
    made = run.measure(device, GRID, names, path=path, **LIVE)
    told = Path(os.path.relpath(made, paths.ROOT)).as_posix()
    display(Markdown(f"Measured now: `{told}`."), metadata={"kvnb_measured": told})
    return [made]


def measured_in(notebook: Path) -> list[Path]:
    """The run that an executed notebook says it measured: others may have measured at the same time."""
    outputs = (output for cell in nbformat.read(notebook, as_version=4).cells for output in cell.get("outputs", []))
    told = (output.get("metadata", {}).get("kvnb_measured") for output in outputs)
    return [paths.ROOT / path for path in told if path]


def decision(run: PaddedRun | None, found: Replayed) -> list[tuple[str, str]]:
    """Three lines, each with its question: when a reserve is not free, when it is, what to do. None: not timed."""
    one = f"One block is {memory()}; {held(found)}."
    if run is None:
        told = (f"{UNTIMED}. {LACKING}", f"{one} {UNTIMED}.", f"{POISON} Where to send padding: not measured.")
    else:
        told = (_not_free(run), f"{_free(run, found.shares)} {one}", f"{_advice(run)} {POISON}")
    return list(zip(QUESTIONS, told))


def decisions(runs: Iterable[str | Path]) -> list[list[tuple[str, str]]]:
    """The decision of each run, or the one without any, beside the synthetic trace."""
    return [decision(run, replayed()) for run in [*map(load, runs)] or [None]]


def markdown(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"- **{question}:** {told}" for question, told in lines)


def _not_free(run: PaddedRun) -> str:
    told = []
    for copy in run.main:
        rows = run.cost(copy)
        dear, heavy = rows[rows["verdict"] == "FASTER"], rows[rows["padding"] == HEAVY]
        text = f"{label(copy)} takes longer in {len(dear)} of {answers.count(len(rows), 'padded cell')}"
        if len(dear):
            text += f", from {dear['rows'].min():.0f} padded rows on, up to {_most(dear)}"
        told.append(text + (f", and to {times(heavy['speedup'].max())} at {HEAVY:.0%}" if len(heavy) else ""))
    what = "; ".join(told) or "no kernel of this run does both"
    return f"{run.about}. With padding written to one null slot, not skipped, {what} ({HEAVY:.0%}: {RANK})."


def _free(run: PaddedRun, shares: pd.DataFrame) -> str:
    told = []
    for copy in run.main:
        rows = run.cost(copy)
        rows = rows[rows["padding"] <= rows["num_tokens"].map(lambda tokens: usual_share(shares, tokens))]
        same, dear = ((rows["verdict"] == verdict).sum() for verdict in ("SAME", "FASTER"))
        cells = answers.count(len(rows), "cell")
        told.append(f"{label(copy)} takes longer in {dear} of {cells} and as long in {same}")
    what = "; ".join(told) or "no kernel of this run does both"
    return f"With no more padding than rounding a batch up to captured sizes usually leaves: {what}."


def _advice(run: PaddedRun) -> str:
    """By the policies' costs in the cells where one slot costs."""
    costs = {policy: [] for policy in NULL}
    for copy in run.main:
        dear = run.cost(copy).query("verdict == 'FASTER'")[stats.PLACE]
        for policy in NULL:
            costs[policy].append(run.cost(copy, policy).merge(dear, on=stats.PLACE))
    costs = {policy: pd.concat(rows) for policy, rows in costs.items() if any(map(len, rows))}
    if not costs:
        return "No kernel of this run pays for one null slot."
    worst = {policy: rows["speedup"].max() for policy, rows in costs.items()}
    best = min(worst, key=worst.get)
    spread = f"where an index copy must write padding, send it to {best}" if best != SLOT else "spreading does not help"
    told = ", ".join(f"{times(ratio)} with {policy}" for policy, ratio in worst.items())
    return f"Let the kernel skip; {spread} (times of skipping, in the worst cell of a kernel: {told})."


def _most(rows: pd.DataFrame) -> str:
    return f"{interval(rows.iloc[-1])} times ({rows['place'].iloc[-1]})"


def _mean(rows: pd.DataFrame) -> float:
    return float(np.log(rows["speedup"]).mean())


def sentences(run: PaddedRun) -> list[str]:
    """For every PyTorch copy: where, under the null policy that serves it best, it beats the kernel that skips."""
    told = []
    for copy in [copy for copy in run.writers if copy not in run.skippers]:
        rivals = {policy: rows for policy in NULL if len(rows := run.over(f"{copy} {policy}", run.hand))}
        if rivals:
            best = max(rivals, key=lambda policy: _mean(rivals[policy]))
            won, lost = (rivals[best][rivals[best]["verdict"] == verdict] for verdict in ("FASTER", "SLOWER"))
            text = f"{label(copy)} with {best} against {run.hand} skipping: slower in {len(lost)}"
            top = f", by up to {_most(won)}" if len(won) else ""
            told.append(f"{text} of {answers.count(len(rivals[best]), 'padded cell')}, faster in {len(won)}{top}.")
    return told


def policy_table(run: PaddedRun, least: float = 0.0) -> pd.DataFrame:
    """Per copy and place of the padding, each policy's speedup over one null slot, from a padded share on."""
    told = []
    for copy in run.writers:
        names = {policy: copy if policy == "skip" else f"{copy} {policy}" for policy in OTHERS}
        tables = [run.over(name, f"{copy} {SLOT}").assign(policy=policy) for policy, name in names.items()]
        cells = pd.concat([table for table in tables if len(table)] or tables[:1]).query(f"padding >= {least}")
        for place, here in cells.groupby(["layout", "padded"]):
            row = {"copy": label(copy), "padding": ", ".join(place)}
            told.append(row | {policy: speedup(found) for policy, found in here.groupby("policy")})
    return pd.DataFrame(told, columns=["copy", "padding", *OTHERS]).fillna("")


def step_table(run: PaddedRun) -> pd.DataFrame:
    """What remap and filter do once per step, and the write, by tokens at the share HEAVY: filter waits for the GPU,
    which no graph can hold, so it is timed eagerly."""
    keys, told = ["layout", "copy", "num_tokens"], []
    for timer in dict.fromkeys((run.timer, "eager")):
        where = {"timer": timer, "padding": HEAVY, "padded": "scattered"}
        both = run.cells(part="step", **where).merge(run.cells(**where), on=keys, suffixes=("", "_write"))
        for (layout, copy), line in both[both["policy"].isin(("remap", "filter"))].groupby(keys[:2]):
            row = {"timer": timer, "copy, policy": copy.replace(" ", ", "), "layout": layout}
            spent = line["seconds"].map(duration) + " + " + line["seconds_write"].map(duration)
            told.append(row | dict(sorted(zip(line["num_tokens"], spent))))
    return pd.DataFrame(told).fillna("").rename(columns=lambda name: f"{name:,}" if isinstance(name, int) else name)


# -- what figures show, and their alt texts


def padding_rows(run: PaddedRun, copy: str) -> pd.DataFrame:
    """Times of a copy under the policies of DRAWN, and of limit.copy, on the layout with most of them."""
    names = {copy: "skip"} | {f"{copy} {policy}": policy for policy in DRAWN} | {"limit.copy": "limit.copy"}
    cells = run.cells().query("copy in @names")
    cells = cells[cells["layout"] == cells["layout"].mode().iloc[0]]
    return cells.assign(policy=cells["copy"].map(names)).sort_values(["num_tokens", "padding"], kind="stable")


def padding_alt(run: PaddedRun, copy: str) -> str:
    rows, told = rows_of(padding_rows(run, copy), {"padded": "scattered"}), []
    for tokens, panel in rows.groupby("num_tokens"):
        ends = [f"{policy} {duration(line['seconds'].iloc[0])} to {duration(line['seconds'].iloc[-1])}"
                for policy, line in panel.groupby("policy")]  # fmt: skip
        told.append(f"{answers.count(tokens, 'token')}: {', '.join(ends)}")
    shares = f"{rows['padding'].min():.0%} to {rows['padding'].max():.0%}"
    return f"Line charts. Time of {label(copy)} on {run.machine}, {shares} padded, scattered. {'; '.join(told)}."


def shares_alt(shares: pd.DataFrame) -> str:
    told = [f"{name}: median {here.median():.1%}, {USUALLY:.0%} of steps at most {here.quantile(USUALLY):.1%}"
            for name, here in shares.groupby("captured")["share"]]  # fmt: skip
    return f"Line charts. Padded share of a decode batch by share of steps, for captured sizes {'; '.join(told)}."


def memory_alt() -> str:
    return f"Dots by model and block size: one block is {memory()}."
