"""The command line: what it refuses, with which exit code, and that it does so before anything is written."""

import os
import re
import signal
import subprocess
import sys
from signal import SIGHUP, SIGINT, SIGTERM

import pytest
from typer.testing import CliRunner

from kvnb import cli, copies, paths, stopping

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


@pytest.fixture
def signals():
    """Those that end a program: one that a command lets pass ends its test, not pytest."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (SIGINT, SIGTERM, SIGHUP)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
@pytest.mark.parametrize("command", ["measure", "report"])
def test_a_signal_is_one_line_and_the_status_that_shells_give_it(tmp_path, signals, command, number):
    """At any moment: here, while a user's file is run."""
    mine = tmp_path / "mine.py"
    mine.write_text(f"import os, signal\nos.kill(os.getpid(), {number:d})\nsignal.pause()")
    result = run(command, "--device", "cpu", "--copies-from", str(mine))
    assert (result.exit_code, result.output) == (128 + number, f"\nkvnb: stopped by {number.name}\n")
    assert {*map(signal.getsignal, signals)} == {signal.default_int_handler}


def test_a_signal_gives_the_process_its_status(tmp_path):
    """An exec that KeyboardInterrupt leaves would have Python end by SIGINT."""
    mine = tmp_path / "mine.py"
    mine.write_text(f"exec('import os, signal; os.kill(os.getpid(), {SIGTERM:d}); signal.pause()')")
    command = [sys.executable, "-m", "kvnb", "measure", "--device", "cpu", "--copies-from", str(mine)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + SIGTERM, "\nkvnb: stopped by SIGTERM\n")


@pytest.mark.parametrize("command", ["measure", "report"])
def test_a_signal_that_was_taken_for_an_error_stops_what_would_follow(
    tmp_path_factory, signals, nothing_written, command
):
    """As pyarrow takes what ends numpy's import for numpy's absence."""
    mine = tmp_path_factory.mktemp("mine") / "mine.py"
    mine.write_text(
        "import os\nfrom pathlib import Path\nfrom kvnb.copies import Copy, register\n"
        "ran = Path(__file__).with_name('ran')\n"
        f"try:\n    ran.exists() or (ran.touch(), os.kill(os.getpid(), {SIGTERM:d}))\n"
        "except BaseException:\n    pass\n"
        "def bind(inputs): ...\nregister(Copy('mine', 'yours', ('skip',), bind, ('cpu',)))"
    )
    result = run(command, "--device", "cpu", "--copies", "mine", "--copies-from", str(mine))
    copies.REGISTRY.pop("mine")
    assert (result.exit_code, result.output) == (143, "\nkvnb: stopped by SIGTERM\n")


def test_a_signal_that_is_ignored_as_by_nohup_stays_so(tmp_path, signals):
    signal.signal(SIGHUP, signal.SIG_IGN)
    mine = tmp_path / "mine.py"
    mine.write_text(f"import os\nos.kill(os.getpid(), {SIGHUP:d})")
    result = run("measure", "--device", "cpu", "--copies-from", str(mine))
    assert (result.exit_code, "registers no copy" in result.output) == (2, True), result.output


@pytest.mark.parametrize("act", [(), (lambda: None,)], ids=["raises", "leaves it to the body"])
def test_a_signal_is_told_once_and_last_whatever_putting_away_raises(signals, capsys, act):
    with pytest.raises(SystemExit) as end, stopping.stoppable(), stopping.stoppable(*act):
        try:
            os.kill(os.getpid(), SIGTERM)
        finally:
            print("the bar", file=sys.stderr)
            raise OSError("the terminal is gone")
    assert (end.value.code, capsys.readouterr().err) == (143, "the bar\n\nkvnb: stopped by SIGTERM\n")


@pytest.mark.parametrize("command", ["report", "render"])
def test_where_kernels_can_have_no_sockets_an_earlier_report_stays(tmp_path, monkeypatch, command):
    """All that may be written to has a long path, and so no room for a socket's name."""
    gpu = next(path.name for path in paths.RECORDED.iterdir())
    *asked, name = {"report": ["--device", "cpu", "--run", "mine"], "render": ["--gpu", gpu]}[command]
    (long := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(paths, "SCRATCH", [str(long)])
    monkeypatch.setattr(paths, "REPORTS", tmp_path / "reports")
    (index := paths.REPORTS / name / "index.html").parent.mkdir(parents=True)
    index.write_text("an earlier report's")
    result = run(command, *asked, name)
    told = f"kvnb: a kernel's sockets need a temporary folder .*, and {long} is not: set TMPDIR to one of .*\n"
    assert (result.exit_code, bool(re.fullmatch(told, result.output))) == (2, True), result.output
    assert [*paths.REPORTS.rglob("*.*")] == [index] and not [*long.iterdir()]


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
