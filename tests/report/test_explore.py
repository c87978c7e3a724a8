"""explore.html: what its chart carries, and in a real browser what a choice does to it."""

import io
import json
import re

import numpy as np
import pandas as pd
import pytest
from test_browser import CHROMIUM, DESK, PHONE, browser  # noqa: F401  (a fixture)

from kvnb.bench import results, stats
from kvnb.report import answers, explore, plots

altair = pytest.importorskip("altair", reason=explore.missing())
pytest.importorskip("vl_convert", reason=explore.missing())
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
EIGHT = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
DRAWN = "#chart[aria-busy=false]"
LEGEND = "#chart .role-legend-label text"
POINTS = "[...document.querySelectorAll('#chart .mark-symbol.role-mark path')].map(path => path.__data__.datum)"


@pytest.fixture(scope="module")
def spec(gpu):
    return explore.chart(gpu).to_dict()


def carried(spec):
    """The rows that a chart carries, with their places' values."""
    rows = pd.read_csv(io.StringIO(spec["datasets"][spec["data"]["name"]]), sep="\t")
    places = [place.split(explore.BAR) for place in params(spec)["places"]["value"]]
    rows["copy"] = np.array(params(spec)["copies"]["value"], object)[rows["who"]]
    return rows.join(pd.DataFrame(places, columns=explore.FIELDS), on="place")


def params(spec):
    return {param["name"]: param for param in spec["params"]}


def test_a_chart_carries_every_timed_cell_to_four_digits(gpu, spec):
    rows = carried(spec)
    cells = gpu.every_cell.query("status == 'ok' and part == 'write' and copy != 'kvnb.again'")
    assert len(rows) == len(cells)
    key = {"num_tokens": 1024, "layout": "HND", "timer": "graph"}
    cell = answers.rows_of(cells, key | EIGHT | {"copy": "triton"}).iloc[0]
    row = answers.rows_of(rows, key | {"shape": "8x128", "copy": "triton"}).iloc[0]
    want = [*(1e6 * cell[name] for name in ("seconds", "low", "high")), cell["gbps"]]
    assert row[["us", "low", "high", "gbps"]].to_numpy(float) == pytest.approx(want, rel=1e-3)


def test_speedups_are_those_of_stats(gpu, spec):
    rows, baselines = carried(spec), params(spec)["baselines"]["value"]
    k = baselines.index("kvnb")
    want = answers.rows_of(stats.compare(gpu.samples, "torch.compile", "kvnb"), {"timer": "eager", "layout": "packed"})
    key = {"copy": "torch.compile", "timer": "eager", "layout": "packed"}
    got = answers.rows_of(rows, key).set_index("num_tokens").loc[want["num_tokens"]]
    columns = [f"{name}{k}" for name in ("ratio", "from", "to")]
    np.testing.assert_allclose(got[columns], want[["speedup", "low", "high"]], rtol=1e-3)
    assert [stats.VERDICTS[int(place)] for place in got[f"verdict{k}"]] == list(want["verdict"])


def test_choices_begin_with_the_headline_and_vllms_kernel(gpu, spec):
    first = {name: param["value"] for name, param in params(spec).items() if "bind" in param}
    assert first == {"shape": "8x128", "layout": "packed", "dtype": "bfloat16", "timer": "graph", "state": "produced",
                     "show": "latency", "baseline": gpu.shipped, "standout": "all"}  # fmt: skip
    assert params(spec)["shape"]["bind"]["options"] == ["1x128", "8x128", "32x128"]


def test_a_copy_looks_as_in_every_figure(spec):
    line, _, point = (layer["encoding"] for layer in spec["layer"])
    place = line["color"]["scale"]["domain"].index("torch.index_copy_wide")
    look = plots.look("torch.index_copy_wide", "torch")
    assert line["color"]["scale"]["range"][place] == look["color"]
    assert line["strokeDash"]["scale"]["range"][place] == [1.5 * part for part in look["linestyle"][1]]
    assert point["shape"]["scale"]["range"][place] == explore.SHAPES[look["marker"]]


def test_grid_padding_shows_each_policy_and_share(padding_file):
    rows = carried(explore.chart(results.load(padding_file)).to_dict())
    assert {"kvnb", "kvnb null_slot"} <= set(rows["copy"])
    assert {"8x128", "8x128 75% padded", "8x128 75% padded at the tail"} <= set(rows["shape"])


def test_jupyterlab_draws_the_chart_itself(gpu):
    with altair.renderers.enable():
        shown = explore.explore(gpu.samples[gpu.samples["copy"] == "triton"])
        assert list(shown._repr_mimebundle_()[0]) == ["application/vnd.vegalite.v5+json", "text/plain"]


def test_a_run_of_one_copy_is_its_own_baseline(gpu):
    spec = explore.chart(gpu.samples[gpu.samples["copy"] == "triton"]).to_dict()
    assert params(spec)["baselines"]["value"] == ["triton"]
    assert (carried(spec)["ratio0"] == 1).all()


def test_what_cannot_be_shown_is_refused_and_leaves_the_old_page(gpu, cpu, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="of 2 runs"):
        explore.chart(pd.concat([gpu.samples, cpu.samples]))
    untimed = gpu.samples.assign(status="error", reason="x", seconds=np.nan)
    with pytest.raises(ValueError, match="gpu-run has no timed cell"):
        explore.chart(untimed)
    old = tmp_path / "explore.html"
    old.write_text("old")
    monkeypatch.setattr(explore, "find_spec", lambda name: None if name == "vl_convert" else name)
    assert explore.missing() == "explore.html needs what is not installed here: pip install vl-convert-python"
    assert explore.missing("altair") == ""
    with pytest.raises(ValueError, match="pip install vl-convert-python"):
        explore.page(gpu, old)
    assert old.read_text() == "old"


# -- the page


@pytest.fixture(scope="module")
def here(tmp_path_factory, run_files):
    """explore.html of the GPU run."""
    return explore.page(run_files[1], tmp_path_factory.mktemp("explore") / "explore.html", [("Answer", "index.html")])


def test_the_page_stays_small_for_200_cases_of_25_copies(here, spec):
    rows = spec["datasets"][spec["data"]["name"]]
    per_cell = len(rows) / rows.count("\n") * (1 + len(explore.BASELINES)) / len(params(spec)["baselines"]["value"])
    assert here.stat().st_size - len(rows) + 1.5 * 200 * 25 * per_cell < 3_000_000  # 1.5: timers and states


def test_what_a_run_file_says_runs_no_script(gpu, tmp_path):
    evil = "</script><script>document.title = 'ran'</script>"
    samples = gpu.samples.assign(gpu=evil, run_id=evil).replace({"copy": {"triton": evil}})
    text = explore.page(answers.Run(samples), tmp_path / "explore.html").read_text()
    assert "<script>document" not in text
    data = re.search(r'id="spec">(.*?)</script>', text, re.DOTALL)[1]
    assert evil in json.loads(data)["scales"][2]["domain"]


def opened(browser, here, **how):  # noqa: F811
    """The page, drawn, with what it asked and said."""
    page = browser.new_context(**{"viewport": DESK, "color_scheme": "light"} | how).new_page()
    page.asked, page.said = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(here.as_uri())
    page.wait_for_selector(DRAWN)
    return page


def choose(page, select, option):
    page.get_by_role("combobox", name=select, exact=True).select_option(option)
    page.wait_for_selector(DRAWN)


@in_browser
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_page_as_a_reader_meets_it(browser, here, colours, size):  # noqa: F811
    from axe_playwright_python.sync_playwright import Axe

    page = opened(browser, here, viewport=size, color_scheme=colours, bypass_csp=True, offline=True)  # axe is a script
    page.locator("summary").click()
    assert page.asked == [here.as_uri()]
    assert page.said == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    box = page.locator("#chart svg").bounding_box()
    assert box["height"] > 400 and 0.8 * size["width"] < box["width"] + 2 * max(20, box["x"])
    assert page.locator(LEGEND).first.evaluate("text => getComputedStyle(text).fill") == page.evaluate(
        "getComputedStyle(document.body).color"
    )
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.context.close()


@in_browser
def test_a_choice_draws_other_marks_and_tells_other_numbers(browser, here, gpu):  # noqa: F811
    page = opened(browser, here)
    cells = gpu.cells(**EIGHT, layout="packed", copy="torch.compile").set_index("num_tokens")
    drawn = {row["num_tokens"]: row for row in page.evaluate(POINTS) if row["copy"] == "torch.compile"}
    assert {n: row["us"] for n, row in drawn.items()} == pytest.approx(dict(1e6 * cells["seconds"]), rel=1e-3)
    choose(page, "show", "speedup")
    choose(page, "baseline", "kvnb")
    want = gpu.speedups("torch.compile", "kvnb")
    want = answers.rows_of(want, EIGHT | {"layout": "packed"}).set_index("num_tokens")
    drawn = {row["num_tokens"]: row for row in page.evaluate(POINTS) if row["copy"] == "torch.compile"}
    assert {n: row["value"] for n, row in drawn.items()} == pytest.approx(dict(want["speedup"]), rel=1e-3)
    cell = page.locator("tr:has(th:text-is('torch.compile')) td").first.text_content()
    first = want.iloc[0]
    assert cell == f"{first['speedup']:.3g}\n[{first['low']:.3g}, {first['high']:.3g}] {first['verdict']}"
    assert page.locator(".role-title text").inner_html().count("Speedup over kvnb") == 1
    assert page.said == []


@in_browser
def test_a_choice_that_was_not_measured_with_the_others_moves_them_and_says_so(browser, here):  # noqa: F811
    page = opened(browser, here)
    choose(page, "layout", "HND")
    choose(page, "shape", "1x128")
    assert page.locator("select[name=layout]").input_value() == "NHD"
    assert page.locator("#moved").inner_text() == (
        "1x128 was not measured with all of the other choices: layout is now NHD."
    )
    assert {row["place"] for row in page.evaluate(POINTS)} == {0}
    assert page.said == []


@in_browser
def test_the_keyboard_chooses_and_hovering_tells(browser, here):  # noqa: F811
    page = opened(browser, here)
    page.keyboard.press("Tab")  # the link
    for _ in explore.FIELDS:
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "show"
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{DRAWN} .role-title text:has-text('GB/s')")
    choose(page, "highlight", "kvnb")
    page.locator("#chart .mark-symbol path[aria-label*='copy: kvnb;']").last.hover()
    told = page.locator("#vg-tooltip-element").inner_text()
    assert re.search(r"kvnb\s.*us \[[\d.]+, [\d.]+\].*GB/s.*\[[\d.]+, [\d.]+\] FASTER", told, re.DOTALL)


@in_browser
def test_without_scripts_the_page_says_what_it_needs(browser, here):  # noqa: F811
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(here.as_uri())
    assert "JavaScript, which is off" in page.locator("noscript").inner_text()
