"""Notebooks in batch: papermill runs them in this very Python, and a notebook's file is only ever a complete one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG
from traitlets.config import Config

from kvnb import paths
from kvnb.report import parameters

TIME_LIMITS = {"01_copies": 300, "02_measure": 3600, "03_compare": 900}  # seconds for a whole notebook
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook: its executed file, and its last lines where it failed (empty: it did not)."""

    name: str
    path: Path
    failure: tuple[str, ...] = ()


class ThisPython(AsyncKernelManager):
    """Kernels of the Python that runs us, whatever kernelspec of that name is installed."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(name: str, values: dict[str, object], folder: Path) -> Outcome:
    """Run notebook `name` with parameters `values` and write `folder/<name>.ipynb`, whole or not at all.

    One that raises, outlasts its limit or loses its kernel leaves what it got to, and why, in `<name>.failed.ipynb`.
    Raises ValueError for wrong parameters, before a kernel starts.
    """
    with contextlib.chdir(paths.ROOT):  # where the notebook will run, and look for files
        parameters.check(name, values)
    folder.mkdir(parents=True, exist_ok=True)
    done, failed, running = (folder / file for file in (f"{name}.ipynb", f"{name}.failed.ipynb", f".{name}.ipynb"))
    problem: Exception | None = None
    try:
        _run(paths.NOTEBOOKS / f"{name}.ipynb", running, values, TIME_LIMITS[name])
    except (PapermillExecutionError, DeadKernelError, CellTimeoutError) as error:
        problem = error
    notebook = clean(nbformat.read(running, as_version=4))
    if problem is not None and not isinstance(problem, PapermillExecutionError):
        notebook.cells.append(
            nbformat.v4.new_markdown_cell(f"**Stopped here:** {_reason(problem, name)}", id="stopped")
        )
    nbformat.write(notebook, running)
    os.replace(running, done if problem is None else failed)
    if problem is None:
        failed.unlink(missing_ok=True)
        return Outcome(name, done)
    done.unlink(missing_ok=True)
    return Outcome(name, failed, tuple(ANSI.sub("", _reason(problem, name)).splitlines()[-12:]))


def _run(source: Path, target: Path, values: dict[str, object], limit: float) -> None:
    deadline = time.monotonic() + limit
    # Sockets are files of ours, so two reports never race for a port; a system takes paths of about 100 characters.
    with tempfile.TemporaryDirectory(prefix="kvnb") as scratch:
        manager = {"transport": "ipc", "connection_file": f"{scratch}/kernel.json"}
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
            kernel_manager_class=ThisPython,
            config=Config({"ThisPython": manager}),
            timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
        )


def _reason(problem: Exception, name: str) -> str:
    if isinstance(problem, PapermillExecutionError):
        return "\n".join(problem.traceback)
    if isinstance(problem, CellTimeoutError):
        return f"{name} took longer than its {TIME_LIMITS[name]} s"
    return "the kernel died: out of memory, or a crash in compiled code"


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook less what differs from run to run belongs to papermill: times, markers, progress on stderr."""
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
