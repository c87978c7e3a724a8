"""Pages: whole without a server, no scripts, everything from data escaped, a description for every figure."""

import base64
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, front, pages
from kvnb.report.execute import Outcome

EVIL = "<script>alert(1)</script><img src='http://example.com/x.png'>"
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


def test_what_a_run_file_says_is_escaped(site, notebook, cpu):
    folder, _ = site
    path = results.save(cpu.samples.assign(cpu=EVIL, torch="<b>2"), paths.LOCAL / "evil.parquet")
    page = Page(pages.report(folder, [notebook], [path]))
    is_safe(page)
    assert EVIL in page.text


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
                [cell.speedup, cell.verdict, *([f"but {cell.lost}"] if cell.lost else []), cell.ends, cell.spread]
            )))  # fmt: skip
    assert {"faster", "slower", "mixed", "none"} <= set(re.findall(r'<td class="(\w+)">', text))


def test_the_figures_that_matter_are_small_and_described(
    site, notebook, padding_file, by_release, monkeypatch, capsys
):
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
    assert any(alt.startswith("Line charts. Time of vllm==0.33.0") for alt in alts)
    assert answers.release_headline(by_release) in " ".join(page.text.split())
    assert len([link for link in page.all("a") if link["href"].endswith(".parquet")]) == 3


def test_a_report_without_any_run_says_so(site, notebook):
    page = Page(pages.report(site[0], [notebook], []))
    is_safe(page)
    assert "No run to answer from" in page.text
    assert "No run to report" in (site[0] / "summary.md").read_text()


def test_the_readme_speaks_for_the_record(site):
    text, run = pages.readme(), answers.load(site[1][1])
    assert text.startswith(f"### {run.title}") and answers.answer(run) in text and front.reserve(None) in text
    assert front.compact(run).markdown() in text and len(text) < 6000
    assert re.search(r"!\[.+\]\(reports/h200/latency\.png\)", text) and "(reports/h200/03_compare.ipynb)" in text
    paths.RECORDED.joinpath("h200", "2026-11-30_full_0123abc.parquet").unlink()
    assert pages.readme().startswith("No run is recorded yet")


def test_the_readmes_figure_is_the_same_every_time(site, tmp_path):
    pages.figure(tmp_path, site[1][1])
    first = (tmp_path / "latency.png").read_bytes()
    pages.figure(tmp_path, site[1][1])
    assert (tmp_path / "latency.png").read_bytes() == first
