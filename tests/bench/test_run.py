"""A run on the CPU: wrong values are refused before anything is written, a killed run goes on where it stopped."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from pathlib import Path

import pytest
from filelock import FileLock
from tqdm import tqdm

import kvnb
from kvnb import machine, paths
from kvnb.bench import results
from kvnb.bench import run as runs
from kvnb.bench.run import Settings, Worker, cells_of
from kvnb.copies import REGISTRY
from kvnb.problem.case import CASE_FIELDS, MIB, Case, grid
from kvnb.stopping import ENDING, stoppable

SMALL = Case(4, 2, 16, cache_bytes=MIB)
SETTINGS = Settings("cpu", "quick", ["torch.index_put"], ["wall"], workers=1, rounds=2, copies_from=None)
ASKED = {"device": "cpu", "grid": "quick", "timers": "wall", "workers": 1, "rounds": 1}
ASKED |= {"copies": ["limit.copy.memcpy", "torch.index_copy"]}  # index_copy is unsupported in half of the cases


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Copies that a test registers are gone after it."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture
def no_process(monkeypatch):
    """Whoever starts a worker fails."""

    def start(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(Worker, "_start", start)


@contextmanager
def worker(settings: Settings):
    made = Worker(0, settings, runs._versions(settings), {"code": settings.code})
    try:
        yield made
    finally:
        made.stop()


# ------------------------------------------------------------------------------------------------------- wrong values


def test_grid_padding_measures_every_policy_of_a_copy_and_of_a_limit_one():
    settings = Settings("cpu", "padding", ["kvnb", "torch.index_put", "limit.copy.memcpy"], ["wall"], 1, 1, None)
    cells, _ = cells_of(Case(32, padding=0.25, cache_bytes=1 << 22), settings)
    writes = {(cell.copy.name, cell.policy) for cell in cells if cell.part == "write"}
    policies = {name: REGISTRY[name].policies for name in ("kvnb", "torch.index_put")}
    wanted = {(name, policy) for name, several in policies.items() for policy in several}
    assert writes == wanted | {("limit.copy.memcpy", REGISTRY["limit.copy.memcpy"].policies[0])}
    assert {(cell.copy.name, cell.policy) for cell in cells if cell.part == "step"} == {
        ("torch.index_put", "remap"),
        ("torch.index_put", "filter"),
    }


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"device": "cuda:99"}, r"device 'cuda:99' is not here; valid: auto, cpu"),
        ({"grid": "quik"}, r"grid 'quik' is not one of quick, full"),
        ({"copies": ["kvnb", "kvmb"]}, r"copies kvmb: valid are all, kvnb, .*torch\.index_put"),
        ({"copies": []}, r"copies \(none\): valid are all"),
        ({"timers": "graphs"}, r"timers graphs: valid on cpu are all, wall"),
        ({"timers": ["graph"]}, r"timers graph: valid on cpu are all, wall"),
        ({"workers": 0}, r"workers = 0 must be a whole number from 1 to 64"),
        ({"workers": 3000}, r"workers = 3000 must be a whole number from 1 to 64"),
        ({"rounds": 1001}, r"rounds = 1001 must be a whole number from 1 to 1000"),
        ({"rounds": 2.5}, r"rounds = 2\.5 must be a whole number from 1 to 1000"),
        ({"copies_from": "nowhere.py"}, r"copies_from: .*nowhere\.py does not exist"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_the_valid_ones_before_anything_is_written(wrong, message, tmp_path, no_process):
    with pytest.raises(ValueError, match=message):
        kvnb.measure(**ASKED | wrong, path=tmp_path / "runs" / "r.parquet")
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- which cells a case gets


def test_all_copies_get_a_cell_or_a_reason():
    cells, rows = cells_of(Case(8, layout="packed"), Settings(**vars(SETTINGS) | {"copies": list(REGISTRY)}))
    measured, refused = {cell.copy.name for cell in cells}, {row["copy"] for row in rows}
    assert measured | refused == set(REGISTRY)
    assert not measured & refused
    assert {cell.timer for cell in cells} == {"wall"}
    assert all(row["status"] == "unsupported" and row["reason"] for row in rows)
    assert next(row["reason"] for row in rows if row["copy"] == "vllm.scalar") == "runs on cuda, not on cpu"


def test_a_step_that_works_is_a_cell_of_its_own():
    def parts(layout: str) -> list[str]:
        return [cell.part for cell in cells_of(Case(8, layout=layout), SETTINGS)[0]]

    assert (parts("packed"), parts("NHD")) == (["write", "step"], ["write"])


def test_timers_that_were_not_asked_for_have_no_cells(monkeypatch):
    monkeypatch.setattr(runs, "timings", lambda *_: (("graph", "produced"), ("call", "cold"), ("eager", "produced")))
    asked = Settings(**vars(SETTINGS) | {"device": "cuda:0", "timers": ["call", "eager"]})
    cells, _ = cells_of(Case(8, layout="packed"), asked)
    assert [(cell.part, cell.timer, cell.state) for cell in cells] == [
        ("write", "call", "cold"),
        ("write", "eager", "produced"),
        ("step", "eager", "produced"),
    ]


# ------------------------------------------------------------------------------------------------------------ workers


def test_a_worker_that_cannot_start_says_why(tmp_path):
    asked = Settings(**vars(SETTINGS) | {"copies_from": str(tmp_path / "gone.py")})
    message = r"worker 0 could not start: .*gone\.py does not exist"
    with worker(asked) as one, pytest.raises(RuntimeError, match=message):
        one.greet()


def test_a_worker_outlives_ctrl_c_and_is_replaced_when_killed_while_others_measured_and_leaves_quietly():
    with worker(SETTINGS) as one, tqdm(total=1, disable=True) as bar:
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # here
        os.kill(one._process.pid, signal.SIGINT)  # while it starts
        one.greet()
        one._process.kill()
        one._process.join()
        assert {row["status"] for row in one.measure(0, SMALL, bar)} == {"ok"}
        one._pipe.send((SMALL, 0, set()))
        one._pipe.close()  # as by a run that is stopped
        one._process.join(60)
        assert one._process.exitcode == 0, "it printed a traceback"


@pytest.mark.parametrize("name", ["code", "torch", "threads"])
def test_a_worker_that_finds_another_machine_or_code_than_the_run_began_with_ends_it(name):
    with worker(SETTINGS) as one, tqdm(total=1, disable=True) as bar:
        one.greet()
        now, one._alike[name] = one._alike[name], "other"
        one._process.kill()
        one._process.join()
        told = f"{name} was 'other' when the run began and is {now!r} in worker 0: undo that, or measure it as a run "
        with pytest.raises(results.RunFileError, match=re.escape(told) + "of another name$"):
            one.measure(0, SMALL, bar)


def test_a_worker_that_dies_in_a_file_of_copies_names_it(tmp_path):
    (tmp_path / "mine.py").write_text("import os\nos.abort()")
    asked = Settings(**vars(SETTINGS) | {"copies_from": str(tmp_path / "mine.py")})
    message = r"^worker 0 died at its copies_from \S+mine\.py \(exit code -6\)$"
    with worker(asked) as one, pytest.raises(RuntimeError, match=message):
        one.greet()


def test_what_no_worker_can_measure_is_one_row_of_no_worker():
    reason = {"status": "unsupported", "reason": "runs on cuda"}
    cell = {"copy": "c", "policy": "skip", "part": "write", "timer": "wall", "state": "produced"}
    error = {"status": "error", "reason": "RuntimeError: no"}
    rows = [cell | outcome | {"worker": number} for number in range(3) for outcome in (reason, error)]
    rows += [cell | reason | {"timer": "graph", "worker": 2}, cell | reason | {"reason": "another", "worker": 2}]
    kept = runs._once(rows)
    assert [(row["timer"], row["worker"]) for row in kept if row["status"] == "unsupported"] == [
        ("wall", -1),
        ("graph", -1),
        ("wall", 2),
    ]
    assert [row["worker"] for row in kept if row["status"] == "error"] == [0, 1, 2]


def test_what_a_case_leaves_is_garbage_first_and_then_looked_through_no_more():
    class Held:
        """In a cycle, as a copy's closures and its graph."""

    held = Held()
    held.itself = held
    gone, kept = weakref.ref(held), Held()
    del held
    before = gc.get_freeze_count()
    try:
        runs._make_room()
        assert gone() is None and gc.get_freeze_count() > before
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.fixture
def ctrl_c():
    """What Ctrl-C raises in a notebook, and in a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_leaves_no_worker_and_waits_for_none(tmp_path, monkeypatch, ctrl_c):
    """In a notebook, nothing else would end them while the exception, and with it their pipes, is kept."""
    running = []

    def write(*_):
        running.extend(multiprocessing.active_children())
        ctrl_c()

    monkeypatch.setattr(results, "write", write)
    monkeypatch.setattr(runs, "grid", lambda *_: [SMALL])
    with pytest.raises(KeyboardInterrupt) as kept:
        kvnb.measure(**ASKED | {"workers": 2}, path=tmp_path / "r.parquet")
    assert multiprocessing.active_children() == [], kept
    assert [worker.exitcode for worker in running] == [-signal.SIGKILL] * 2  # one that left by itself had 10 s to do so


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_signal_as_a_worker_begins_leaves_none_and_none_complains(tmp_path, monkeypatch, capfd, ctrl_c, nth, number):
    """It comes when the system has begun the process, which waits to hear what it is to do."""
    begun, spawn = [], util.spawnv_passfds
    resource_tracker.ensure_running()  # it begins as they do

    def spawned(*words):
        begun.append(spawn(*words))
        if len(begun) == nth:
            os.kill(os.getpid(), number)
        return begun[-1]

    monkeypatch.setattr(util, "spawnv_passfds", spawned)
    with pytest.raises(SystemExit) as end, stoppable():
        kvnb.measure(**ASKED | {"workers": 3}, path=tmp_path / "r.parquet")
    assert (end.value.code, len(begun), multiprocessing.active_children()) == (128 + number, nth, [])
    for pid in begun:
        with pytest.raises(ChildProcessError):  # it ended, and was waited for: none was lost
            os.waitpid(pid, os.WNOHANG)
    assert capfd.readouterr().err == f"\nkvnb: stopped by {number.name}\n"


# -------------------------------------------------------------------------------------------------- killed and resumed


MEASURING = """
import multiprocessing
import sys
import threading
import kvnb
from kvnb.bench import timing
from kvnb.problem.case import grid

waited = []

def measure_case(bench, case, cells, on_visit, **rest):
    def told(cell, stage):
        on_visit(cell, stage)
        if (case, stage) == (grid("quick", "cpu")[1], "round") and not waited:
            waited.append(True)
            with open({fifo!r}, "w") as fifo:
                fifo.write("measuring")
            if sys.platform == "linux":
                threading.Event().wait()  # as a copy that hangs
            multiprocessing.parent_process().join()

    return measured(bench, case, cells, on_visit=told, **rest)

if __name__ == "__main__":
    kvnb.measure(**{asked}, path={path!r})
else:  # a worker, at its visit to a cell
    measured, timing.measure_case = timing.measure_case, measure_case
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The folder of a run that was killed while a worker, spawned as a user's are, measured the second case.

    The worker must end by itself: the test goes on when nobody has stderr open any more.
    """
    path = tmp_path_factory.mktemp("killed") / "r.parquet"
    fifo = path.with_name("measuring")
    os.mkfifo(fifo)
    script = path.with_name("measuring.py")
    script.write_text(MEASURING.format(asked=ASKED, path=str(path), fifo=str(fifo)))
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True)
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as told:
        assert select.select([told], [], [], 120)[0], "no worker came to the second case"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        os.set_blocking(told.fileno(), True)
        assert told.read() == "measuring"
    _, said = process.communicate(timeout=60)  # ends when the last worker has let go of stderr
    assert "Traceback" not in said
    assert not path.exists()
    assert [part.name for part in path.with_suffix(".parts").glob("*.parquet")] == ["0000.parquet"]
    return path.with_suffix(".parts")


@pytest.fixture
def cut_off(killed, tmp_path) -> Path:
    """Where the killed run was to be published, its parts beside it."""
    shutil.copytree(killed, tmp_path / "r.parts")
    return tmp_path / "r.parquet"


def test_a_killed_run_goes_on_where_it_stopped(cut_off, monkeypatch, capsys):
    part = cut_off.with_suffix(".parts") / "0000.parquet"
    first = kvnb.load(part)
    assert not kvnb.cells(first).empty
    assert set(first["num_tokens"]) == {grid("quick", "cpu")[0].num_tokens}
    done = {int(found.stem) for found in part.parent.glob("*.parquet")}
    measured = []
    measure = Worker.measure
    monkeypatch.setattr(
        Worker, "measure", lambda self, number, *rest: measured.append(number) or measure(self, number, *rest)
    )

    assert kvnb.measure(**ASKED, path=cut_off) == cut_off

    assert capsys.readouterr().err.count("kvnb: run r; if it is cut short, the same command goes on\n") == 1
    assert measured == [number for number in range(len(grid("quick", "cpu"))) if number not in done]
    samples = kvnb.load(cut_off)
    assert samples["run_id"].nunique() == samples["utc"].nunique() == 1
    assert first["run_id"][0] == samples["run_id"][0]
    assert not samples.duplicated([*CASE_FIELDS, "copy", *results.CELL_FIELDS, "worker", "round", "sample"]).any()
    found = {tuple(case) for case in samples[[*CASE_FIELDS]].itertuples(index=False)}
    assert found == {tuple(case.fields().values()) for case in grid("quick", "cpu")}
    unsupported = samples[samples["status"] == "unsupported"]
    assert set(unsupported["layout"]) == {"packed"}
    assert set(unsupported["worker"]) == {-1}
    assert len(unsupported) == sum(case.layout == "packed" for case in grid("quick", "cpu"))
    assert set(samples["status"]) == {"ok", "unsupported"}
    assert not cut_off.with_suffix(".parts").exists()


def test_a_complete_run_is_returned_as_it_is(finished, monkeypatch, no_process):
    monkeypatch.setattr(paths, "LOCAL", finished.parent)
    before = finished.read_bytes()
    assert kvnb.measure(**ASKED, run="r") == finished
    assert finished.read_bytes() == before


@pytest.mark.parametrize("outcome", [("unsupported", -1), ("error", 0)], ids=lambda outcome: outcome[0])
def test_a_complete_run_that_could_measure_nothing_is_one(finished, outcome, no_process):
    status, worker = outcome
    samples = kvnb.load(finished).drop_duplicates([*CASE_FIELDS, "copy", *results.CELL_FIELDS])
    nothing = {"seconds": None, "status": status, "reason": "no", "worker": worker, "round": -1, "sample": -1}
    results.save(samples.assign(**nothing), finished)
    assert kvnb.measure(**ASKED, path=finished) == finished


def test_a_file_that_is_no_run_is_not_taken_for_one(tmp_path, no_process):
    path = tmp_path / "r.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(results.RunFileError, match="r.parquet is not a complete run file"):
        kvnb.measure(**ASKED, path=path)


def test_a_folder_is_not_taken_for_a_finished_run(tmp_path, no_process):
    path = tmp_path / "r.parquet"
    path.mkdir()
    for asks in (kvnb.measure, lambda **asked: runs.planned(**asked, run=None)):
        with pytest.raises(results.RunFileError, match=r"r\.parquet is no file, and so no run file: move it away"):
            asks(**ASKED, path=path)
    assert [left.name for left in tmp_path.iterdir()] == [path.name]


def test_a_copy_that_is_asked_for_twice_is_measured_once():
    asked = runs.planned(**ASKED | {"copies": ["kvnb", "torch.index_put", "kvnb"]}, run=None)[0]
    assert asked.copies == ["kvnb", "torch.index_put"]


def contents(parts: Path) -> dict[str, bytes]:
    return {part.name: part.read_bytes() for part in sorted(parts.iterdir()) if part.name not in ("lock", "owner")}


def refused(path: Path, message: str, **asked) -> None:
    """Resuming `path` is refused, and leaves its parts as they are."""
    before = contents(path.with_suffix(".parts"))
    with pytest.raises(ValueError, match=message):
        kvnb.measure(**ASKED | asked, path=path)
    assert contents(path.with_suffix(".parts")) == before
    assert not path.exists()


def test_a_run_that_asks_for_something_else_is_not_mixed_in(cut_off, no_process):
    asked = r'holds a run that was cut off and asked for .*"rounds": 1.*resume it with these, choose another run name'
    refused(cut_off, f"(?s){asked}", rounds=2)


def test_a_run_does_not_go_on_with_other_code(cut_off, no_process):
    asked = cut_off.with_suffix(".parts") / "settings.json"
    asked.write_text(asked.read_text().replace(machine.code(), "0123456789"))
    refused(cut_off, r"r\.parts holds a run that was begun before kvnb/ or csrc/ was edited: undo that, choose another")
    refused(cut_off, r'(?s)asked for .*"code": "0123456789"', rounds=2)


@pytest.mark.parametrize("damage", ["a folder", "bytes that are no text"])
def test_settings_that_cannot_be_read_are_named(cut_off, damage, no_process):
    asked = cut_off.with_suffix(".parts") / "settings.json"
    asked.unlink()
    if damage == "a folder":
        asked.mkdir()
    else:
        asked.write_bytes(b"\xff\xfe")
    for asks in (kvnb.measure, lambda **asked: runs.planned(**asked, run=None)):
        with pytest.raises(ValueError, match=r"r\.parts/settings\.json cannot be read \(.*\): mend it, choose another"):
            asks(**ASKED, path=cut_off)
    assert asked.exists() and (asked.parent / "0000.parquet").exists()


OTHER = {"threads": 99, "l2_bytes": 99, "dirty": None}


@pytest.mark.parametrize("column", results.SAME_MACHINE)
def test_a_run_of_another_machine_is_not_mixed_in(cut_off, column, monkeypatch, capsys):
    part = cut_off.with_suffix(".parts") / "0000.parquet"
    samples = kvnb.load(part)
    samples["timer"] = "graph" if column == "gpu" else "wall"
    about = {name: results.read(part)[name][0].as_py() for name in results.MACHINE_FIELDS}
    other = OTHER.get(column, "another")
    results.save(samples.assign(**{column: other}), part)
    monkeypatch.setattr(Worker, "_start", lambda self: None)
    monkeypatch.setattr(Worker, "stop", lambda *_, **__: None)
    monkeypatch.setattr(Worker, "greet", lambda self: about)
    refused(cut_off, f"was measured with {column} {other!r}, this is .*: resume it there, choose another run name")
    assert capsys.readouterr().err == "", "nothing says that it runs"


def test_a_run_of_another_kernel_is_not_mixed_in(cut_off, no_process):
    part = cut_off.with_suffix(".parts") / "0000.parquet"
    results.save(kvnb.load(part).assign(copy_version="older"), part)
    refused(cut_off, r"was measured with version of \S+ 'older', this is '\w{10}': resume it there, choose another run")


def test_parts_of_two_machines_are_not_put_together(cut_off, no_process):
    part = cut_off.with_suffix(".parts") / "0000.parquet"
    case = grid("quick", "cpu")[7]
    other = kvnb.load(part).assign(cpu="another", **case.fields(), bytes_moved=case.bytes_moved)
    results.save(other, part.with_name("0007.parquet"))
    refused(cut_off, "was measured with cpu '.*', this is 'another'")


def truncated(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def of_another_case(part: Path) -> None:
    part.rename(part.with_name("0005.parquet"))


def of_no_case(part: Path) -> None:
    part.rename(part.with_name("mine.parquet"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, r"0000.parquet is not a complete run file .*: `rm \S+0000.parquet`, and the command that began"),
        (of_another_case, r"0005.parquet is no part of this run: `rm \S+0005.parquet`, and the same call goes on"),
        (of_no_case, r"mine.parquet is no part of this run: `rm \S+mine.parquet`, and the same call goes on"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_part_that_is_not_what_it_should_be_is_told_before_anything_is_measured(cut_off, damage, message, no_process):
    damage(cut_off.with_suffix(".parts") / "0000.parquet")
    refused(cut_off, message)


@pytest.fixture
def finished(cut_off, monkeypatch) -> Path:
    """A run file, and a grid of its one case."""
    only = grid("quick", "cpu")[:1]
    monkeypatch.setattr(runs, "grid", lambda *_: only)
    shutil.move(cut_off.with_suffix(".parts") / "0000.parquet", cut_off)
    shutil.rmtree(cut_off.with_suffix(".parts"))
    return cut_off


@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        ({"grid": "full"}, "grid full"),
        ({"copies": ["kvnb", "limit.copy.memcpy"]}, "copy kvnb"),
        ({"rounds": 3}, "round 1, 2"),
        ({"workers": 2}, "worker 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_finished_run_does_not_stand_for_one_that_asks_for_more(finished, more, lacks, no_process):
    before = finished.read_bytes()
    with pytest.raises(ValueError, match=f"r.parquet is a finished run without {lacks}; choose another run name"):
        kvnb.measure(**ASKED | more, path=finished)
    assert finished.read_bytes() == before


def test_a_finished_run_without_a_case_does_not_stand_for_the_grid_that_has_it(finished, monkeypatch, no_process):
    both = grid("quick", "cpu")[:2]
    monkeypatch.setattr(runs, "grid", lambda *_: both)
    with pytest.raises(ValueError, match=f"r.parquet is a finished run without case {both[1]}; choose another"):
        kvnb.measure(**ASKED, path=finished)


def test_a_run_that_another_process_ended_meanwhile_is_looked_at_again(finished, monkeypatch, no_process):
    """Between the first look and the lock."""
    ended, held = finished.rename(finished.with_name("ended")), paths.held

    @contextmanager
    def late(*arguments):
        shutil.copy(ended, finished)
        with held(*arguments):
            yield

    monkeypatch.setattr(paths, "held", late)
    with pytest.raises(ValueError, match="r.parquet is a finished run without round 1; choose another run name"):
        kvnb.measure(**ASKED | {"rounds": 2}, path=finished)
    assert finished.read_bytes() == ended.read_bytes()
    finished.unlink()
    assert kvnb.measure(**ASKED, path=finished) == finished
    assert sorted(left.name for left in finished.parent.iterdir()) == ["ended", "r.parquet"]


@pytest.mark.parametrize("column", ["copy_version", *runs.SAME_WHEN_FINISHED[1:]])  # "gpu" is the next test's
def test_a_finished_run_of_another_copy_or_machine_does_not_stand_for_this_one(finished, column, no_process):
    other = OTHER.get(column, "another")
    results.save(kvnb.load(finished).assign(**{column: other}), finished)
    before = finished.read_bytes()
    what = r"version of \S+" if column == "copy_version" else column
    message = f"r.parquet was measured with {what} {other!r}, this is .*: choose another run name, or remove that file$"
    for asks in (kvnb.measure, lambda **asked: runs.planned(**asked, run=None)):
        with pytest.raises(ValueError, match=message):
            asks(**ASKED, path=finished)
    assert finished.read_bytes() == before


def test_a_finished_run_stands_for_itself_where_another_copy_was_edited_and_after_a_commit(finished, no_process):
    samples = kvnb.load(finished)
    older = samples["copy_version"].where(samples["copy"] == "torch.index_copy", "older")
    results.save(samples.assign(kvnb_commit="another", dirty=None, copy_version=older), finished)
    assert kvnb.measure(**ASKED | {"copies": ["torch.index_copy"]}, path=finished) == finished


def test_a_finished_run_of_a_gpu_does_not_stand_for_one_of_the_cpu(finished, no_process):
    results.save(kvnb.load(finished).assign(gpu="Test GPU", timer="graph"), finished)
    with pytest.raises(ValueError, match="is a finished run without device cpu; choose another run name"):
        kvnb.measure(**ASKED, path=finished)
    asked = Settings("cuda:0", "quick", ASKED["copies"], ["graph", "eager"], workers=1, rounds=1, copies_from=None)
    with pytest.raises(ValueError, match="is a finished run without timer eager; choose another run name"):
        runs._refuse_other_contents(results.read(finished), asked, finished)


@pytest.fixture
def left_beside(finished, killed) -> Path:
    """A finished run, its parts beside it: it was killed before they went."""
    shutil.copytree(killed, finished.with_suffix(".parts"))
    return finished


def test_what_a_kill_left_beside_a_finished_run_goes(left_beside, no_process):
    assert kvnb.measure(**ASKED, path=left_beside) == left_beside
    assert [left.name for left in left_beside.parent.iterdir()] == [left_beside.name]


def test_tidying_up_takes_the_settings_last(left_beside, monkeypatch, no_process):
    """Cases that lie beside no settings would be nobody's: what is left of them, should it be killed, is the run's."""
    removed, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **how: removed.append(path.name) or unlink(path, **how))
    kvnb.measure(**ASKED, path=left_beside)
    ours = [name for name in removed if name.endswith((".parquet", ".json"))]
    assert len(ours) > 1 and ours[-1] == "settings.json"


def is_open(info: os.stat_result) -> bool:
    for number in range(256):
        with suppress(OSError):
            if os.path.samestat(os.fstat(number), info):
                return True
    return False


def test_a_lock_that_stays_in_its_folder_while_it_is_open_fails_no_finished_run(left_beside, monkeypatch, no_process):
    """NFS gives a file that is removed while it is open another name, which nobody can remove before it is closed."""
    unlink = os.unlink

    def unlink_over_nfs(path, *, dir_fd=None):
        if not is_open(os.stat(path, dir_fd=dir_fd)):
            unlink(path, dir_fd=dir_fd)
        elif Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        else:
            os.rename(path, Path(path).with_name(".nfs1"))

    with monkeypatch.context() as over_nfs:
        over_nfs.setattr(os, "unlink", unlink_over_nfs)
        for _ in range(2):
            assert kvnb.measure(**ASKED, path=left_beside) == left_beside
            assert [left.name for left in left_beside.with_suffix(".parts").iterdir()] == [".nfs1"]
    assert kvnb.measure(**ASKED, path=left_beside) == left_beside
    assert [left.name for left in left_beside.parent.iterdir()] == [left_beside.name]


def test_a_run_that_another_process_measures_is_left_alone(cut_off, no_process):
    parts = cut_off.with_suffix(".parts")
    with FileLock(parts / "lock"):
        assert (parts / "owner").exists()  # it names the process that was killed, and that holds nothing
        for _ in range(2):
            refused(cut_off, "^another process measures into .*r.parquet: wait for it, or choose another run name")
            (parts / "owner").unlink(missing_ok=True)
        refused(cut_off, "^another process measures into", rounds=2)  # than what it measures
        with pytest.raises(ValueError, match="^another process measures into"):
            runs.planned(**ASKED | {"rounds": 2}, run=None, path=cut_off)
        (parts / "owner").write_text(f"process {os.getpid()} on {platform.node()}")
        refused(cut_off, f"^process {os.getpid()} on .* measures into .*r.parquet: wait for it, or choose another")
    with pytest.raises(ValueError, match="holds a run that was cut off and asked for"):
        runs.planned(**ASKED | {"rounds": 2}, run=None, path=cut_off)
    assert sorted(os.listdir(parts)) == ["0000.parquet", "settings.json"]


def test_a_file_system_without_locks_is_told_with_what_to_do(tmp_path, monkeypatch, no_process):
    def flock(*_, **__):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(paths.FileLock, "acquire", flock)
    with pytest.raises(ValueError, match=r"r\.parts cannot be locked \(no flock here\): make room .*another folder"):
        kvnb.measure(**ASKED, path=tmp_path / "r.parquet")
