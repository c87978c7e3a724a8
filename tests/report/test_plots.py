"""Figures: small, the same every time, and with names that can be read."""

from __future__ import annotations

import itertools

import fixture_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kvnb.copies import REGISTRY
from kvnb.report import answers, plots

BY_RELEASE = ["releases"]
NEEDED = {"gpu": [name for name in answers.FIGURES if name not in BY_RELEASE], "cpu": ["latency", "heads"]}
NEEDED["by_release"] = BY_RELEASE
pytestmark = pytest.mark.usefixtures("facts")
DRAWN = [(run, figure) for run, figures in NEEDED.items() for figure in figures]


@pytest.mark.parametrize(("run", "figure"), DRAWN)
def test_png_is_small_and_deterministic(run, figure, request):
    first, second = (plots.png(figure, request.getfixturevalue(run)) for _ in range(2))
    assert first == second
    assert len(first) <= 60_000
    assert b"matplotlib" not in first.lower()


@pytest.mark.parametrize(("run", "figure"), DRAWN)
def test_titles_name_the_machine(run, figure, request):
    run = request.getfixturevalue(run)
    words = [text.get_text() for text in plots.make(figure, run).texts]
    assert any(run.machine in word for word in words)


@pytest.mark.parametrize("figure", ["latency", "limit", "eager", "step"])
def test_names_at_line_ends_do_not_overlap_and_stay_in_the_picture(figure, gpu):
    fig = plots.make(figure, gpu)
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    for ax in fig.axes:
        boxes = [Text.get_window_extent(text, renderer) for text in ax.texts]  # of an annotation, without its arrow
        assert len(boxes) == len(ax.lines) - (figure == "limit")
        # glyph boxes include the leading above and below, which may touch
        assert not any(a.shrunk(1, 0.8).overlaps(b.shrunk(1, 0.8)) for a, b in itertools.combinations(boxes, 2))
        assert all(fig.bbox.x0 <= box.x0 and box.x1 <= fig.bbox.x1 and box.y1 <= fig.bbox.y1 for box in boxes)


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


def test_copies_of_a_family_share_a_colour_and_no_shape():
    looks = {copy.name: plots.look(copy.name, copy.family) for copy in REGISTRY.values()}
    looks |= {name: plots.look(name, "peer") for name in (*answers.PEERS, "vllm==0.4.2", "vllm==0.33.0")}
    assert looks["vllm==0.4.2"] == looks["vllm==0.33.0"], "figures with other copies hold the newest release only"
    copies = [copy for copy in REGISTRY.values() if not copy.name.startswith("vllm==")]
    for a, b in itertools.combinations(copies, 2):
        same_colour = looks[a.name]["color"] == looks[b.name]["color"]
        assert same_colour == (a.family == b.family)
        shapes = [(look["marker"], look["linestyle"]) for look in (looks[a.name], looks[b.name])]
        assert a.family != b.family or shapes[0] != shapes[1], f"{a.name} and {b.name} look the same"
