"""Executed notebooks as pages, and the index that gives the answers. A page needs no script and asks no server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import jinja2
import mistune
import nbformat
from nbconvert import HTMLExporter

from kvnb import paths
from kvnb.report import answers, explore, files, front, null_block, plots
from kvnb.report.execute import ANSI, TIME_LIMITS, Outcome

TABLE = re.compile(
    r'</?(table|thead|tbody|tr|th|td)>|<table (border="\d" )?class="dataframe">|<tr style="text-align: right;">'
)


def _without_links() -> mistune.Markdown:
    """For Markdown that a notebook put out: names of machines and copies in it link to nothing and show no picture."""
    made = mistune.create_markdown(escape=True)
    for rule in ("link", "auto_link", "auto_email"):
        made.inline.rules.remove(rule)
    return made


FILTERS = {
    "prose": mistune.create_markdown(escape=True),
    "told": _without_links(),
    "is_table": lambda html: "<" not in TABLE.sub("", html),  # as pandas writes it, what it holds escaped
    "plain": lambda text: escape(ANSI.sub("", text)),
    "alt": lambda output: output.metadata.get("image/png", {}).get("alt", "A figure without a description"),
}


def ready() -> None:
    """Raise ValueError, naming the mend, where no notebook can become a page: ours builds on nbconvert's templates."""
    try:
        _body(nbformat.v4.new_notebook())
    except (ValueError, jinja2.TemplateNotFound) as error:
        raise ValueError(
            "nbconvert does not find its templates, which lie in share/jupyter of the prefix that it was installed "
            "into: name that folder, JUPYTER_PATH=/the/prefix/share/jupyter, or install it again: "
            f"{sys.executable} -m pip install --force-reinstall --no-deps nbconvert"
        ) from error


def clear(folder: Path, *more: str) -> None:
    """Remove what an earlier report wrote into `folder`, `more` with it, but for index.html, which goes as the folder
    is claimed; what else is there is somebody's own."""
    made = (f"{name}.{kind}" for name in TIME_LIMITS for kind in ("html", "ipynb", "failed.ipynb"))
    for file in ("summary.md", "explore.html", *more, *made):
        (folder / file).unlink(missing_ok=True)


def _body(notebook: nbformat.NotebookNode) -> str:
    exporter = HTMLExporter(template_name="kvnb", extra_template_basedirs=[str(files.TEMPLATES)], filters=FILTERS)
    return exporter.from_notebook_node(notebook)[0]


def page(outcome: Outcome, links: Iterable[tuple[str, str]]) -> Path:
    """Write `<name>.html` beside an executed notebook. `links`: (text, file) of the report's pages."""
    notebook = nbformat.read(outcome.path, as_version=4)
    body = _body(notebook)
    heading = re.search(r"^# +(.+)$", notebook.cells[0].source, re.MULTILINE)
    title = re.sub(r"[*_`]", "", heading[1]) if heading else outcome.name
    title += " (not finished)" * bool(outcome.failure)
    here = outcome.path.with_name(f"{outcome.name}.html")
    return files.write(here, "notebook.html.j2", title=title, body=body, links=links)


def report(
    folder: Path, outcomes: list[Outcome], runs: list[Path], releases: Sequence[Path] = (), padded: Sequence[Path] = ()
) -> Path:
    """Write into `folder` a page per notebook, summary.md, and index.html with the answers of `runs`; returns its path.

    `releases`, `padded`: the runs of 05_releases and of 04_null_block, whose answers stand there too; without any
    `padded`, what is known without one. The first of `runs` is explore.html's, where that can be made.
    """
    timed = bool(runs) and answers.load(runs[0]).every_cell["status"].eq("ok").any()
    lacking = explore.missing() or ("" if timed else "no run with a time to explore")
    explorable = [] if lacking else [("explore", "explore.html")]
    links = [("Answer", "index.html"), *explorable, *((outcome.name, f"{outcome.name}.html") for outcome in outcomes)]
    for outcome in outcomes:
        page(outcome, links)
    (folder / "explore.html").unlink(missing_ok=True)  # an earlier report's
    if explorable:
        explore.page(answers.load(runs[0]), folder / "explore.html", links)
    else:
        print(f"kvnb: no explore.html: {lacking}", file=sys.stderr)
    answered = [(answers.load(path), path, *_links(path, folder)) for path in runs]
    others = [_links(path, folder)[0] for path in (*padded, *releases)]
    padded, releases = [*map(null_block.load, padded)], [*map(answers.load, releases)]
    values = {"answers": answers, "null_block": null_block, "front": front, "lacking": lacking}
    values["failed"] = failed = [outcome for outcome in outcomes if outcome.failure]
    values["held"] = [outcome.name for outcome in outcomes]
    values |= {"reserves": padded or [None], "others": others}
    values["pictures"] = front.pictures(answered[0][0], releases, padded) if answered else []
    told = [run for run, *_ in answered]
    with paths.whole(folder / "summary.md") as partial:
        partial.write_text(front.summary(told, padded, [outcome.name for outcome in failed]), encoding="utf-8")
    values |= {"links": links, "answered": answered, "releases": releases}
    return files.write(folder / "index.html", "report.html.j2", **values)


def _links(path: Path, folder: Path) -> tuple[str, str]:
    """From `folder` to a run's file, and to a recorded run's own report where that is another."""
    home = paths.REPORTS / path.parent.name / "index.html"
    home = home if path.is_relative_to(paths.RECORDED) and home.parent != folder and home.is_file() else None
    return tuple(Path(os.path.relpath(target, folder)).as_posix() if target else "" for target in (path, home))


def figure(folder: Path, run: Path) -> None:
    """Write `latency.png`, README's figure, into the folder of a recorded run's report."""
    with paths.whole(folder / "latency.png") as partial:
        partial.write_bytes(plots.png("latency", answers.load(run)))


def trust() -> str:
    """README's list of what tests tried, as they counted it: tests/trust.txt."""
    lines = (paths.ROOT / "tests" / "trust.txt").read_text().splitlines()
    return "\n".join(f"- {line.partition(chr(9))[2]}" for line in lines)


def readme() -> str:
    """README's answer for each recorded GPU: a few sentences to each question, a table, a figure, a link to more."""
    told = []
    for gpu, path in answers.recorded().items():
        run, padded = answers.load(path), answers.recorded(null_block.GRID).get(gpu)
        alt = answers.alt("latency", run).replace("[", "(").replace("]", ")")
        answer = front.told([run], [null_block.load(padded)] if padded else [])
        told += map(front.inert, (f"### {run.title}", answer, front.compact(run).markdown()))
        told += [f"![{front.inert(alt)}](reports/{gpu}/latency.png)"]
        notebook = f"reports/{gpu}/03_compare.ipynb"
        told.append(f"Every copy, figure and number: [{notebook}]({notebook}), or, as pages, reports/{gpu}/index.html.")
    return "\n\n".join(told) or "No run is recorded yet: `make report` measures one."
