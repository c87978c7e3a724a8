"""Where things lie. Nothing depends on the working folder."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
LOCAL = DATA / "local"
RECORDED = DATA / "recorded"
REPORTS = ROOT / "reports"
CACHE = Path(os.environ.get("KVNB_CACHE") or user_cache_path("kvnb"))
