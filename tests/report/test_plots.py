"""Figures: small, the same every time, told apart in greyscale, and with names that can be read."""

from __future__ import annotations

import io
import itertools

import fixture_runs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from kvnb.copies import REGISTRY
from kvnb.copies.base import FAMILIES
from kvnb.problem.case import grid, timings
from kvnb.report import answers, plots

BY_RELEASE = ["releases"]
NEEDED = {"gpu": [name for name in answers.FIGURES if name not in BY_RELEASE], "cpu": ["latency", "heads"]}
NEEDED["by_release"], NEEDED["crowded"] = BY_RELEASE, NEEDED["gpu"]
pytestmark = pytest.mark.usefixtures("facts")
DRAWN = [(run, figure) for run, figures in NEEDED.items() for figure in figures]
LINES = [(run, figure) for run in ("gpu", "crowded") for figure in ("latency", "limit", "eager", "step")]
RECORDED = [(path, figure) for path in answers.recorded().values() for figure in answers.FIGURES]
MORE = {"torch.scatter": "torch", "torch.index_put_wide": "torch", "torch.compile_first": "compile", "sglang": "peer"}


@pytest.fixture(scope="module")
def crowded() -> answers.Run:
    """Grid `full` of 8 heads, with more copies than a figure should need: each figure has its fullest panels."""
    run = fixture_runs._Run("crowded-run", fixture_runs.H200)
    families = {copy: family for copy, (family, *_) in fixture_runs.GPU_COPIES.items()} | MORE
    for case in [case for case in grid("full") if case.num_kv_heads == 8]:
        for copy, family in families.items():
            known = copy if copy not in MORE else "torch.index_copy" if family == "torch" else "flashinfer"
            seconds = (1 + len(copy) / 100) * fixture_runs.known_seconds(known, case)
            run.timed(case, copy, family, "graph", seconds)
            if ("eager", "produced") in timings("full", case):
                run.timed(case, copy, family, "eager", 2e-5 + seconds)
        if case.layout != "NHD":
            run.timed(case, "torch.index_put", "torch", "graph", 4e-6, part="step")
    return answers.Run(run.samples())


def check(first: bytes, second: bytes) -> Image.Image:
    """A figure's bytes, made twice: a small palette PNG without a word about who made it and when."""
    picture, chunks, at = Image.open(io.BytesIO(first)), [], 8
    while at < len(first):
        chunks.append(first[at + 4 : at + 8])
        at += 12 + int.from_bytes(first[at : at + 4])
    assert first == second
    assert picture.mode == "P" and len(first) <= 60_000
    assert set(chunks) == {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
    assert picture.width >= 888, "a figure that fits a page's width on a screen"
    return picture


@pytest.mark.parametrize(("run", "figure"), DRAWN)
def test_png_is_small_and_deterministic(run, figure, request):
    run = request.getfixturevalue(run)
    picture = check(plots.png(figure, run), plots.png(figure, run)).convert("RGB")
    rows = answers.figure_data(figure, run)
    if figure in ("latency", "limit", "eager", "step"):
        drawn = {colour for _, colour in picture.getcolors(1 << 24)}
        coloured = rows[~rows["copy"].isin(plots.greyed(run))]
        for family in coloured["family"].unique():
            assert tuple(round(255 * part) for part in to_rgb(plots.COLOURS[family])) in drawn, family


@pytest.mark.parametrize(("path", "figure"), RECORDED, ids=lambda value: getattr(value, "stem", value))
def test_png_of_the_newest_record_is_small_and_deterministic(path, figure):
    run = answers.load(path)
    if answers.figure_data(figure, run).empty:
        pytest.skip(answers.alt(figure, run))
    check(plots.png(figure, run), plots.png(figure, run))


def test_a_palette_keeps_what_is_flat_and_every_hue():
    pixels = np.full((300, 300, 3), 255, np.uint8)
    blue, green = ([round(255 * part) for part in to_rgb(plots.COLOURS[family])] for family in ("kernel", "triton"))
    shades = np.linspace(0, 1, 300)[:, None]
    pixels[:, :80] = (shades * 255 + (1 - shades) * blue)[:, None]  # as edges have, and more of them than of green
    pixels[10:40, 120:250] = 247  # flat, and nearly white: a cell of a heat map
    pixels[100, 120:140] = green
    picture = plots.in_palette(Image.fromarray(pixels))
    drawn = np.asarray(picture.convert("RGB")).astype(int)
    assert (drawn[10:40, 120:250] == 247).all() and (drawn[200:, 200:] == 255).all()
    assert (drawn[100, 120:140] == green).all()
    assert abs(drawn - pixels).max() < plots.PNG_STEP and len({*picture.get_flattened_data()}) < 16


def test_a_figure_that_cannot_be_small_is_refused():
    fig = Figure(figsize=(7, 7))
    fig.figimage(np.random.default_rng(0).integers(0, 2, (840, 840, 3)) * 1.0)
    with pytest.raises(ValueError, match=r"a figure needs more than 60,000 bytes at 120 dpi: draw less in it"):
        plots.png_of(fig)


@pytest.mark.parametrize(("run", "figure"), DRAWN)
def test_titles_name_the_machine(run, figure, request):
    run = request.getfixturevalue(run)
    words = [" ".join(text.get_text().split()) for text in plots.make(figure, run).texts]
    timer = "graph and eager" if figure == "eager" else run.timer
    assert any(word.startswith(f"{run.machine}, torch {run.first['torch']}; ") for word in words)
    assert any(word.endswith(f"; timer {timer}, state produced") for word in words)
    assert (figure == "limit") == any(plots.BYTES in word for word in words)


@pytest.mark.parametrize(("run", "figure"), LINES)
def test_names_at_line_ends_do_not_overlap_and_stay_in_the_picture(run, figure, request):
    fig = plots.make(figure, request.getfixturevalue(run))
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    every = []
    for ax in fig.axes:
        boxes = [Text.get_window_extent(text, renderer) for text in ax.texts]  # of an annotation, without its arrow
        assert len(boxes) == len(ax.lines) - (figure == "limit")
        assert all(fig.bbox.x0 <= box.x0 and box.x1 <= fig.bbox.x1 and box.y1 <= fig.bbox.y1 for box in boxes)
        every += boxes
    # glyph boxes include the leading above and below, which may touch
    assert not any(a.shrunk(1, 0.8).overlaps(b.shrunk(1, 0.8)) for a, b in itertools.combinations(every, 2))


@pytest.mark.parametrize(("run", "figure"), LINES)
def test_ticks_stand_at_the_sizes_that_a_panel_has(run, figure, request):
    run = request.getfixturevalue(run)
    rows = answers.figure_data(figure, run)
    for ax in plots.make(figure, run).axes:
        here = rows[rows["panel"] == ax.get_title(loc="left").split(";")[0]]
        assert list(ax.get_xticks()) == sorted(here["num_tokens"].unique())
        assert len(ax.get_xticks(minor=True)) == 0


def test_cases_with_rows_in_slot_order_draw_no_line_of_their_own(crowded):
    rows = answers.figure_data("latency", crowded, "NHD")
    assert {16_384, 65_536} <= {*crowded.cells(slots="prefill")["block_size"]}
    assert {*rows["block_size"]} == {16} and {*rows["slots"]} == {"random"} and {*rows["head_size"]} == {128}
    ax = plots.make("latency", crowded, "NHD").axes[0]
    assert len(ax.lines) == rows["copy"].nunique() >= 14


@pytest.mark.parametrize(("run", "figure"), LINES)
def test_copies_of_a_figure_are_told_apart_without_colour(run, figure, request):
    rows = answers.figure_data(figure, request.getfixturevalue(run))[["copy", "family"]].drop_duplicates()
    looks = [plots.look(*row) for row in rows.itertuples(index=False)]
    shapes = [(look["marker"], look["linestyle"]) for look in looks]
    assert len(shapes) == len(set(shapes)) == rows["copy"].nunique()


def test_grey_is_what_is_nowhere_pytorchs_fastest(gpu):
    fastest = set()
    names = [copy for copy, (family, *_) in fixture_runs.GPU_COPIES.items() if family in ("torch", "compile")]
    for case in fixture_runs.gpu_cases():
        failed = {"torch.compile"} if (case.num_tokens, case.num_kv_heads) == (1, 32) else set()
        possible = [copy for copy in names if not fixture_runs.reason_against(copy, case) and copy not in failed]
        fastest.add(min(possible, key=lambda copy: fixture_runs.known_seconds(copy, case)))
    grey = plots.greyed(gpu)
    assert grey == {*names} - fastest - {"torch.index_put"} and grey
    fig = plots.make("latency", gpu, "NHD")
    drawn = {text.get_text(): text.arrow_patch.get_edgecolor()[:3] for text in fig.axes[0].texts}
    assert {name for name, colour in drawn.items() if colour == to_rgb(plots.REST)} == grey & {*drawn}
    assert any("light grey" in text.get_text() for text in fig.texts)


@pytest.mark.parametrize("colour", [*plots.COLOURS.values(), *plots.GREYS, plots.REST])
def test_names_are_dark_enough_to_be_read(colour):
    ink = plots.ink(colour)
    assert 1.05 / (plots.luminance(ink) + 0.05) >= 4.5
    assert np.argsort(ink).tolist() == np.argsort(to_rgb(colour)).tolist() or len({*ink}) < 3, "the same hue"


def test_luminance_is_as_wcag_has_it():
    assert plots.luminance("white") == pytest.approx(1) and plots.luminance("black") == 0
    assert plots.luminance("#777777") == pytest.approx(0.1845, abs=1e-4)


@pytest.mark.parametrize("panel", [0, 1])
def test_each_release_has_its_registers_above_and_its_call_below(panel, by_release):
    ax = plots.make("releases", by_release).axes[panel]
    ticks = [label.get_text().split() for label in ax.get_xticklabels()]
    calls = [[layout, source] if panel else [] for *_, layout, source in fixture_runs.RELEASES.values()]
    assert ticks == [[version, *call] for version, call in zip(fixture_runs.RELEASES, calls, strict=True)]
    above = {round(text.xy[0]): text.get_text() for text in ax.texts if text.get_text().isdigit()}
    assert above == {place: str(registers) for place, (registers, *_) in enumerate(fixture_runs.RELEASES.values())}
    assert len(ax.lines) == len(fixture_runs.TOKENS)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.2)), max_size=15))
def test_spread_keeps_order_and_leaves_no_overlap(labels):
    labels.sort()
    heights = [height for _, height in labels]
    placed = plots.spread([at for at, _ in labels], heights)
    assert len(placed) == len(labels)
    for (low, h_low), (high, h_high) in itertools.pairwise(zip(placed, heights, strict=True)):
        assert high - low >= (h_low + h_high) / 2 - 1e-9


def test_spread_leaves_labels_alone_that_fit():
    assert plots.spread([0.1, 0.5, 0.9], [0.1, 0.1, 0.1]) == pytest.approx([0.1, 0.5, 0.9])


def test_spread_keeps_labels_within_the_panel():
    assert plots.spread([0.98, 0.99, 1.0], [0.1, 0.1, 0.1]) == pytest.approx([0.75, 0.85, 0.95])
    assert plots.spread([0.0, 0.01], [0.1, 0.1], low=-0.1) == pytest.approx([-0.045, 0.055])


def test_a_family_has_one_colour_and_a_copy_one_shape():
    looks = {copy.name: plots.look(copy.name, copy.family) for copy in REGISTRY.values()}
    families = {copy.name: copy.family for copy in REGISTRY.values()} | dict.fromkeys(answers.PEERS, "peer")
    looks |= {name: plots.look(name, "peer") for name in (*answers.PEERS, "vllm==0.4.2", "vllm==0.33.0")}
    assert looks["vllm==0.4.2"] == looks["vllm==0.33.0"], "figures with other copies hold the newest release only"
    copies = [name for name in families if not name.startswith("vllm==")] + ["vllm==0.33.0"]
    for a, b in itertools.combinations(copies, 2):
        same_family = families.get(a, "peer") == families.get(b, "peer")
        assert (looks[a]["color"] == looks[b]["color"]) == same_family
        shapes = [(look["marker"], look["linestyle"]) for look in (looks[a], looks[b])]
        assert shapes[0] != shapes[1], f"{a} and {b} look the same in greyscale"
    assert len({plots.look("any", family)["color"] for family in FAMILIES}) == len(FAMILIES)
