"""Pages in a real browser: nothing asked of a server, no sideways scroll on a phone, nothing that axe objects to."""

import base64
import io
import shutil
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, pages, plots
from kvnb.report.execute import Outcome

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium")
COMMITTED = [page for page in sorted(paths.REPORTS.glob("*/*.html")) if not (page.parent / ".gitignore").exists()]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser():
    lacking = "needs playwright: pip install playwright axe-playwright-python"
    sync_api = pytest.importorskip("playwright.sync_api", reason=lacking)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory, run_files):
    """The index of a GPU run with a failed notebook, and that notebook's page: table, figure, traceback."""
    folder = tmp_path_factory.mktemp("site")
    run = answers.Run(results.load(run_files[1]))
    new, alt = nbformat.v4.new_output, answers.alt("latency", run)
    picture = base64.b64encode(plots.png("latency", run)).decode()
    code = nbformat.v4.new_code_cell("samples = kvnb.load(path)")
    code.outputs = [
        new("execute_result", {"text/html": answers.verdict_table(run).to_html(index=False)}),
        new("display_data", {"image/png": picture}, metadata={"image/png": {"alt": alt}}),
        new("error", ename="E", evalue="x", traceback=["E: " + "very " * 60 + "long"]),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title\n\n## Part\n\n`code`"), code])
    nbformat.write(notebook, folder / "03_compare.failed.ipynb")
    outcome = Outcome("03_compare", folder / "03_compare.failed.ipynb", ("E: x",))
    pages.report(folder, [outcome], [Path(run_files[1])])
    return folder


@pytest.mark.parametrize("name", ["index", "03_compare"])
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_page_as_a_reader_meets_it(browser, site, name, colours, size):
    meet(browser, site / f"{name}.html", colours, size)


@pytest.mark.parametrize("colours, size", [("light", PHONE), ("dark", DESK)], ids=["light phone", "dark desk"])
@pytest.mark.parametrize("page", COMMITTED, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_committed_page_as_a_reader_meets_it(browser, page, colours, size):
    meet(browser, page, colours, size)


def meet(browser, path: Path, colours: str, size: dict) -> None:
    """Open a page with everything unfolded: nothing is asked or said, its figures are there, axe finds nothing."""
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport=size, color_scheme=colours, bypass_csp=True)  # axe is a script
    page = context.new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    address = path.as_uri()
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert [url for url in asked if not url.startswith("data:")] == [address]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    drawn = page.evaluate("[...document.images].map(image => [image.naturalWidth, image.width, image.height])")
    assert all(own >= 800 and width >= 300 and height >= 100 for own, width, height in drawn), drawn
    shot = Image.open(io.BytesIO(page.screenshot()))
    assert (shot.convert("L").getpixel((2, 2)) < 128) == (colours == "dark")
    assert len(shot.convert("RGB").getcolors(1 << 24)) > 50  # letters, not a blank page
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    context.close()


def test_no_script_of_a_page_runs(browser, site):
    evil = site / "evil.html"
    index = (site / "index.html").read_text()
    evil.write_text(index.replace("<main>", "<main><script>document.title = 'ran'</script>"))
    page = browser.new_page()
    page.goto(evil.as_uri())
    assert page.title().startswith("kvnb: NVIDIA H200")
