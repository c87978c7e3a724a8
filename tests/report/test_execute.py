"""Notebooks in batch: a target is only ever complete, and a failure keeps what it got to and why."""

import contextlib
import io
import json
import os
import resource
import select
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

from kvnb import paths
from kvnb.report import execute, pages

NOTEBOOK = "03_compare"
FIRST = "import sys\nprint(sys.executable)\nprint('half', file=sys.stderr)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a notebook of the given code cells as 03_compare: (outcome, what it left)."""
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    paths.NOTEBOOKS.mkdir()

    def run(*cells, **values):
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "elsewhere", "display_name": "gone"}})
        parameters = nbformat.v4.new_code_cell('runs = "newest"', metadata={"tags": ["parameters"]})
        notebook.cells = [parameters, *map(nbformat.v4.new_code_cell, (FIRST, *cells))]
        nbformat.write(notebook, paths.NOTEBOOKS / f"{NOTEBOOK}.ipynb")
        outcome = execute.execute(NOTEBOOK, values, tmp_path / "out")
        return outcome, nbformat.read(outcome.path, as_version=4)

    return run


def files(outcome):
    return sorted(path.name for path in outcome.path.parent.iterdir())


def text(notebook):
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def test_it_runs_in_this_python_and_leaves_one_whole_file(run):
    outcome, notebook = run("print(runs)", runs="newest")
    assert outcome.failure == ()
    assert text(notebook).splitlines() == [sys.executable, "newest"]
    assert files(outcome) == [f"{NOTEBOOK}.ipynb"]


def test_the_same_run_gives_the_same_bytes(run):
    first = run("print(runs)", runs="newest")[0].path.read_bytes()
    outcome = execute.execute(NOTEBOOK, {"runs": "newest"}, paths.NOTEBOOKS.parent / "out")
    assert outcome.path.read_bytes() == first
    assert b"papermill" not in first


def test_a_failure_keeps_its_traceback_and_a_later_success_replaces_it(run):
    outcome, notebook = run("1 / 0", "print('never')")
    assert outcome.failure[-1] == "ZeroDivisionError: division by zero"
    assert files(outcome) == [f"{NOTEBOOK}.failed.ipynb"]
    assert notebook.cells[-2].outputs[0].ename == "ZeroDivisionError"
    assert notebook.cells[1].source.startswith("**This notebook did not finish.**")
    assert notebook.cells[1].source.endswith("    ZeroDivisionError: division by zero")
    assert "never" not in text(notebook)
    outcome, _ = run("print('mended')")
    assert files(outcome) == [f"{NOTEBOOK}.ipynb"]


def test_a_dead_kernel_is_said_to_be_dead(run, tmp_path, monkeypatch):
    """The kernel ends once its last words are heard: what is under way is lost with it."""
    os.mkfifo(fifo := tmp_path / "fifo")

    class Heard(io.StringIO):
        def write(self, text):
            if "at case 7" in text:
                fifo.write_text("")
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Heard())
    last = f"print('at case 7', file=sys.stderr, flush=True)\nopen({str(fifo)!r}).close()\nos._exit(3)"
    outcome, notebook = run(f"import os\n{last}")
    assert outcome.failure == ("at case 7", "the kernel ended, exit status 3")
    assert sys.executable in text(notebook)
    assert notebook.cells[1].source.endswith("\n\n    at case 7\n    the kernel ended, exit status 3")


def ended(pid):
    """Wait until a process that is no child of ours has ended."""
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(pid)], [], [], 60)[0]


def test_a_kernel_killed_for_memory_takes_all_that_it_started_along(run):
    """Killed as a system kills that is out of memory: by SIGKILL. Its workers would go on using the GPU."""
    child = "import os, signal, subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)"
    outcome, notebook = run(child, "os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.failure == ("the kernel died of signal 9 (Killed, as a system does that runs out of memory)",)
    assert files(outcome) == [f"{NOTEBOOK}.failed.ipynb"]
    ended(int(text(notebook).splitlines()[1]))


def test_a_kernel_that_does_not_start_is_a_failure_of_its_notebook(run, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no Python starts with it
    outcome, _ = run()
    assert "Kernel died before replying" in outcome.failure[-1]
    assert files(outcome) == [f"{NOTEBOOK}.failed.ipynb"]


def test_what_is_no_notebook_is_a_failure_too(run, tmp_path):
    run()
    (paths.NOTEBOOKS / f"{NOTEBOOK}.ipynb").write_text('{"cells": [')
    outcome = execute.execute(NOTEBOOK, {}, tmp_path / "out")
    assert "JSON" in outcome.failure[-1] and files(outcome) == [f"{NOTEBOOK}.failed.ipynb"]


def test_a_notebook_that_fills_its_temporary_folder_is_a_failure_too(run):
    """No file may have more than 60,000 bytes: what papermill wrote of this one is cut off."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        outcome, notebook = run("'x' * 70_000")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.failure == ("OSError: [Errno 27] File too large",)
    assert files(outcome) == [f"{NOTEBOOK}.failed.ipynb"]
    (told,) = notebook.cells
    assert told.source.endswith("\n\n    OSError: [Errno 27] File too large")
    assert "File too large" in pages.page(outcome, []).read_text()


def test_a_cell_that_leaves_early_is_a_failure(run):
    """papermill takes exit status 0 for success, whatever cells are left."""
    outcome, notebook = run("sys.exit(0)", "print('never')")
    assert outcome.failure[-1] == "SystemExit: a cell left the notebook early"
    assert files(outcome) == [f"{NOTEBOOK}.failed.ipynb"] and "never" not in text(notebook)


def test_a_notebook_has_a_time_limit(run, monkeypatch):
    """Even where its kernel answers nothing: pause() is called with Python's lock held, and signals are blocked."""
    monkeypatch.setitem(execute.TIME_LIMITS, NOTEBOOK, 4)
    block = "import ctypes, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    outcome, notebook = run(f"{block}\nctypes.PyDLL(None).pause()")
    assert outcome.failure == (f"{NOTEBOOK} took longer than its 4 s",)
    assert sys.executable in text(notebook)


def test_the_limit_is_the_notebooks_and_not_a_cells(run, monkeypatch):
    monkeypatch.setitem(execute.TIME_LIMITS, NOTEBOOK, 3)
    outcome, _ = run(*["import threading; threading.Event().wait(1)"] * 4)
    assert outcome.failure == (f"{NOTEBOOK} took longer than its 3 s",)


def test_a_limit_that_passes_before_the_kernel_starts_is_why(run, monkeypatch):
    monkeypatch.setitem(execute.TIME_LIMITS, NOTEBOOK, 0)
    outcome, notebook = run("print('never')")
    assert outcome.failure == (f"{NOTEBOOK} took longer than its 0 s",)
    assert files(outcome) == [f"{NOTEBOOK}.failed.ipynb"] and "never" not in text(notebook)


def test_a_limit_that_passes_while_the_kernel_starts_is_why(run, tmp_path, monkeypatch):
    """The kernel's Python waits for a pipe that nobody writes to before it answers anything."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'fifo')!r})")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setitem(execute.TIME_LIMITS, NOTEBOOK, 2)
    outcome, _ = run("print('never')")
    assert outcome.failure == (f"{NOTEBOOK} took longer than its 2 s",)


SOCKETS = """import json
from pathlib import Path
shell = get_ipython()
mine = {link.readlink().name for link in Path('/proc/self/fd').iterdir() if link.is_symlink()}
rows = [line.split() for name in ('tcp', 'tcp6') for line in open(f'/proc/self/net/{name}').readlines()[1:]]
tcp = [row[1].split(':')[0] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in mine]
rows = [line.split() for line in open('/proc/self/net/unix')]
ipc = sorted({row[7] for row in rows if row[3] == '00010000' and f'socket:[{row[6]}]' in mine and len(row) == 8})
mode = {oct(Path(path).parent.stat().st_mode & 0o777) for path in ipc}
print(json.dumps([tcp, ipc, sorted(mode), shell.kernel.parent.transport, shell.profile_dir.location]))"""


@pytest.mark.skipif(not Path("/proc/self/net/unix").exists(), reason="sockets are listed in /proc, which is not here")
def test_kernels_speak_over_sockets_in_a_private_folder_with_a_short_path(run, tmp_path, monkeypatch):
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    outcome, notebook = run(SOCKETS)
    assert not outcome.failure, outcome.failure
    tcp, ipc, mode, transport, profile = json.loads(text(notebook).splitlines()[-1])
    assert transport == "ipc" and len(ipc) == 5 and mode == ["0o700"]
    assert tcp in ([], ["0100007F"]), "but for ipykernel's own pipe on 127.0.0.1, nothing listens on TCP"
    (folder,) = {Path(path).parent for path in ipc}
    assert folder.is_absolute() and max(map(len, ipc)) < execute.SOCKET_BYTES
    assert Path(profile).parent == folder and not folder.exists(), "nothing of the user's profile runs, nothing is left"


def test_without_a_short_temporary_folder_no_kernel_starts(run, monkeypatch):
    monkeypatch.setattr(execute, "SOCKET_BYTES", len(execute.SOCKET))
    with pytest.raises(ValueError, match="set TMPDIR"):
        run()


def test_wrong_parameters_start_no_kernel(run, tmp_path):
    with pytest.raises(ValueError, match="'run' is not one of runs; did you mean runs?"):
        run(run="x")
    assert not (tmp_path / "out").exists()
