"""Pages: whole without a server, no scripts, everything from data escaped, a description for every figure."""

import base64
import hashlib
import re
import shutil
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import mistune
import nbformat
import pandas as pd
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, front, null_block, pages
from kvnb.report.execute import Outcome

EVIL = "<script>alert(1)</script><img src='http://example.com/x.png'>\" onload=alert(2) </style>{{ 7 + 7 }}{% raw %}"
MACHINE = ("gpu", "cpu", "torch", "driver", "cuda", "triton", "python", "gpu_uuid", "run_id", "kvnb_commit")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
UNSHOWN = ("image/svg+xml", "application/javascript", "text/latex", "text/vnd.mermaid", "application/x-foreign")
DOT = base64.b64encode(b"not a real picture").decode()


class Page(HTMLParser):
    """Tags with their attributes, and the text outside style."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self._open = [], "", []
        self.feed(Path(path).read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def outputs():
    new = nbformat.v4.new_output
    return [
        new("stream", name="stdout", text=f"\x1b[31mred\x1b[0m {EVIL}"),
        new("execute_result", {"text/html": pd.DataFrame({EVIL: [EVIL]}).to_html(index=False, border=0)}),
        new("display_data", {"text/markdown": f"a < b **bold** {EVIL}"}),
        new("display_data", {"image/png": DOT}, metadata={"image/png": {"alt": 'Lines: 2.1 "times"'}}),
        new("execute_result", {"text/plain": EVIL}),
        new("error", ename="E", evalue=EVIL, traceback=[f"\x1b[31mE\x1b[0m: {EVIL}"]),
        new("display_data", {"text/html": f"<div>{EVIL}</div>", "text/plain": "as text"}),
        new("display_data", {"text/html": f"<table><tr><td onclick='x'>{EVIL}</td></tr></table>"}),
        new("display_data", {"text/markdown": "![seen](http://example.com/x.png) [here](http://example.com/y)"}),
        new("display_data", {"text/markdown": "<http://example.com/z> and [later][1]\n\n[1]: http://example.com/l"}),
        *(new("display_data", {kind: EVIL}) for kind in UNSHOWN),
    ]


@pytest.fixture
def notebook(tmp_path):
    cells = [nbformat.v4.new_markdown_cell(f"# What is *copied*\n\n{EVIL}"), nbformat.v4.new_code_cell("x = 1  # why")]
    cells[1].outputs = outputs()
    path = tmp_path / "01_copies.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return Outcome("01_copies", path)


def is_safe(page):
    assert not page.all("script")
    assert not [tag for tag, attributes in page.tags for name in attributes if name.startswith("on")]
    assert all(picture["src"].startswith("data:") and picture["alt"] for picture in page.all("img"))
    assert "default-src 'none'" in next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert (page.all("html")[0]["lang"], len(page.all("main")), len(page.all("h1"))) == ("en", 1, 1)


def test_a_notebooks_page(notebook):
    page = Page(pages.page(notebook, [("Answer", "index.html"), ("01_copies", "01_copies.html")]))
    is_safe(page)
    assert "What is copied" in page.text
    assert page.text.count("<script>alert(1)</script>") >= 5  # shown, not run
    assert [picture["alt"] for picture in page.all("img")] == ['Lines: 2.1 "times"']
    assert {link["href"] for link in page.all("a")} == {"index.html", "01_copies.html"}
    assert "as text" in page.text and "[here](http://example.com/y)" in page.text
    assert len(page.all("table")) == 1, "of HTML, a table whose cells are escaped, and nothing else"
    assert len(page.all("details")) == 1
    assert "\x1b" not in page.text
    assert next(link["href"] for link in page.all("a") if "aria-current" in link) == "01_copies.html"


@pytest.fixture
def site(tmp_path, monkeypatch, run_files, notebook):
    """A report of a CPU run here and a recorded GPU run; returns (folder, runs)."""
    for name in ("RECORDED", "LOCAL", "REPORTS"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    live, record = paths.LOCAL / "mine.parquet", paths.RECORDED / "h200" / "2026-11-30_full_0123abc.parquet"
    for source, target in zip(run_files, (live, record)):
        target.parent.mkdir(parents=True)
        shutil.copy(source, target)
    folder = paths.REPORTS / "mine"
    folder.mkdir(parents=True)
    return folder, [live, record]


def test_the_index_answers_for_every_run(site, notebook):
    folder, runs = site
    page = Page(pages.report(folder, [notebook], runs))
    is_safe(page)
    flat = " ".join(page.text.split())
    for run in map(answers.load, runs):
        told = (answers.answer(run), answers.certainty(run), *answers.sentences(run), run.title)
        assert all(sentence in flat for sentence in told)
    assert all(text in flat for text in (front.reserve(None), *front.method(answers.load(runs[0])), *front.LIMITS))
    for figure in ("limit", "eager", "step"):
        assert answers.alt(figure, answers.load(runs[0])) in flat, "a figure that the run cannot fill is missed"
    assert [link["href"] for link in page.all("a")].count("explore.html") == 2
    assert (folder / "explore.html").stat().st_size > 100_000
    assert (folder / "summary.md").read_text() == front.summary([answers.load(path) for path in runs], [])
    targets = [link["href"] for link in page.all("a") if link["href"].endswith(".parquet")]
    assert [(folder / target).resolve() for target in targets] == [path.resolve() for path in runs]
    assert "failed" not in flat


def test_the_index_says_what_failed(site, notebook):
    folder, runs = site
    failed = Outcome("01_copies", notebook.path, ("ValueError: 3 < 4",))
    page = Page(pages.report(folder, [failed], runs))
    is_safe(page)
    assert "01_copies failed" in page.text
    assert "ValueError: 3 < 4" in page.text


@pytest.fixture(scope="module")
def evil(tmp_path_factory, gpu):
    """A report of a GPU run in which the name of every machine, copy and version is markup: its folder."""
    folder = tmp_path_factory.mktemp("evil")
    linking = "![a](http://example.com/{}) http://example.com/x www.example.com me@example.com @user x/y#7 [a][b] ![b]"
    hostile = {name: f"{name} {EVIL} {linking.format(name)} $\\bad$" for name in MACHINE}
    hostile["cpu"] += "\n\n[b]: /elsewhere\n\n"
    hostile["gpu"] += "\n\n[b]: /elsewhere\n\n"
    few = gpu.samples["layout"].eq("packed") & gpu.samples["num_kv_heads"].eq(8)
    samples = gpu.samples[few].assign(**hostile)
    samples.loc[samples["copy"].eq("triton"), "copy"] = f"mine {EVIL}"
    path = results.save(samples, folder / "evil.parquet")
    run = answers.load(path)
    told = [answers.headline(run), answers.note([run]), *answers.sentences(run)]
    tables = [answers.provenance(run), answers.verdict_table(run, run.copies), answers.limits_table(run)]
    shown = [{"text/markdown": text} for text in told] + [{"text/html": one.to_html(index=False)} for one in tables]
    cell = nbformat.v4.new_code_cell("runs", outputs=[nbformat.v4.new_output("display_data", data) for data in shown])
    compared = folder / "03_compare.failed.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Compared"), cell]), compared)
    pages.report(folder, [Outcome("03_compare", compared, (f"ValueError: {EVIL}",))], [path])
    return folder


def test_what_a_run_file_says_is_escaped(evil):
    for name in ("index", "03_compare"):
        page = Page(evil / f"{name}.html")
        is_safe(page)
        assert " ".join(page.text.split()).count(EVIL) >= 5
        assert not [link for link in page.all("a") if "example.com" in link["href"]]
    summary = (evil / "summary.md").read_text()
    assert "cpu &lt;script>" in summary or "gpu &lt;script>" in summary
    assert "<" not in summary and "](" not in summary
    rendered = mistune.create_markdown(escape=True, plugins=["url", "table"])(summary)
    assert not re.findall(r"<(?:a|img)\b", rendered), "not even by a reference"
    shown = unescape(unescape(rendered))  # mistune leaves entities alone, GitHub does not
    assert not re.findall(r"@\w|://|www\.|#\d", shown), "what GitHub itself makes a link or a mention of"
    assert "x/y#7 [a][b] ![b]" in shown.replace("\u2060", ""), "and it looks as it did"
    chart = Page(evil / "explore.html")
    assert len(chart.all("script")) == 2 and not chart.all("img")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium")
def test_a_browser_runs_and_fetches_nothing_of_it(evil):
    """Even without the pages' own policy, which would forbid it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_context(bypass_csp=True).new_page()
        asked, alerts, errors = [], [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        opened = [(evil / f"{name}.html").as_uri() for name in ("index", "03_compare", "explore")]
        for address in opened:
            page.goto(address)
        page.locator("#body tr").first.wait_for(state="attached")
        assert EVIL in page.locator("#body").text_content()
        page.locator("select[name=timer]").select_option("eager")  # which moves the state
        page.wait_for_selector("#chart[aria-busy=false]")
        assert [url for url in asked if not url.startswith("data:")] == opened
        assert (alerts, errors) == ([], [])
        chromium.close()


def test_the_verdicts_are_a_matrix_of_words_and_colours(site, notebook):
    folder, runs = site
    index = pages.report(folder, [notebook], runs[1:])
    run, text = answers.load(runs[1]), index.read_text()
    rows = re.findall(r'<tr><th scope="row">(\w+), (\w+)<span>(.*?)</tr>', text, re.DOTALL)
    tables = front.matrices(run)
    assert [table.kernel for table in tables] == ["vllm==0.33.0", "kvnb"]
    assert [(layout, regime) for layout, regime, _ in rows] == 2 * [
        (layout, regime) for layout in answers.LAYOUTS for regime in answers.REGIMES
    ]
    for (_, _, cells), (_, _, html) in zip([row for table in tables for row in table.rows], rows):
        shown = re.findall(r'<td class="(\w+)">(.*?)</td>', html, re.DOTALL)
        assert len(shown) == len(cells)
        for cell, (colour, words) in zip(cells, shown):
            words = " ".join(re.sub(r"<[^>]+>", " ", words).split())
            assert (colour, words) == (("none", "not measured") if cell is None else (cell.colour, " ".join(
                [cell.speedup, cell.verdict, *([f"but {cell.but}"] if cell.but else []), cell.ends, cell.spread]
            )))  # fmt: skip
    assert {"faster", "slower", "mixed", "none"} <= set(re.findall(r'<td class="(\w+)">', text))


def test_the_figures_that_matter_are_small_and_described(site, notebook, padding_file, by_release, monkeypatch, capsys):
    folder, runs = site
    monkeypatch.setitem(sys.modules, "altair", None)
    (folder / "explore.html").write_text("an earlier report's")
    releases = results.save(by_release.samples, folder / "releases.parquet")
    index = pages.report(folder, [notebook], runs[1:], [releases], [padding_file])
    page, run = Page(index), answers.load(runs[1])
    assert "explore.html" not in {link["href"] for link in page.all("a")} and not (folder / "explore.html").exists()
    lacking = "There is no explore.html: "
    assert lacking in page.text and "altair" in page.text.partition(lacking)[2][:200]
    assert "kvnb: no explore.html: " in capsys.readouterr().err
    drawn = page.all("img")
    assert 8 <= len(drawn) <= 15 and index.stat().st_size < 8e6
    assert all(len(base64.b64decode(picture["src"].partition(",")[2])) <= 60_000 for picture in drawn)
    alts = [picture["alt"] for picture in drawn]
    assert alts[:2] == [answers.alt("latency", run, layout) for layout in ("packed", "NHD")]
    captions = re.findall(r"<figcaption>(.+?)</figcaption></figure>", index.read_text())
    assert len(captions) == len(set(captions)) == len(drawn) and all(told.count(". ") == 0 for told in captions)
    assert captions[0] == "Time of one copy of K and V, 8x128, layout packed, by number of tokens: a line per copy."
    assert any(alt.startswith("Line charts. Time of vllm==0.33.0") for alt in alts)
    assert answers.release_headline(by_release) in " ".join(page.text.split())
    assert len([link for link in page.all("a") if link["href"].endswith(".parquet")]) == 3


def test_the_page_says_what_the_first_todos_answer_rests_on(site, notebook, padding_file, tmp_path):
    folder, runs = site
    recorded = paths.RECORDED / "h200" / "2026-11-30_padding_0123abc.parquet"
    rows = results.load(padding_file)
    results.save(rows[rows["round"] < 4].reset_index(drop=True), recorded)  # so that its certainty is no other run's
    run = null_block.load(recorded)
    assert "of up to 4 rounds" in null_block.certainty(run)
    index, label = pages.report(folder, [notebook], runs, padded=[recorded]), f"<b>{run.machine}, grid padding.</b> "
    text, page = unescape(index.read_text()), Page(index)
    is_safe(page)
    assert label in text, "beside a CPU's answer"
    assert f'<p class="soft">{null_block.certainty(run)}</p>' in text
    proof, about = hashlib.sha256(recorded.read_bytes()).hexdigest(), page.text.partition("To reproduce and check")[2]
    asked = about.partition(f"{null_block.ASKED} Grid padding:")[2]
    assert proof in asked and "make record GRID=padding ROUNDS=4" in asked and run.first["kvnb_commit"] in asked
    assert [link["href"] for link in page.all("a")].count("../../recorded/h200/2026-11-30_padding_0123abc.parquet") == 1
    alone = unescape(pages.report(folder, [notebook], runs[1:], padded=[recorded]).read_text())
    assert label not in alone and null_block.certainty(run) in alone, "one GPU's page says whose it is once"


def test_a_report_without_any_run_says_so(site, notebook):
    page = Page(pages.report(site[0], [notebook], []))
    is_safe(page)
    assert "No run to answer from" in page.text
    assert "No run to report" in (site[0] / "summary.md").read_text()


def test_the_readme_speaks_for_the_record(site):
    text, run = pages.readme(), answers.load(site[1][1])
    assert text.startswith(f"### {run.title}") and answers.answer(run) in text and front.reserve(None) in text
    assert f"{answers.scope(run)} {answers.certainty(run)}\n\n" in text and "(timer graph)" in text
    assert front.compact(run).markdown() in text and len(text) < 6000
    assert re.search(r"!\[.+\]\(reports/h200/latency\.png\)", text) and "(reports/h200/03_compare.ipynb)" in text
    paths.RECORDED.joinpath("h200", "2026-11-30_full_0123abc.parquet").unlink()
    assert pages.readme().startswith("No run is recorded yet")


def test_the_readmes_figure_is_the_same_every_time(site, tmp_path):
    pages.figure(tmp_path, site[1][1])
    first = (tmp_path / "latency.png").read_bytes()
    pages.figure(tmp_path, site[1][1])
    assert (tmp_path / "latency.png").read_bytes() == first
