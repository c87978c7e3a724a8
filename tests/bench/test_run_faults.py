"""Faults, made to happen to whole runs on the CPU: signals at any moment, full disks, workers that die, and the like.

A run starts worker processes, and a process that imports torch takes seconds. So this file, run as a script, is a warm
parent: it has imported everything, and forks a process for each measurement that a test orders. That process forks its
workers in turn; nothing else about the run differs from a user's, but for its grid of a few small cases.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import pandas as pd
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.bench import run as runs
from kvnb.problem.case import CASE_FIELDS, MIB, Case
from kvnb.stopping import stoppable

SMALL = Case(4, 2, 16, cache_bytes=1 << 16)
CASES = [SMALL, Case(4, 2, 16, cache_bytes=1 << 16, layout="packed"), Case(5, 2, 16, cache_bytes=1 << 16)]
ASKED = {"device": "cpu", "grid": "quick", "timers": "wall", "workers": 1, "rounds": 1}
ASKED |= {"copies": ["torch.index_copy"]}  # unsupported in the packed case
CELL = (*CASE_FIELDS, "copy", *results.CELL_FIELDS)
KILL_POINTS, WORKER_KILL_POINTS = 50, 10
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED = ("/kvnb/bench/run.py", "/kvnb/bench/results.py", "/kvnb/paths.py")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, sys/prctl.h

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes its faults by Linux's fork, prctl and /dev/full")


# ----------------------------------------------------------------------------------- the warm parent, and its children


def serve() -> None:
    """Carry out orders from stdin, a line of JSON each; a line of JSON answers each."""
    import torch

    from kvnb import machine
    from kvnb.bench import timing

    machine.describe(torch.device("cpu"))  # so that its children need not ask git,
    timing.SAMPLES = 1  # as where a call lasts long: a busy machine changes no number of rows, and so of lines
    timing.inputs_of.POISON_WORDS = SMALL.cache_bytes // 8  # nor make a pattern for caches that are 100 times as large
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # workers whose parent was killed become ours, to be waited for
    resource_tracker.ensure_running()  # one for all
    runs.START, runs.STOP_SECONDS = "fork", 0  # a forked worker holds the other end of its pipe too: it must be killed
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        told, tell = os.pipe()
        pid = order.get("continue") or os.fork()
        if pid == 0:
            os._exit(_carry_out(order, tell))
        os.close(tell)
        if "continue" in order:
            os.kill(pid, signal.SIGCONT)
        print(json.dumps(_outcome(pid, told)), flush=True)


def _outcome(pid: int, told: int) -> dict:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"stopped": pid}
    with contextlib.suppress(ProcessLookupError):  # where no worker outlived it
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)
    said = os.read(told, 1 << 16)
    os.close(told)
    return {"code": os.waitstatus_to_exitcode(status), **(json.loads(said) if said else {})}


def _carry_out(order: dict, tell: int) -> int:
    """Measure as ordered, as a command does: in a process and a group of its own."""
    import kvnb

    os.setpgid(0, 0)
    runs.grid = lambda *_: [Case(**fields) for fields in order["cases"]]
    os.environ |= order.get("environment", {})
    for module in order.get("imports", ()):  # once, not in every worker
        importlib.import_module(module)
    if "full" in order:
        fill_disk(Path(order["asked"]["path"]).with_suffix(".parts"), order["full"])
    if "most_bytes" in order:
        die_within_a_file(order["most_bytes"])
    if "unsaid" in order:  # the disk of the file that takes what we say
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    runs.STEP_SECONDS = order.get("step_seconds", runs.STEP_SECONDS)
    if "killer" in order:
        kill_when_inputs_are_made(order["killer"])
    watch = Watch(order.get("point"), order.get("signal"), order.get("whom", "me"), order.get("watched", WATCHED))
    code, said = 0, {}
    sys.settrace(watch.enter)
    try:
        with stoppable():
            kvnb.measure(**order["asked"])
    except SystemExit as end:
        code = end.code
    except Exception as error:  # noqa: BLE001  the test that ordered it looks at it
        code, said = 1, {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):  # where there is no room for that, either
            traceback.print_exc()
    sys.settrace(None)
    os.write(tell, json.dumps(said | {"lines": watch.lines}).encode())
    return code


def fill_disk(parts: Path, name: str) -> None:
    """Let a file of a run lie on a full disk: what is written to /dev/full fails as it does there."""
    parts.mkdir(parents=True, exist_ok=True)
    paths.partial_of(parts / name).symlink_to("/dev/full")


def die_within_a_file(most_bytes: int) -> None:
    """Let the system kill this process in the middle of a write that makes a file larger than this."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # which is a file, too
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def kill_when_inputs_are_made(num_tokens: int) -> None:
    """Be the system that is out of memory: it kills the process whose allocation was one too many."""
    from kvnb.problem import inputs

    make = inputs.make

    def made(case, *arguments, **options):
        if case.num_tokens == num_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(case, *arguments, **options)

    inputs.make = made


class Watch:
    """Counts the lines that this process runs of watched files, and sends a signal at a certain one."""

    def __init__(self, point: int | None, sent: int | None, whom: str, watched: Sequence[str]) -> None:
        self.pid, self.lines, self.point, self.sent, self.whom = os.getpid(), 0, point, sent, whom
        self.watched = watched

    def enter(self, frame, event, arg):
        if os.getpid() != self.pid:  # a worker
            return sys.settrace(None)
        where = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        return self.line if any(part in where for part in self.watched) else None

    def line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.point:
                self.strike()
        return self.line

    def strike(self) -> None:
        if self.whom == "me":
            os.kill(self.pid, self.sent)
        elif self.whom == "all of us":
            os.killpg(self.pid, self.sent)
        else:
            for worker in multiprocessing.active_children()[:1]:
                os.kill(worker.pid, self.sent)


@pytest.fixture(scope="module")
def order():
    """order(path, ...) -> what became of a measurement into `path`."""
    command = [sys.executable, str(Path(__file__))]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}  # other tests run beside it
    warm = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert json.loads(warm.stdout.readline()) == "ready"

    def carry_out(path: Path, cases: list[Case] = CASES, asked: dict = {}, **more) -> dict:  # noqa: B006
        told = {"asked": ASKED | asked | {"path": str(path)}, "cases": [case.fields() for case in cases], **more}
        warm.stdin.write(json.dumps(told) + "\n")
        warm.stdin.flush()
        return json.loads(warm.stdout.readline())

    yield carry_out
    warm.stdin.close()
    assert warm.wait() == 0


@dataclass
class Undisturbed:
    """A run that nothing happened to: its samples, how many lines it took, and its file's size."""

    samples: pd.DataFrame
    lines: int
    size: int


@pytest.fixture(scope="module")
def undisturbed(order, tmp_path_factory) -> Undisturbed:
    path = tmp_path_factory.mktemp("undisturbed") / "r.parquet"
    done = order(path)
    assert done["code"] == 0, done
    return Undisturbed(results.load(path), done["lines"], path.stat().st_size)


# ------------------------------------------------------------------------------------------------------ signals


def finished(path: Path):
    """Samples of every finished case by number; each must be readable."""
    return {part.name: results.load(part) for part in sorted(path.with_suffix(".parts").glob("*.parquet"))}


def visits(samples) -> set[tuple]:
    """What was measured, and what became of it."""
    return {*samples[[*CELL, "worker", "round", "status"]].itertuples(index=False, name=None)}


def assert_goes_on(order, path: Path, undisturbed) -> None:
    """Resuming measures the rest and no more, and nothing but a whole run remains."""
    kept = finished(path)
    published = results.load(path) if path.exists() else None
    done = order(path)
    assert done["code"] == 0, done
    samples = results.load(path)
    assert visits(samples) == visits(undisturbed.samples)
    assert not samples.duplicated([*CELL, "worker", "round", "sample"]).any()
    assert samples["run_id"].nunique() == 1
    for before in [*kept.values(), *([] if published is None else [published])]:
        again = samples.merge(before[[*CASE_FIELDS]].drop_duplicates())
        assert again["seconds"].dropna().tolist() == before["seconds"].dropna().tolist()
    assert [left.name for left in path.parent.iterdir()] == [path.name]


def test_a_run_that_a_signal_ends_anywhere_loses_no_finished_case(order, undisturbed, tmp_path, record_property):
    random_points = random.Random(6).sample(range(1, undisturbed.lines + 1), KILL_POINTS)
    cases_kept = []
    for number, point in enumerate(random_points):
        folder = tmp_path / str(number)
        sent, whom = SIGNALS[number % 4], ("me", "all of us")[number // 4 % 2]
        cut = order(folder / "r.parquet", point=point, signal=sent, whom=whom)
        assert cut["code"] == (-sent if sent == signal.SIGKILL else 128 + sent), (point, sent, whom, cut)
        cases_kept.append(len(finished(folder / "r.parquet")))
        assert_goes_on(order, folder / "r.parquet", undisturbed)
    assert len(cases_kept) == KILL_POINTS
    assert {0, len(CASES)} < set(cases_kept)  # from before the first case to after the last
    told = "lines of its Python at which a signal ends a run whose workers were forked, not spawned: "
    told += "no finished case is lost, and resuming measures only the rest"
    record_property("trust", f"{KILL_POINTS} {told}")


@pytest.mark.parametrize("share", [0.005, 0.3, 0.6, 0.99])
def test_a_run_that_is_killed_in_the_middle_of_a_write_leaves_whole_files_only(order, undisturbed, tmp_path, share):
    """Of the settings, and of the first part at several places: most of it, as of the run file, is the schema."""
    path = tmp_path / "run" / "r.parquet"
    cut = order(path, most_bytes=int(share * undisturbed.size))
    assert cut["code"] == -signal.SIGXFSZ
    assert not path.exists()
    assert_goes_on(order, path, undisturbed)


def test_a_worker_that_is_killed_anywhere_costs_one_cell_and_not_the_run(order, undisturbed, tmp_path, record_property):
    wanted, died = {seen[:-1] for seen in visits(undisturbed.samples) if seen[-1] == "ok"}, 0
    busy = ("_start", "greet", "measure", "_try", "_receive")  # it is idle, or not there, in other lines
    watched = [f"/kvnb/bench/run.py:Worker.{name}" for name in busy]
    lines = order(tmp_path / "r.parquet", watched=watched)["lines"]
    chance, each = random.Random(7), lines // WORKER_KILL_POINTS  # one point in every part of a run
    for point in (chance.randint(part * each + 1, (part + 1) * each) for part in range(WORKER_KILL_POINTS)):
        path = tmp_path / str(point) / "r.parquet"
        done = order(path, point=point, signal=signal.SIGKILL, whom="worker", watched=watched)
        if done["code"]:  # it had not begun, as where a script lacks its `if __name__`: the run goes on by name
            assert "worker 0 died at its start (exit code -9: killed" in done["error"]
            done = order(path)
        assert done["code"] == 0, done
        samples = results.load(path)
        assert not samples.duplicated([*CELL, "worker", "round", "sample"]).any()
        lost = samples[samples["status"] == "error"]
        assert set(lost["reason"]) <= {"the worker process died (exit code -9: killed, as by a system out of memory)"}
        assert len(lost) <= 1
        died += len(lost)
        ok = {seen[:-1] for seen in visits(samples) if seen[-1] == "ok"}
        assert len(wanted - ok) <= len(lost) and ok <= wanted  # it may have died when asked about an unsupported cell
    assert died > 0
    told = "lines of a run at which its forked worker is killed: that costs a cell, not the run"
    record_property("trust", f"{WORKER_KILL_POINTS} {told}")


COMMAND = """
import sys
from pathlib import Path
from kvnb import paths
from kvnb.__main__ import main
from kvnb.bench import run
from kvnb.problem.case import Case
paths.LOCAL = Path(sys.argv.pop(1))
run.grid = lambda *_: [Case(tokens, 2, 16, cache_bytes=1 << 16) for tokens in range(1, 6)]
main()
"""
STOPPING_COPY = """
import json
import os
from pathlib import Path
from kvnb.copies import REGISTRY, Copy, register

def bind(inputs):
    ordered = Path(__file__).with_suffix(".json")
    if ordered.exists():
        tokens, signal, whom = json.loads(ordered.read_text())
        if tokens == inputs.case.num_tokens:
            ordered.unlink()
            os.kill(os.getppid(), signal) if whom == "command" else os.killpg(os.getpgrp(), signal)
    return REGISTRY["torch.index_copy"].bind(inputs)

register(Copy("mine", "yours", ("null_slot",), bind, ("cpu",)))
"""
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
STOPS = [(2, TERM, "command"), (3, TERM, "all of us"), (4, INT, "all of us"), (5, HUP, "all of us")]


def test_a_stopped_command_says_one_line_and_the_same_command_goes_on(tmp_path):
    """As a shell starts it, with workers that are spawned; the signal comes while one of them is in a cell."""
    (mine := tmp_path / "mine.py").write_text(STOPPING_COPY)
    path = tmp_path / "local" / "r.parquet"
    command = [sys.executable, "-c", COMMAND, str(path.parent), "measure", "--run", "r", "--device", "cpu"]
    command += ["--workers", "2", "--rounds", "1", "--copies", "mine", "--copies-from", str(mine)]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
    begun = "kvnb: run r; if it is cut short, the same with RUN=r goes on"

    def said() -> tuple[int, list[str]]:
        """Its exit status, and what all of its processes said on stderr until the last had ended, less the bar."""
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as process:
            lines = process.communicate(timeout=60)[1].splitlines()
        return process.returncode, [line for line in lines if line.strip() and "%|" not in line]

    for case, number, whom in STOPS:
        mine.with_suffix(".json").write_text(json.dumps([case, number, whom]))
        assert said() == (128 + number, [begun, f"kvnb: stopped by {number.name}"]), whom
        assert len(finished(path)) == case - 1
    assert said() == (0, [begun])
    samples = results.load(path)
    assert {*samples["status"]} == {"ok"} and samples["run_id"].nunique() == 1 and samples["num_tokens"].nunique() == 5
    assert [left.name for left in path.parent.iterdir()] == [path.name]


# ------------------------------------------------------------------------------------------------- nowhere to write

TOLD = "): make room and see that you may write there, or choose another folder; nothing was measured now, finished "
TOLD += "cases stay"


@pytest.mark.parametrize("name", ["0001.parquet", "published"])
def test_a_disk_that_fills_up_ends_the_run_with_every_finished_case_kept(order, undisturbed, tmp_path, name):
    path = tmp_path / "run" / "r.parquet"
    cut = order(path, full=name)
    kept = {"0001.parquet": 1, "published": 3}[name]
    assert cut["code"] == 1
    assert f"{name} cannot be written (" in cut["error"] and "No space left on device): make room" in cut["error"]
    assert f"{kept} finished cases stay in {path.with_suffix('.parts')}, and the same run name goes on" in cut["error"]
    assert len(finished(path)) == kept
    assert [*path.parent.glob("**/.*.partial")] == []  # nothing that would keep the disk full
    assert_goes_on(order, path, undisturbed)


@pytest.mark.parametrize("name", ["owner", "settings.json"])
def test_a_full_disk_is_told_before_anything_is_measured(order, tmp_path, name):
    cut = order(tmp_path / "r.parquet", full=name, killer=SMALL.num_tokens)
    assert cut["error"].startswith("ValueError: ") and "No space left on device" in cut["error"]
    assert cut["error"].endswith(TOLD)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_takes_no_files_is_told_before_anything_is_measured(order, tmp_path):
    places = [Path("/sys/kvnb/r.parquet")]  # takes none from anybody
    if os.geteuid():
        tmp_path.chmod(0o555)
        places.append(tmp_path / "new" / "r.parquet")
    for path in places:
        cut = order(path, killer=SMALL.num_tokens)
        assert cut["error"].startswith(f"ValueError: {path.with_suffix('.parts')} cannot be written ("), cut
        assert cut["error"].endswith(TOLD)


def test_a_run_that_cannot_go_on_says_that_its_finished_cases_stay(order, undisturbed, tmp_path):
    path = tmp_path / "run" / "r.parquet"
    assert order(path, full="0001.parquet")["code"] == 1
    cut = order(path, full="owner", killer=SMALL.num_tokens)
    assert "No space left on device" in cut["error"] and cut["error"].endswith(TOLD)
    cut = order(path, unsaid=True)
    assert "No space left on device; 1 finished cases stay in" in cut["error"]
    assert len(finished(path)) == 1
    assert_goes_on(order, path, undisturbed)


def test_finished_cases_without_settings_are_refused_and_kept(order, undisturbed, tmp_path):
    path = tmp_path / "run" / "r.parquet"
    assert order(path, full="published")["code"] == 1
    settings = path.with_suffix(".parts") / "settings.json"
    before = settings.read_text()
    settings.unlink()
    told = f"ValueError: {settings.parent} holds {len(CASES)} finished cases and no settings.json: put it back, choose "
    assert order(path, asked={"rounds": 2})["error"].startswith(told)
    assert len(finished(path)) == len(CASES)
    settings.write_text(before)
    assert_goes_on(order, path, undisturbed)


def test_the_second_of_two_measures_into_one_run_is_refused_and_names_the_first(order, undisturbed, tmp_path):
    path = tmp_path / "run" / "r.parquet"
    first = order(path, point=undisturbed.lines // 2, signal=signal.SIGSTOP)["stopped"]
    before = {part.name: part.read_bytes() for part in path.with_suffix(".parts").iterdir()}
    for asked in ({}, {"rounds": 2}):
        second = order(path, asked=asked)
        assert second["error"].startswith(f"ValueError: process {first} on ")
        assert second["error"].endswith(f" measures into {path}: wait for it, or choose another run name")
    assert {part.name: part.read_bytes() for part in path.with_suffix(".parts").iterdir()} == before
    assert order(path, **{"continue": first})["code"] == 0
    assert visits(results.load(path)) == visits(undisturbed.samples)


# --------------------------------------------------------------------------------------- copies and cases that fail

MY_COPIES = """
import os
import threading
import torch
from kvnb import copies
from kvnb.bench import timing
from kvnb.copies import REGISTRY, Copy

def bind_fine(inputs):
    return REGISTRY["torch.index_put"].bind(inputs)

def bind_raises(inputs):
    raise KeyError("no such kernel")

def bind_dies(inputs):
    return lambda slots: lambda key, value: os._exit(7)

def bind_hangs(inputs):
    return lambda slots: lambda key, value: inputs.case.num_tokens == 4 and threading.Event().wait()

def bind_loses_the_device(inputs):
    def lost(bench):
        raise RuntimeError("device-side assert")

    def write(key, value):
        timing.Cpu.synchronize = lost
        raise RuntimeError("an illegal memory access was encountered")

    return lambda slots: write

def bind_compile_fails(inputs):
    compiled = torch.compile(lambda rows: rows + 1, fullgraph=True)
    return lambda slots: lambda key, value: compiled(key)

binds = {"dies": bind_dies, "raises": bind_raises, "loses": bind_loses_the_device, "compile": bind_compile_fails}
binds |= {"hangs": bind_hangs}
for name, bind in (binds | {"fine": bind_fine}).items():
    copies.register(Copy(f"mine.{name}", "yours", ("null_slot",), bind, ("cpu",)))
"""
HUGE = Case(6, 2, 16, cache_bytes=1 << 50)
WHY = {
    "mine.dies": ("error", "the worker process died (exit code 7)"),
    "mine.loses": ("error", "RuntimeError: an illegal memory access was encountered"),
    "mine.raises": ("error", "KeyError: 'no such kernel'"),
    "mine.compile": ("error", "InductorError: InvalidCxxCompiler: No working C++ compiler found"),
}


def test_what_fails_is_a_row_with_its_reason_and_the_next_case_runs(order, tmp_path):
    """One run: a case that does not fit, one whose inputs get the worker killed, and two with copies that fail."""
    mine, path = tmp_path / "my_copies.py", tmp_path / "r.parquet"
    mine.write_text(MY_COPIES)
    killed = Case(7, 2, 16, cache_bytes=1 << 16)
    asked = {"copies": [*WHY, "mine.fine"], "copies_from": str(mine), "workers": 2}
    no_compiler = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    no_compiler |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes that would outlive us
    imports = ["torch._dynamo", "torch._inductor.compile_fx"]
    done = order(
        path, [HUGE, killed, SMALL, CASES[2]], asked, killer=killed.num_tokens, environment=no_compiler, imports=imports
    )
    assert done["code"] == 0, done
    samples = results.load(path)
    for case, status, reason in (
        (HUGE, "out_of_memory", "DefaultCPUAllocator: can't allocate memory"),
        (killed, "error", "the worker process died (exit code -9: killed, as by a system out of memory)"),
    ):
        rows = samples[samples["num_tokens"] == case.num_tokens]
        each = [(copy, worker) for copy in sorted(asked["copies"]) for worker in (0, 1)]
        assert sorted(zip(rows["copy"], rows["worker"], strict=True)) == each
        assert set(rows["status"]) == {status}
        assert rows["reason"].str.contains(reason, regex=False).all()
    for case in (SMALL, CASES[2]):
        rows = samples[samples["num_tokens"] == case.num_tokens].set_index("copy")
        assert set(rows.loc["mine.fine", "status"]) == {"ok"}
        for copy, (status, reason) in WHY.items():
            assert sorted(rows.loc[[copy], "worker"]) == [0, 1]
            assert set(rows.loc[[copy], "status"]) == {status}
            assert rows.loc[[copy], "reason"].str.startswith(reason).all()


def test_a_copy_that_hangs_costs_its_cell_and_the_next_case_runs(order, tmp_path):
    mine, path, limit = tmp_path / "my_copies.py", tmp_path / "r.parquet", 4
    mine.write_text(MY_COPIES)
    asked = {"copies": ["mine.hangs", "mine.fine"], "copies_from": str(mine)}
    assert order(path, [SMALL, CASES[2]], asked, step_seconds=limit)["code"] == 0
    samples = results.load(path).set_index(["num_tokens", "copy"])
    hung = samples.loc[[(SMALL.num_tokens, "mine.hangs")]]
    why = f"the worker process died (killed: its prepare took longer than {limit} s)"
    assert [*zip(hung["status"], hung["reason"], strict=True)] == [("error", why)]
    for case in (SMALL, CASES[2]):
        assert set(samples.loc[[(case.num_tokens, "mine.fine")], "status"]) == {"ok"}
    assert set(samples.loc[[(CASES[2].num_tokens, "mine.hangs")], "status"]) == {"wrong"}  # it wrote nothing


ODD_COPIES = """
import math
import os
import sys
from pathlib import Path
from kvnb import copies
from kvnb.bench import timing
from kvnb.copies import REGISTRY, Copy

def bind(inputs):
    return REGISTRY["torch.index_put"].bind(inputs)

def bind_saves_itself(inputs):
    if inputs.case.num_tokens == 5:
        with open(__file__, "a") as mine:
            mine.write("# saved while the run goes on\\n")
        if Path(__file__).with_name("die").exists():
            os._exit(7)
    return bind(inputs)

def bind_says_half_a_letter(inputs):
    raise RuntimeError("K\\udc80")

def bind_says_nothing(inputs):
    raise MemoryError

def visit_without_a_clock(self, visit=timing.EagerTimed.visit):
    for seconds, mhz in visit(self):
        yield math.nan if self.cell.copy.name == "mine.timeless" else seconds, mhz

timing.EagerTimed.visit = visit_without_a_clock

def in_the_packed_case(act):
    return lambda case, policy, timer="": act() if case.layout == "packed" else None

def raises():
    raise KeyError("no such dtype")

def register(name, bind=bind, **more):
    copies.register(Copy(f"mine.{name}", "yours", ("null_slot",), bind, ("cpu",), **more))

register("saves", bind_saves_itself)
register("letter", bind_says_half_a_letter)
register("nothing", bind_says_nothing)
register("raises", supports=in_the_packed_case(raises))
register("steps", steps=in_the_packed_case(raises))
register("exits", supports=in_the_packed_case(lambda: sys.exit(3)))
register("dies", steps=in_the_packed_case(lambda: os._exit(4)))
register("timeless")
register("fine")
register("true", supports=in_the_packed_case(lambda: True))
"""


@pytest.fixture
def odd(tmp_path) -> Path:
    path = tmp_path / "odd_copies.py"
    path.write_text(ODD_COPIES)
    return path


def test_a_copy_that_is_odd_when_it_is_asked_or_that_says_odd_things_costs_its_own_cells(order, odd, tmp_path):
    path, always = tmp_path / "r.parquet", ("mine.letter", "mine.nothing", "mine.timeless")
    why = {
        "letter": ("error", r"RuntimeError: K\udc80"),
        "nothing": ("out_of_memory", "MemoryError"),
        "timeless": ("error", "Disturbed: a time of nan s"),
        "raises": ("error", "KeyError: 'no such dtype'"),
        "steps": ("error", "KeyError: 'no such dtype'"),
        "exits": ("error", "the worker process died (exit code 3)"),
        "dies": ("error", "the worker process died (exit code 4)"),
        "true": ("error", "TypeError: supports returned True: it must say why in words, or None"),
    }
    names = [f"mine.{name}" for name in (*why, "fine")]
    done = order(path, CASES[:2], {"copies": names, "copies_from": str(odd), "workers": 2})
    assert done["code"] == 0, done
    samples = results.load(path).set_index(["layout", "copy"]).sort_index()
    for name in names:
        for layout in ("NHD", "packed"):
            rows = samples.loc[[(layout, name)]]
            fails = name in always or (layout == "packed" and name != "mine.fine")
            status, reason = why[name.removeprefix("mine.")] if fails else ("ok", "")
            assert {*zip(rows["status"], rows["reason"], strict=True)} == {(status, reason)}, (name, layout)
            assert sorted({*rows["worker"]}) == [0, 1] and (len(rows) == 2 or not fails)


def test_a_source_that_is_saved_while_a_run_goes_on_costs_nothing(order, odd, tmp_path):
    """What runs is what was read at the start. A worker that starts later would be another version's: it ends the run,
    which goes on once that is undone."""
    path, before = tmp_path / "run" / "r.parquet", odd.read_bytes()
    asked = {"copies": ["mine.saves"], "copies_from": str(odd)}
    (dies := odd.with_name("die")).touch()
    cut = order(path, asked=asked)
    told = "RunFileError: a source of mine.saves was edited since the run began: undo that, or measure it as a run of "
    told += f"another name; 2 finished cases stay in {path.with_suffix('.parts')}, and the same run name goes on there"
    assert cut["error"] == told
    assert len(finished(path)) == 2
    dies.unlink()
    assert "was measured with version of mine.saves" in order(path, asked=asked)["error"]
    odd.write_bytes(before)
    done = order(path, asked=asked)
    assert done["code"] == 0, done
    assert odd.read_bytes() != before
    samples = results.load(path)
    assert set(samples["status"]) == {"ok"} and samples.groupby([*CASE_FIELDS]).ngroups == len(CASES)
    assert set(samples["copy_version"]) == {hashlib.sha256(before).hexdigest()[:10]}


GPU_COPIES = """
import torch
from kvnb import copies
from kvnb.copies import REGISTRY, Copy

def bind_fine(inputs):
    return REGISTRY["torch.index_put"].bind(inputs)

def bind_out_of_range(inputs):
    rows = inputs.key_cache.view(inputs.case.num_slots, -1)

    def step(slots):
        beyond = slots + inputs.case.num_slots
        def write(key, value):
            rows[beyond] = key.reshape(len(key), -1)
        return write

    return step

def bind_launch_fails(inputs):
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void nothing() {}', "nothing")
    return lambda slots: lambda key, value: kernel(block=(2048, 1, 1))

def breaks(rows):
    torch._dynamo.graph_break()
    return rows + 1

def bind_compile_fails(inputs):
    compiled = torch.compile(breaks, fullgraph=True)
    return lambda slots: lambda key, value: compiled(key)

binds = {"assert": bind_out_of_range, "launch": bind_launch_fails, "compile": bind_compile_fails, "fine": bind_fine}
for name, bind in binds.items():
    copies.register(Copy(f"mine.{name}", "yours", ("null_slot",), bind, ("cuda",)))
"""


@pytest.mark.gpu
def test_on_a_gpu_what_fails_is_a_row_with_its_reason_and_the_next_case_runs(tmp_path, monkeypatch):
    """A case larger than any GPU; then an out-of-range slot, which poisons the CUDA context, beside other failures."""
    import kvnb

    monkeypatch.setattr(runs.all_copies, "REGISTRY", {**runs.all_copies.REGISTRY})  # ours are gone after this
    mine = tmp_path / "my_copies.py"
    mine.write_text(GPU_COPIES)
    names = ["mine.assert", "mine.launch", "mine.compile", "mine.fine"]
    cases = [Case(6, cache_bytes=1 << 45), Case(32, cache_bytes=64 * MIB), Case(33, cache_bytes=64 * MIB)]
    monkeypatch.setattr(runs, "grid", lambda *_: cases)
    asked = ASKED | {"device": "cuda:0", "timers": "eager", "workers": 2, "copies": names, "copies_from": str(mine)}
    samples = kvnb.load(kvnb.measure(**asked, path=tmp_path / "r.parquet"))
    huge = samples[samples["num_tokens"] == cases[0].num_tokens]
    assert set(huge["status"]) == {"out_of_memory"} and set(huge["copy"]) == set(names)
    for case in cases[1:]:
        rows = samples[samples["num_tokens"] == case.num_tokens].set_index("copy")
        assert set(rows.loc["mine.fine", "status"]) == {"ok"}
        assert set(rows.loc["mine.fine", "worker"]) == {0, 1}
        for name, reason in (
            ("mine.assert", "device-side assert"),
            ("mine.launch", "CUDA error: invalid argument"),
            ("mine.compile", "Unsupported"),
        ):
            assert set(rows.loc[[name], "status"]) == {"error"}
            assert rows.loc[[name], "reason"].str.contains(reason).all(), rows.loc[[name], "reason"].tolist()


if __name__ == "__main__":
    serve()
