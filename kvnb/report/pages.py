"""Executed notebooks as pages, and the index that gives the answers. A page needs no script and asks no server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

import bleach
import jinja2
import mistune
import nbformat
from markupsafe import Markup
from nbconvert import HTMLExporter

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, plots
from kvnb.report.execute import ANSI, Outcome

TEMPLATES = Path(__file__).parent / "templates"
TABLE_TAGS = set("table caption thead tbody tr th td p div span strong em code pre br ul ol li".split())
TABLE_ATTRIBUTES = {"*": ["scope", "colspan", "rowspan"]}
prose = mistune.create_markdown(escape=True, plugins=["table"])
_files = jinja2.FileSystemLoader(TEMPLATES / "kvnb")
_jinja = jinja2.Environment(loader=_files, autoescape=True, undefined=jinja2.StrictUndefined)


def _scrolling(markdown: str) -> str:
    """Markdown as HTML, its own tags shown as text; a wide table scrolls alone."""
    html = prose(markdown)
    return html.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")


def _tame(html: str) -> str:
    """HTML of an output less its styles, scripts and links: tables remain."""
    bare = re.sub(r"<(style|script)\b.*?</\1\s*>", "", html, flags=re.DOTALL | re.IGNORECASE)
    clean = bleach.clean(bare, tags=TABLE_TAGS, attributes=TABLE_ATTRIBUTES, strip=True)
    clean = re.sub(r"<th[^>]*></th>", "<td></td>", clean)  # an empty header heads nothing
    return re.sub(r"(?<=\d) (?=(us|ms|s)<)", "\u00a0", clean)  # a time and its unit stay on one line


def _alt(output: nbformat.NotebookNode) -> str:
    return output.metadata.get("image/png", {}).get("alt", "A figure without a description")


def _verdict(text: str) -> Markup:
    """A speedup with its verdict, in colour where it is FASTER or SLOWER: the words say it too."""
    word = next((word for word in ("FASTER", "SLOWER") if word in text), "")
    return Markup('<b class="{}">{}</b>').format(word.lower(), text) if word else Markup.escape(text)


_jinja.filters["verdict"] = _verdict
_FILTERS = {"prose": _scrolling, "plain": lambda text: escape(ANSI.sub("", text)), "tame": _tame, "alt": _alt}


def page(outcome: Outcome, links: Iterable[tuple[str, str]]) -> Path:
    """Write `<name>.html` beside an executed notebook. `links`: (text, file) of the report's pages."""
    exporter = HTMLExporter(template_name="kvnb", extra_template_basedirs=[str(TEMPLATES)], filters=_FILTERS)
    notebook = nbformat.read(outcome.path, as_version=4)
    body, _ = exporter.from_notebook_node(notebook)
    told = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    heading = re.search(r"^# +(.+)$", told, re.MULTILINE)
    title = re.sub(r"[*_`]", "", heading[1]) if heading else outcome.name
    here = f"{outcome.name}.html"
    return _write(outcome.path.with_name(here), "notebook.html.j2", title=title, body=body, links=links, here=here)


def report(folder: Path, outcomes: list[Outcome], runs: list[Path]) -> Path:
    """Write into `folder` a page per notebook and `index.html` with the answers of `runs`; returns the index's path."""
    links = [("Answer", "index.html"), *((outcome.name, f"{outcome.name}.html") for outcome in outcomes)]
    for outcome in outcomes:
        page(outcome, links)
    failed = [outcome for outcome in outcomes if outcome.failure]
    title = "kvnb: no run to report"
    if runs:
        first = results.load(runs[0]).iloc[0]
        title = f"kvnb on {first['gpu'] or first['cpu']}, torch {first['torch']}, {first['utc'][:10]}"
    values = {"title": title, "links": links, "here": "index.html", "failed": failed, "note": answers.NOTE}
    return _write(folder / "index.html", "report.html.j2", runs=[_run(path, folder) for path in runs], **values)


def recorded() -> dict[str, Path]:
    """GPU folder -> its newest recorded run: grid full, or quick where there is no full one."""
    folders = sorted(path.name for path in paths.RECORDED.glob("*/"))
    newest = {name: results.newest(name, "full") or results.newest(name, "quick") for name in folders}
    return {name: path for name, path in newest.items() if path}


def figure(folder: Path, run: Path) -> None:
    """Write `latency.png`, README's figure, into the folder of a recorded run's report."""
    samples = results.load(run)
    (folder / "latency.png").write_bytes(plots.png(plots.make("latency", samples)))


def readme() -> str:
    """README's answer: each recorded GPU's summary and figure."""
    told = []
    for gpu, path in recorded().items():
        samples = results.load(path)
        alt = answers.alt("latency", samples).replace("[", "(").replace("]", ")")
        told += [f"### {answers.machine(samples)}", answers.summary_markdown(samples)]
        told.append(f"![{alt}](reports/{gpu}/latency.png)")
    return "\n\n".join(told) or "No run is recorded yet: `make report` measures one."


def _run(path: Path, folder: Path) -> dict[str, object]:
    samples = results.load(path)
    first = samples.iloc[0]
    ours = path.is_relative_to(paths.RECORDED)
    home = paths.REPORTS / path.parent.name / "index.html"
    return {
        "origin": "Recorded" if ours else "Measured here",
        "title": f"{answers.machine(samples)}, grid {first['grid']}, {first['utc'][:10]}",
        "headline": answers.headline(samples),
        "sentences": answers.sentences(samples),
        "verdicts": answers.verdict_table(samples),
        "provenance": answers.provenance(samples),
        "file": _relative(path, folder),
        "page": _relative(home, folder) if ours and home.parent != folder and home.is_file() else "",
    }


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _write(path: Path, template: str, **values: object) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(_jinja.get_template(template).render(values), encoding="utf-8")
    os.replace(partial, path)
    return path
