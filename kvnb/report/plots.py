"""Figures of one run: static PNG, the same bytes from the same samples, shown with alt text. Tables beside them.

Rows and alt texts come from answers.py; this file only draws. A family has one colour and a copy one marker and dash in
every figure, so that a copy is found again, in greyscale too. Lines carry their names at their ends.
"""

from __future__ import annotations

import io
import textwrap
import zlib
from collections.abc import Callable

import numpy as np
import pandas as pd
import seaborn
from IPython.display import HTML, Markdown, display
from IPython.display import Image as Picture
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from PIL import Image

from kvnb.problem.case import LAYOUTS
from kvnb.report import answers

COLOURS = {  # Okabe and Ito's palette, which is told apart with any colour vision
    "kernel": "#0072B2",
    "torch": "#D55E00",
    "compile": "#E69F00",
    "triton": "#009E73",
    "peer": "#CC79A7",
    "yours": "#56B4E9",
    "limit": "#555555",
}
SHAPES = (  # marker, dash (0: solid)
    *(("o", "-"), ("s", (0, (5, 1.5))), ("^", (0, (1, 1))), ("D", (0, (6, 1.5, 1, 1.5)))),
    *(("v", (0, (3, 1, 1, 1, 1, 1))), ("P", (0, (8, 2))), ("X", (0, (2, 2)))),
)
FIXED = {  # copies of one family in the order of SHAPES; a copy that is not here gets its shape from its name
    "kernel": ("kvnb", "kvnb.dependent", "kvnb.again", "vllm.scalar"),
    "torch": (
        *("torch.index_put", "torch.index_copy", "torch.scatter"),
        *("torch.index_put_wide", "torch.index_copy_wide", "torch.index_put_packed"),
    ),
    "compile": ("torch.compile", "torch.compile_view"),
    "triton": ("triton",),
    "limit": ("limit.event", "limit.copy", "limit.launch", "limit.launch.dependent", "limit.copy.memcpy"),
}
BYTES = "bytes moved = 2 (read, write) x written tokens x heads x (head size + value head size) x item size + index"
GREY, DOTS_PER_INCH, PALETTE = "#444444", 150, 48
STYLE = {
    **{"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9},
    **{"axes.titlelocation": "left", "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.spines.top": False},
    **{"axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6},
}


def draw(figure: str, samples: pd.DataFrame) -> None:
    """Show a figure of FIGURES in a notebook, or say what the run lacks for it."""
    alt = answers.alt(figure, samples)
    if answers.figure_data(figure, samples).empty:
        display(Markdown(f"{answers.machine(samples)}: {alt}"))
    else:
        show(make(figure, samples), alt)


def table(rows: pd.DataFrame, caption: str = "") -> None:
    """Show a table of `answers` in a notebook, whole and without row numbers."""
    if caption:
        display(Markdown(f"**{caption}**"))
    rows = rows.replace(r" \[(\S+), (\S+)\]", "\u00a0[\\1,\u00a0\\2]", regex=True)  # an interval stays in one line
    with pd.option_context("display.max_colwidth", None):
        display(HTML(rows.to_html(index=False, border=0)) if len(rows) else Markdown("none"))


def make(figure: str, samples: pd.DataFrame) -> Figure:
    """The figure by its name in FIGURES; `answers.figure_data` of that name must not be empty."""
    with rc_context(STYLE):
        return FIGURES[figure](answers.figure_data(figure, samples), samples)


def show(fig: Figure, alt: str) -> None:
    """Display a figure as PNG with `alt` in the output's metadata, where pages look for it."""
    display(Picture(data=png(fig), format="png", alt=alt))


def png(fig: Figure) -> bytes:
    """A figure as PNG with a palette of PALETTE colours: small, and free of versions and dates."""
    full, small = io.BytesIO(), io.BytesIO()
    fig.savefig(full, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    colours = Image.open(full).convert("RGB")
    colours.quantize(PALETTE, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


# -- parts of figures


def look(copy: str, family: str) -> dict:
    """Colour, marker and dash of a copy."""
    fixed = FIXED.get(family, ())
    marker, dash = SHAPES[fixed.index(copy) if copy in fixed else zlib.crc32(copy.encode()) % len(SHAPES)]
    return {"color": COLOURS[family], "marker": marker, "linestyle": dash}


def _panels(rows: int, height: float) -> tuple[Figure, list[Axes]]:
    """A column of panels with one x axis and room for names at the right."""
    fig = Figure(figsize=(7.4, height), layout=None)
    axes = fig.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    top = 1 - (0.55 if rows == 1 else 0.72) / height
    fig.subplots_adjust(left=0.11, right=0.70, bottom=0.65 / height, top=top, hspace=0.28)
    return fig, list(axes)


def _title(fig: Figure, title: str, samples: pd.DataFrame, what: str, timer: str = "") -> Figure:
    height, timer = fig.get_figheight(), timer or answers.headline_timer(samples)
    about = f"{answers.machine(samples)}; {what}; timer {timer}, state produced"
    fig.text(0.012, 1 - 0.06 / height, title, size=11, weight="bold", va="top")
    fig.text(0.012, 1 - 0.27 / height, about, size=8.5, color=GREY, va="top")
    return fig


def _lines(ax: Axes, table: pd.DataFrame, column: str, scale: float = 1.0) -> list[tuple[float, float, str, str]]:
    """A line per copy of `column` x scale against tokens, kvnb on top; returns the lines' ends: x, y, name, colour."""
    ends = []
    for (copy, family), line in table.sort_values("num_tokens").groupby(["copy", "family"]):
        ours = copy == answers.OURS
        weight = {"linewidth": 2.4 if ours else 1.3, "markersize": 5 if ours else 4, "zorder": 4 if ours else 3}
        shape = look(copy, family) | ({"marker": ""} if copy.startswith("limit.launch") else {})
        x, y = line["num_tokens"].to_numpy(), scale * line[column].to_numpy()
        ax.plot(x, y, **shape, **weight)
        if column == "seconds":
            ax.fill_between(x, scale * line["low"], scale * line["high"], color=shape["color"], alpha=0.2, linewidth=0)
        ends.append((x[-1], y[-1], answers.LABELS.get(copy, copy), shape["color"]))
    _token_axis(ax, table["num_tokens"])
    return ends


def _token_axis(ax: Axes, tokens: pd.Series) -> None:
    """Ticks at the measured sizes, 1k for 1,024."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(tokens.unique())))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: short(round(n))))
    ax.xaxis.set_minor_locator(NullLocator())


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _time_axis(ax: Axes) -> None:
    """Microseconds, log, ticks at 1, 2, 5."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylabel("microseconds")


def _names(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Each line's name right of the panel, at the height of its end or as near as names do not overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    words = [textwrap.fill(name, 30) for _, _, name, _ in ends]
    inches = ax.figure.get_figheight() * ax.get_position().height
    heights = [0.135 * (1 + word.count("\n")) / inches for word in words]
    wanted = [ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1] for x, y, _, _ in ends]
    for (x, y, _, colour), word, at in zip(ends, words, spread(wanted, heights), strict=True):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        place = {"xytext": (1.045, at), "textcoords": "axes fraction", "va": "center", "arrowprops": arrow}
        weight = "bold" if word == answers.OURS else "normal"
        ax.annotate(word, (x, y), color=colour, size=8, weight=weight, linespacing=0.95, annotation_clip=False, **place)


def spread(wanted: list[float], heights: list[float]) -> list[float]:
    """Centres for labels of these heights near `wanted` (ascending), in that order and without overlap."""
    groups: list[tuple[float, float, int]] = []  # (centre, height, labels) of touching labels, lowest first
    for centre, height in zip(wanted, heights, strict=True):
        group = (centre, height, 1)
        while groups and groups[-1][0] + groups[-1][1] / 2 > group[0] - group[1] / 2:
            below = groups.pop()
            labels = below[2] + group[2]
            group = ((below[0] * below[2] + group[0] * group[2]) / labels, below[1] + group[1], labels)
        groups.append(group)
    placed = []
    for centre, total, labels in groups:
        bottom = centre - total / 2
        for height in heights[len(placed) : len(placed) + labels]:
            placed.append(bottom + height / 2)
            bottom += height
    return placed


# -- figures


def latency(table: pd.DataFrame, samples: pd.DataFrame) -> Figure:
    """Time against tokens, log-log, with limit.launch as the floor and limit.copy."""
    fig, (ax,) = _panels(1, 4.9)
    ends = _lines(ax, table, "seconds", 1e6)
    _time_axis(ax)
    ax.set_xlabel("tokens")
    _names(ax, ends)
    what = answers.line_name(table.iloc[0], layout=True)
    return _title(fig, "Time of one copy of K and V", samples, what)


def limit(table: pd.DataFrame, samples: pd.DataFrame) -> Figure:
    """Percent of limit.copy against tokens, a panel per layout."""
    layouts = [name for name in LAYOUTS if name in set(table["layout"])]
    fig, axes = _panels(len(layouts), 0.9 + 1.75 * len(layouts))
    for ax, layout in zip(axes, layouts, strict=True):
        ends = _lines(ax, table[table["layout"] == layout], "limit_percent")
        ax.axhline(100, color=COLOURS["limit"], linewidth=1, linestyle=look("limit.copy", "limit")["linestyle"])
        ax.set_ylim(0, max(105, 1.05 * table["limit_percent"].max()))
        ax.set(title=layout, ylabel="% of limit.copy")
        _names(ax, ends)
    axes[-1].set_xlabel("tokens")
    fig.text(0.012, 0.06 / fig.get_figheight(), BYTES, size=7.5, color=GREY)
    title = "Speed as a share of a contiguous copy of the same bytes"
    return _title(fig, title, samples, answers.line_name(table.iloc[0]))


def heads(table: pd.DataFrame, samples: pd.DataFrame) -> Figure:
    """Heat map of kvnb's speedup over the fastest PyTorch copy by heads and tokens, diverging around 1."""
    speedups = table.pivot(index="num_kv_heads", columns="num_tokens", values="speedup").astype(float)
    verdicts = table.pivot(index="num_kv_heads", columns="num_tokens", values="verdict")
    signs = verdicts.replace({"FASTER": "", "SLOWER": "\nSLOWER", "SAME": "\nSAME", "UNDECIDED": "\n?"})
    text = speedups.map(answers.times, na_action="ignore") + signs
    exponent = np.log2(speedups)
    reach = max(1.0, float(np.nanmax(np.abs(exponent))))
    fig = Figure(figsize=(7.4, 1.35 + 0.42 * len(exponent)))
    ax = fig.subplots()
    colours = {"cmap": "PuOr", "vmin": -reach, "vmax": reach, "linewidths": 1, "cbar": False}
    seaborn.heatmap(exponent, annot=text.fillna(""), fmt="", annot_kws={"size": 8}, ax=ax, **colours)
    ax.set(xlabel="tokens (purple: kvnb is faster, orange: PyTorch is; ?: UNDECIDED)", ylabel="KV heads")
    ax.set_xticklabels([short(tokens) for tokens in exponent.columns])
    ax.tick_params(length=0, labelrotation=0)
    ax.grid(False)
    height = fig.get_figheight()
    fig.subplots_adjust(left=0.085, right=0.985, bottom=0.5 / height, top=1 - 0.55 / height)
    what = f"head size {table['head_size'].iloc[0]} {table['layout'].iloc[0]}"
    return _title(fig, f"Speedup of kvnb over the {answers.BEST} copy", samples, what)


def eager(table: pd.DataFrame, samples: pd.DataFrame) -> Figure:
    """Time against tokens in a CUDA graph and eagerly, on one scale."""
    fig, axes = _panels(2, 5.6)
    titles = {"graph": "in a CUDA graph", "eager": "eager: N calls, one synchronise"}
    for ax, (timer, title) in zip(axes, titles.items(), strict=True):
        ends = _lines(ax, table[table["timer"] == timer], "seconds", 1e6)
        _time_axis(ax)
        ax.set_ylim(0.7e6 * table["seconds"].min(), 1.4e6 * table["seconds"].max())
        ax.set_title(title)
        _names(ax, ends)
    axes[-1].set_xlabel("tokens")
    what = answers.line_name(table.iloc[0], layout=True)
    return _title(fig, "What a CUDA graph saves", samples, what, "graph and eager")


def step(table: pd.DataFrame, samples: pd.DataFrame) -> Figure:
    """Time per layer with the step in every call (hollow) and shared by all layers (filled)."""
    table = table.sort_values("every", ascending=False, kind="stable").reset_index(drop=True)
    fig = Figure(figsize=(7.4, 1.3 + 0.26 * len(table)))
    ax = fig.subplots()
    for y, row in table.iterrows():
        shape = look(row["copy"], row["family"]) | {"linestyle": "-"}
        ax.plot([1e6 * row["shared"], 1e6 * row["every"]], [y, y], **(shape | {"marker": ""}))
        ax.plot(1e6 * row["shared"], y, **shape)
        ax.plot(1e6 * row["every"], y, **shape, markerfacecolor="white")
        for side, value in (("right", row["shared"]), ("left", row["every"])):
            put = {"xytext": (6 if side == "left" else -6, 0), "textcoords": "offset points", "ha": side}
            ax.annotate(answers.duration(value), (1e6 * value, y), size=8, va="center", **put)
    names = [f"{row['copy']}, {answers.line_name(row, layout=True)}" for _, row in table.iterrows()]
    ax.set_yticks(table.index, names)
    ax.set(xlabel="microseconds per layer", xlim=(0, 1.15e6 * table["every"].max()), ylim=(-0.6, len(table) - 0.4))
    height = fig.get_figheight()
    fig.subplots_adjust(left=0.36, right=0.98, bottom=0.48 / height, top=1 - 0.55 / height)
    title = f"Step in every call (hollow) and shared by {answers.LAYERS} layers (filled)"
    return _title(fig, title, samples, f"{table['num_tokens'].iloc[0]} tokens")


FIGURES: dict[str, Callable[[pd.DataFrame, pd.DataFrame], Figure]] = {
    "latency": latency,
    "limit": limit,
    "heads": heads,
    "eager": eager,
    "step": step,
}
