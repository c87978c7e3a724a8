"""Figures of one run: static PNG, the same bytes from the same samples, shown with alt text. Tables beside them.

Rows, titles and alt texts come from answers.py; this file only draws. A family has one colour and a copy one marker and
dash in every figure, so that a copy is found again, in greyscale too. Lines carry their names at their ends.
"""

from __future__ import annotations

import io
import textwrap
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import seaborn
from IPython.display import HTML, Markdown, display
from IPython.display import Image as Picture
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
from PIL import Image

from kvnb.copies import REGISTRY
from kvnb.copies.base import FAMILIES
from kvnb.report import answers, null_block

# Okabe and Ito's palette, which is told apart with any colour vision
COLOURS = dict(zip(FAMILIES, ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#555555", "#56B4E9")))
MARKERS = "os^DvPX"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 2)))
RANGES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of batches and block sizes, which have no family
OCCUR = (
    "shaded: shares that rounding a decode batch up to this size leaves in 95 % of steps; dotted: a rank's in context\n"
    "parallelism of 2, 4 and 8; hollow: the same share at the tail instead of scattered"
)
BYTES = "bytes moved = 2 (read, write) x written tokens x heads x (head size + value head size) x item size + index"
STYLE = {
    **{"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9},
    **{"axes.titlelocation": "left", "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.spines.top": False},
    **{"axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6},
}


def draw(figure: str, run: answers.Run, layout: str = "") -> None:
    """Show a figure of answers.FIGURES in a notebook with its alt text, or say what the run lacks for it.

    `layout`: another than that of run.line, for figures of one line.
    """
    alt = answers.alt(figure, run, layout)
    if answers.figure_data(figure, run, layout).empty:
        display(Markdown(f"{run.machine}: {alt}"))
    else:
        display(Picture(data=png(figure, run, layout), format="png", alt=alt))


def table(rows: pd.DataFrame, caption: str = "") -> None:
    """Show a table of `answers` in a notebook, whole and without row numbers."""
    if caption:
        display(Markdown(f"**{caption}**"))
    whole = {r" \[(\S+), (\S+)\]": "\u00a0[\\1,\u00a0\\2]", r"^(\S+) (us|ms|s)$": "\\1\u00a0\\2"}  # stay in one line
    rows = rows.replace(whole, regex=True)
    with pd.option_context("display.max_colwidth", None):
        display(HTML(rows.to_html(index=False, border=0)) if len(rows) else Markdown("none"))


def png(figure: str, run: answers.Run, layout: str = "") -> bytes:
    return png_of(make(figure, run, layout))


def png_of(fig: Figure) -> bytes:
    """A figure as PNG with a palette of 48 colours: small, and free of versions and dates."""
    full, small = io.BytesIO(), io.BytesIO()
    fig.savefig(full, format="png", dpi=150, metadata={"Software": None})
    colours = Image.open(full).convert("RGB")
    colours.quantize(48, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


@rc_context(STYLE)
def make(figure: str, run: answers.Run, layout: str = "") -> Figure:
    """A figure of answers.FIGURES; its `answers.figure_data` must not be empty."""
    rows, (title, column, _) = answers.figure_data(figure, run, layout), answers.FIGURES[figure]
    about = f"{answers.line_name(run.line)} {layout or run.line['layout']}"
    if figure in answers.PANELS:
        about = answers.line_name(run.line)
    elif figure == "releases":
        about = "8x128; above the points: registers per thread (sm_90)"
    fig = {"heads": heat_map, "releases": by_release}.get(figure, lines)(rows, column)
    timer = "graph and eager" if figure == "eager" else run.timer
    return _titled(fig, title, f"{run.machine}; {about}; timer {timer}, state produced")


def _titled(fig: Figure, title: str, about: str) -> Figure:
    height = fig.get_figheight()
    fig.text(0.012, 1 - 0.06 / height, title, size=11, weight="bold", va="top")
    fig.text(0.012, 1 - 0.27 / height, about, size=8.5, color=COLOURS["limit"], va="top")
    return fig


def look(copy: str, family: str) -> dict:
    """Colour, marker and dash of a copy: by its place in its family, or by its name where it is not registered.

    Peers have fixed places, as which of them are registered differs by machine; vLLM's releases share one, as one
    alone is drawn beside other copies.
    """
    known = [other.name for other in REGISTRY.values() if other.family == family]
    if family == "peer":
        known, copy = ["vllm==", *answers.PEERS], "vllm==" if copy.startswith("vllm==") else copy
    place = known.index(copy) if copy in known else zlib.crc32(copy.encode())
    return {"color": COLOURS[family], "marker": MARKERS[place % 7], "linestyle": DASHES[place % 7]}


# -- lines against tokens


def lines(rows: pd.DataFrame, column: str) -> Figure:
    """A column of panels: microseconds (log-log) or percent of limit.copy against tokens; a line per copy."""
    order = {layout: place for place, layout in enumerate(answers.LAYOUTS)}
    panels = sorted(rows["panel"].unique(), key=lambda panel: (order.get(panel.split(",")[0], 0), panel))
    height = 1.1 + (3.8 if len(panels) == 1 else 1.9 * len(panels))
    fig = Figure(figsize=(7.4, height))
    fig.subplots_adjust(left=0.11, right=0.70, bottom=0.65 / height, top=1 - 0.72 / height, hspace=0.28)
    axes = fig.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    ends = [[_line(ax, line, column) for _, line in rows[rows["panel"] == panel].groupby("copy")]
            for ax, panel in zip(axes, panels)]  # fmt: skip
    axes[-1].set_xlabel("tokens")
    _token_axis(axes[0], rows["num_tokens"].unique())
    if column == "seconds":
        _time_axis(axes[0], LogLocator(subs=(1, 2, 5)))
    else:
        axes[0].set_ylim(0, max(105, 1.05 * rows[column].max()))
        for ax in axes:
            ax.axhline(100, color=COLOURS["limit"], linewidth=1)
        fig.text(0.012, 0.06 / height, BYTES, size=7.5, color=COLOURS["limit"])
    for ax, panel, named in zip(axes, panels, ends):
        ax.set(title=panel, ylabel="microseconds" if column == "seconds" else "% of limit.copy")
        _name_ends(ax, named)
    return fig


def _line(ax: Axes, line: pd.DataFrame, column: str) -> tuple[float, float, str, str]:
    """Draw a copy with its interval; returns the line's end: x, y, name, colour."""
    copy, scale = line["copy"].iloc[0], 1e6 if column == "seconds" else 1
    shape = look(copy, line["family"].iloc[0]) | ({"marker": ""} if copy.startswith("limit.launch") else {})
    bold = copy == answers.OURS
    x, y = line["num_tokens"].to_numpy(), scale * line[column].to_numpy()
    ax.plot(x, y, **shape, linewidth=2.4 if bold else 1.3, markersize=5 if bold else 4, zorder=4 if bold else 3)
    if column == "seconds":
        ax.fill_between(x, scale * line["low"], scale * line["high"], color=shape["color"], alpha=0.2, linewidth=0)
    return x[-1], y[-1], answers.label(copy), shape["color"]


def _time_axis(ax: Axes, ticks: LogLocator) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(ticks)
    ax.yaxis.set_major_formatter("{x:,.10g}")
    ax.yaxis.set_minor_locator(NullLocator())


def _token_axis(ax: Axes, tokens: Iterable[int]) -> None:
    """Ticks at the measured sizes, 1k for 1,024."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(tokens)))
    ax.xaxis.set_major_formatter(lambda n, _: short(round(n)))
    ax.xaxis.set_minor_locator(NullLocator())


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _name_ends(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Each line's name right of the panel, at the height of its end or as near as names do not overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    words = [textwrap.fill(name, 30) for _, _, name, _ in ends]
    inches = ax.figure.get_figheight() * ax.get_position().height
    heights = [0.135 * (1 + word.count("\n")) / inches for word in words]
    wanted = [ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1] for x, y, _, _ in ends]
    for (x, y, _, colour), word, at in zip(ends, words, spread(wanted, heights)):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        place = {"xytext": (1.045, at), "textcoords": "axes fraction", "va": "center", "arrowprops": arrow}
        weight = "bold" if word == answers.OURS else "normal"
        ax.annotate(word, (x, y), color=colour, size=8, weight=weight, linespacing=0.95, annotation_clip=False, **place)


def spread(wanted: Sequence[float], heights: Sequence[float]) -> np.ndarray:
    """Centres for labels of these heights: ascending like `wanted`, without overlap, nearest to it in least squares.

    That is isotonic regression of how far each label lies from its place in a stack of them, by its minimax formula.
    """
    stack = np.cumsum(heights) - np.divide(heights, 2)
    off, n = wanted - stack, len(wanted)
    least = [[min(off[low : high + 1].mean() for high in range(i, n)) for low in range(i + 1)] for i in range(n)]
    return stack + [max(means) for means in least]


# -- time by release


def by_release(rows: pd.DataFrame, column: str) -> Figure:
    """A panel per problem: microseconds against releases, oldest first; a line per number of tokens."""
    panels, names = list(rows["panel"].unique()), sorted(rows["copy"].unique(), key=answers.age)
    height = 0.9 + 3.5 * len(panels)
    fig = Figure(figsize=(7.4, height))
    fig.subplots_adjust(left=0.09, right=0.86, bottom=0.6 / height, top=1 - 0.75 / height, hspace=0.3)
    for ax, panel in zip(fig.subplots(len(panels), sharey=True, squeeze=False)[:, 0], panels):
        here, colour = rows[rows["panel"] == panel], COLOURS["peer"]
        ends = []
        for tokens, line in here.groupby("num_tokens"):
            x, y = line["copy"].map(names.index).to_numpy(), 1e6 * line[column].to_numpy()
            ax.plot(x, y, color=colour, marker="o", markersize=4, linewidth=1.3)
            ax.fill_between(x, 1e6 * line["low"], 1e6 * line["high"], color=colour, alpha=0.2, linewidth=0)
            ends.append((x[-1], y[-1], f"{short(tokens)} token{'s' * (tokens > 1)}", colour))
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "size": 8}
        for name, top in here.groupby("copy")[column].max().items():
            ax.annotate(answers.registers(name), (names.index(name), 1e6 * top), **above)
        calls = (here["layout"] + "\n" + here["source"]).set_axis(here["copy"])
        ticks = [calls[[name]].iloc[0] if name in calls.index else "not\nmeasured" for name in names]
        if panel == answers.SAME:  # whose title says the call
            ticks = [tick.replace(calls.iloc[0], "") for tick in ticks]
        _time_axis(ax, LogLocator(subs=(1, 2, 5)))
        ax.set_xticks(range(len(names)), [f"{answers.release(name)}\n{tick}" for name, tick in zip(names, ticks)])
        ax.set(title=panel, ylabel="microseconds", xlim=(-0.4, len(names) - 0.6))
        ax.margins(y=0.1)
        _name_ends(ax, ends)
    return fig


# -- speedups by tokens and heads


def heat_map(rows: pd.DataFrame, column: str) -> Figure:
    """Speedups by heads and tokens, diverging around 1, each with its verdict unless it is FASTER."""
    table = rows.pivot(index="num_kv_heads", columns="num_tokens", values=[column, "verdict"])
    speedups, verdicts = table[column], table["verdict"]
    signs = verdicts.replace({"FASTER": "", "SLOWER": "\nSLOWER", "SAME": "\nSAME", "UNDECIDED": "\n?"})
    text = (speedups.map(answers.times, na_action="ignore") + signs).fillna("")
    exponent = np.log2(speedups.astype(float))
    reach = max(1.0, float(np.nanmax(np.abs(exponent))))
    height = 1.35 + 0.42 * len(exponent)
    fig = Figure(figsize=(7.4, height))
    fig.subplots_adjust(left=0.085, right=0.985, bottom=0.5 / height, top=1 - 0.55 / height)
    ax = fig.subplots()
    colours = {"cmap": "PuOr", "vmin": -reach, "vmax": reach, "linewidths": 1, "cbar": False}
    seaborn.heatmap(exponent, annot=text, fmt="", annot_kws={"size": 8}, ax=ax, **colours)
    ax.set(xlabel="tokens (purple: kvnb is faster, orange: PyTorch is; ?: UNDECIDED)", ylabel="KV heads")
    ax.set_xticklabels(map(short, exponent.columns))
    ax.tick_params(length=0, labelrotation=0)
    ax.grid(False)
    return fig


# -- padding


def show(fig: Figure, alt: str) -> None:
    """Show one of the figures below in a notebook, with its alt text of null_block."""
    display(Picture(data=png_of(fig), format="png", alt=alt))


@rc_context(STYLE)
def padding(run: null_block.PaddedRun, copy: str, shares: pd.DataFrame) -> Figure:
    """Microseconds against the padded share: a panel per number of tokens, a line per policy, and shares that occur."""
    rows = null_block.padding_rows(run, copy)
    tokens, height = sorted(rows["num_tokens"].unique()), 5.6
    fig = Figure(figsize=(7.4, height))
    fig.subplots_adjust(left=0.075, right=0.975, bottom=0.98 / height, top=1 - 0.75 / height, hspace=0.3, wspace=0.22)
    axes = fig.subplots(-(-len(tokens) // 3), 3, squeeze=False, sharex=True)
    for ax, n in zip(axes.flat, tokens):
        here = rows[rows["num_tokens"] == n]
        for policy in [name for name in (*null_block.DRAWN, "limit.copy") if name in set(here["policy"])]:
            _policy(ax, here[here["policy"] == policy], policy)
        _occurring(ax, null_block.usual_share(shares, n))
        _time_axis(ax, LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        low, high = ax.get_ylim()
        ax.set(title=f"{n:,} tokens", xlim=(-0.03, 1), ylim=(min(low, 0.6 * high), high))
    for ax in axes[:, 0]:
        ax.set_ylabel("microseconds")
    for ax in axes[-1]:
        ax.xaxis.set_major_formatter("{x:.0%}")
    lines = {line.get_label(): line for ax in axes.flat for line in ax.lines if line.get_label()[0] != "_"}
    fig.legend(lines.values(), lines.keys(), loc="lower left", ncols=6, frameon=False, fontsize=8, handlelength=3.2)
    fig.text(0.012, 0.34 / height, OCCUR, size=7.5, linespacing=1.3, color=COLOURS["limit"])
    about = f"{run.machine}; {answers.line_name(rows.iloc[0], layout=True)}; timer {run.timer}, state produced"
    return _titled(fig, f"Time of {answers.label(copy)}, by padded share and policy", about)


def _policy(ax: Axes, line: pd.DataFrame, policy: str) -> None:
    """A policy's line over scattered shares; hollow, where the same share lies at the tail."""
    place = null_block.DRAWN.index(policy) if policy in null_block.DRAWN else 0
    shape = {"color": COLOURS[line["family"].iloc[0]], "marker": MARKERS[place], "linestyle": DASHES[place]}
    if policy == "limit.copy":
        shape |= {"marker": "", "linewidth": 1}
    scattered, tail = (line[line["padded"] == padded] for padded in ("scattered", "tail"))
    x, y = scattered["padding"], 1e6 * scattered["seconds"]
    ax.plot(x, y, label=policy, **{"linewidth": 2.2 if policy == "skip" else 1.2, "markersize": 4} | shape)
    ax.fill_between(x, 1e6 * scattered["low"], 1e6 * scattered["high"], color=shape["color"], alpha=0.2, linewidth=0)
    hollow = shape | {"linestyle": "", "markerfacecolor": "white", "markersize": 6.5, "zorder": 2}
    ax.plot(tail["padding"], 1e6 * tail["seconds"], **hollow)


def _occurring(ax: Axes, usual: float) -> None:
    """Shade the padded shares that rounding up leaves, and mark those of context parallelism."""
    if usual > 0:
        ax.axvspan(0, usual, color=COLOURS["compile"], alpha=0.18, linewidth=0, zorder=0)
    for ranks in null_block.RANKS:  # a full batch
        ax.axvline(1 - 1 / ranks, color=COLOURS["limit"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        place = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom", "size": 7}
        ax.text(1 - 1 / ranks, 1.0, ranks, **place)


@rc_context(STYLE)
def padded_shares(shares: pd.DataFrame, about: str) -> Figure:
    """Cumulative share of steps by padded share: a panel per capture list, a line per range of decode batches."""
    height, names = 3.4, list(shares["captured"].unique())
    fig = Figure(figsize=(7.4, height))
    fig.subplots_adjust(left=0.085, right=0.985, bottom=0.5 / height, top=1 - 0.75 / height, wspace=0.12)
    shares = shares.assign(range=null_block.ranges(shares))
    axes = fig.subplots(1, len(names), sharey=True, sharex=True, squeeze=False)[0]
    for ax, name in zip(axes, names):
        here = shares[shares["captured"] == name]
        for place, (batch, some) in enumerate(here.groupby("range", observed=True)):
            shape = {"color": RANGES[place], "linestyle": DASHES[place], "linewidth": 1.6}
            ax.ecdf(some["share"], label=f"batches of {batch}", **shape)
        ax.ecdf(here["share"], label="all", color=COLOURS["limit"], linewidth=2.2)
        ax.set(title=f"captured: {name}", xlabel="padded share of the batch")
        ax.xaxis.set_major_formatter("{x:.0%}")
        ax.yaxis.set_major_formatter("{x:.0%}")
    axes[0].set_ylabel("steps")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return _titled(fig, "Padding that rounding a decode batch up to captured sizes leaves", about)


@rc_context(STYLE)
def memory() -> Figure:
    """One block's share of the pool: a row per model, a dot per block size."""
    rows = null_block.memory_rows()
    names = list(rows["model"].unique())[::-1]
    height = 1.3 + 0.26 * len(names)
    fig = Figure(figsize=(7.4, height))
    fig.subplots_adjust(left=0.31, right=0.97, bottom=0.5 / height, top=1 - 0.75 / height)
    ax = fig.subplots()
    for place, (size, dots) in enumerate(rows.groupby("block_size")):
        y = dots["model"].map(names.index)
        ax.plot(dots["percent"], y, MARKERS[place], color=RANGES[place], label=f"blocks of {size}")
    ax.set(xscale="log", xlabel="% of the pool (log)", yticks=range(len(names)), yticklabels=names)
    ax.xaxis.set_major_formatter("{x:.3g}")
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    return _titled(fig, "Memory of a reserved block", f"one block's share of {null_block.POOL}; bfloat16, one GPU")
