"""A run: worker processes take turns at every case; each finished case is on disk before the next begins.

Workers are separate processes with allocations of their own, alive side by side and measuring one at a time. The
parent makes no CUDA context. A case's rows are written to `<run>.parts/` when every worker has had its turn; a killed
run goes on from there, on the same machine. A worker that dies costs the cell it was at.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout
from tqdm import tqdm

from kvnb import copies as all_copies
from kvnb import machine, paths
from kvnb.bench import results
from kvnb.copies.base import GPU_TIMERS
from kvnb.problem.case import Case, grid, timings

STOP_SECONDS = 10  # for a worker to end by itself
SAME_MACHINE = ("gpu_uuid", "cpu", "torch", "kvnb_commit")  # what a resumed run must share with its first part


@dataclass(frozen=True)
class Settings:
    """What a run measures; a resumed run must ask for the same."""

    device: str
    grid: str
    copies: list[str]
    timers: list[str]
    workers: int
    rounds: int
    copies_from: str | None

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)


def measure(
    device: str = "auto",
    grid: str = "quick",
    copies: str | Iterable[str] = "all",
    timers: str | Iterable[str] = "all",
    run: str | None = None,
    workers: int = 3,
    rounds: int = 10,
    path: str | Path | None = None,
    copies_from: str | None = None,
) -> Path:
    """Measure a grid and return the path of the run file (`data/local/<run>.parquet`, or `path`).

    `run` None makes a name of the time and the grid. A run that exists is complete and returned as it is; one that was
    cut off goes on where it stopped. Raises ValueError for a device, grid, copy or timer that does not exist (naming
    those that do), and where an earlier run of that name asked for something else or ran on another machine.
    """
    settings, path = planned(device, grid, copies, timers, run, workers, rounds, path, copies_from)
    if path.exists():
        return path
    parts = path.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(parts / "lock", timeout=0):
            _measure_parts(settings, parts)
            _publish(parts, path)
    except Timeout:
        raise ValueError(f"another process measures into {path}; wait for it or choose another run name") from None
    shutil.rmtree(parts)
    return path


def planned(device, grid, copies, timers, run, workers, rounds, path=None, copies_from=None) -> tuple[Settings, Path]:
    """What `measure` would do with these arguments, and its run file; writes nothing. Raises ValueError as it does."""
    settings = _checked(device, grid, copies, timers, workers, rounds, copies_from)
    run = run or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{settings.grid}"
    path = Path(path) if path else paths.LOCAL / f"{run}.parquet"
    asked = path.with_suffix(".parts") / "settings.json"
    if path.exists():
        _refuse_other_contents(results.read(path), settings, path)
    elif asked.exists() and asked.read_text() != settings.text:
        raise ValueError(
            f"{asked.parent} holds a run that was cut off and asked for {asked.read_text()}; resume it with these, "
            "choose another run name, or delete that folder"
        )
    return settings, path


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
        names = [value] if isinstance(value, str) else list(value)
        chosen[what] = everything[what] if names == ["all"] else names
        unknown = [name for name in chosen[what] if name not in valid]
        if unknown or not chosen[what]:
            here = f" on {place.type}" if what == "timers" else ""
            raise ValueError(f"{what} {', '.join(unknown) or '(none)'}: valid{here} are all, {', '.join(valid)}")
    for what, value in (("workers", workers), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{what} = {value} must be at least 1")
    return Settings(str(place), grid_name, chosen["copies"], chosen["timers"], workers, rounds, copies_from)


def _measure_parts(settings: Settings, parts: Path) -> None:
    """Measure every case that has no part yet."""
    (parts / "settings.json").write_text(settings.text)
    cases = grid(settings.grid, _type(settings.device))
    done = {int(part.stem) for part in parts.glob("*.parquet")}
    workers = [Worker(number, settings) for number in range(settings.workers)]
    try:
        about = workers[0].greet()
        first = _first_row(parts)
        run_id, utc = (first["run_id"], first["utc"]) if first else (uuid.uuid4().hex[:12], about["utc"])
        if first:
            _refuse_other_machine(first, about, parts)
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        with tqdm(
            total=len(cases) * len(workers), initial=len(done) * len(workers), bar_format=form, mininterval=0.5
        ) as bar:
            for number, case in enumerate(cases):
                if number in done:
                    continue
                rows = [row for worker in workers for row in worker.measure(number, case, bar)]
                common = {
                    **about,
                    "utc": utc,
                    "run_id": run_id,
                    "schema_version": results.SCHEMA_VERSION,
                    "grid": settings.grid,
                }
                results.write([{**row, **common} for row in _once(rows)], parts / f"{number:04d}.parquet")
    finally:
        for worker in workers:
            worker.stop()


def _refuse_other_contents(table: pa.Table, settings: Settings, path: Path) -> None:
    """A finished run stands for a call that asks for no more than it holds."""
    for name, wanted in (("grid", {settings.grid}), ("copy", set(settings.copies))):
        lacks = ", ".join(sorted(wanted - set(table[name].to_pylist())))
        if lacks:
            raise ValueError(f"{path} is a finished run without {name} {lacks}; choose another run name")


def _type(device: str) -> str:
    return device.split(":")[0]


def _first_row(parts: Path) -> dict | None:
    for part in sorted(parts.glob("*.parquet")):
        return results.read(part).slice(0, 1).to_pylist()[0]
    return None


def _refuse_other_machine(first: dict, about: dict, parts: Path) -> None:
    for name in SAME_MACHINE:
        if first[name] != about[name]:
            raise ValueError(
                f"{parts} was begun with {name} {first[name]!r}, this is {about[name]!r}: resume it there, choose "
                "another run name, or delete that folder"
            )


def _once(rows: list[dict]) -> list[dict]:
    """Rows without what every worker found alike: a reason that is the same everywhere is one row."""
    seen, kept = set(), []
    for row in rows:
        key = tuple(row[name] for name in ("copy", *results.CELL_FIELDS, "status", "reason"))
        if row["status"] == "unsupported":
            if key in seen:
                continue
            seen.add(key)
            row = {**row, "worker": -1}
        kept.append(row)
    return kept


def _publish(parts: Path, path: Path) -> None:
    tables = [results.read(part) for part in sorted(parts.glob("*.parquet"))]
    results.write(pa.concat_tables(tables), path)


class Worker:
    """A process that measures, and this end of the pipe to it. One that died is replaced at once."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number, self.settings = number, settings
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.settings), daemon=True)
        self._process.start()
        theirs.close()
        self._greeted = False

    def greet(self) -> dict:
        """Wait until the process is ready; returns the machine columns that it found."""
        if not self._greeted:
            try:
                kind, self.machine = self._pipe.recv()
            except (EOFError, ConnectionError):
                self._process.join()
                raise RuntimeError(
                    f"worker {self.number} died while it started (exit code {self._process.exitcode}); a script that "
                    "calls kvnb.measure() does so under `if __name__ == '__main__':`"
                ) from None
            if kind == "failed":
                raise RuntimeError(f"worker {self.number} could not start: {self.machine}")
            self._greeted = True
        return self.machine

    def measure(self, number: int, case: Case, bar: tqdm) -> list[dict]:
        """Rows of a case. A cell that kills the process or its device becomes an error row; the rest is tried anew."""
        lost: list[dict] = []
        skip: set[tuple] = set()
        while True:
            progress = bar.n
            if self._greeted and not self._process.is_alive():  # killed while others measured
                self.stop()
                self._start()
            self.greet()
            self._pipe.send((case, number * self.settings.workers + self.number, skip))
            rows, failed = self._receive(case, bar)
            if failed is None:
                bar.update(max(0.0, min(progress + 1, bar.total) - bar.n))
                return [{**row, "worker": self.number} for row in [*lost, *rows]]
            lost.append(failed)
            skip.add(_key(failed))
            self.stop()
            self._start()

    def _receive(self, case: Case, bar: tqdm) -> tuple[list[dict], dict | None]:
        """(rows, None), or (nothing, the row of the cell that took the process along)."""
        at = None
        while True:
            try:
                kind, *content = self._pipe.recv()
            except EOFError:
                self._process.join()
                if at is None:
                    raise RuntimeError(
                        f"worker {self.number} died before its first cell (exit code {self._process.exitcode})"
                    ) from None
                return [], {
                    **at,
                    "status": "error",
                    "reason": f"the worker process died (exit code {self._process.exitcode})",
                }
            if kind == "visit":
                at, share = content
                bar.set_description(f"{case}, {at['copy']}", refresh=False)
                bar.update(max(0.0, min(share, bar.total - bar.n - 1e-6)))
            elif kind == "rows":
                return content[0], None
            else:
                return [], content[0]

    def stop(self) -> None:
        """End the process: it leaves when the pipe closes, and is made to if it does not."""
        self._pipe.close()
        self._process.join(STOP_SECONDS)
        self._process.terminate()
        self._process.join()


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in ("copy", *results.CELL_FIELDS))


def _serve(pipe, settings: Settings) -> None:
    """The worker process: answers (case, seed, skip) with rows until the pipe closes."""
    import torch

    from kvnb.bench import timing

    try:
        if settings.copies_from:
            all_copies.load_from(settings.copies_from)
        device = torch.device(settings.device)
        bench = timing.Gpu(device) if device.type == "cuda" else timing.Cpu()
        about = machine.describe(device)
    except Exception as error:  # noqa: BLE001  the parent raises it, with the worker's number
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("hello", about))
    while True:
        try:
            case, seed, skip = pipe.recv()
        except EOFError:
            return
        cells, rows = cells_of(case, settings)
        cells = [cell for cell in cells if _key(timing.row_of(cell, case)) not in skip]
        visits = max(1, len(cells) * (2 + settings.rounds))

        def on_visit(cell, stage, case=case, visits=visits) -> None:
            pipe.send(("visit", timing.row_of(cell, case), 1 / visits))

        try:
            rows += timing.measure_case(bench, case, cells, rounds=settings.rounds, seed=seed, on_visit=on_visit)
        except timing.Poisoned as lost:
            pipe.send(("poisoned", lost.row))
            return
        pipe.send(("rows", rows))
        if device.type == "cuda":
            torch.cuda.empty_cache()


def cells_of(case: Case, settings: Settings):
    """(cells to time, rows that say why the others are not) of one case."""
    from kvnb.bench.timing import Cell, row_of

    device = _type(settings.device)
    cells, rows = [], []
    for name in settings.copies:
        copy = all_copies.REGISTRY[name]
        every_policy = settings.grid == "padding" and copy.family != "limit"
        policies = copy.policies if every_policy else copy.policies[:1]
        for policy, (timer, state) in product(policies, timings(settings.grid, case, device)):
            if timer not in settings.timers:
                continue
            write = Cell(copy, policy, "write", timer, state)
            reason = copy.reason_against(case, policy, timer, device)
            if (device, settings.grid, copy.family) == ("cpu", "quick", "compile"):
                reason = "on a CPU in grid full only: compiling takes longer than all the rest of grid quick"
            if reason:
                rows.append(row_of(write, case, status="unsupported", reason=reason))
                continue
            cells.append(write)
            if copy.steps(case, policy) and state == "produced" and timer in ("graph", "eager", "wall"):
                cells.append(Cell(copy, policy, "step", timer, state))
    return cells, rows
