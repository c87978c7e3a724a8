"""What is committed for people who run nothing: notebooks/, and each recorded GPU's folder of reports/.

They open anywhere: small, PNG only, described, without widgets, scripts of others, machine paths or dead links.
"""

from __future__ import annotations

import base64
import html
import io
import re
import tempfile
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from PIL import Image

from kvnb import paths
from kvnb.report import answers, pages, parameters
from kvnb.report.execute import execute

NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted(paths.NOTEBOOKS.glob("*.ipynb"))}
FOLDERS = [paths.REPORTS / gpu for gpu in answers.recorded()]
EXECUTED = [path for folder in FOLDERS for path in sorted(folder.glob("*.ipynb"))]
PAGES = [path for folder in FOLDERS for path in sorted(folder.glob("*.html"))]
STATIC = [page for page in PAGES if page.name != "explore.html"]
BACK = "[All answers](../README.md)"
MACHINE = re.compile(r"""(?<=["'\s(>=])/(?:home|mnt|opt|root|srv|tmp|usr|var|work\w*|Users)/[\w.]""")
EMBEDDED = re.compile(r"data:image/(\w+);base64,([A-Za-z0-9+/=]+)")
MOST_PNG = 60_000  # bytes

each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
each_executed = pytest.mark.parametrize("path", EXECUTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
each_static_page = pytest.mark.parametrize("page", STATIC, ids=lambda path: f"{path.parent.name}-{path.stem}")


def outputs(path: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def is_small_png_with_palette(picture: bytes) -> bool:
    opened = Image.open(io.BytesIO(picture))
    return len(picture) <= MOST_PNG and (opened.format, opened.mode) == ("PNG", "P")


def is_a_finding(alt: str | None) -> bool:
    return bool(alt) and len(alt) > 20 and re.search(r"\d", alt) is not None


# -- notebooks/


@each_notebook
def test_a_notebook_leads_back_and_says_what_its_parameters_do(name):
    title, about = NOTEBOOKS[name].cells[0].source.split("\n\n")[:2]
    assert title.startswith("# ") and about.startswith(BACK) and "\n" not in about
    named = [parameter.name for parameter in parameters.TABLES[name]]
    assert set(re.findall(r"`(\w+)`", about)) == set(named), "each parameter, and nothing else, in backticks"
    assert ("Parameters: " in about) == bool(named) and ("no parameters" in about) == (not named)


@each_notebook
def test_no_cell_is_long_prose_included(name):
    assert [cell.id for cell in NOTEBOOKS[name].cells if len(cell.source.splitlines()) > 20] == []


# -- reports/<gpu>/


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_report_is_small_and_of_the_newest_record(folder):
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 10_000_000
    index = folder / "index.html"
    assert index.stat().st_size < 8_000_000
    assert answers.recorded()[folder.name].name in index.read_text()
    assert len(EMBEDDED.findall(index.read_text())) <= 15


@each_executed
def test_an_executed_notebook_is_small_and_the_committed_ones_cell_by_cell(path):
    assert path.stat().st_size < 1_000_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata and "papermill" not in notebook.metadata
    ids = [cell.id for cell in notebook.cells if not cell.id.startswith("injected-")]
    assert ids == [cell.id for cell in NOTEBOOKS[path.stem].cells]
    assert "](index.html)" in notebook.cells[0].source and BACK not in notebook.cells[0].source


@each_executed
def test_outputs_are_text_tables_and_described_pictures(path):
    for output in outputs(path):
        assert output.output_type != "error"
        data = output.get("data", {})
        assert set(data) <= {"text/plain", "text/html", "text/markdown", "image/png"}
        assert not re.search(r"<(?:script|img|svg|iframe|video|style)\b", data.get("text/html", ""), re.IGNORECASE)
        if "image/png" in data:
            assert is_small_png_with_palette(base64.b64decode(data["image/png"]))
            assert is_a_finding(output.metadata["image/png"]["alt"])


@each_page
def test_a_pages_pictures_are_small_and_described(page):
    text = page.read_text()
    for kind, picture in EMBEDDED.findall(text):
        assert kind == "png" and is_small_png_with_palette(base64.b64decode(picture))
    for tag in re.findall(r"<img\b[^>]*>", re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)):
        alt = re.search(r'\balt="([^"]*)"', tag)
        assert is_a_finding(alt and html.unescape(alt[1])), tag[:200]


@each_static_page
def test_a_page_runs_nothing_and_asks_no_server(page):
    text = EMBEDDED.sub("", page.read_text())
    assert not re.search(r"<(?:script|iframe|link)\b|@import|\bsrc=[\"']?(?:https?:)?//", text, re.IGNORECASE)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_with_scripts_holds_them_itself(folder):
    text = (folder / "explore.html").read_text()
    assert not re.search(r"<script\b[^>]*\bsrc=|<link\b[^>]*\bhref=[\"']?(?:https?:)?//", text, re.IGNORECASE)
    assert "<noscript>" in text


@pytest.mark.parametrize("path", [*EXECUTED, *PAGES], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_no_path_of_the_machine_that_rendered(path):
    text = re.sub(r'"image/png": "[^"]*"', "", EMBEDDED.sub("", path.read_text()))
    assert MACHINE.findall(text) == []
    for place in {paths.ROOT, Path.home(), Path(tempfile.gettempdir())} - {Path("/")}:
        assert not re.search(rf"(?<![\w.]){re.escape(str(place))}/", text), place


@each_static_page
def test_a_pages_links_lead_somewhere(page):
    text = page.read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    for target in map(html.unescape, re.findall(r'\bhref="([^"]+)"', text)):
        file, _, anchor = target.partition("#")
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / unquote(file)).exists(), target
            assert file or anchor in ids, target


@each_executed
def test_a_notebooks_links_lead_somewhere(path):
    prose = "".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in target]
    assert targets and [target for target in targets if not (path.parent / target).exists()] == []


# -- the same bytes


def test_a_notebook_with_every_figure_gives_the_same_bytes_twice(tmp_path, run_files, gpu):
    """The real 03_compare and its page; test_report renders a whole folder twice, of stand-ins."""
    rendered = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        outcome = execute("03_compare", {"runs": run_files}, folder)
        assert not outcome.failure, outcome.failure
        pages.page(outcome, [("Answer", "index.html")])
        rendered.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert list(rendered[0]) == ["03_compare.html", "03_compare.ipynb"]
    assert rendered[0] == rendered[1]
    figures = [output for output in outputs(outcome.path) if "image/png" in output.get("data", {})]
    assert len(figures) > len(gpu.layouts)
