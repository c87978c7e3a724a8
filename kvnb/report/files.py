"""A report's folder, which one process at a time writes to, and its files from templates: whole or not at all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2

from kvnb import paths

TEMPLATES = Path(__file__).parent / "templates"


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Make a report's folder, and keep it to this process until its report is written.

    index.html goes at once: a folder without one holds a report that did not end. Raises ValueError where another
    process has the folder, naming it, and where the folder cannot be written.
    """
    other = "choose another run name"
    with paths.held(folder / ".lock", folder / ".writer", f"writes {folder}", f"make room there, or {other}", other):
        (folder / "index.html").unlink(missing_ok=True)
        yield folder


def write(path: Path, template: str, **values: object) -> Path:
    """Fill `templates/kvnb/<template>`, which also gets the file's name as `here`, and write it; returns `path`."""
    loader = jinja2.FileSystemLoader(TEMPLATES / "kvnb")
    filled = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    filled.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    with paths.whole(path) as partial:
        partial.write_text(filled.get_template(template).render(values, here=path.name), encoding="utf-8")
    return path
