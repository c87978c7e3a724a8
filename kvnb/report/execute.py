"""Notebooks in batch: papermill runs them in this very Python, and a notebook's file is only ever a complete one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
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

TIME_LIMITS = {"01_copies": 300, "02_measure": 3600, "03_compare": 900, "04_null_block": 1800}  # s
TIME_LIMITS |= {"05_releases": 900, "06_timers": 1800, "07_runs": 900}
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
    failure = ""
    try:
        _run(paths.NOTEBOOKS / f"{name}.ipynb", running, values, TIME_LIMITS[name])
    except PapermillExecutionError as error:
        failure = ANSI.sub("", "\n".join(error.traceback))
    except CellTimeoutError:
        failure = f"a cell took longer than {TIME_LIMITS[name]} s"
    except DeadKernelError:
        failure = "the kernel died: out of memory, or a crash in compiled code"
    notebook = clean(nbformat.read(running, as_version=4))
    notebook.cells[0].source = notebook.cells[0].source.replace("(../README.md)", "(index.html)")  # the report's own
    if failure:
        why = f"**This notebook stopped:** {failure.splitlines()[-1]}"
        notebook.cells.append(nbformat.v4.new_markdown_cell(why, id="stopped"))
    nbformat.write(notebook, running)
    here, gone = (failed, done) if failure else (done, failed)
    os.replace(running, here)
    gone.unlink(missing_ok=True)
    return Outcome(name, here, tuple(failure.splitlines()[-12:]))


def _run(source: Path, target: Path, values: dict[str, object], limit: int) -> None:
    # Sockets are files of ours, so two reports never race for a port; a system takes paths of about 100 characters.
    with tempfile.TemporaryDirectory(prefix="kvnb") as scratch:
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
            config=Config(ThisPython={"transport": "ipc", "connection_file": f"{scratch}/kernel.json"}),
            execution_timeout=limit,
        )


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
