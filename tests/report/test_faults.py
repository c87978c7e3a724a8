"""Reports whose notebooks fail, that are stopped, that run side by side; pages whose data is hostile."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nbformat
import pytest
from test_report import held, place, report_mine, small_grid, write_notebook  # noqa: F401  place is a fixture
from typer.testing import CliRunner

from kvnb import cli, paths
from kvnb.__main__ import main
from kvnb.bench import run as runs
from kvnb.report import execute, files

PATHS = ("ROOT", "LOCAL", "RECORDED", "REPORTS", "NOTEBOOKS")


@pytest.fixture(scope="module")
def forks():
    """A warm parent of processes: it has imported what a report needs, and started nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvnb.cli", "kvnb.report.pages", "torch", "test_report"])
    return context


@pytest.fixture
def small(place, monkeypatch):  # noqa: F811
    """The place less what takes long and is not what is tested: a recorded run, explore.html."""
    shutil.rmtree(paths.RECORDED / "h200")
    monkeypatch.setitem(sys.modules, "altair", None)
    return place


# ---------------------------------------------------------------------------------------- notebooks that do not finish


def test_what_stops_a_notebook_stops_no_other(small, monkeypatch):
    monkeypatch.setitem(execute.TIME_LIMITS, "03_compare", 3)
    write_notebook("01_copies", "[][7]")
    write_notebook("02_measure", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    write_notebook("03_compare", "import threading\nthreading.Event().wait()")
    folder = paths.REPORTS / "mine"
    folder.mkdir()
    for name in ("01_copies.ipynb", "03_compare.ipynb", "07_runs.html", "07_runs.failed.ipynb", "index.html"):
        (folder / name).write_text("an earlier report's")
    done = report_mine()
    assert done.exit_code == 1, done.output
    index, summary = (folder / "index.html").read_text(), (folder / "summary.md").read_text()
    died = "the kernel died of signal 9 (Killed, as a system does that runs out of memory)"
    stopped = {"01_copies": ["IndexError: list index out of range"], "02_measure": [died]}
    stopped["03_compare"] = ["03_compare took longer than its 3 s"]
    blocks = dict(re.findall(r'<div class="failed"><h2>(\w+) failed</h2>.*?<pre tabindex="0">(.*?)</pre>', index, re.S))
    for name, last in stopped.items():
        assert blocks[name].splitlines()[-len(last) :] == last
        assert [line in done.output for line in last] == [True] * len(last)
        page = (folder / f"{name}.html").read_text()
        told = page.partition("This notebook did not finish.")[2].partition("</code>")[0]
        assert told.strip().endswith(last[-1]) and "(not finished)</title>" in page
    assert list(blocks) == list(stopped) and "(not finished)</title>" in index
    assert "**Not finished: 01_copies, 02_measure, 03_compare failed" in summary
    left = sorted(path.stem for path in folder.glob("*.ipynb"))
    assert left == ["01_copies.failed", "02_measure.failed", "03_compare.failed", "04_null_block"]
    assert "did not finish" not in (folder / "04_null_block.html").read_text()
    assert not (paths.REPORTS / "latest").exists() and not (folder / "07_runs.html").exists()


# ------------------------------------------------------------------------------------------------------ side by side


def in_fork(where: dict, limits: dict, target, *arguments):
    """In a process of its own: the test's folders and limits, then target(*arguments), its exit status."""
    for name, path in where.items():
        setattr(paths, name, path)
    execute.TIME_LIMITS.update(limits)
    sys.exit(target(*arguments))


def start(forks, target, *arguments):
    where = {name: getattr(paths, name) for name in PATHS}
    process = forks.Process(target=in_fork, args=(where, execute.TIME_LIMITS, target, *arguments))
    process.start()
    return process


def ended(process, seconds=300):
    """How a process ended; one that has not by then is killed, and the test fails."""
    process.join(seconds)
    if running := process.is_alive():
        process.kill()
    assert not running
    return process.exitcode


def read(fifo: Path) -> str:
    """What is written to a named pipe: written by its one writer in one piece, within a minute."""
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as pipe:
        assert select.select([pipe], [], [], 60)[0]
        os.set_blocking(pipe.fileno(), True)
        return pipe.read()


def one_report(run: str) -> int:
    sys.modules["altair"], runs.grid = None, small_grid
    return CliRunner().invoke(cli.app, ["report", *held(run)]).exit_code


def test_two_reports_at_once_do_not_disturb_each_other(small, forks, monkeypatch):
    """Their kernels are alive at the same time: in its second notebook, each waits for the other."""
    shutil.copy(paths.LOCAL / "mine.parquet", paths.LOCAL / "yours.parquet")
    mine, yours = small / "mine", small / "yours"
    os.mkfifo(mine), os.mkfifo(yours)
    write_notebook(
        "02_measure",
        f"if run == 'mine':\n    open({str(mine)!r}, 'w').close(); open({str(yours)!r}).close()\n"
        f"else:\n    open({str(mine)!r}).close(); open({str(yours)!r}, 'w').close()\nrun",
    )
    monkeypatch.setitem(execute.TIME_LIMITS, "02_measure", 120)  # where the other does not come
    other = start(forks, one_report, "yours")
    done = report_mine()
    assert (done.exit_code, ended(other)) == (0, 0), done.output
    for run, not_its in (("mine", "yours"), ("yours", "mine")):
        cells = nbformat.read(paths.REPORTS / run / "02_measure.ipynb", as_version=4).cells
        assert cells[-1].outputs[0].data["text/plain"] == repr(run)
        compared = (paths.REPORTS / run / "03_compare.html").read_text()
        assert f"data/local/{run}.parquet" in compared and f"data/local/{not_its}.parquet" not in compared
    assert (paths.REPORTS / "latest").resolve().name in ("mine", "yours")
    assert sorted(path.name for path in paths.REPORTS.iterdir()) == ["latest", "mine", "yours"]


def claim(folder: Path, told, until) -> int:
    with files.claimed(folder):
        told.send(os.getpid())
        until.poll(None)
    return 0


def test_a_folder_has_one_writer_and_says_which(small, forks):
    folder = paths.REPORTS / "mine"
    folder.mkdir()
    (folder / "index.html").write_text("an earlier report's")
    heard, told = forks.Pipe(duplex=False)
    until, _end = forks.Pipe(duplex=False)
    first = start(forks, claim, folder, told, until)
    assert heard.poll(60)
    pid = heard.recv()
    with pytest.raises(ValueError, match=rf"process {pid} on .* writes .*mine: .*choose another run name"):
        files.claimed(folder).__enter__()
    assert not (folder / "index.html").exists(), "what looks finished while it is written"
    os.kill(pid, signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    with files.claimed(folder):  # one that died lets go
        pass
    assert list(folder.iterdir()) == []


def test_reports_begun_in_one_second_take_one_name_and_the_second_is_refused(small):
    """All names of the next minutes are taken, as by reports that began then."""
    begin = datetime.now(UTC)
    with contextlib.ExitStack() as reports:
        for second in range(240):
            name = f"{begin + timedelta(seconds=second):%Y%m%d-%H%M%S}-full"
            reports.enter_context(files.claimed(paths.REPORTS / name))
        done = CliRunner().invoke(cli.app, ["report", "--device", "cpu", "--grid", "full", "--copies", "kvnb"])
    told = rf"kvnb: process {os.getpid()} on \S+ writes \S+-full: wait for it, or choose another run name\n"
    assert (done.exit_code, bool(re.search(told, done.output))) == (2, True), done.output
    assert not [*paths.REPORTS.glob("*/*")], "nothing of it was written"


# ------------------------------------------------------------------------------------------------------------ stopped


def whole_report(said: Path) -> None:
    """`kvnb report` as a shell runs it; what it says on stderr goes to a file."""
    with open(said, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.modules["altair"], runs.grid, sys.argv = None, small_grid, ["kvnb", "report", *held("mine")]
    main()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is not here")
@pytest.mark.parametrize("verb", ["report", "measure"])
def test_a_full_stdout_is_no_full_folder_and_the_result_is_named(small, monkeypatch, capsys, verb):
    (small / "notebooks").rename(small / "none")  # they fail at once, and the report is written
    result = {"report": paths.REPORTS / "mine" / "index.html", "measure": paths.LOCAL / "mine.parquet"}[verb]
    with open("/dev/full", "w") as full, pytest.raises(SystemExit) as end:
        monkeypatch.setattr(sys, "stdout", full)
        cli.app([verb, *held("mine")])
    said = capsys.readouterr().err
    told = f"kvnb: stdout cannot be written ([Errno 28] No space left on device); {result} is written\n"
    assert (end.value.code, said.count(told), result.is_file()) == (1, 1, True), said
    assert "make room" not in said and said.count("01_copies failed:") == (verb == "report")


def write_a_page(folder: Path, said: Path) -> None:
    """Where no file may be longer than 4 KiB: more fails to be written, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with open(said, "w") as sys.stderr, cli._writing(folder), paths.whole(folder / "index.html") as partial:
        partial.write_text("x" * 5000)


def test_a_report_that_cannot_be_written_is_one_line(small, forks):
    folder, said = paths.REPORTS / "mine", small / "said"
    assert ended(start(forks, write_a_page, folder, said)) == 1
    told = f"kvnb: {folder} cannot be written ([Errno 27] File too large): make room there, and begin again\n"
    assert said.read_text() == told and not list(folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_report_leaves_neither_a_kernel_nor_a_file_and_says_one_line(small, forks, number):
    """Stopped in a notebook's kernel, which answers an interrupt with a traceback."""
    fifo, said, folder = small / "fifo", small / "said", paths.REPORTS / "mine"
    os.mkfifo(fifo)
    folder.mkdir()
    own = ["08_mine.html", "latency.png", "notes.md"]
    for name in ("index.html", "summary.md", "explore.html", "02_measure.ipynb", "03_compare.html", "05_releases.html"):
        (folder / name).write_text("an earlier report's")
    for name in own:
        (folder / name).write_text("somebody's")
    write_notebook(
        "02_measure",
        "import json, os, threading\n"
        f"with open({str(fifo)!r}, 'w') as pipe:\n"
        "    json.dump([os.getpid(), get_ipython().profile_dir.location], pipe)\n"
        "threading.Event().wait()",
    )
    process = start(forks, whole_report, said)
    try:
        kernel, profile = json.loads(read(fifo))
    finally:
        os.kill(process.pid, number)
        status = ended(process)
    assert status == 128 + number
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(kernel)], [], [], 60)[0]
    lines = filter(None, said.read_text().splitlines())
    ours = [line for line in lines if "[IPKernelApp]" not in line]  # a kernel that its notebook's end interrupted
    named, took, *stopped = ours
    assert named.startswith("kvnb: run mine") and took.startswith("kvnb: 01_copies took")
    assert stopped == [f"kvnb: stopped by {signal.Signals(number).name}"]
    assert not Path(profile).parent.exists() and not (paths.REPORTS / "latest").exists()
    left = sorted(path.name for path in folder.iterdir())
    assert left == [".gitignore", "01_copies.ipynb", *own], "what looks like a report that ended"
    assert {(folder / name).read_text() for name in own} == {"somebody's"}


def stop_while_writing(folder: Path) -> None:
    with cli._writing(folder):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_report_stopped_between_notebooks_lets_go_of_its_folder(small, forks):
    assert ended(start(forks, stop_while_writing, paths.REPORTS / "mine")) == 128 + signal.SIGTERM
    assert list((paths.REPORTS / "mine").iterdir()) == []


def test_a_folder_in_the_place_of_the_link_to_the_newest_report_stays(small, capsys):
    """As where the tree was copied, and what links lead to with it."""
    latest = paths.REPORTS / "latest"
    latest.mkdir()
    cli._lead_to("mine")
    told = f"kvnb: {latest} does not lead to this report (Is a directory): move it away\n"
    assert capsys.readouterr().err == told
    assert [*paths.REPORTS.iterdir()] == [latest] and not latest.is_symlink()


# ---------------------------------------------------------------------------------------------- refused before a kernel


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--grid", ""], "grid: '' is not one of quick, full, releases, padding"),
        (["--grid", "padding"], "a CPU has quick and full"),
        (["--copies", ""], "copies: '' is not one of kvnb"),
        (["--copies", "kvnb,kvmb"], "did you mean kvnb?"),
        (["--timers", "graph"], "valid on cpu are all, wall"),
        (["--device", "cuda:99"], "valid: auto, cpu"),
        (["--workers", "7e12345"], "valid int"),
        (["--rounds", "1e-3"], "valid int"),
        (["--workers", "true"], "valid int"),
        (["--run", "a/b"], "begin with a letter or digit"),
        (["--girdle", "full"], "No such option"),
    ],
)
def test_a_report_is_refused_before_a_kernel_starts(small, asked, told):
    (small / "notebooks").rename(small / "none")  # no kernel has anything to run
    done = report_mine(*asked)
    assert (done.exit_code, " ".join(done.output.replace("│", " ").split()).count(told)) == (2, 1), done.output
    assert not list(paths.REPORTS.iterdir())


# ------------------------------------------------------------------------------------------------------------ make lab


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_lab_keeps_its_token(tmp_path):
    """The server that the recipe starts answers to its token, and to nobody without."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install jupyterlab")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "JUPYTER_"))}
    make = ["make", "-n", "lab", "VENV=", f"PYTHON={sys.executable}"]
    recipe = subprocess.run(make, cwd=paths.ROOT, env=kept, capture_output=True, text=True, check=True).stdout
    (command,) = [line for line in recipe.splitlines() if "jupyter lab" in line]
    assert not re.search(r"token|password|xsrf|origin|\bip=|remote", command)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    opened = tmp_path / "opened"  # what the server tells the browser, once it listens
    os.mkfifo(opened)
    browser = {"BROWSER": f"sh -c 'echo %s > {opened}'"}
    more = [f"--ServerApp.port={port}", "--ServerApp.use_redirect_file=False", *["--allow-root"] * (os.geteuid() == 0)]
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path) for name in ("CONFIG", "RUNTIME", "DATA")}
    with open(os.open(opened, os.O_RDONLY | os.O_NONBLOCK)) as heard, open(tmp_path / "said", "w") as said:
        started = f"exec {command} {' '.join(more)}"
        server = subprocess.Popen(started, shell=True, cwd=paths.ROOT, env=kept | folders | browser, stderr=said)
        try:
            assert select.select([heard], [], [], 60)[0], (tmp_path / "said").read_text()
            host, token = re.match(r"(http://[\w.]+:\d+)/\S*\?token=(\w+)$", heard.readline()).groups()
            assert len(token) >= 32
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{host}/api/contents")
            with urllib.request.urlopen(f"{host}/api/contents?token={token}") as answer:
                assert "notebooks" in answer.read().decode()
        finally:
            server.kill()
            server.wait()
