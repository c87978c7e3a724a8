"""Programs that tests put in place of others, and the path on which a fresh Python finds this checkout."""

from __future__ import annotations

import os
from pathlib import Path


def script(path: Path, body: str) -> Path:
    """A program of the shell's."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def python_path(*first: Path) -> str:
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])
