"""The command line: what it refuses, with which exit code, and that it does so before anything is written."""

import os
import re
import signal
import site
import subprocess
import sys
import tomllib
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

import pytest
from programs import python_path
from typer.testing import CliRunner

from kvnb import cli, copies, paths, stopping
from kvnb.__main__ import main

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


@pytest.fixture
def ends(signals, monkeypatch, capsys):
    """ends(words) -> (status, stderr) of the `kvnb` command, in this process."""

    def ends(*words):
        monkeypatch.setattr(sys, "argv", ["kvnb", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().err

    return ends


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
@pytest.mark.parametrize("command", ["measure", "report"])
def test_a_signal_is_one_line_and_the_status_that_shells_give_it(tmp_path, signals, ends, command, number):
    """At any moment: here, while a user's file is run."""
    mine = tmp_path / "mine.py"
    mine.write_text(f"import os, signal\nos.kill(os.getpid(), {number:d})\nsignal.pause()")
    said = ends(command, "--device", "cpu", "--copies-from", str(mine))
    assert said == (128 + number, f"\nkvnb: stopped by {number.name}\n")
    after = {number: signal.SIG_IGN if number == SIGINT else signal.default_int_handler for number in signals}
    assert {number: signal.getsignal(number) for number in signals} == after


def test_a_signal_gives_the_process_its_status(tmp_path):
    """An exec that KeyboardInterrupt leaves would have Python end by SIGINT."""
    mine = tmp_path / "mine.py"
    mine.write_text(f"exec('import os, signal; os.kill(os.getpid(), {SIGTERM:d}); signal.pause()')")
    command = [sys.executable, "-m", "kvnb", "measure", "--device", "cpu", "--copies-from", str(mine)]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + SIGTERM, "\nkvnb: stopped by SIGTERM\n")


SCRIPT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kvnb"]
FROM, _, NAME = SCRIPT.partition(":")
BEGUN = {"python -m kvnb": ["-m", "kvnb"], "kvnb": ["-c", f"import sys; from {FROM} import {NAME}; sys.exit({NAME}())"]}


def early(folder: Path, number: int, first: str = "", begun: str = "kvnb", stderr=subprocess.PIPE) -> tuple[int, str]:
    """(status, stderr) of a command that hears a signal while it imports typer, before which `first` is run."""
    (folder / "typer.py").write_text(f"import os, signal\n{first}\nos.kill(os.getpid(), {number})\nsignal.pause()")
    done = subprocess.run(
        [sys.executable, *BEGUN[begun], "measure"],
        env={**os.environ, "PYTHONPATH": python_path(folder, paths.ROOT), "PYTHONUNBUFFERED": ""},
        stderr=stderr,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_before_the_command_line_is_there_is_the_same_line(tmp_path, begun, number):
    assert early(tmp_path, number, begun=begun) == (128 + number, f"\nkvnb: stopped by {number.name}\n")


def test_one_more_ctrl_c_while_python_ends_says_no_more(tmp_path):
    again = f"import atexit\natexit.register(os.kill, os.getpid(), {SIGINT:d})"
    assert early(tmp_path, SIGINT, again) == (128 + SIGINT, "\nkvnb: stopped by SIGINT\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is not here")
def test_a_signal_keeps_its_status_where_nothing_can_be_said(tmp_path):
    with open("/dev/full", "w") as full:
        assert early(tmp_path, SIGTERM, stderr=full)[0] == 128 + SIGTERM


@pytest.mark.parametrize("command", ["measure", "report"])
def test_a_signal_that_was_taken_for_an_error_stops_what_would_follow(tmp_path_factory, ends, nothing_written, command):
    """As pyarrow takes what ends numpy's import for numpy's absence."""
    mine = tmp_path_factory.mktemp("mine") / "mine.py"
    mine.write_text(
        "import os\nfrom pathlib import Path\nfrom kvnb.copies import Copy, register\n"
        "ran = Path(__file__).with_name('ran')\n"
        f"try:\n    ran.exists() or (ran.touch(), os.kill(os.getpid(), {SIGTERM:d}))\n"
        "except BaseException:\n    pass\n"
        "def bind(inputs): ...\nregister(Copy('mine', 'yours', ('skip',), bind, ('cpu',)))"
    )
    said = ends(command, "--device", "cpu", "--copies", "mine", "--copies-from", str(mine))
    copies.REGISTRY.pop("mine")
    assert said == (143, "\nkvnb: stopped by SIGTERM\n")


def test_a_signal_that_is_ignored_as_by_nohup_stays_so(tmp_path, signals, ends):
    signal.signal(SIGHUP, signal.SIG_IGN)
    mine = tmp_path / "mine.py"
    mine.write_text(f"import os\nos.kill(os.getpid(), {SIGHUP:d})")
    status, said = ends("measure", "--device", "cpu", "--copies-from", str(mine))
    assert (status, "registers no copy" in said) == (2, True), said


@pytest.mark.parametrize("act", [(), (lambda: None,)], ids=["raises", "leaves it to the body"])
def test_a_signal_is_told_once_and_last_whatever_putting_away_raises(signals, capsys, act):
    with pytest.raises(SystemExit) as end, stopping.stoppable(), stopping.stoppable(*act):
        try:
            os.kill(os.getpid(), SIGTERM)
        finally:
            print("the bar", file=sys.stderr)
            raise OSError("the terminal is gone")
    assert (end.value.code, capsys.readouterr().err) == (143, "the bar\n\nkvnb: stopped by SIGTERM\n")


def ctrl_c_at(point: int, act, counted=lambda: True) -> int:
    """Does act(), with a Ctrl-C at this line of those that it runs of stopping.py while they are counted; how many."""
    lines = 0

    def at(_frame, event, _arg):
        nonlocal lines
        if event == "line" and counted():
            lines += 1
            if lines == point:
                os.kill(os.getpid(), SIGINT)
        return at

    signal.signal(SIGINT, signal.default_int_handler)
    sys.settrace(lambda frame, *_: at if frame.f_code.co_filename == stopping.__file__ else None)
    try:
        act()
    finally:
        sys.settrace(None)
    return lines


def test_ctrl_c_at_any_line_of_what_tells_a_signal_changes_nothing(signals, capsys):
    sent = []

    def stopped():
        sent.clear()
        with pytest.raises(SystemExit) as end, stopping.stoppable(ends=True), stopping.stoppable():
            sent.append(SIGTERM)
            os.kill(os.getpid(), SIGTERM)
        assert (end.value.code, capsys.readouterr().err) == (143, "\nkvnb: stopped by SIGTERM\n")
        assert signal.getsignal(SIGTERM) == signal.getsignal(SIGHUP) == signal.default_int_handler

    lines = ctrl_c_at(0, stopped, lambda: sent and stopping._came)
    assert lines > 10
    for point in range(1, lines + 1):
        ctrl_c_at(point, stopped, lambda: sent and stopping._came)


def test_ctrl_c_at_any_line_of_what_puts_it_off_is_heard_and_leaves_all_as_it_was(signals):
    def put_off():
        with stopping.put_off():
            pass

    for point in range(1, ctrl_c_at(0, put_off) + 1):
        with pytest.raises(KeyboardInterrupt):
            ctrl_c_at(point, put_off)
        assert {*map(signal.getsignal, signals)} == {signal.default_int_handler}, point


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


def test_without_nbconverts_templates_an_earlier_report_stays_and_the_mend_is_told(tmp_path, monkeypatch):
    """As where packages come from another prefix: it looks for them in this Python's, and in the user's folders."""
    from jupyter_core import paths as looked_in

    for name in ("ENV_JUPYTER_PATH", "SYSTEM_JUPYTER_PATH"):
        monkeypatch.setattr(looked_in, name, [str(tmp_path / "prefix")])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    for name in ("LOCAL", "REPORTS"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    (index := paths.REPORTS / "mine" / "index.html").parent.mkdir(parents=True)
    index.write_text("an earlier report's")
    result = run("report", "--device", "cpu", "--run", "mine")
    told = r"kvnb: nbconvert does not find its templates, .* JUPYTER_PATH=/.*/share/jupyter, .* install .*nbconvert\n"
    assert (result.exit_code, bool(re.fullmatch(told, result.output))) == (2, True), result.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [index]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is not here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_one_line(unbuffered):
    """Also where Python would write it once more as it ends."""
    given = {**os.environ, "PYTHONPATH": python_path(paths.ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvnb", "releases"]
        done = subprocess.run(command, env=given, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = "kvnb: stdout cannot be written ([Errno 28] No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_closed_stdout_is_no_news():
    given = {**os.environ, "PYTHONPATH": python_path(paths.ROOT), "PYTHONUNBUFFERED": ""}
    heard, closed = os.pipe()
    os.close(heard)
    command = [sys.executable, "-m", "kvnb", "releases"]
    done = subprocess.run(command, env=given, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    os.close(closed)
    assert (done.returncode, done.stderr) == (1, "")


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
