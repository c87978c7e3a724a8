"""The command line: what it refuses, with which exit code, and that it does so before anything is written."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvnb import cli, paths

HEAVY = ("torch", "matplotlib", "seaborn", "scipy", "papermill", "nbconvert", "triton", "vllm", "pandas", "pyarrow")


def run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def nothing_written(tmp_path, monkeypatch):
    for name in ("LOCAL", "REPORTS", "RECORDED"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["report", "--grid", "ful"], "did you mean full?"),
        (["report", "--copies", "kvnb,torch.index_pt"], "did you mean torch.index_put?"),
        (["report", "--run", "latest"], "reports/latest is kept for"),
        (["measure", "--timers", "grph"], "did you mean graph?"),
        (["measure", "--device", "cuda:99"], "valid: auto, cpu"),
        (["measure", "--workers", "0"], "must be at least 1"),
        (["measure", "--copies-from", "nowhere.py"], "nowhere.py does not exist"),
        (["record", "--device", "cpu"], "a record is a GPU's"),
        (["record", "--device", "cpu", "--copies", "kvnb"], "No such option: --copies"),
        (["render", "--gpu", "h9000"], "no run is recorded yet"),
        (["compare", "gone.parquet", "lost.parquet"], "gone.parquet does not exist; run files lie in"),
        (["compare", "gone.parquet"], "Missing argument 'B'"),
    ],
)
def test_wrong_parameters_are_refused(arguments, told, nothing_written):
    result = run(*arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_a_run_may_not_take_a_records_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    (tmp_path / "h200").mkdir()
    result = run("report", "--run", "h200", "--device", "cpu")
    assert (result.exit_code, "reports/h200 is kept for" in result.output) == (2, True)


@pytest.mark.parametrize("command", ["measure", "report"])
def test_ctrl_c_is_one_line_and_the_status_that_shells_give_it(tmp_path, command):
    """At any moment: here, while a user's file is run."""
    mine = tmp_path / "mine.py"
    mine.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()")
    result = run(command, "--device", "cpu", "--copies-from", str(mine))
    assert (result.exit_code, result.output) == (130, "\nkvnb: stopped by SIGINT\n")


def test_an_unknown_option_is_refused():
    assert run("report", "--gird", "full").exit_code == 2


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla T4", "t4"),
    ],
)
def test_gpu_folder(gpu, folder):
    assert paths.gpu_folder(gpu) == folder


def test_importing_kvnb_loads_nothing_heavy():
    code = f"import sys, kvnb; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_command_line_is_ready_without_torch():
    code = f"import sys, kvnb.cli; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_name_of_the_package_lists_the_known():
    import kvnb

    with pytest.raises(AttributeError, match="'mesure'; it has .*measure"):
        _ = kvnb.mesure
