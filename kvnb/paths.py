"""Where things lie. Nothing depends on the working folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
LOCAL = DATA / "local"
RECORDED = DATA / "recorded"
REPORTS = ROOT / "reports"
CACHE = Path(os.environ.get("KVNB_CACHE") or user_cache_path("kvnb")).absolute()
if os.environ.get("KVNB_CACHE"):  # said where a home cannot be written: other packages' caches go there too
    for _cache in ("TRITON_CACHE_DIR", "MPLCONFIGDIR", "IPYTHONDIR"):
        os.environ.setdefault(_cache, str(CACHE / _cache.lower()))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed to it at the end, so that it is complete or not there.

    Whatever goes wrong leaves nothing of it behind: a full disk is not filled further.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def record(name: str, machine: dict) -> Path:
    """`data/recorded/<gpu>/<date>_<name>_<sha7>.parquet` of a machine as machine.describe has it."""
    commit = machine["kvnb_commit"].removeprefix("tree-")[:7]
    return RECORDED / gpu_folder(machine["gpu"]) / f"{machine['utc'][:10]}_{name}_{commit}.parquet"


def gpu_folder(gpu: str) -> str:
    """A GPU's name as the folder of its records: "NVIDIA H200" is h200, "NVIDIA GeForce RTX 4090" is rtx-4090."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\b(nvidia|geforce|tesla)\b", "", gpu.lower())).strip("-")
