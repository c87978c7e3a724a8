"""Files of a report from their templates: whole or not at all."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import jinja2

from kvnb import paths

TEMPLATES = Path(__file__).parent / "templates"


def write(path: Path, template: str, **values: object) -> Path:
    """Fill `templates/kvnb/<template>`, which also gets the file's name as `here`, and write it; returns `path`."""
    loader = jinja2.FileSystemLoader(TEMPLATES / "kvnb")
    filled = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    filled.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    with paths.whole(path) as partial:
        partial.write_text(filled.get_template(template).render(values, here=path.name), encoding="utf-8")
    return path
