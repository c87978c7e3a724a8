"""The command line behind the Makefile. Wrong parameters are refused, with the valid ones, before a kernel starts."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer

from kvnb import paths
from kvnb.report import parameters

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The paged KV-cache copy, measured.",
)


def _option(name: str, metavar: str = "TEXT"):
    parameter = next(row for row in parameters.TABLES["02_measure"] if row.name == name)
    return typer.Option(help=parameter.help, metavar=metavar, show_default=parameter.default is not None)


Device = Annotated[str, _option("device")]
Grid = Annotated[str, _option("grid")]
Copies = Annotated[str, _option("copies", "NAME,NAME")]
Timers = Annotated[str, _option("timers", "NAME,NAME")]
Run = Annotated[str | None, _option("run")]
Workers = Annotated[int, _option("workers", "N")]
Rounds = Annotated[int, _option("rounds", "N")]
CopiesFrom = Annotated[str | None, _option("copies_from", "FILE")]


def refusing(command: Callable) -> Callable:
    """A ValueError of ours is what the user typed wrong, or a file that will not do: its message, and exit code 2."""

    @wraps(command)
    def wrapped(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except ValueError as error:
            print(f"kvnb: {error}", file=sys.stderr)
            raise typer.Exit(2) from error

    return wrapped


def _checked(**values: object) -> dict[str, object]:
    """The parameters of 02_measure as it takes them. Raises ValueError for a wrong one or an absent device."""
    for name in ("copies", "timers"):
        if values[name] != "all":
            values[name] = [part.strip() for part in str(values[name]).split(",")]
    if values["copies_from"]:
        values["copies_from"] = _from_root(Path(str(values["copies_from"])))
    parameters.check("02_measure", values)
    from kvnb import machine

    machine.resolve_device(str(values["device"]))
    return values


def _from_root(path: Path) -> str:
    """A path as notebooks of a report take it: they run in the repository's root."""
    path = path.resolve()
    return path.relative_to(paths.ROOT).as_posix() if path.is_relative_to(paths.ROOT) else str(path)


@app.command()
@refusing
def report(
    device: Device = "auto",
    grid: Grid = "quick",
    copies: Copies = "all",
    timers: Timers = "all",
    run: Run = None,
    workers: Workers = 3,
    rounds: Rounds = 10,
    copies_from: CopiesFrom = None,
) -> None:
    """Run the notebooks here and write reports/<run>/index.html, recorded runs beside the live one."""
    name = run or f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}_{grid}"
    given = {"device": device, "grid": grid, "copies": copies, "timers": timers, "run": name}
    values = _checked(**given, workers=workers, rounds=rounds, copies_from=copies_from)
    if name == "latest" or (paths.RECORDED / name).is_dir():
        owner = "a link" if name == "latest" else "the recorded runs"
        raise ValueError(f"run: reports/{name} is kept for {owner}; choose another name")
    from kvnb.report import pages
    from kvnb.report.execute import execute

    folder = paths.REPORTS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")  # yours, not the project's
    outcomes = [execute("01_copies", {}, folder), execute("02_measure", values, folder)]
    runs = [path for path in (paths.LOCAL / f"{name}.parquet", *pages.recorded().values()) if path.is_file()]
    outcomes.append(execute("03_compare", {"runs": [_from_root(path) for path in runs] or "newest"}, folder))
    _publish(folder, outcomes, runs)


@app.command()
@refusing
def render(gpu: Annotated[str | None, typer.Option(help="one folder of data/recorded")] = None) -> None:
    """Render the recorded runs into reports/<gpu>/: needs no GPU, writes the same bytes every time."""
    from kvnb.report import pages
    from kvnb.report.execute import execute

    recorded = pages.recorded()
    if gpu is not None and gpu not in recorded:
        raise ValueError(f"gpu: {parameters.unknown(gpu, recorded or ['(no run is recorded yet)'])}")
    for name in [gpu] if gpu else recorded:
        folder = paths.REPORTS / name
        outcome = execute("03_compare", {"runs": [_from_root(recorded[name])]}, folder)
        pages.figure(folder, recorded[name])
        _publish(folder, [outcome], [recorded[name]], link=False)


def _publish(folder: Path, outcomes: list, runs: list[Path], link: bool = True) -> None:
    """Pages, index and the `latest` link; prints the verdicts. Exit code 1 where a notebook failed."""
    from kvnb.bench import results
    from kvnb.report import answers, pages

    index = pages.report(folder, outcomes, runs)
    if link:
        fresh = paths.REPORTS / f".latest.{os.getpid()}"
        fresh.symlink_to(folder.name)
        os.replace(fresh, paths.REPORTS / "latest")
    for path in runs:
        samples = results.load(path)
        print("", answers.headline(samples), *(f"  - {sentence}" for sentence in answers.sentences(samples)), sep="\n")
    failed = [outcome for outcome in outcomes if outcome.failure]
    for outcome in failed:
        print(f"\n{outcome.name} failed:", *outcome.failure, sep="\n  ", file=sys.stderr)
    print(f"\n{index}")
    if failed:
        raise typer.Exit(1)


@app.command()
@refusing
def measure(
    device: Device = "auto",
    grid: Grid = "quick",
    copies: Copies = "all",
    timers: Timers = "all",
    run: Run = None,
    workers: Workers = 3,
    rounds: Rounds = 10,
    copies_from: CopiesFrom = None,
) -> None:
    """Measure only: write data/local/<run>.parquet, or go on with the one that is there."""
    given = {"device": device, "grid": grid, "copies": copies, "timers": timers, "run": run}
    values = _checked(**given, workers=workers, rounds=rounds, copies_from=copies_from)
    import kvnb

    print(kvnb.measure(**values))


@app.command()
@refusing
def record(
    device: Device = "auto",
    grid: Grid = "full",
    run: Annotated[str | None, typer.Option(help="a record that a limit cut short, to go on with")] = None,
    workers: Workers = 3,
    rounds: Rounds = 10,
) -> None:
    """Measure a record of this GPU for others: data/recorded/<gpu>/<date>_<grid>_<commit>.parquet."""
    values = _checked(
        device=device, grid=grid, copies="all", timers="all", run=run, workers=workers, rounds=rounds, copies_from=None
    )
    import kvnb

    facts = kvnb.machine.describe(kvnb.machine.resolve_device(device))
    if not facts["gpu"]:
        raise ValueError("device: a record is a GPU's, and this device is a CPU; `kvnb measure` writes to data/local")
    if facts["dirty"]:
        print("kvnb: kvnb/ or csrc/ have uncommitted changes, and the record will say so", file=sys.stderr)
    values["run"] = run or f"{facts['utc'][:10]}_{grid}_{facts['kvnb_commit'].removeprefix('tree-')[:7]}"
    print(kvnb.measure(**values, path=paths.RECORDED / gpu_folder(facts["gpu"]) / f"{values['run']}.parquet"))


def gpu_folder(gpu: str) -> str:
    """A GPU's name as the folder of its records: "NVIDIA H200" is h200, "NVIDIA GeForce RTX 4090" is rtx-4090."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\b(nvidia|geforce|tesla)\b", "", gpu.lower())).strip("-")


@app.command()
@refusing
def readme() -> None:
    """Splice the newest records' answers into README.md."""
    done = subprocess.run([sys.executable, "-m", "cogapp", "-r", "README.md"], cwd=paths.ROOT, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
