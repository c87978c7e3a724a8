"""What a report's front page says, and what of it README and an issue's comment take: answers, verdicts, figures."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvnb import paths
from kvnb.bench import stats
from kvnb.bench.run import ROUNDS, WORKERS
from kvnb.copies import REGISTRY
from kvnb.report import answers, null_block, plots
from kvnb.report.answers import BEST, ISSUE, LAYERS, OURS, REGIMES, Run, count, interval, label, line_name
from kvnb.report.words import mean

TOKENS = {"decode": "up to 256 tokens", "mixed": "257 to 2,047 tokens", "prefill": "2,048 tokens and more"}
COMPACT = ("packed", "NHD")  # layouts in README
WORDS = (
    "A case is one problem: a number of tokens, heads of a size and type, a layout. Decode writes up to 256 tokens, "
    "one per request; prefill 2,048 and more, whole prompts. Layouts: packed has K and V side by side, as vLLM lays "
    "its cache out now; NHD has slots before heads, as in the issue; HND heads before slots."
)
LIMITS = (
    "It is the separate copy that is compared. Engines move to kernels that rotate and write in one, which removes it.",
    "fp8 caches, MLA and x-packed caches are not covered.",
    "A copy is timed by itself: what it does to the caches of the attention kernel that follows is not counted.",
    "Compare copies within a case: across cases, their allocations alone can move a copy by a few percent.",
    "torch.compile compiles, in every worker, for the first size met in a regime, and keeps the faster of two tilings "
    "in its own timing, which can go either way.",
    "Intervals come from few processes: where processes differ more than rounds do, they are too short, and they say "
    "nothing of other boards.",
    f"vllm==X is what that wheel ships; vllm.scalar is {answers.VLLM}, and no verdict on vLLM rests on it.",
)
CAPTIONS = {  # what a figure draws; its alt text says what it shows
    "latency": "Time of one copy of K and V, {shape}, layout {layout}, by number of tokens: a line per copy.",
    "limit": "Speed of each copy in percent of limit.copy's, {shape}, by number of tokens: a panel per layout.",
    "heads": f"Speedup of {OURS} over the {BEST} copy, {{heads}}, layout {{layout}}, by KV heads and number of tokens.",
    "eager": "Time of one copy, {shape}, layout {layout}, by number of tokens: in a CUDA graph, and called eagerly.",
    "step": f"Time per layer, {{shape}}: with the step done in every call, and with one that {LAYERS} layers share.",
    "releases": "Time of one copy, 8x128, by vLLM release: a panel per problem, a line per number of tokens.",
}
PAGES = {  # what a notebook's page holds
    "01_copies": "what is copied, and how a wrong copy is caught",
    "02_measure": "the run as it was measured",
    "03_compare": "every copy, figure and table of this comparison",
    "04_null_block": "padding that occurs, its time, memory, capacity and safety",
    "05_releases": "the same kernel through vLLM's releases",
    "06_timers": "what each timer and state measures",
    "07_runs": "runs of several machines, commits and versions",
}


# -- TODO 1


def reserve(run: null_block.PaddedRun | None) -> str:
    """The issue's first TODO in two sentences: what a reserved slot costs in time, then in memory. None: not timed."""
    rows = null_block.memory_rows()
    lacking = f"Not timed yet: {null_block.LACKING[0].lower()}{null_block.LACKING[1:]}"
    most = rows.loc[rows["percent"].idxmax()]
    return (
        f"{_time(run, null_block.replayed().shares) if run else lacking} In memory it is one block, "
        f"{null_block.bill()} ({most['model']}, blocks of {most['tokens']:,} tokens)."
    )


def _time(run: null_block.PaddedRun, shares: pd.DataFrame) -> str:
    if not run.main:
        return "Not measured in time: no kernel of this run both skips padding and writes it."
    costs = {copy: run.cost(copy) for copy in run.main}
    rows = pd.concat(costs.values())
    rows = rows.assign(dear=rows["verdict"] == "FASTER")
    usual = {tokens: null_block.usual_share(shares, tokens) for tokens in rows["num_tokens"].unique()}
    usual = rows[null_block.is_usual(rows, usual)]
    much = "Time" if usual["dear"].any() else "Time where much is padded" if rows["dear"].any() else "No time"
    lead = much if (rows["verdict"] != "UNDECIDED").mean() > 0.5 else "Not decided"
    slows = " and ".join(_slows(cost, label(copy)) for copy, cost in costs.items())
    few = usual["dear"].sum()
    often = (
        f", {'and' if few else 'but'} in {few or 'none'} of the {len(usual)} cases with no more padding than rounding "
        f"up to vLLM's captured sizes ({null_block.VLLM_SIZES}) usually leaves"
    )
    what = f"{lead}, and one block: padding written to it, not skipped, slows {slows}"
    return f"{what}{often * bool(len(usual) and rows['dear'].any())}."


def _slows(rows: pd.DataFrame, name: str) -> str:
    """`kvnb by up to 9.40 [9.39, 9.40] times`."""
    dear = rows[rows["verdict"] == "FASTER"]
    most = f"by up to {interval(dear.iloc[-1])} times" if len(dear) else ""
    return f"{name} " + (most or f"in none of {count(len(rows), 'padded case')}")


# -- verdicts


@dataclass(frozen=True)
class Cell:
    """A kernel's speedup over a copy in one regime and layout: a geometric mean, its ends, and what it is a mean of."""

    speedup: str
    ends: str
    verdict: str
    spread: str
    but: str  # how many of its cells say the contrary

    @property
    def colour(self) -> str:
        """Of the verdict; a mean that hides losses has one of its own."""
        return "mixed" if self.but and self.verdict != "SLOWER" else self.verdict.lower()

    @property
    def text(self) -> str:
        return f"{self.speedup} {self.ends} {self.verdict}" + f", but {self.but}" * bool(self.but)


@dataclass(frozen=True)
class Matrix:
    """Verdicts of one kernel: a row per layout and regime, with a cell (None: not measured) per copy."""

    kernel: str
    copies: list[str]
    rows: list[tuple[str, str, list[Cell | None]]]

    def markdown(self) -> str:
        """As a table for GitHub."""
        head = [f"{self.kernel}'s speedup over", *map(label, self.copies)]
        lines = [[f"{layout}, {regime}", *(cell.text if cell else "not measured" for cell in cells)]
                 for layout, regime, cells in self.rows]  # fmt: skip
        return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def matrix(run: Run, kernel: str, copies: Iterable[str] = (), layouts: Iterable[str] = answers.LAYOUTS) -> Matrix:
    copies, held = list(copies) or answers.main_copies(run, kernel), {}
    for copy in copies:
        rows = run.speedups(kernel, copy)
        for key, cells in rows.groupby(["layout", "regime"]):
            held[(*key, copy)] = _cell(cells)
    rows = [(layout, regime, [held.get((layout, regime, copy)) for copy in copies])
            for layout in layouts for regime in REGIMES]  # fmt: skip
    return Matrix(kernel, copies, [row for row in rows if any(row[2])])


def _cell(rows: pd.DataFrame) -> Cell:
    told = mean(rows, "case")
    but = answers.contrary(rows, told["verdict"])
    return Cell(*interval(told).split(" ", 1), told["verdict"], told["spread"], but)


def matrices(run: Run) -> list[Matrix]:
    """kvnb against every copy, after the kernel that vLLM ships against PyTorch's, where the run holds it."""
    both = [matrix(run, kernel) for kernel in (run.shipped, OURS) if kernel]
    return [table for table in both if table.rows]


def compact(run: Run) -> Matrix:
    """kvnb against the three or four copies that the question is about, in the layouts of COMPACT."""
    wanted = [copy for copy in (run.shipped, BEST, ISSUE, "torch.compile") if copy in answers.main_copies(run)]
    return matrix(run, OURS, wanted, COMPACT)


# -- figures


@dataclass(frozen=True)
class Picture:
    """A figure as the page embeds it."""

    name: str
    png: bytes
    alt: str
    caption: str

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def pictures(run: Run, releases: Sequence[Run] = (), padded: Sequence[null_block.PaddedRun] = ()) -> list[Picture]:
    """The figures that matter, of those that the runs hold rows for: at most 15."""
    asked = [("latency", run, layout) for layout in run.layouts[:2]]
    asked += [("limit", run, ""), *(("heads", run, layout) for layout in run.layouts[:2])]
    asked += [("eager", run, ""), ("step", run, ""), *(("releases", other, "") for other in releases[:1])]
    told = [Picture(name, plots.png(name, run, layout), answers.alt(name, run, layout), _caption(name, run, layout))
            for name, run, layout in asked if len(answers.figure_data(name, run, layout))]  # fmt: skip
    for other in padded[:1]:
        shares = null_block.replayed().shares
        for copy in other.main[:1]:
            drawn = plots.png_of(plots.padding(other, copy, shares))
            caption = f"Time of {label(copy)} by padded share: a panel per number of tokens, a line per policy."
            told.append(Picture("padding", drawn, null_block.padding_alt(other, copy), caption))
    return told


def _caption(figure: str, run: Run, layout: str) -> str:
    heads, where = f"heads of {run.line['head_size']}", layout or run.line["layout"]
    return CAPTIONS[figure].format(shape=line_name(run.line), heads=heads, layout=where)


def missing(run: Run) -> list[str]:
    """What the page would show of a run but cannot, in words."""
    return [answers.alt(name, run) for name in ("latency", "limit", "heads", "eager", "step")
            if answers.figure_data(name, run).empty]  # fmt: skip


# -- what it rests on


def method(run: Run) -> list[str]:
    """How it was measured, in five lines."""
    done = run.samples[run.samples["status"] == "ok"]
    workers, rounds = (count(done[name].nunique(), noun) for name, noun in (("worker", "worker"), ("round", "round")))
    how = "as a share of a CUDA graph of many calls" if run.timer == "graph" else "call by call"
    return [
        f"Timed is the write of K and V, without padding, {how} (timer {run.timer}).",
        "Caches are as a server leaves them (state produced): K and V still in L2, the slots written to not.",
        f"{workers} (processes with allocations of their own) of up to {rounds}; in each, a case's copies run in a new "
        "random order on the same inputs.",
        "A copy is timed only where it wrote every bit right in this very case, before and after.",
        "A speedup is the median of a round's ratios of times, with a bootstrapped 95 % interval. FASTER, SLOWER: all "
        f"of it lies beyond the margin ({stats.LEAST_MARGIN:.0%}, or the noise floor if larger: a copy timed under two "
        "names); SAME: within it; UNDECIDED: neither.",
    ]


def commands(run: Run, path: Path) -> list[tuple[str, str]]:
    """(command, what it does) that reproduce the run and its page."""
    commit, versions = run.first["kvnb_commit"], " ".join(map(answers.release, run.releases))
    done = run.samples[run.samples["status"] == "ok"]
    asked = f"GRID={run.first['grid']}"
    for name, usual in (("worker", WORKERS), ("round", ROUNDS)):
        if len(done) and (most := done[name].max() + 1) != usual:
            asked += f" {name.upper()}S={most}"
    fetch = [(f".venv/bin/kvnb releases {versions}", "fetches vLLM's kernels")] if versions else []
    if not path.is_relative_to(paths.RECORDED):
        return [*fetch, (f"make report {asked}", "measures, and draws this page")]
    code = "the code that measured, but for changes of its own:" if run.first["dirty"] else "the code that measured:"
    checkout = [] if commit.startswith("tree-") else [(f"git checkout {paths.short_commit(commit)}", code)]
    draw = (f"make render GPU={path.parent.name}", "draws this page from the run file, without a GPU")
    return [draw, *checkout, *fetch, (f"make record {asked}", f"measures anew, on {run.machine}")]


def elsewhere(run: Run, path: Path) -> list[str]:
    """How certain the answer is at another place in memory, and by what other recorded runs of the same grid and GPU
    model say, on another board."""
    placed = [told] if (told := answers.placed(run)) else []
    if not path.is_relative_to(paths.RECORDED):
        return placed
    others = [other for other in sorted(path.parent.glob(f"*_{run.first['grid']}_*.parquet")) if other != path]
    return [*placed, *(f"Another run, {other.name}{_answer(other)}" for other in others)]


def _answer(path: Path) -> str:
    try:
        return f": {answers.answer(answers.load(path))}"
    except ValueError as error:  # it is not what the page is about
        return f", is left out: {error}"


def copies(run: Run) -> list[tuple[str, str]]:
    """(copy, what it is) of the copies that the page names; those that this kvnb knows no more are left out."""
    named = dict.fromkeys([OURS, f"{OURS}.dependent", *run.copies])
    return [(label(copy), REGISTRY[copy].title_in(run.versions.get(copy, ""))) for copy in named if copy in REGISTRY]


def provenance(run: Run, path: Path) -> list[tuple[str, str]]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [*answers.provenance(run).itertuples(index=False, name=None), ("SHA-256 of its file", digest)]


# -- for README and for an issue's comment


ASKED = "Does PyTorch's index copy outperform a hand-written kernel?"


LINKING = re.compile(r"(?<=@)|(?<=:)(?=//)|(?<=#)(?=\d)|(?<=www)(?=\.)", re.IGNORECASE)  # of itself, on GitHub
JOINER = "&#8288;"  # a character without width, at which GitHub sees two words


def inert(text: str) -> str:
    """Markdown in which names of machines and copies are no HTML, picture, link, mention or reference to an issue.

    GitHub shows it as it was. Once only: what is inert already would show its escapes.
    """
    bracketed = re.sub(r"(?<=[!\]])(?=[\[(:])", r"\\", text.replace("<", "&lt;"))
    return LINKING.sub(JOINER, bracketed)


def reserved(run: null_block.PaddedRun | None) -> str:
    """`reserve`, and what it rests on."""
    return " ".join([reserve(run), *([null_block.certainty(run)] if run else [])])


def told(runs: Sequence[Run], padded: Sequence[null_block.PaddedRun]) -> str:
    """Both questions with their answers, in Markdown that is not inert yet."""
    several = len({run.machine for run in (*runs, *padded)}) > 1
    of = (lambda run: f"{run.machine}, grid {run.first['grid']}: " if run else "") if several else lambda run: ""
    both = [f"**{ASKED}**"] * bool(runs or not padded)
    for run in runs:
        both += [of(run) + answers.answer(run), f"{answers.scope(run)} {answers.certainty(run)}".strip()]
    both += [f"**{null_block.ASKED}**", *(of(run) + reserved(run) for run in padded or [None])]
    return "\n\n".join(both)


def summary(runs: Sequence[Run], padded: Sequence[null_block.PaddedRun], failed: Sequence[str] = ()) -> str:
    """To paste into a GitHub issue: the answers, a table of verdicts per run, and what they rest on.

    `failed`: notebooks that did not finish.
    """
    lines = [f"# {' and '.join(run.title for run in runs or padded) or 'No run to report'}"]
    lines += [f"**Not finished: {', '.join(failed)} failed, and what they would show is missing.**"] * bool(failed)
    lines.append(told(runs, padded))
    for run in runs:
        lines += [f"## {run.title}"] * (len(runs) > 1) + [table.markdown() for table in matrices(run)]
        lines.append(_measured(run))
    lines += [_measured(run) for run in padded]
    lines += [answers.note(runs)] if runs else []
    return inert("\n\n".join(lines)) + "\n"


def _measured(run: Run) -> str:
    about = run.first
    return f"{run.about}; grid {about['grid']}, run {about['run_id']}, kvnb {about['kvnb_commit'][:12]}."
