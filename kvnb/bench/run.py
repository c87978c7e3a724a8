"""A run: worker processes take turns at every case; each finished case is on disk before the next begins.

Workers are separate processes with allocations of their own, alive side by side and measuring one at a time. The
parent makes no CUDA context. A case's rows are written to `<run>.parts/` when every worker has had its turn; a killed
run goes on from there, on the same machine. A worker that dies or hangs costs the cell it was at.

The folder of parts holds `lock` and `owner` (who measures), `settings.json` (what was asked for, and machine.code), a
file per finished case and, at the very end, `published`, which becomes the run file by a rename. All of it is written
under a temporary name first, so that a kill at any moment leaves whole files only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing as mp
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from multiprocessing import resource_tracker
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from kvnb import copies as all_copies
from kvnb import machine, paths
from kvnb.bench import results
from kvnb.copies.base import GPU_TIMERS
from kvnb.problem.case import CASE_FIELDS, Case, grid, timings
from kvnb.stopping import put_off

WORKERS, ROUNDS = 3, 10  # of a run that asks for nothing else
START = "spawn"  # how a worker begins: with allocations and a CUDA context of its own
STOP_SECONDS = 10  # for a worker to end by itself
STEP_SECONDS = 15 * 60  # for its start, a case's inputs, a cell's prepare, round or verify: compiling takes minutes
ASKING = "supports or steps"  # of a copy: what it says of a case's cells, a step of a worker's too
MOST = {"workers": 64, "rounds": 1000}  # more than anybody means: each worker has a CUDA context and caches of its own
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, sys/prctl.h
INSTEAD = "choose another run name, or remove that file"
# A finished run stands for itself under a later commit: what it measured has its version in `copy_version`.
SAME_WHEN_FINISHED = [name for name in results.SAME_MACHINE if name not in ("kvnb_commit", "dirty")]
UNWRITABLE = "make room and see that you may write there, or choose another folder; nothing was measured now, "
UNWRITABLE += "finished cases stay"


@dataclass(frozen=True)
class Settings:
    """What a run measures, and the code that does; a resumed run must ask for the same."""

    device: str
    grid: str
    copies: list[str]
    timers: list[str]
    workers: int
    rounds: int
    copies_from: str | None
    code: str = field(default_factory=machine.code)

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)


def measure(
    device: str = "auto",
    grid: str = "quick",
    copies: str | Iterable[str] = "all",
    timers: str | Iterable[str] = "all",
    run: str | None = None,
    workers: int = WORKERS,
    rounds: int = ROUNDS,
    path: str | Path | None = None,
    copies_from: str | None = None,
) -> Path:
    """Measure a grid and return the path of the run file (`data/local/<run>.parquet`, or `path`).

    `run` None makes a name of the time and the grid. A run that exists is complete and returned as it is; one that was
    cut off goes on where it stopped. Raises ValueError for a device, grid, copy or timer that does not exist (naming
    those that do), and where an earlier run of that name asked for something else, had another version of a copy or
    ran on another machine.
    """
    settings, path = _asked(device, grid, copies, timers, run, workers, rounds, path, copies_from)
    if _is_finished(settings, path) and not path.with_suffix(".parts").exists():
        return path
    with _claimed(path) as parts:
        if not _is_finished(settings, path):  # again: another process may have ended it meanwhile
            _begin(settings, parts)
            _measure_parts(settings, parts)
            _publish(parts, path)
        with suppress(OSError):  # a finished run does not fail for what tidying up leaves
            asked = parts / "settings.json"
            for left in [*{*parts.iterdir()} - {parts / "lock", asked}, asked]:  # never cases without settings
                left.unlink()
    return path


@contextmanager
def _claimed(path: Path) -> Iterator[Path]:
    """The folder of a run's parts, this process's alone. Where nothing is in it at the end, it goes."""
    parts = path.with_suffix(".parts")
    does, instead = f"measures into {path}", "choose another run name"
    try:
        with paths.held(parts / "lock", parts / "owner", does, UNWRITABLE, instead):
            yield parts
    finally:
        with suppress(OSError):
            parts.rmdir()


def _goes_on(settings: Settings, parts: Path) -> bool:
    """Whether the folder of parts holds a run that was begun. Raises ValueError where that asked for something else,
    was measured with other code, or does not say what it asked for."""
    asked = parts / "settings.json"
    instead = "choose another run name, or delete that folder"
    try:
        text = asked.read_text()
    except FileNotFoundError:
        if cases := len([*parts.glob("*.parquet")]):
            told = f"{parts} holds {cases} finished cases and no settings.json"
            raise ValueError(f"{told}: put it back, {instead}") from None
        return False
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{asked} cannot be read ({error}): mend it, {instead}") from error
    if text in (replace(settings, code=code).text for code in re.findall(r'"code": "(\w+)"', text)):
        if text != settings.text:
            told = f"{parts} holds a run that was begun before kvnb/ or csrc/ was edited"
            raise ValueError(f"{told}: undo that, {instead}")
        return True
    raise ValueError(f"{parts} holds a run that was cut off and asked for {text}; resume it with these, {instead}")


def _begin(settings: Settings, parts: Path) -> None:
    """Say in the folder of parts what is asked for, unless it says so already."""
    if _goes_on(settings, parts):
        return
    asked = parts / "settings.json"
    try:
        with paths.whole(asked) as partial:
            partial.write_text(settings.text)
    except OSError as error:
        raise ValueError(f"{asked} cannot be written ({error}): {UNWRITABLE}") from error


def planned(device, grid, copies, timers, run, workers, rounds, path=None, copies_from=None) -> tuple[Settings, Path]:
    """What `measure` would do with these arguments, and its run file; leaves all as it is. Raises ValueError as it
    does, but for parts that were measured elsewhere, which its workers find."""
    settings, path = _asked(device, grid, copies, timers, run, workers, rounds, path, copies_from)
    if not _is_finished(settings, path) and path.with_suffix(".parts").exists():
        with _claimed(path) as parts:
            _goes_on(settings, parts)
    return settings, path


def _asked(device, grid, copies, timers, run, workers, rounds, path, copies_from) -> tuple[Settings, Path]:
    settings = _checked(device, grid, copies, timers, workers, rounds, copies_from)
    run = run or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{settings.grid}"
    return settings, Path(path) if path else paths.LOCAL / f"{run}.parquet"


def _is_finished(settings: Settings, path: Path) -> bool:
    """Whether `path` holds this run whole. Raises ValueError where it holds another one."""
    if not path.exists():
        return False
    table = results.read(path)
    _refuse_other_contents(table, settings, path)
    _refuse_other_versions(table, _versions(settings), path)
    here = machine.describe(machine.resolve_device(settings.device))
    for first in table.select(SAME_WHEN_FINISHED).group_by(SAME_WHEN_FINISHED).aggregate([]).to_pylist():
        _refuse_other_machine(first, here, path, SAME_WHEN_FINISHED)
    return True


def _checked(device, grid_name, copies, timers, workers, rounds, copies_from) -> Settings:
    place = machine.resolve_device(device)
    grid(grid_name, place.type)
    if copies_from:
        all_copies.load_from(copies_from)
    chosen = {}
    timers_here = ["wall"] if place.type == "cpu" else list(GPU_TIMERS)
    registry = list(all_copies.REGISTRY)
    everything = {"timers": timers_here, "copies": registry}
    if grid_name != "releases":
        everything["copies"] = [name for name in registry if not all_copies.releases.superseded(name)]
    for what, value, valid in (("copies", copies, registry), ("timers", timers, timers_here)):
        names = [value] if isinstance(value, str) else list(dict.fromkeys(value))
        chosen[what] = everything[what] if names == ["all"] else names
        unknown = [name for name in chosen[what] if name not in valid]
        if unknown or not chosen[what]:
            here = f" on {place.type}" if what == "timers" else ""
            raise ValueError(f"{what} {', '.join(unknown) or '(none)'}: valid{here} are all, {', '.join(valid)}")
    for what, value in (("workers", workers), ("rounds", rounds)):
        if value not in range(1, MOST[what] + 1):
            raise ValueError(f"{what} = {value!r} must be a whole number from 1 to {MOST[what]}")
    return Settings(str(place), grid_name, chosen["copies"], chosen["timers"], workers, rounds, copies_from)


def _measure_parts(settings: Settings, parts: Path) -> None:
    """Measure every case that has no part yet."""
    cases, versions = grid(settings.grid, _type(settings.device)), _versions(settings)
    done = _finished(versions, cases, parts)
    if len(done) == len(cases):
        return
    workers: list[Worker] = []
    alike: dict = {"code": settings.code}
    try:
        for number in range(settings.workers):
            with put_off():  # a process that has begun is one that is stopped
                workers.append(Worker(number, settings, versions, alike))
        with _keeping(parts):
            about, *_ = [worker.greet() for worker in workers]
        first = next(iter(done.values()), about | {"run_id": uuid.uuid4().hex[:12]})
        _refuse_other_machine(first, about, parts)
        common = {**about, "utc": first["utc"], "run_id": first["run_id"], "grid": settings.grid}
        common["schema_version"] = results.SCHEMA_VERSION
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        total, ended = (len(some) * len(workers) for some in (cases, done))
        with _keeping(parts), tqdm(total=total, initial=ended, bar_format=form, mininterval=0.5) as bar:
            again = f"the same with RUN={parts.stem}" if parts.parent == paths.LOCAL else "the same command"
            bar.write(f"kvnb: run {parts.stem}; if it is cut short, {again} goes on", file=sys.stderr)
            for number, case in enumerate(cases):
                if number in done:
                    continue
                rows = _once([row for worker in workers for row in worker.measure(number, case, bar)])
                rows = [{**row, **common, "copy_version": versions[row["copy"]]} for row in rows]
                results.write(rows, parts / f"{number:04d}.parquet")
        for worker in workers:
            worker.stop()
    finally:
        for worker in workers:
            worker.stop(at_once=True)


def _versions(settings: Settings) -> dict[str, str]:
    """Of this process's copies. A run takes them once: a source that is saved meanwhile is not what it measures."""
    return {name: all_copies.REGISTRY[name].version for name in settings.copies}


def _finished(versions: dict[str, str], cases: list[Case], parts: Path) -> dict[int, dict]:
    """Number and first row of every case that has its part. Raises RunFileError for a part that is damaged, not this
    run's, or measured with another version of a copy."""
    done: dict[int, dict] = {}
    for part in sorted(parts.glob("*.parquet")):
        table = results.read(part)
        number = int(part.stem) if part.stem.isdecimal() else len(cases)
        held = table.select(CASE_FIELDS).group_by(CASE_FIELDS).aggregate([]).to_pylist()
        if [case.fields() for case in cases[number : number + 1]] != held:
            raise results.RunFileError(f"{part} is no part of this run: `rm {part}`, and the same call goes on")
        row = table.slice(0, 1).to_pylist()[0]
        _refuse_other_machine(next(iter(done.values()), row), row, parts)
        _refuse_other_versions(table, versions, parts)
        done[number] = row
    return done


def _refuse_other_contents(table: pa.Table, settings: Settings, path: Path) -> None:
    """A finished run stands for a call that asks for no more than it holds.

    Rows that were not measured are of worker or round -1; where there are no others, any number of them would be.
    """
    device = _type(settings.device)
    cases = grid(settings.grid, device)
    timers = {timer for case in cases for timer, _ in timings(settings.grid, case, device)}
    workers, rounds = ({*table[name].unique().to_pylist()} - {-1} for name in ("worker", "round"))
    held_cases = table.select(CASE_FIELDS).group_by(CASE_FIELDS).aggregate([]).to_pylist()
    for name, wanted, held in (
        ("grid", [settings.grid], table["grid"].unique().to_pylist()),
        ("device", [device], ["cuda" if gpu else "cpu" for gpu in table["gpu"].unique().to_pylist()]),
        ("copy", settings.copies, table["copy"].unique().to_pylist()),
        ("timer", sorted(timers & set(settings.timers)), table["timer"].unique().to_pylist()),
        ("worker", range(settings.workers), workers or range(settings.workers)),
        ("round", range(settings.rounds), rounds or range(settings.rounds)),
        ("case", cases, [Case(**fields) for fields in held_cases]),
    ):
        missing = [str(one) for one in wanted if one not in held]
        if missing:
            lacks = ", ".join(missing[:3]) + f" and {len(missing) - 3} more" * (len(missing) > 3)
            raise ValueError(f"{path} is a finished run without {name} {lacks}; {INSTEAD}")


def _type(device: str) -> str:
    return device.split(":")[0]


def _refuse_other_versions(table: pa.Table, versions: dict[str, str], place: Path) -> None:
    for copy, version in {*zip(table["copy"].to_pylist(), table["copy_version"].to_pylist(), strict=True)}:
        if copy in versions:
            _refuse_other(f"version of {copy}", version, versions[copy], place)


def _refuse_other_machine(first: dict, here: dict, place: Path, names: Iterable[str] = results.SAME_MACHINE) -> None:
    for name in names:
        _refuse_other(name, first[name], here[name], place)


def _refuse_other(name: str, first: object, here: object, place: Path) -> None:
    """`place` is a run's folder of parts, or its finished file."""
    if first != here:
        parts = place.suffix == ".parts"
        fix = "resume it there, choose another run name, or delete that folder" if parts else INSTEAD
        raise ValueError(f"{place} was measured with {name} {first!r}, this is {here!r}: {fix}")


def _once(rows: list[dict]) -> list[dict]:
    """Rows without what every worker found alike: a reason that is the same everywhere is one row."""
    said, kept = {}, []
    for row in rows:
        if row["status"] != "unsupported" or said.get(_key(row), row["reason"]) != row["reason"]:
            kept.append(row)
        elif _key(row) not in said:
            said[_key(row)] = row["reason"]
            kept.append({**row, "worker": -1})
    return kept


def _publish(parts: Path, path: Path) -> None:
    tables = [results.read(part) for part in sorted(parts.glob("*.parquet"))]
    with _keeping(parts):
        os.replace(results.write(pa.concat_tables(tables), parts / "published"), path)


@contextmanager
def _keeping(parts: Path) -> Iterator[None]:
    """Around what writes measurements: where that fails, say that finished ones are not lost."""
    try:
        yield
    except (OSError, results.RunFileError) as error:
        kept = f"{len([*parts.glob('*.parquet')])} finished cases stay in {parts}, and the same run name goes on there"
        raise results.RunFileError(f"{error}; {kept}") from error


class Worker:
    """A process that measures, and this end of the pipe to it. One that died is replaced at once.

    `alike`: what all processes of a run find the same; the first to say it fills it in.
    """

    def __init__(self, number: int, settings: Settings, versions: dict[str, str], alike: dict) -> None:
        self.number, self.settings, self._versions, self._alike = number, settings, versions, alike
        self._start()

    def _start(self) -> None:
        context = mp.get_context(START)
        with put_off():  # it would never hear what it is to do, and say so
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self.settings), daemon=True)
            resource_tracker.ensure_running()  # now, as its own start would let Ctrl-C through again
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process keeps: see _serve
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._greeted, self._hung, self._step = False, False, "start"

    def greet(self) -> dict:
        """Wait until the process is ready; returns the machine columns that it found.

        Raises RunFileError where it has another version of a copy than the run, other code, or another machine.
        """
        if not self._greeted:
            hint = "; a script that calls kvnb.measure() does so under `if __name__ == '__main__':`"
            try:
                kind, self.machine, *versions = self._receive()
                if kind == "loads":
                    self._step, hint = f"copies_from {self.machine}", ""
                    kind, self.machine, *versions = self._receive()
            except EOFError:
                raise RuntimeError(f"worker {self.number} died at its {self._step} ({self._death}){hint}") from None
            if kind == "failed":
                raise RuntimeError(f"worker {self.number} could not start: {self.machine}")
            self._refuse_edits(*versions)
            self._greeted = True
        return self.machine

    def _refuse_edits(self, versions: dict[str, str], code: str) -> None:
        """Raise RunFileError where the process found other sources, packages or hardware than the run's first one."""
        instead = "undo that, or measure it as a run of another name"
        if edited := [name for name, version in versions.items() if version != self._versions[name]]:
            raise results.RunFileError(f"a source of {', '.join(edited)} was edited since the run began: {instead}")
        for name, found in {"code": code, **{name: self.machine[name] for name in SAME_WHEN_FINISHED}}.items():
            first = self._alike.setdefault(name, found)
            if found != first:
                told = f"{name} was {first!r} when the run began and is {found!r} in worker {self.number}"
                raise results.RunFileError(f"{told}: {instead}")

    def measure(self, number: int, case: Case, bar: tqdm) -> list[dict]:
        """Rows of a case. What kills the process or its device becomes error rows; the rest is tried anew.

        Raises RuntimeError where the process dies twice before it says what it would measure.
        """
        lost: list[dict] = []
        skip: set[tuple | str] = set()  # cells, and copies that took the process along when they were asked
        early = 0
        progress = bar.n
        while True:
            self.greet()
            rows, failed = self._try(case, number, skip, bar)
            if rows is not None:
                bar.update(max(0.0, min(progress + 1, bar.total) - bar.n))
                return [{**row, "worker": self.number} for row in [*lost, *rows]]
            early += not failed  # it may have been killed while others measured
            if early > 1:
                raise RuntimeError(f"worker {self.number} died twice before its first cell of {case}: {self._death}")
            lost += [row for row in failed if _key(row) not in skip]
            skip |= {row["copy"] if self._step == ASKING else _key(row) for row in failed}
            self._replace()

    def _try(self, case: Case, number: int, skip: set, bar: tqdm) -> tuple[list[dict] | None, list[dict]]:
        """(rows, nothing), or (None, rows of what took the process along: a cell, a copy's, or all while inputs are
        made)."""
        at: list[dict] = []
        try:
            with suppress(OSError):  # it is gone, as we shall hear
                self._pipe.send((case, number * self.settings.workers + self.number, skip))
            while True:
                kind, *content = self._receive()
                if kind == "visit":
                    self._step, at, share = content
                    bar.set_description(f"{case}, {at[0]['copy']}" if at else str(case), refresh=False)
                    bar.update(max(0.0, min(share, bar.total - bar.n - 1e-6)))
                elif kind == "rows":
                    return content[0], []
                else:
                    return None, content
        except EOFError:
            died = {"status": "error", "reason": f"the worker process died ({self._death})"}
            return None, [row | died for row in at]

    def _receive(self) -> tuple:
        """The process's next message. Raises EOFError where it died, or said nothing for STEP_SECONDS and was killed.

        The wait has ten parts: for however long Ctrl-Z stopped it and us, no more than one of them passed.
        """
        with suppress(EOFError, OSError):  # the other end is gone, between two messages or within one
            if any(self._pipe.poll(STEP_SECONDS / 10) for _ in range(10)):
                return self._pipe.recv()
            self._hung = True
            self._process.kill()
        self._process.join()
        raise EOFError

    @property
    def _death(self) -> str:
        if self._hung:
            return f"killed: its {self._step} took longer than {STEP_SECONDS} s"
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return f"exit code {code}: killed, as by a system out of memory"
        return f"exit code {code}"

    def _replace(self) -> None:
        self.stop()
        self._start()

    def stop(self, at_once: bool = False) -> None:
        """End the process: it leaves when the pipe closes, and is killed if it does not, is only starting, or is to end
        `at_once`."""
        if self._greeted and not at_once:
            self._pipe.close()
            self._process.join(STOP_SECONDS)
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in ("copy", *results.CELL_FIELDS))


def _serve(pipe, settings: Settings) -> None:
    """The worker process: answers (case, seed, skip) with rows until the pipe closes.

    Ctrl-C reaches the whole group of processes, and is the parent's to handle: a worker leaves when its pipe closes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    import torch

    from kvnb.bench import timing

    def tell(*message: object) -> None:
        try:
            pipe.send(message)
        except ConnectionError:
            sys.exit()

    def visit(case: Case, stage: str, cells: list, share: float = 0.0) -> None:
        tell("visit", stage, [timing.row_of(cell, case) for cell in cells], share)

    try:
        if settings.copies_from:
            tell("loads", settings.copies_from)
            all_copies.load_from(settings.copies_from)
        versions = _versions(settings)
        device = torch.device(settings.device)
        bench = timing.Gpu(device) if device.type == "cuda" else timing.Cpu()
        about, code = machine.describe(device), machine.code()
    except Exception as error:  # noqa: BLE001  the parent raises it, with the worker's number
        tell("failed", f"{type(error).__name__}: {error}")
        return
    tell("hello", about, versions, code)
    while True:
        try:
            case, seed, skip = pipe.recv()
        except (EOFError, ConnectionError):
            return
        cells, rows = cells_of(case, settings, skip, partial(visit, case, ASKING))
        visit(case, "inputs", cells)
        share = 1 / max(1, len(cells) * (2 + settings.rounds))

        def on_visit(cell, stage, case=case, share=share) -> None:
            visit(case, stage, [cell], share)

        try:
            rows += timing.measure_case(bench, case, cells, rounds=settings.rounds, seed=seed, on_visit=on_visit)
        except timing.Poisoned as lost:
            tell("poisoned", lost.row)
            return
        if device.type == "cuda":
            _make_room()
        tell("rows", rows)


def _make_room() -> None:
    """Give back what a case held on the GPU, before the next worker has its turn.

    What is garbage goes first. The rest, torch and its compiler above all, is then looked through never again: that
    took longer than timing some cases.
    """
    import torch

    gc.collect()
    gc.freeze()
    torch.cuda.empty_cache()


def _die_with_parent() -> None:
    """Have the system kill this process when its parent dies: one whose copy hangs would never see its pipe close."""
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0):
        print("kvnb: should this run be killed while a copy hangs, end its worker by hand", file=sys.stderr)
    elif os.getppid() != mp.parent_process().pid:  # it died before
        os._exit(1)


def cells_of(
    case: Case, settings: Settings, skip: Collection = (), on_copy: Callable[[list], None] = lambda cells: None
):
    """(cells to time, rows that say why the others are not) of one case, without copies and cells (_key) in `skip`.

    Calls `on_copy` with what is to be asked before a copy is asked about it: should that end the process, the parent
    knows whose doing it was.
    """
    from kvnb.bench.timing import Cell, reason_of, row_of

    device = _type(settings.device)
    cells, rows = [], []
    for name in settings.copies:
        copy = all_copies.REGISTRY[name]
        every_policy = settings.grid == "padding" and copy.family != "limit" and name != "kvnb.again"
        policies = copy.policies if every_policy else copy.policies[:1]
        visits = product(policies, timings(settings.grid, case, device))
        writes = [Cell(copy, policy, "write", *visit) for policy, visit in visits if visit[0] in settings.timers]
        if not writes or name in skip:
            continue
        on_copy(writes)
        for write in writes:
            try:
                reason = copy.reason_against(case, write.policy, write.timer, device)
                step = write.state == "produced" and write.timer in ("graph", "eager", "wall") and not reason
                step = step and copy.steps(case, write.policy)
            except Exception as error:  # noqa: BLE001  as where a cell of it is timed
                rows.append(row_of(write, case, status="error", reason=reason_of(error)))
                continue
            if (device, settings.grid, copy.family) == ("cpu", "quick", "compile"):
                reason = "on a CPU in grid full only: compiling takes longer than all the rest of grid quick"
            if reason:
                rows.append(row_of(write, case, status="unsupported", reason=reason))
            else:
                cells += [write, replace(write, part="step")] if step else [write]
    rows = [row for row in rows if _key(row) not in skip]
    return [cell for cell in cells if _key(row_of(cell, case)) not in skip], rows
