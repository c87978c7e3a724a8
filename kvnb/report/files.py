"""A report's folder, which one process at a time writes to, and its files from templates: whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2
from filelock import FileLock, Timeout

from kvnb import paths

TEMPLATES = Path(__file__).parent / "templates"


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Make a report's folder, and keep it to this process until its report is written.

    index.html goes at once: a folder without one holds a report that did not end. Raises ValueError where another
    process has the folder, naming it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, writer = FileLock(folder / ".lock", timeout=0), folder / ".writer"  # a process that dies lets go of the lock
    try:
        lock.acquire()
    except Timeout:
        who = writer.read_text() if writer.is_file() else "that just began"
        raise ValueError(f"another process, {who}, writes {folder}: wait for it, or choose another run name") from None
    try:
        with paths.whole(writer) as partial:
            partial.write_text(str(os.getpid()))
        (folder / "index.html").unlink(missing_ok=True)
        yield folder
    finally:
        writer.unlink(missing_ok=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def write(path: Path, template: str, **values: object) -> Path:
    """Fill `templates/kvnb/<template>`, which also gets the file's name as `here`, and write it; returns `path`."""
    loader = jinja2.FileSystemLoader(TEMPLATES / "kvnb")
    filled = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    filled.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    with paths.whole(path) as partial:
        partial.write_text(filled.get_template(template).render(values, here=path.name), encoding="utf-8")
    return path
