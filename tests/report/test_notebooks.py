"""Notebooks as committed: stripped, short-celled, and running; showing notebooks run on small fixture runs."""

from __future__ import annotations

import ast
import shutil
import statistics

import nbformat
import pytest
from programs import python_path

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, compare, null_block, parameters, timers
from kvnb.report.execute import execute

NAMES = sorted(parameters.TABLES)


@pytest.fixture(params=NAMES)
def notebook(request):
    return nbformat.read(paths.NOTEBOOKS / f"{request.param}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_is_valid_and_stripped(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_cells_are_short(notebook):
    lines = [len(cell.source.splitlines()) for cell in code_cells(notebook)]
    assert max(lines) <= 20
    assert statistics.median(lines) <= 4


def test_opens_with_prose_then_parameters_then_their_check(notebook):
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    first, second = code_cells(notebook)[:2]
    assert first.metadata.tags == ["parameters"]
    assert "parameters.check(" in second.source
    for node in ast.parse(first.source).body:
        ast.literal_eval(node.value)
    assert all("#" in line for line in first.source.splitlines()), "every parameter has its comment"


def test_closes_with_the_command_that_reproduces_it(notebook):
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert "`make " in next(text for text in reversed(prose) if "## Method" in text)


def test_copies_runs_and_catches_every_wrong_copy(tmp_path):
    outcome = execute("01_copies", {}, tmp_path)
    assert not outcome.failure
    text = outcome.path.read_text()
    assert "every bit right" in text and "should hold token" in text


def test_compare_runs_on_fixture_runs_and_opens_with_the_answer(tmp_path, run_files, gpu, cpu):
    outcome = execute("03_compare", {"runs": run_files}, tmp_path)
    assert not outcome.failure
    outputs = [out for cell in code_cells(nbformat.read(outcome.path, as_version=4)) for out in cell.outputs]
    assert [out.data["text/markdown"] for out in outputs[:2]] == [answers.headline(cpu), answers.headline(gpu)]
    assert [out.data["text/markdown"] for out in outputs if "placement" in str(out.data)] == [answers.placed(gpu)]
    figures = [out for out in outputs if "image/png" in out.get("data", {})]
    by_layout = [(run, layout) for run in (cpu, gpu) for layout in run.layouts]
    assert {out.metadata["image/png"]["alt"] for out in figures} == {
        *(answers.alt(figure, run, layout) for figure in ("latency", "heads") for run, layout in by_layout),
        *(answers.alt(figure, gpu) for figure in ("limit", "eager", "step")),
    }


@pytest.mark.parametrize("recorded", [False, True])
def test_null_block_runs_with_and_without_a_run_and_opens_with_the_answer(
    tmp_path, padding_file, padded, recorded, monkeypatch
):
    runs = [str(padding_file)] if recorded else "newest"
    if not recorded:  # a project without a record
        shutil.copytree(paths.ROOT / "kvnb", tmp_path / "kvnb")
        shutil.copytree(paths.CSRC, tmp_path / "csrc")
        monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    outcome = execute("04_null_block", {"runs": runs, "live": "no"}, tmp_path)
    assert not outcome.failure, outcome.failure
    outputs = [out for cell in code_cells(nbformat.read(outcome.path, as_version=4)) for out in cell.outputs]
    found = null_block.replayed()
    decision = null_block.decision(padded if recorded else None, found)
    assert outputs[0].data["text/markdown"] == null_block.markdown(decision)
    figures = {out.metadata["image/png"]["alt"] for out in outputs if "image/png" in out.get("data", {})}
    drawn = padded.drawn if recorded else []
    alts = {null_block.shares_alt(found.shares), null_block.memory_alt()}
    assert figures == alts | {null_block.padding_alt(padded, copy) for copy in drawn}
    shown = str(outputs)
    assert "tensor([0., 0., 1., 0., 0., 9.])" in shown and "written to: nan" in shown and "63 usable" in shown


def test_releases_runs_on_a_fixture_run_and_opens_with_the_answer(tmp_path, by_release):
    run = str(results.save(by_release.samples, tmp_path / "releases.parquet"))
    outcome = execute("05_releases", {"runs": [run]}, tmp_path)
    assert not outcome.failure, outcome.failure
    outputs = [out for cell in code_cells(nbformat.read(outcome.path, as_version=4)) for out in cell.outputs]
    assert outputs[0].data["text/markdown"] == answers.release_headline(by_release)
    (figure,) = (out for out in outputs if "image/png" in out.get("data", {}))
    assert figure.metadata["image/png"]["alt"] == answers.alt("releases", by_release)
    shown = "".join(out.data.get("text/html", "") for out in outputs)
    assert shown.count("<td>packed, slices of the fused projection</td>") == 2
    assert "its kernel knows no head stride" in shown and "-0.5 should be untouched" in shown


def test_timers_shows_a_record_and_says_what_is_not_the_runs(tmp_path, run_files, gpu):
    outcome = execute("06_timers", {"run": run_files[1], "live": "no", "device": "cpu"}, tmp_path)
    assert not outcome.failure, outcome.failure
    outputs = [out for cell in code_cells(nbformat.read(outcome.path, as_version=4)) for out in cell.outputs]
    measured, counted = timers.seen("cpu", "no", gpu.first["gpu"])
    assert f"** {timers.origins(gpu, measured, counted)}\n\n- " in outputs[0].data["text/markdown"]
    shown = "".join(out.data.get("text/html", out.data.get("text/markdown", "")) for out in outputs)
    for name, made in ((timers.LIVE, measured), (timers.COUNTED, counted)):
        commit = made["kvnb_commit"].iloc[0]
        assert f"**kvnb {commit[:7]}**" in shown and f"<th>{name}</th>" in shown and f"<td>{commit}</td>" in shown


def test_runs_compares_two_runs_and_opens_with_what_differs(tmp_path, run_files, gpu):
    later = gpu.samples.assign(run_id="later", torch="2.14.0", seconds=gpu.samples["seconds"] / 2)
    pair = [run_files[1], str(results.save(later, tmp_path / "later.parquet"))]
    outcome = execute("07_runs", dict(zip("ab", pair)), tmp_path)
    assert not outcome.failure, outcome.failure
    outputs = [out for cell in code_cells(nbformat.read(outcome.path, as_version=4)) for out in cell.outputs]
    compared = compare.Comparison(*pair)
    assert outputs[0].data["text/markdown"] == compared.headline()
    shown = "".join(out.data.get("text/html", "") for out in outputs)
    assert "2.14.0" in shown and compared.extremes()["cell"].iloc[0] in shown


def test_runs_without_parameters_takes_what_there_is(tmp_path):
    outcome = execute("07_runs", {}, tmp_path)
    assert not outcome.failure, outcome.failure
    outputs = [out for cell in code_cells(nbformat.read(outcome.path, as_version=4)) for out in cell.outputs]
    assert outputs[0].data["text/markdown"] == compare.Comparison(*compare.find()).headline()
