"""Figures of one run: static PNG, the same bytes from the same samples, shown with alt text. Tables beside them.

Rows, titles and alt texts come from answers.py; this file only draws. A family has one colour, and a copy one pair of
marker and dash that no other copy has, in every figure: it is found again, in greyscale too. Lines carry their names at
their ends; PyTorch's spellings that are nowhere in the run its fastest are light grey. Ticks of tokens and of shares
stand where something was measured.
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
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
from PIL import Image

from kvnb.copies import REGISTRY
from kvnb.copies.base import FAMILIES
from kvnb.report import answers, null_block

# Okabe and Ito's palette, which is told apart with any colour vision
COLOURS = dict(zip(FAMILIES, ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#555555", "#56B4E9")))
REST = "#b4b4b4"
MARKERS = "os^DvPX"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 2)))
GREYS = ("#111111", "#5f5f5f", "#8c8c8c", "#adadad")  # of batches and block sizes, which have no family
BARS = "bars: 95 % intervals"
GREYED = "light grey: in no case the fastest PyTorch copy (timer {})"
LIMIT = "limit.copy: in each case the faster of limit.copy and limit.copy.memcpy"
DEPENDENT = "limit.copy is launched plainly; the floor of kvnb.dependent is limit.launch.dependent"
OCCUR = (
    f"shaded: shares that rounding a decode batch up to this size leaves in {null_block.USUALLY:.0%} of steps; "
    "dotted: a rank's share in\ncontext parallelism (CP) of so many ranks; hollow: the same share at the tail instead "
    f"of scattered; {BARS};\nevery panel spans the same ratio of times: equal heights are equal ratios"
)
BYTES = "bytes moved = 2 (read, write) x written tokens x heads x (head size + value head size) x item size + index"
WIDTH, NOTE = 7.4, {"x": 0.012, "size": 7.5, "linespacing": 1.3, "color": COLOURS["limit"]}  # inches; footnotes
PNG_BYTES, PNG_DPI, PNG_STEP, PNG_FLAT = 60_000, (200, 180, 160, 140, 120), 40, 1e-3
STYLE = {
    **{"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9},
    **{"axes.titlelocation": "left", "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.spines.top": False},
    **{"axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6},
    "text.parse_math": False,  # a machine's name is text
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
    """Show a table of `answers` in a notebook, whole and without row numbers; it may bring a caption of its own."""
    if caption := caption or rows.attrs.get("caption", ""):
        display(Markdown(f"**{caption}**"))
    whole = {r" \[(\S+), (\S+)\]": "\u00a0[\\1,\u00a0\\2]", r"^(\S+) (us|ms|s)$": "\\1\u00a0\\2"}  # stay in one line
    rows = rows.replace(whole, regex=True)
    with pd.option_context("display.max_colwidth", None):
        display(HTML(rows.to_html(index=False, border=0)) if len(rows) else Markdown("none"))


def png(figure: str, run: answers.Run, layout: str = "") -> bytes:
    return png_of(make(figure, run, layout))


def png_of(fig: Figure) -> bytes:
    """A figure as PNG with a palette, at the first of PNG_DPI that needs at most PNG_BYTES; no versions, no dates.

    Raises ValueError where none does.
    """
    for dpi in PNG_DPI:
        full, small = io.BytesIO(), io.BytesIO()
        fig.savefig(full, format="png", dpi=dpi)
        in_palette(Image.open(full).convert("RGB")).save(small, "png", optimize=True)
        if len(small.getvalue()) <= PNG_BYTES:
            return small.getvalue()
    raise ValueError(f"a figure needs more than {PNG_BYTES:,} bytes at {PNG_DPI[-1]} dpi: draw less in it")


def in_palette(picture: Image.Image) -> Image.Image:
    """Mode P: the commonest colours, until each is one of them, or rarer than PNG_FLAT and within PNG_STEP of one.

    So what is flat keeps its exact colour. Distance is of lightness and, counted for more, of hue (red against green,
    yellow against blue; 0 to 255): edges get few shades, and a thin line or a word is not merged into another hue, as
    by a median cut.
    """
    pixels = np.asarray(picture, dtype=np.int32)
    codes, where, counts = np.unique(pixels @ (65536, 256, 1), return_inverse=True, return_counts=True)
    colours, palette = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1), []
    places = colours @ [[1 / 3, 1, 1 / 2], [1 / 3, -1, 1 / 2], [1 / 3, 0, -1]]
    while counts.any() and len(palette) < 256:
        palette.append(counts.argmax())
        apart = ((places - places[palette[-1]]) ** 2).sum(axis=1)
        counts[(apart == 0) | (apart < PNG_STEP**2) & (counts < PNG_FLAT * where.size)] = 0
    nearest = ((places[:, None] - places[palette]) ** 2).sum(axis=2).argmin(axis=1)
    indexed = Image.fromarray(nearest[where].astype(np.uint8).reshape(pixels.shape[:2]), "P")
    indexed.putpalette(colours[palette].astype(np.uint8).tobytes())
    return indexed


@rc_context(STYLE)
def make(figure: str, run: answers.Run, layout: str = "") -> Figure:
    """A figure of answers.FIGURES; its `answers.figure_data` must not be empty."""
    rows, (title, column, _) = answers.figure_data(figure, run, layout), answers.FIGURES[figure]
    about = f"{answers.line_name(run.line)} {layout or run.line['layout']}"
    if figure in answers.PANELS:
        about = answers.line_name(run.line)
    elif figure == "releases":
        about = "8x128"
    elif figure == "heads":
        about = f"heads of {run.line['head_size']}, {layout or run.line['layout']}"
    drawn = {"heads": heat_map, "releases": by_release}.get(figure)
    fig = drawn(rows, column) if drawn else lines(rows, column, greyed(run), GREYED.format(run.timer))
    return _titled(fig, title, _where(run, about, "graph and eager" if figure == "eager" else run.timer))


def _where(run: answers.Run, about: str, timer: str) -> str:
    return f"{run.machine}, torch {run.first['torch']}; {about}; timer {timer}, state produced"


def _titled(fig: Figure, title: str, about: str) -> Figure:
    height = fig.get_figheight()
    fig.text(0.012, 1 - 0.06 / height, title, size=11, weight="bold", va="top")
    wrapped = textwrap.fill(about, 112, break_long_words=False)
    fig.text(0.012, 1 - 0.27 / height, wrapped, size=8.5, color=COLOURS["limit"], va="top")
    return fig


def _noted(fig: Figure, *notes: str) -> None:
    """Footnotes, a line each."""
    fig.text(y=0.07 / fig.get_figheight(), s="\n".join(filter(None, notes)), va="bottom", **NOTE)


def look(copy: str, family: str) -> dict:
    """Colour, marker and dash of a copy: by its place in its family, or by its name where it is not registered.

    The dash is the place's, and the marker moves on with the family, so that no two copies share both. Peers have
    fixed places, as which of them are registered differs by machine; vLLM's releases share one, as one alone is drawn
    beside other copies.
    """
    known = [other.name for other in REGISTRY.values() if other.family == family]
    if family == "peer":
        known, copy = ["vllm==", *answers.PEERS], "vllm==" if copy.startswith("vllm==") else copy
    place = known.index(copy) if copy in known else zlib.crc32(copy.encode())
    marker = MARKERS[(place + FAMILIES.index(family)) % len(MARKERS)]
    return {"color": COLOURS[family], "marker": marker, "linestyle": DASHES[place % len(DASHES)]}


def luminance(colour: str | Sequence[float]) -> float:
    """Relative luminance by WCAG 2: 0 is black, 1 white."""
    rgb = np.array(to_rgb(colour))
    return float(np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722))


def ink(colour: str) -> tuple[float, ...]:
    """A colour for words: as dark as a contrast of 4.5 with white asks for."""
    rgb = np.array(to_rgb(colour))
    while 1.05 / (luminance(rgb) + 0.05) < 4.5:
        rgb *= 0.97
    return tuple(rgb)


# -- lines against tokens


def lines(rows: pd.DataFrame, column: str, grey: set[str] = frozenset(), told: str = "") -> Figure:
    """A column of panels: microseconds (log-log) or percent of limit.copy against tokens; a line per copy, those of
    `grey` in grey, as the note `told` says."""
    order = {layout: place for place, layout in enumerate(answers.LAYOUTS)}
    panels = sorted(rows["panel"].unique(), key=lambda panel: (order.get(panel.split(",")[0], 0), panel))
    here = [rows[rows["panel"] == panel] for panel in panels]
    copies = max(table["copy"].nunique() for table in here)
    tall, gap = max(3.8 if len(panels) == 1 else 1.3, 0.16 * copies), 0.56
    in_us, names = column == "seconds", {*rows["copy"]}
    notes = [told * bool(grey & names), BARS * bool(rows["low"].notna().any()) if in_us else BYTES]
    if "limit.copy" in names or not in_us:
        notes += [LIMIT, DEPENDENT * ("kvnb.dependent" in names)]
    foot = 0.55 + 0.14 * len([*filter(None, notes)])
    head = 0.8 if all(panels) or not in_us else 0.65
    height = head + len(panels) * (tall + gap) - gap + foot
    fig = Figure(figsize=(WIDTH, height))
    fig.subplots_adjust(left=0.11, right=0.70, bottom=foot / height, top=1 - head / height, hspace=gap / tall)
    axes = fig.subplots(len(panels), sharey=True, squeeze=False)[:, 0]
    sizes = rows["num_tokens"].min(), rows["num_tokens"].max()
    ends = []
    for ax, panel, table in zip(axes, panels, here):
        ends.append([_line(ax, line, column, copy in grey) for copy, line in table.groupby("copy")])
        _token_axis(ax, table["num_tokens"].unique(), *sizes)
        ax.set(title=panel, ylabel="microseconds" if in_us else "% of limit.copy")
        if in_us:
            _time_axis(ax, LogLocator(subs=(1, 2, 5)))
        else:
            speed = 100 * table["gbps"] / table["limit_percent"]
            ax.set(title=f"{panel}; 100 % is {_span(speed)} GB/s", ylim=(0, max(105, 1.05 * rows[column].max())))
            ax.axhline(100, color=COLOURS["limit"], linewidth=1)
    for ax, named in zip(axes, ends):  # once all limits are known
        _name_ends(ax, named)
    axes[-1].set_xlabel("tokens")
    _noted(fig, *notes)
    return fig


def greyed(run: answers.Run) -> set[str]:
    """The PyTorch copies that are in no cell of a run's headline the fastest of these; not the issue's."""
    cells = run.cells()
    torch = cells[cells["family"].isin(answers.GROUPS[answers.BEST])].sort_values("seconds", kind="stable")
    best = torch.drop_duplicates([*answers.LINE, "num_tokens"])
    return {*torch["copy"]} - {*best["copy"], answers.ISSUE}


def _span(values: pd.Series) -> str:
    """`3,900 to 4,210`, or one number where both ends round to it."""
    return " to ".join(dict.fromkeys(f"{end:,.0f}" for end in (values.min(), values.max())))


def _line(ax: Axes, line: pd.DataFrame, column: str, grey: bool) -> tuple[float, float, str, str]:
    """Draw a copy with its intervals; returns the line's end: x, y, name, colour."""
    copy, scale = line["copy"].iloc[0], 1e6 if column == "seconds" else 1
    shape = look(copy, line["family"].iloc[0]) | ({"marker": ""} if copy.startswith("limit.launch") else {})
    shape |= {"color": REST, "zorder": 2, "linewidth": 1.1, "markersize": 3.5} if grey else {"zorder": 3}
    if copy == answers.OURS:  # a band below the others, so that what lies on it is seen
        shape |= {"zorder": 2.4, "linewidth": 3.4, "markersize": 7}
    x, y = line["num_tokens"].to_numpy(), scale * line[column].to_numpy()
    ax.plot(x, y, **{"linewidth": 1.2, "markersize": 4} | shape)
    if column == "seconds" and not grey:
        _bars(ax, x, line, shape["color"])
    return x[-1], y[-1], answers.label(copy), shape["color"]


def _bars(ax: Axes, x: Sequence[float], line: pd.DataFrame, colour: str) -> None:
    """A line's intervals, where there are any."""
    if line["low"].notna().any():
        ax.vlines(x, 1e6 * line["low"], 1e6 * line["high"], color=colour, alpha=0.5, linewidth=2.5, zorder=2.5)


def _time_axis(ax: Axes, ticks: LogLocator) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(ticks)
    ax.yaxis.set_major_formatter("{x:,.10g}")
    ax.yaxis.set_minor_locator(NullLocator())


def _token_axis(ax: Axes, tokens: Iterable[int], least: int, most: int) -> None:
    """Ticks at the measured sizes, 1k for 1,024; from the least to the most that the figure has."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(least / 1.35, most * 1.35)
    ax.xaxis.set_major_locator(FixedLocator(sorted(tokens)))
    ax.xaxis.set_major_formatter(lambda n, _: short(round(n)))
    ax.xaxis.set_minor_locator(NullLocator())


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _name_ends(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Each line's name right of the panel, at the height of its end or as near as names do not overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    words = [textwrap.fill(name, 30) for _, _, name, _ in ends]
    wide, tall = ax.get_position().size * ax.figure.get_size_inches()
    heights = [0.135 * (1 + word.count("\n")) / tall for word in words]
    wanted = [ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1] for x, y, _, _ in ends]
    for (x, y, _, colour), word, at in zip(ends, words, spread(wanted, heights, -0.08 / tall, 1 + 0.08 / tall)):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        place = {"xytext": (1 + 0.2 / wide, at), "textcoords": "axes fraction", "va": "center", "arrowprops": arrow}
        style = {"color": ink(colour), "size": 8, "weight": "bold" if word == answers.OURS else "normal"}
        ax.annotate(word, (x, y), **style, linespacing=0.95, annotation_clip=False, **place)


def spread(wanted: Sequence[float], heights: Sequence[float], low: float = 0, high: float = 1) -> np.ndarray:
    """Centres for labels of these heights: ascending like `wanted`, without overlap, nearest to it in least squares,
    between `low` and `high` where they fit there: else they begin below `low`.

    That is isotonic regression of how far each label lies from its place in a stack of them, by its minimax formula.
    """
    stack = np.cumsum(heights) - np.divide(heights, 2)
    off, n = wanted - stack, len(wanted)
    least = [[min(off[low : high + 1].mean() for high in range(i, n)) for low in range(i + 1)] for i in range(n)]
    return stack + np.clip([max(means) for means in least], low, high - np.sum(heights))


# -- time by release


def by_release(rows: pd.DataFrame, column: str) -> Figure:
    """A panel per problem: microseconds against releases, oldest first; a line per number of tokens."""
    panels, names = list(rows["panel"].unique()), sorted(rows["copy"].unique(), key=answers.age)
    height = 0.75 + 3.4 * len(panels)
    fig = Figure(figsize=(WIDTH, height))
    fig.subplots_adjust(left=0.09, right=0.86, bottom=0.85 / height, top=1 - 0.8 / height, hspace=0.25)
    for ax, panel in zip(fig.subplots(len(panels), sharey=True, squeeze=False)[:, 0], panels):
        here, colour = rows[rows["panel"] == panel], COLOURS["peer"]
        ends = []
        for tokens, line in here.groupby("num_tokens"):
            x, y = line["copy"].map(names.index).to_numpy(), 1e6 * line[column].to_numpy()
            ax.plot(x, y, color=colour, marker=look("vllm==", "peer")["marker"], markersize=4, linewidth=1.3)
            _bars(ax, x, line, colour)
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
    _noted(fig, f"above the points: registers per thread of the kernel (sm_90); {BARS}")
    return fig


# -- speedups by tokens and heads


DARKEST = 2  # log2 of the speedup that has the darkest colour, in every map


def heat_map(rows: pd.DataFrame, column: str) -> Figure:
    """Speedups by heads and tokens, diverging around 1, each with its verdict unless it is FASTER."""
    table = rows.pivot(index="num_kv_heads", columns="num_tokens", values=[column, "verdict"])
    speedups, verdicts = table[column], table["verdict"]
    signs = verdicts.replace({"FASTER": "", "SLOWER": "\nSLOWER", "SAME": "\nSAME", "UNDECIDED": "\n?"})
    text = (speedups.map(answers.times, na_action="ignore") + signs).fillna("")
    exponent = np.log2(speedups.astype(float))
    height = 1.45 + 0.42 * len(exponent)
    fig = Figure(figsize=(WIDTH, height))
    fig.subplots_adjust(left=0.085, right=0.985, bottom=0.7 / height, top=1 - 0.65 / height)
    ax = fig.subplots()
    colours = {"cmap": "PuOr", "vmin": -DARKEST, "vmax": DARKEST, "linewidths": 1, "cbar": False}
    seaborn.heatmap(exponent, annot=text, fmt="", annot_kws={"size": 8}, ax=ax, **colours)
    ax.set(xlabel="tokens", ylabel="KV heads")
    ax.set_xticklabels(map(short, exponent.columns))
    ax.tick_params(length=0, labelrotation=0)
    ax.grid(False)
    colours = f"purple: kvnb is faster; orange: PyTorch is; darkest: {2**DARKEST} times and more"
    _noted(fig, f"{colours}; ?: UNDECIDED; blank: not measured")
    return fig


# -- padding


def show(fig: Figure, alt: str) -> None:
    """Show one of the figures below in a notebook, with its alt text of null_block."""
    display(Picture(data=png_of(fig), format="png", alt=alt))


@rc_context(STYLE)
def padding(run: null_block.PaddedRun, copy: str, shares: pd.DataFrame) -> Figure:
    """Microseconds against the padded share: a panel per number of tokens, a line per policy, and shares that occur."""
    rows = null_block.padding_rows(run, copy)
    tokens, label = sorted(rows["num_tokens"].unique()), 0.95  # inches that a policy's name takes
    deep, tall, gap, foot = -(-len(tokens) // 2), 1.3, 0.55, 1.05
    height = 0.85 + deep * (tall + gap) - gap + foot
    fig = Figure(figsize=(WIDTH, height))
    wide = (WIDTH - 0.6 - 2 * label - 0.5) / 2
    fig.subplots_adjust(left=0.6 / WIDTH, right=1 - label / WIDTH, bottom=foot / height, top=1 - 0.85 / height)
    fig.subplots_adjust(hspace=gap / tall, wspace=(label + 0.5) / wide)
    axes = fig.subplots(deep, 2, squeeze=False)
    spans = rows.groupby("num_tokens")["seconds"].agg(["min", "max"]) * 1e6
    reach = 1.2 * np.sqrt(max(4, (spans["max"] / spans["min"]).max()))
    for ax, n in zip(axes.flat, tokens):
        here = rows[rows["num_tokens"] == n]
        middle = np.sqrt(spans.loc[n].prod())
        ax.set(title=f"{n:,} tokens", xlim=(-0.03, 1), ylabel="microseconds")
        _time_axis(ax, LogLocator(subs=(1, 2, 5)))
        ax.set_ylim(middle / reach, middle * reach)
        drawn = [name for name in (*null_block.DRAWN, "limit.copy") if name in {*here["policy"]}]
        ends = [_policy(ax, here[here["policy"] == policy], policy) for policy in drawn]
        _occurring(ax, null_block.usual_share(shares, n))
        _share_axis(ax, here["padding"].unique())
        _name_ends(ax, ends)
    for ax in axes.flat[len(tokens) :]:
        ax.remove()
    for ax in axes.flat[: len(tokens)][-2:]:
        ax.set_xlabel("padded share")
    _noted(fig, OCCUR)
    about = _where(run, answers.line_name(rows.iloc[0], layout=True), run.timer)
    return _titled(fig, f"Time of {answers.label(copy)}, by padded share and policy", about)


def _policy(ax: Axes, line: pd.DataFrame, policy: str) -> tuple[float, float, str, str]:
    """A policy's line over scattered shares; hollow, where the same share lies at the tail. Returns the line's end."""
    place = null_block.DRAWN.index(policy) if policy in null_block.DRAWN else 0
    shape = {"color": COLOURS[line["family"].iloc[0]], "marker": MARKERS[place], "linestyle": DASHES[place]}
    if policy == "limit.copy":
        shape |= {"marker": "", "linewidth": 1}
    scattered, tail = (line[line["padded"] == padded] for padded in ("scattered", "tail"))
    x, y = scattered["padding"].to_numpy(), 1e6 * scattered["seconds"].to_numpy()
    ax.plot(x, y, label=policy, **{"linewidth": 2.2 if policy == "skip" else 1.2, "markersize": 4} | shape)
    _bars(ax, x, scattered, shape["color"])
    hollow = shape | {"linestyle": "", "markerfacecolor": "white", "markersize": 6.5, "zorder": 2}
    ax.plot(tail["padding"], 1e6 * tail["seconds"], **hollow)
    return x[-1], y[-1], policy, shape["color"]


def _share_axis(ax: Axes, shares: Iterable[float]) -> None:
    """Ticks at the measured shares, with numbers where these do not touch."""
    ticks, named = sorted(shares), [0.0]
    for share in ticks:
        if share - named[-1] > 0.1:
            named.append(share)
    ax.set_xticks(ticks, [f"{share:.0%}" if share in named else "" for share in ticks])
    ax.grid(axis="x", visible=False)  # the dotted lines are what to look for


def _occurring(ax: Axes, usual: float) -> None:
    """Shade the padded shares that rounding up leaves, and mark those of context parallelism."""
    if usual > 0:
        ax.axvspan(0, usual, color="#e3e3e3", linewidth=0, zorder=0)
    for ranks in null_block.RANKS:  # a full batch
        ax.axvline(1 - 1 / ranks, color=COLOURS["limit"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        place = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom", "size": 7}
        ax.text(1 - 1 / ranks, 1.0, f"CP {ranks}", color=COLOURS["limit"], **place)


@rc_context(STYLE)
def padded_shares(shares: pd.DataFrame, about: str) -> Figure:
    """Padded share that so many steps do not exceed: a panel per capture list, a line per range of decode batches."""
    height, names, label = 3.6, list(shares["captured"].unique()), 1.4
    fig = Figure(figsize=(WIDTH, height))
    wide = (WIDTH - 0.6 - (0.1 + label) * len(names)) / len(names)
    fig.subplots_adjust(left=0.6 / WIDTH, right=1 - label / WIDTH, wspace=(0.1 + label) / wide)
    fig.subplots_adjust(bottom=0.7 / height, top=1 - 0.8 / height)
    shares, ends = shares.assign(range=null_block.ranges(shares)), {}
    axes = fig.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for ax, name in zip(axes, names):
        here = shares[shares["captured"] == name]
        lines = [(f"batch of {batch}", some, {"color": GREYS[place], "linestyle": DASHES[place + 1], "linewidth": 1.4})
                 for place, (batch, some) in enumerate(here.groupby("range", observed=True))]  # fmt: skip
        lines.append(("every batch", here, {"color": "black", "linewidth": 2.2}))
        for told, some, shape in lines:
            y = np.sort(some["share"])
            ax.plot(np.arange(1, len(y) + 1) / len(y), y, drawstyle="steps-pre", **shape)
            ends.setdefault(ax, []).append((1, y[-1], told, shape["color"]))
        ax.axvline(null_block.USUALLY, color=COLOURS["limit"], linewidth=0.8, linestyle=(0, (1, 2)))
        ax.set(title=f"captured: {name}", xlabel="share of steps, least padded first", xlim=(0, 1))
        ax.set_xticks([0, 0.25, 0.5, 0.75, null_block.USUALLY])
        ax.xaxis.set_major_formatter("{x:.0%}")
        ax.yaxis.set_major_formatter("{x:.0%}")
    axes[0].set(ylabel="padded share of the batch, at most", ylim=(0, None))
    for ax in axes:
        _name_ends(ax, ends[ax])
    _noted(fig, f"dotted: what {null_block.USUALLY:.0%} of steps do not exceed")
    return _titled(fig, "Padding that rounding a decode batch up to captured sizes leaves", about)


@rc_context(STYLE)
def memory() -> Figure:
    """One block's share of the pool: a row per model, a dot per block size."""
    rows = null_block.memory_rows()
    names = list(rows["model"].unique())[::-1]
    height = 1.3 + 0.26 * len(names)
    fig = Figure(figsize=(WIDTH, height))
    fig.subplots_adjust(left=0.31, right=0.97, bottom=0.5 / height, top=1 - 0.8 / height)
    ax = fig.subplots()
    for place, (size, dots) in enumerate(rows.groupby("block_size")):
        y = dots["model"].map(names.index)
        ax.plot(dots["percent"], y, MARKERS[place], markerfacecolor="none", color=GREYS[0], markeredgewidth=1.3)
        top = {"xytext": (0, 10), "textcoords": "offset points", "ha": "center", "size": 8}
        ax.annotate(f"blocks of {size}", (dots["percent"].iloc[0], y.iloc[0]), **top)
    ax.set(xscale="log", xlabel="% of the pool (log)", yticks=range(len(names)), yticklabels=names)
    ax.xaxis.set_major_formatter("{x:.3g}")
    ax.xaxis.set_minor_locator(NullLocator())
    return _titled(fig, "Memory of a reserved block", f"one block's share of {null_block.POOL}; bfloat16, one GPU")
