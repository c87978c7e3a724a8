"""Pages: whole without a server, no scripts, everything from data escaped, a description for every figure."""

import base64
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, pages
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
    for path in runs:
        run = answers.Run(results.load(path))
        for sentence in (answers.headline(run), *answers.sentences(run)):
            assert " ".join(sentence.split()) in flat
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


def test_the_readme_speaks_for_the_record(site):
    text = pages.readme()
    assert answers.summary_markdown(answers.Run(results.load(site[1][1]))) in text
    assert re.search(r"!\[.+\]\(reports/h200/latency\.png\)", text)
    paths.RECORDED.joinpath("h200", "2026-11-30_full_0123abc.parquet").unlink()
    assert pages.readme().startswith("No run is recorded yet")


def test_the_readmes_figure_is_the_same_every_time(site, tmp_path):
    pages.figure(tmp_path, site[1][1])
    first = (tmp_path / "latency.png").read_bytes()
    pages.figure(tmp_path, site[1][1])
    assert (tmp_path / "latency.png").read_bytes() == first
