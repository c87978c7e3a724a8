"""Where things lie. Nothing depends on the working folder."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
LOCAL = DATA / "local"
RECORDED = DATA / "recorded"
REPORTS = ROOT / "reports"
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # where a temporary folder may lie, should TMPDIR not do
_given = os.environ.get("KVNB_CACHE")
try:
    CACHE = Path(_given or user_cache_path("kvnb")).absolute()
    Path.home()
except RuntimeError as error:  # the system knows no such user, as in a container with --user 12345
    if not _given:
        told = "this user has no home folder: name one, HOME=/some/folder, or a cache, KVNB_CACHE=/some/folder"
        raise ValueError(told) from error
    os.environ["HOME"] = str(CACHE / "home")  # Jupyter and matplotlib look into it, whatever else they are told
if _given:  # said where a home cannot be written: other packages' caches go there too
    for _cache in ("TRITON_CACHE_DIR", "MPLCONFIGDIR", "IPYTHONDIR"):
        os.environ.setdefault(_cache, str(CACHE / _cache.lower()))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed to it at the end, so that it is complete or not there.

    Whatever goes wrong leaves nothing of it behind: a full disk is not filled further. What a process of this host
    left in that folder, killed while it wrote, goes too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".*.partial"):
        named = re.fullmatch(r".*@(.+)@(\d+)\.partial", left.name)
        if named and _died(*named.groups()):
            left.unlink(missing_ok=True)
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_of(path: Path) -> Path:
    """The temporary name that `whole` gives a file in this process; it names the process and its host."""
    return path.with_name(f".{path.name}@{platform.node()}@{os.getpid()}.partial")


@contextmanager
def held(lock: Path, holder: Path, does: str, fix: str, instead: str | None = None) -> Iterator[None]:
    """Hold the lock in file `lock`, which the system releases when this process dies; `holder` names it meanwhile.

    `does` says what its holder does, as in "process 7 on gpu1 measures into r.parquet". Where there is one already,
    raises ValueError that names it and says what to do `instead`; where that is None, says so on stderr and waits.
    Raises ValueError with `fix` where the folder cannot be written, or its file system has no locks.

    Neither file stays. The lock's goes last, when nothing is left to do that could disturb the next holder: who got it
    open before finds that it is gone (filelock looks at st_nlink), and takes the one that is there then.
    """
    taken = FileLock(lock)
    with ExitStack() as stack:
        try:
            for folder in (lock.parent, holder.parent):
                folder.mkdir(parents=True, exist_ok=True)
            try:
                taken.acquire(timeout=0)
            except Timeout:
                if instead is not None:
                    raise ValueError(f"{_named(holder)} {does}: wait for it, or {instead}") from None
                told = f"kvnb: waiting for {_named(holder)}, which {does}; if it hangs, end it"
                print(told, file=sys.stderr, flush=True)
                taken.acquire()
            stack.callback(taken.release)
            stack.callback(_remove, lock)
            holder.unlink(missing_ok=True)  # it may name one that was killed
            with whole(holder) as partial:
                partial.write_text(f"process {os.getpid()} on {platform.node()}")
        except (OSError, NotImplementedError) as error:
            what = "written" if isinstance(error, OSError) else "locked"
            raise ValueError(f"{lock.parent} cannot be {what} ({error}): {fix}") from error
        stack.callback(_remove, holder)
        yield


def _remove(path: Path) -> None:
    """A lock or its holder's name: what was done is done, and one that stays tells of a process that is gone."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _named(holder: Path) -> str:
    """Who the holder's file says it is. One that died holds nothing: its successor has yet to write its own name."""
    try:
        said = holder.read_text()
    except FileNotFoundError:
        said = ""
    named = re.fullmatch(r"process (\d+) on (.*)", said)
    return said if named and not _died(named[2], named[1]) else "another process"


def _died(host: str, pid: str) -> bool:
    """Whether a process of this host is no more; of another host's, nothing is known."""
    if host != platform.node():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    return False


def private_folder(fits: Callable[[str], bool]) -> tempfile.TemporaryDirectory | None:
    """A new temporary folder, this process's alone, in the first place that `fits` and can be written to; else None."""
    for place in map(os.path.abspath, filter(None, (os.environ.get("TMPDIR"), *SCRATCH))):
        with suppress(OSError):
            if fits(place):
                return tempfile.TemporaryDirectory(prefix="kvnb", dir=place, ignore_cleanup_errors=True)
    return None


def record(name: str, machine: dict) -> Path:
    """`data/recorded/<gpu>/<date>_<name>_<sha7>.parquet` of a machine as machine.describe has it."""
    commit = short_commit(machine["kvnb_commit"])
    return RECORDED / gpu_folder(machine["gpu"]) / f"{machine['utc'][:10]}_{name}_{commit}.parquet"


def short_commit(commit: str) -> str:
    """Seven digits of a commit, or of the tree of files where there is no git (`tree-...`)."""
    return commit.removeprefix("tree-")[:7]


def gpu_folder(gpu: str) -> str:
    """A GPU's name as the folder of its records: "NVIDIA H200" is h200, "NVIDIA GeForce RTX 4090" is rtx-4090."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\b(nvidia|geforce|tesla)\b", "", gpu.lower())).strip("-")
