"""Notebooks in batch: a target is only ever complete, and a failure keeps what it got to and why."""

import sys

import nbformat
import pytest

from kvnb import paths
from kvnb.report import execute

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
    assert notebook.cells[-3].outputs[0].ename == "ZeroDivisionError"
    assert notebook.cells[-1].source.endswith("ZeroDivisionError: division by zero")
    assert "never" not in text(notebook)
    outcome, _ = run("print('mended')")
    assert files(outcome) == [f"{NOTEBOOK}.ipynb"]


def test_a_dead_kernel_is_said_to_be_dead(run):
    outcome, notebook = run("import os; os._exit(3)")
    assert "the kernel died" in outcome.failure[0]
    assert sys.executable in text(notebook)
    assert "the kernel died" in notebook.cells[-1].source


def test_a_notebook_has_a_time_limit(run, monkeypatch):
    monkeypatch.setitem(execute.TIME_LIMITS, NOTEBOOK, 5)
    outcome, notebook = run("import threading; threading.Event().wait()")
    assert outcome.failure == ("a cell took longer than 5 s",)
    assert sys.executable in text(notebook)


def test_wrong_parameters_start_no_kernel(run, tmp_path):
    with pytest.raises(ValueError, match="'run' is not one of runs; did you mean runs?"):
        run(run="x")
    assert not (tmp_path / "out").exists()
