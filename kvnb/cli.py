"""The command line behind the Makefile. Wrong parameters are refused, with the valid ones, before a kernel starts."""

from __future__ import annotations

import errno
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnb import paths
from kvnb.report import parameters
from kvnb.stopping import stoppable

if TYPE_CHECKING:
    from kvnb.report.execute import Outcome


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@contextmanager
def refusing() -> Iterator[None]:
    """Around what looks at the user's words: a ValueError becomes its message and exit code 2, without a traceback."""
    try:
        yield
    except ValueError as error:
        print(f"kvnb: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _say(*lines: object, result: Path | None = None) -> None:
    """Print to stdout, the one place that does. Where that cannot be, it is said, and where `result` is, with exit
    code 1; of a closed pipe, nothing is: typer ends the command then."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python, as it ends, writes it again
        there = f"; {result} is written" if result else ""
        print(f"kvnb: stdout cannot be written ({error}){there}", file=sys.stderr)
        raise typer.Exit(1) from error


@contextmanager
def _leaving_out(what: str) -> Iterator[None]:
    """Around what a report can do without: a ValueError is said, and costs no report."""
    try:
        yield
    except ValueError as error:
        print(f"kvnb: {what} left out: {error}", file=sys.stderr)


def measuring(*left_out: str, **defaults: object) -> Callable:
    """Makes command(values) one of the app that takes what 02_measure takes, by the same table, checked before."""
    options = []
    for row in parameters.TABLES["02_measure"]:
        default = defaults.get(row.name, row.default)
        kind = int if isinstance(default, int) else str if default else str | None
        option = Annotated[kind, typer.Option(help=row.help, metavar="NAME,NAME" if row.several else None)]
        options.append(inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option))

    def decorate(command: Callable) -> Callable:
        def checked(**values: object) -> None:
            with refusing():
                _check(values)
            command(values)

        checked.__signature__ = inspect.Signature([option for option in options if option.name not in left_out])
        return app.command(command.__name__, help=command.__doc__)(checked)

    return decorate


def _check(values: dict) -> None:
    """Split typed lists of names. Raises ValueError for a wrong value or an absent device."""
    for name in {"copies", "timers"} & values.keys():
        if values[name] != "all":
            values[name] = [part.strip() for part in values[name].split(",")]
    parameters.check("02_measure", values)
    from kvnb import machine

    machine.resolve_device(values["device"])


def _name(values: dict, name: str = "") -> str:
    """The run's name as the user has it, or `name`, or one of now."""
    values["run"] = values["run"] or name or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{values['grid']}"
    return values["run"]


def _execute(name: str, values: dict, folder: Path) -> Outcome:
    """`execute`, and how long it took, on stderr: a report takes minutes."""
    from kvnb.report.execute import execute

    start = time.monotonic()
    outcome = execute(name, values, folder)
    ended = "failed after" if outcome.failure else "took"
    print(f"kvnb: {name} {ended} {time.monotonic() - start:.0f} s", file=sys.stderr)
    return outcome


@contextmanager
def _writing(folder: Path, *files: str) -> Iterator[None]:
    """Around what writes a report's folder, `files` beside its pages: an earlier report goes. Before it does, another
    process that writes there is named, with exit code 2, and so is what kernels or pages lack; where there is no room,
    it is said, with exit code 1; signals leave no report that looks finished."""
    from kvnb.report import pages
    from kvnb.report.execute import private_folder
    from kvnb.report.files import claimed

    with stoppable(), ExitStack() as stack:
        with refusing(), private_folder():  # each notebook makes one: known before an earlier report goes
            pages.ready()
            stack.enter_context(claimed(folder))
        try:
            pages.clear(folder, *files)
            yield
        except OSError as error:
            if error.errno == errno.EPIPE or not _is_in(folder, error.filename):  # written to elsewhere
                raise
            print(f"kvnb: {folder} cannot be written ({error}): make room there, and begin again", file=sys.stderr)
            raise typer.Exit(1) from error


def _is_in(folder: Path, name: str | None) -> bool:
    """Whether a system's error can be of a file in `folder`: one that says no name is of a file open already."""
    return name is None or Path(name).is_relative_to(folder)


def _from_root(path: Path | str) -> str:
    """A path as notebooks of a report take it: they run in the repository's root."""
    return Path(os.path.relpath(path, paths.ROOT)).as_posix()


@measuring()
def report(values: dict) -> None:
    """Run the notebooks here and write reports/<run>/index.html, recorded runs beside the live one."""
    with refusing():
        if values["run"] == "latest" or (paths.RECORDED / (values["run"] or "?")).is_dir():
            raise ValueError(f"run: reports/{values['run']} is kept for a link or a record; choose another name")
    from kvnb.bench import run

    with refusing():
        run.planned(**values)
    name = _name(values)
    if values["copies_from"]:
        values["copies_from"] = _from_root(values["copies_from"])
    with _writing(folder := paths.REPORTS / name):
        print(f"kvnb: run {name}; its report goes to {_from_root(folder)}", file=sys.stderr)
        told = _report(name, values, folder)
    _tell(*told)


def _report(name: str, values: dict, folder: Path) -> tuple:
    """Write the report; what _tell takes."""
    from kvnb.report import answers, null_block, pages

    recorded, padded = _recorded(answers.load), _recorded(null_block.load, "padding")
    releases = _recorded(answers.load, "releases")
    (folder / ".gitignore").write_text("*\n")  # yours, not the project's
    outcomes = [_execute("01_copies", {}, folder), _execute("02_measure", values, folder)]
    mine = [path for path in [paths.LOCAL / f"{name}.parquet"] if path.is_file()]
    padded, releases = ([*mine * (values["grid"] == grid), *theirs]
                        for grid, theirs in (("padding", padded), ("releases", releases)))  # fmt: skip
    runs = [*mine * (values["grid"] != "padding"), *recorded]
    outcomes.append(_execute("03_compare", {"runs": [_from_root(path) for path in runs] or "newest"}, folder))
    reserve, padded = _null_block(padded, folder, device=values["device"])
    outcomes += [reserve, *_by_release(releases, folder), *_two_runs(None, mine, folder)]
    index = pages.report(folder, outcomes, runs, releases, padded)
    if not any(outcome.failure for outcome in outcomes):
        _lead_to(name)
    return index, outcomes, runs, padded


def _lead_to(name: str) -> None:
    """Make reports/latest a link to this report; where that cannot be, it is said, and costs no report."""
    latest, fresh = paths.REPORTS / "latest", paths.REPORTS / f".latest.{os.getpid()}"
    try:
        fresh.symlink_to(name)
        os.replace(fresh, latest)
    except OSError as error:  # a folder is there, or the file system has no links
        print(f"kvnb: {latest} does not lead to this report ({error.strerror}): move it away", file=sys.stderr)
        fresh.unlink(missing_ok=True)


def _recorded(load: Callable[[Path], object], *grids: str) -> list[Path]:
    """`answers.recorded`, less what `load` refuses: known before anything is measured, which it shall not cost."""
    from kvnb.report import answers

    sound = []
    for path in answers.recorded(*grids).values():
        with _leaving_out("a recorded run"):
            load(path)
            sound.append(path)
    return sound


@app.command()
def render(gpu: Annotated[str | None, typer.Option(help="one folder of data/recorded")] = None) -> None:
    """Render the recorded runs into reports/<gpu>/: needs no GPU, writes the same bytes every time."""
    from kvnb.bench import results
    from kvnb.problem.case import GRIDS
    from kvnb.report import answers

    with refusing():
        recorded = answers.recorded()
        if not recorded:
            raise ValueError("no run is recorded yet; `make record` measures one on a GPU")
        if gpu is not None and gpu not in recorded:
            raise ValueError(f"gpu: {parameters.unknown(gpu, recorded)}")
        for name in [gpu] if gpu else recorded:
            for path in (path for grid in GRIDS for path in recorded[name].parent.glob(f"????-??-??_{grid}_*.parquet")):
                results.read(path)  # a damaged one is no reason to overwrite what was rendered of a sound one
    for name in [gpu] if gpu else recorded:
        with _writing(folder := paths.REPORTS / name, "latency.png"):
            told = _render(name, recorded[name], folder)
        _tell(*told)


def _render(name: str, recorded: Path, folder: Path) -> tuple:
    """As _report."""
    from kvnb.report import answers, pages

    outcomes = [_execute("03_compare", {"runs": [_from_root(recorded)]}, folder)]
    padded, releases = ([path for gpu, path in answers.recorded(grid).items() if gpu == name]
                        for grid in ("padding", "releases"))  # fmt: skip
    reserve, padded = _null_block(padded, folder, live="no")
    timers = _execute("06_timers", {"run": _from_root(recorded), "live": "no"}, folder)
    alike = [*recorded.parent.glob(f"????-??-??_{recorded.stem.split('_')[1]}_*.parquet")]
    outcomes += [reserve, *_by_release(releases, folder), timers, *_two_runs(alike, [recorded], folder)]
    pages.figure(folder, recorded)
    return pages.report(folder, outcomes, [recorded], releases, padded), outcomes, [recorded], padded


def _null_block(runs: list[Path], folder: Path, **values: object) -> tuple[Outcome, list[Path]]:
    """04_null_block on runs of grid `padding`, or on none; and these runs with what it measured itself."""
    from kvnb.report import null_block

    given = {"runs": [_from_root(path) for path in runs] or "newest"}
    outcome = _execute("04_null_block", given | values, folder)
    return outcome, [*null_block.measured_in(outcome.path), *runs]


def _by_release(runs: list[Path], folder: Path) -> list[Outcome]:
    """05_releases on runs of grid `releases`, where there are any."""
    return [_execute("05_releases", {"runs": [_from_root(path) for path in runs]}, folder)] if runs else []


def _two_runs(files: list[Path] | None, newest: list[Path], folder: Path) -> list[Outcome]:
    """07_runs on the two newest of these files (None: all there are) that are of one grid and GPU, if `newest` is B."""
    from kvnb.report import compare

    asked = []
    with _leaving_out("07_runs"):  # an older run that will not do is no reason to lose this report
        pair = compare.find(files=files) if newest else []
        if len(pair) == 2 and pair[1] in newest:
            compare.Comparison(*pair)
            asked.append(dict(zip("ab", map(_from_root, pair))))
    return [_execute("07_runs", values, folder) for values in asked]


def _tell(index: Path, outcomes: list, runs: list[Path], padded: list[Path]) -> None:
    """Say the verdicts, what failed, and where the report is. Exit code 1 where a notebook failed."""
    from kvnb.report import answers, null_block

    lines = []
    for path in runs:
        run = answers.load(path)
        told = [] if paths.RECORDED in path.resolve().parents else answers.sentences(run)  # of this machine's run only
        lines += ["", answers.headline(run), *(f"  - {sentence}" for sentence in told)]
    for decision in null_block.decisions(padded):
        lines += ["", null_block.ASKED, *(f"  - {question}: {told}" for question, told in decision)]
    failed = [outcome for outcome in outcomes if outcome.failure]
    try:
        _say(*lines, f"\n{index}", result=index)
    finally:
        for outcome in failed:
            print(f"\n{outcome.name} failed:", *outcome.failure, sep="\n  ", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


@measuring()
def measure(values: dict) -> None:
    """Measure only: write data/local/<run>.parquet, or go on with the one that is there."""
    _name(values)
    _measure(values)


@measuring("copies", "timers", "copies_from", grid="full")
def record(values: dict) -> None:
    """Measure a record of this GPU for others: data/recorded/<gpu>/<date>_<grid>_<commit>.parquet."""
    from kvnb import machine

    facts = machine.describe(machine.resolve_device(values["device"]))
    with refusing():
        if not facts["gpu"]:
            raise ValueError("device: a record is a GPU's, and this one is a CPU; `kvnb measure` writes to data/local")
    if facts["dirty"]:
        print("kvnb: kvnb/ or csrc/ have uncommitted changes, and the record will say so", file=sys.stderr)
    standard = paths.record(values["grid"], facts)
    name = _name(values, standard.stem)
    _measure(values, standard.with_name(f"{name}.parquet"))


def _measure(values: dict, path: Path | None = None) -> None:
    from kvnb.bench import run

    with stoppable(), refusing():
        path = run.measure(**values, path=path)
    _say(path, result=path)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="a run file, as data/recorded/h200/X.parquet")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another, of any GPU, commit or torch")],
) -> None:
    """Compare two run files cell by cell: what differs between them, then the speedup of B over A."""
    from kvnb.report.compare import Comparison

    with refusing():
        told = Comparison(a, b).told()
    _say(told.removesuffix("\n"))


@app.command()
def goals(gpu: Annotated[str, typer.Option(help="one folder of data/recorded")] = "h200") -> None:
    """Print what our kernel has to reach, and what a GPU's newest recorded runs say of each goal."""
    from kvnb.report import answers, goals

    with refusing():
        runs = {grid: answers.recorded(grid) for grid in ("full", "releases")}
        if not any(gpu in found for found in runs.values()):
            raise ValueError(f"gpu: {parameters.unknown(gpu, sorted(set().union(*runs.values())))}")
        loaded = [answers.load(found[gpu]) for found in runs.values() if gpu in found]
    of = (f"{grid}: {_from_root(found[gpu]) if gpu in found else 'not recorded'}" for grid, found in runs.items())
    _say(*of, "", goals.told(goals.table(loaded)).to_string(index=False))


@app.command()
def releases(
    versions: Annotated[list[str] | None, typer.Argument(help="of vLLM, as 0.10.1; none: list what is cached")] = None,
    arch: Annotated[str | None, typer.Option(help="as sm_90; none: this GPU's")] = None,
    wheel: Annotated[Path | None, typer.Option(help="a wheel on disk, instead of PyPI's")] = None,
) -> None:
    """Take the copy kernel out of vLLM's wheels into the cache: each release is a copy `vllm==X` then. Needs no GPU."""
    from kvnb.copies import releases as shipped

    with refusing():
        if arch and not versions and not wheel:
            raise ValueError("arch: goes with a version or a wheel; without any of these, what is cached is listed")
        for release in shipped.fetch(versions or [], arch, wheel) if versions or wheel else shipped.cached():
            _say(shipped.line(release))
    if not shipped.cached():
        _say(f"no release is cached in {shipped.FOLDER}; for one: kvnb releases 0.33.0 --arch sm_90")
