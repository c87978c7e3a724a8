"""Notebooks in batch: papermill runs them in this very Python, and a notebook's file is only ever a complete one.

Whatever stops one notebook (an error, its time limit, a kernel that dies) becomes an Outcome, so that the others still
run; Ctrl-C, SIGTERM and SIGHUP stop the report, and leave neither a kernel nor a file behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG
from traitlets.config import Config

from kvnb import paths
from kvnb.report import parameters
from kvnb.stopping import stoppable

TIME_LIMITS = {"01_copies": 300, "02_measure": 4 * 3600, "03_compare": 900, "04_null_block": 1800}  # s, whole notebook
TIME_LIMITS |= {"05_releases": 900, "06_timers": 1800, "07_runs": 900}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LAST_LINES = 12  # of a failure
SOCKET = "kvnb12345678/kernel-ipc-5"  # how the name of a kernel's socket goes on after its temporary folder
SOCKET_BYTES = 100  # that every system takes as a socket's path (Linux: 107, macOS: 103)
logging.getLogger("papermill").addHandler(logging.NullHandler())  # how a kernel ended, Outcome says


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook: its executed file, and its last lines where it failed (empty: it did not)."""

    name: str
    path: Path
    failure: tuple[str, ...] = ()


class ThisPython(AsyncKernelManager):
    """Kernels of the Python that runs us, whatever kernelspec of that name is installed."""

    newest: ClassVar[ThisPython | None] = None  # papermill makes it, and tells nobody how its kernel ended
    late: ClassVar[threading.Event] = threading.Event()  # set once the notebook is to end, whatever it does

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])

    async def start_kernel(self, **options: object) -> None:
        await super().start_kernel(**options)
        ThisPython.newest = self
        if ThisPython.late.is_set():  # it was when there was nothing to kill yet
            self.kill()

    @property
    def death(self) -> str:
        """How the kernel ended, in words."""
        process = self.provisioner.process
        status = process.returncode if process else None
        if status is None or status >= 0:
            return "the kernel ended" + f", exit status {status}" * (status is not None)
        memory = ", as a system does that runs out of memory" * (-status == signal.SIGKILL)
        return f"the kernel died of signal {-status} ({signal.strsignal(-status)}{memory})"

    @classmethod
    def end(cls) -> None:
        """End the notebook that runs, from another thread or a signal: papermill finds its kernel dead."""
        cls.late.set()
        if cls.newest:
            cls.newest.kill()

    def kill(self) -> None:
        """End the kernel and all that it started, workers on a GPU above all; what has ended already is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of one that has ended
            os.killpg(self.provisioner.pgid, signal.SIGKILL)


def execute(name: str, values: dict[str, object], folder: Path) -> Outcome:
    """Run notebook `name` with parameters `values` and write `folder/<name>.ipynb`, whole or not at all.

    One that raises, leaves early, outlasts its limit or loses its kernel leaves what it got to, and why, in
    `<name>.failed.ipynb`. Raises ValueError for wrong parameters, and where no socket can be made, before a kernel
    starts.
    """
    with contextlib.chdir(paths.ROOT):  # where the notebook will run, and look for files
        parameters.check(name, values)
    with private_folder() as scratch:
        running = scratch / f"{name}.ipynb"
        why = _run(name, running, values, scratch)
        notebook = _got_to(running)
    failure = tuple([*_said(notebook), *why.splitlines()][-LAST_LINES:] if why else ())
    notebook = clean(notebook)
    if notebook.cells:  # the report's own answers
        notebook.cells[0].source = notebook.cells[0].source.replace("(../README.md)", "(index.html)")
    if failure:
        quoted = "\n".join(f"    {line}" for line in failure)
        told = f"**This notebook did not finish.** Its last lines:\n\n{quoted}"
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell(told, id="stopped"))
    done, failed = (folder / file for file in (f"{name}.ipynb", f"{name}.failed.ipynb"))
    here, gone = (failed, done) if failure else (done, failed)
    with paths.whole(here) as partial:
        nbformat.write(notebook, partial)
    gone.unlink(missing_ok=True)
    return Outcome(name, here, failure)


def _run(name: str, target: Path, values: dict[str, object], scratch: Path) -> str:
    """Why the notebook did not finish, or nothing. A kernel that is past the limit is killed: it may answer nothing.
    So is one when a signal comes: raised in an event loop, an exception would leave tasks and sockets that complain.

    Whatever else comes of that (a kernel that did not start, a cell that ended as the time did), the limit is why.
    """
    ThisPython.newest, ThisPython.late = None, threading.Event()
    limit = threading.Timer(TIME_LIMITS[name], ThisPython.end)
    limit.daemon = True  # a second signal may come before it is cancelled
    limit.start()
    try:
        with stoppable(ThisPython.end):
            why = _failure(name, target, values, scratch)
    finally:
        limit.cancel()
        if ThisPython.newest:
            ThisPython.newest.kill()
    return f"{name} took longer than its {TIME_LIMITS[name]} s" if ThisPython.late.is_set() else why


def _failure(name: str, target: Path, values: dict[str, object], scratch: Path) -> str:
    try:
        _papermill(paths.NOTEBOOKS / f"{name}.ipynb", target, values, scratch)
        cells = nbformat.read(target, as_version=4).cells
    except PapermillExecutionError as error:
        return ANSI.sub("", "\n".join(error.traceback)) or str(error)
    except DeadKernelError:
        return ThisPython.newest.death
    except Exception as error:  # noqa: BLE001  a kernel that does not start, a disk that is full: this one's failure
        return f"{type(error).__name__}: {error}"
    errors = [output for cell in cells for output in cell.get("outputs", []) if output.output_type == "error"]
    return f"{errors[0].ename}: a cell left the notebook early" if errors else ""  # papermill takes exit(0) for success


def _papermill(source: Path, target: Path, values: dict[str, object], scratch: Path) -> None:
    papermill.execute_notebook(
        source,
        target,
        values,
        kernel_name="python3",
        language="python",
        cwd=paths.ROOT,
        progress_bar=False,
        stderr_file=sys.stderr,
        autosave_cell_every=0,  # saved between cells only: nothing beside a measurement
        start_timeout=120,
        iopub_timeout=60,  # s, for output that comes after its cell's end: 4 are few on a busy machine
        kernel_manager_class=ThisPython,
        config=Config(ThisPython={"transport": "ipc", "connection_file": f"{scratch}/kernel.json"}),
        extra_arguments=[f"--ipython-dir={scratch}"],  # no start-up files of the user's, nothing to share
    )


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder that is this process's alone, so that two reports share nothing, and short enough for sockets.

    Raises ValueError where there is none.
    """
    made = paths.private_folder(lambda place: len(os.fsencode(f"{place}/{SOCKET}")) <= SOCKET_BYTES)
    if made is None:
        first = os.environ.get("TMPDIR") or paths.SCRATCH[0]
        raise ValueError(
            f"a kernel's sockets need a temporary folder that can be written to and whose path is short, and "
            f"{first} is not: set TMPDIR to one of at most {SOCKET_BYTES - len(SOCKET) - 1} letters"
        )
    with made as folder:
        yield Path(folder)


def _got_to(target: Path) -> nbformat.NotebookNode:
    """A notebook as papermill left it; an empty one where it could not read or write it, which `_failure` says."""
    try:
        return nbformat.read(target, as_version=4)
    except (FileNotFoundError, ValueError):  # never begun; cut off, as on a disk that is full
        return nbformat.v4.new_notebook()


def _said(notebook: nbformat.NotebookNode) -> list[str]:
    """What the last cell that began said on stderr, in lines: where a measurement was, or a crash's own words."""
    begun = [cell for cell in notebook.cells if cell.metadata.get("papermill", {}).get("start_time")]
    outputs = begun[-1].get("outputs", []) if begun else []
    said = "".join(output.text for output in outputs if output.get("name") == "stderr")
    return [line for line in ANSI.sub("", said).splitlines() if line.strip()]


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook less what papermill adds and what differs from run to run: times, markers, progress on stderr."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    notebook.cells = [cell for cell in notebook.cells if ERROR_MARKER_TAG not in cell.metadata.get("tags", [])]
    for index, cell in enumerate(notebook.cells):
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = f"injected-{index}"
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook
