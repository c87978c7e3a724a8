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
from kvnb.problem.case import NULL_BLOCKS
from kvnb.report import answers
from kvnb.report.answers import ISSUE, OURS, Run, count, duration, interval, label, neither, rows_of, speedup, times
from kvnb.report.words import mean
from kvnb.reserve import replay

GRID, SLOT, WIDE = "padding", "null_slot", "torch.index_copy_wide"
NULL = {SLOT: 1, "null_block": 1, "null_blocks": NULL_BLOCKS}  # policy: blocks that it takes of the pool
SPREAD = tuple(NULL)[1:]
DRAWN = ("skip", *NULL, "last_slot")  # remap writes as null_slot does, and filter has no graph
OTHERS = ("skip", *SPREAD, "last_slot", "remap")  # beside one null slot
SIZES = dict(zip(replay.CAPTURED, (
    "vLLM's captured sizes (1, 2, 4, multiples of 8 up to 256, of 16 up to 512)", "powers of two")))  # fmt: skip
VLLM_SIZES = next(iter(SIZES))
RANKS = (2, 4, 8)  # of context parallelism
HEAVY, RANK = replay.rank_share(1, 1, 4), "a rank's padding in context parallelism of 4"
LOADS = (1.0, 2.0, 3.0)  # of the trace, so that small and large batches come up
USUALLY = 0.95  # of steps have at most the share that is said to occur
BATCHES = (8, 64, 256, 512)  # ends of ranges of decode batches
BLOCK_SIZES = (16, 64, 256)
SCARCE = {"block_size": 16, "load": 2.0}  # of the replay that one block less might disturb
POOL = f"a pool of {models.POOL_BYTES / models.GIB:.0f} GiB"
ASKED = "What does a reserved slot cost?"
QUESTIONS = ("When it is not free", "When it is free", "What to do")
NEITHER = "no kernel of this run does both"
UNTIMED = "What padding costs in time is not measured"
LACKING = "No run of grid padding is recorded yet (make record GRID=padding)."
UNREPEATED = (
    "This machine's times differ in every run, and with live = no a page is the same every time. `make report`, or "
    "this notebook with live = auto, measures and shows them here."
)
POISON = "Zero the null block after warm-up, or skip: attention multiplies what it masks by 0, and 0 x NaN is NaN."
LIVE = {"workers": 1, "rounds": 3}  # a look at this machine; a record takes 3 and 10


# -- what a CPU can say: a trace replayed, and sizes of models


@dataclass(frozen=True)
class Replayed:
    """A trace under LOADS: `shares` as replay.padded_shares has them, of steps that only decode, and `capacity` with
    none, one and NULL_BLOCKS reserved of a SCARCE pool: twice the blocks of the longest request, or NULL_BLOCKS more.
    """

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
    longest = -(-int((trace["context"] + trace["generated"]).max()) // SCARCE["block_size"])
    scarce = max(2 * longest, longest + NULL_BLOCKS)
    name = f"{f'trace {Path(path).name}' if path else 'synthetic trace'} of {len(trace):,} requests"
    shares = replay.padded_shares(steps[steps["prefill"] == 0])
    if shares.empty:
        raise ValueError(f"{name}: while requests arrive, no step only decodes; give a longer trace")
    return Replayed(name, trace, shares, replay.capacity(trace, scarce, (0, 1, NULL_BLOCKS), **SCARCE))


def usual_share(shares: pd.DataFrame, tokens: int, captured: str = VLLM_SIZES) -> float:
    """The padded share that USUALLY is not exceeded in batches that a list of replay.CAPTURED rounds up to `tokens`; 0
    where none is."""
    here = shares[(shares["captured"] == captured) & (shares["rows"] == tokens)]
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
            row[words] = f"{share:.1%}, {count(round(padded), 'row')}"
        told.append(row)
    return pd.DataFrame(told)


def held(found: Replayed) -> str:
    """What a scarce pool holds with all of its blocks, and with fewer, in a sentence."""
    blocks = found.capacity["usable blocks"]
    each = zip(blocks, found.capacity["held in the mean"])
    told = ", ".join(f"{held:.2f} with {f'{blocks[0] - usable} less' if usable < blocks[0] else 'all of them'}"
                     for usable, held in each)  # fmt: skip
    pool = f"{blocks[0]:,} blocks of {SCARCE['block_size']} tokens, {found.name}, load {SCARCE['load']:g}"
    return f"Requests that a pool made scarce ({pool}) holds in the mean: {told}."


def memory_rows() -> pd.DataFrame:
    """One block of each model of models.CACHES, on one of its `tp` GPUs: model (with its degree), block_size, tokens,
    MiB, percent (of POOL), source."""
    return pd.DataFrame(
        {"model": model.title, "block_size": size, "tokens": model.tokens_per_block(size, model.tp),
         "MiB": model.block_bytes(size, model.tp) / 2**20,
         "percent": 100 * model.share(block_size=size, tp=model.tp), "source": model.source}
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
    return " to ".join(f"{row.percent:#.2g} % ({row.model}, {row.tokens:,} tokens)" for row in rows) + f" of {POOL}"


def bill(blocks: int = 1) -> str:
    """What so many blocks take of the pool of the model whose block takes most."""
    return f"at most {blocks * memory_rows()['percent'].max():#.2g} % of {POOL}"


# -- what a run says


class PaddedRun(Run):
    """A run of grid `padding`; a copy under another policy than skip is named `copy policy`."""

    def __init__(self, samples: pd.DataFrame, path: Path | None = None) -> None:
        self.path = path  # of its file
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
    return PaddedRun(results.load(path), Path(path))


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
    one = f"One block is {memory()}. {held(found)}"
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


def certainty(run: PaddedRun) -> str:
    """What the intervals rest on, and which differences are not called."""
    costs = [run.cost(copy) for copy in run.main]
    return answers.brackets(run.samples, pd.concat(costs) if costs else pd.DataFrame())


def _not_free(run: PaddedRun) -> str:
    told = []
    for copy in run.main:
        rows = run.cost(copy)
        dear, heavy = rows[rows["verdict"] == "FASTER"], rows[rows["padding"] == HEAVY]
        text = f"{label(copy)} takes longer in {len(dear)} of {count(len(rows), 'padded cell')}"
        if len(dear):
            text += f", from {dear['rows'].min():.0f} padded rows on, up to {_most(dear)}"
        told.append(text + (f", and to {times(heavy['speedup'].max())} at {HEAVY:.0%}" if len(heavy) else ""))
    what = "; ".join(told) or NEITHER
    return f"{run.about}. With padding written to one null slot, not skipped, {what} ({HEAVY:.0%}: {RANK})."


def _free(run: PaddedRun, shares: pd.DataFrame) -> str:
    """What the padding of a rounded-up batch costs, by list of captured sizes."""
    told = []
    for captured, sizes in SIZES.items():
        usual = {tokens: usual_share(shares, tokens, captured) for tokens in sorted(run.cells()["num_tokens"].unique())}
        left = ", ".join(f"{share:.0%} of {tokens:,} rows" for tokens, share in usual.items() if share)
        costs = "; ".join(_usual_cost(run.cost(copy), label(copy), usual) for copy in run.main) or NEITHER
        if left:
            told.append(f"Rounding a batch up to {sizes} usually leaves at most {left} padded. With no more, {costs}.")
    return " ".join(told)


def _usual_cost(rows: pd.DataFrame, name: str, usual: dict[int, float]) -> str:
    """What one null slot costs at most with the `usual` padding of each number of tokens, and with what was measured
    next above that."""
    within = is_usual(rows, usual)
    here, dear = rows[within], rows[within & (rows["verdict"] == "FASTER")]
    more = rows[~within & rows["num_tokens"].map(usual).gt(0)]
    above = more[more["padding"] == more.groupby("num_tokens")["padding"].transform("min")]
    above = above[above["verdict"] == "FASTER"]
    same, cells = (here["verdict"] == "SAME").sum(), count(len(here), "cell")
    told = f"{name} takes longer in {len(dear)} of {cells} and as long in {same}"
    told += f", up to {_most(dear)}" if len(dear) else ""
    return told + (f", and at the next larger share measured up to {_most(above)}" if len(above) else "")


def is_usual(rows: pd.DataFrame, usual: dict[int, float]) -> pd.Series:
    """Which rows are padded no more than is `usual` for their number of tokens."""
    return rows["padding"] <= rows["num_tokens"].map(usual)


def _advice(run: PaddedRun) -> str:
    """Skip; and where an index copy cannot, the null policy that serves it best where much is padded."""
    worst = {}
    for copy in run.main:
        dear = run.cost(copy).query("verdict == 'FASTER'")[stats.PLACE]
        for policy in NULL:
            worst.setdefault(policy, []).extend(run.cost(copy, policy).merge(dear, on=stats.PLACE)["speedup"])
    told = ", ".join(f"{times(max(ratios))} with {policy}" for policy, ratios in worst.items() if ratios)
    if not told:
        return "No kernel of this run pays for one null slot."
    kernels = " and ".join(map(label, run.main))
    return f"Let the kernel skip (times of skipping, in the worst cell of {kernels}: {told}). {_spreading(run)}"


def _spreading(run: PaddedRun) -> str:
    """What index copies gain by each other null policy over one null slot, where much is padded."""
    gains = {(copy, policy): rows for copy in (ISSUE, WIDE) for policy in SPREAD
             if len(rows := run.over(f"{copy} {policy}", f"{copy} {SLOT}").query("padding >= @HEAVY"))}  # fmt: skip
    if not gains:
        return "No index copy of this run says how to spread padding."
    each = {name: pd.concat(rows for (_, policy), rows in gains.items() if policy == name) for _, name in gains}
    best = max(each, key=lambda policy: _mean(each[policy]))
    helps = mean(each[best])["verdict"] == "FASTER"
    blocks = f"{count(NULL[best], 'block')}, {bill(NULL[best])}"
    lead = f"Where an index copy must write padding, send it to {best} ({blocks})" if helps else (
        "Where an index copy must write padding, spreading it does not help")  # fmt: skip
    told = ", ".join(f"{label(copy)} {interval(found := mean(rows))}{neither(found)} with {policy}"
                     for (copy, policy), rows in gains.items())  # fmt: skip
    return f"{lead}; speedup over one null slot, {HEAVY:.0%} padded and more: {told}."


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
            told.append(f"{text} of {count(len(rivals[best]), 'padded cell')}, faster in {len(won)}{top}.")
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
        shares = f"{panel['padding'].min():.0%} to {panel['padding'].max():.0%} padded"
        told.append(f"{count(tokens, 'token')}, {shares}: {', '.join(ends)}")
    return f"Line charts. Time of {label(copy)} on {run.machine} by padded share, scattered. {'; '.join(told)}."


def shares_alt(shares: pd.DataFrame) -> str:
    told = [f"{name}: median {here.median():.1%}, {USUALLY:.0%} of steps at most {here.quantile(USUALLY):.1%}"
            for name, here in shares.groupby("captured")["share"]]  # fmt: skip
    return f"Line charts. Padded share of a decode batch by share of steps, for captured sizes {'; '.join(told)}."


def memory_alt() -> str:
    return f"Dots by model and block size: one block is {memory()}."
