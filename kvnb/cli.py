"""The command line behind the Makefile. Wrong parameters are refused, with the valid ones, before a kernel starts."""

from __future__ import annotations

import datetime
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def measuring(command: Callable | None = None, **defaults: object) -> Callable:
    """A command that takes what 02_measure takes, by the same table; `defaults` differ from the table's."""
    if command is None:
        return lambda command: measuring(command, **defaults)
    options = []
    for row in parameters.TABLES["02_measure"]:
        default = defaults.get(row.name, row.default)
        kind = int if int in row.types else str if default is not None else str | None
        metavar = "NAME,NAME" if list in row.types else None
        typed = Annotated[kind, typer.Option(help=row.help, metavar=metavar)]
        options.append(inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=typed))
    command.__signature__ = inspect.Signature(options)
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


@contextmanager
def refusing() -> Iterator[None]:
    """Around what looks at the user's words: a ValueError becomes its message and exit code 2, without a traceback."""
    try:
        yield
    except ValueError as error:
        print(f"kvnb: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _checked(values: dict[str, object]) -> dict[str, object]:
    """What 02_measure takes, from what was typed. Raises ValueError for a wrong value or an absent device."""
    for name in ("copies", "timers"):
        if values[name] != "all":
            values[name] = [part.strip() for part in str(values[name]).split(",")]
    if values["copies_from"]:
        values["copies_from"] = str(Path(str(values["copies_from"])).resolve())
    values["run"] = values["run"] or f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}_{values['grid']}"
    parameters.check("02_measure", values)
    from kvnb import machine

    machine.resolve_device(str(values["device"]))
    return values


def _announce(values: dict[str, object]) -> None:
    print(f"kvnb: run {values['run']}; if it is cut short, RUN={values['run']} goes on with it", file=sys.stderr)


def _from_root(path: Path) -> str:
    """A path as notebooks of a report take it: they run in the repository's root."""
    path = path.resolve()
    return path.relative_to(paths.ROOT).as_posix() if path.is_relative_to(paths.ROOT) else str(path)


@app.command()
@measuring
def report(**typed: object) -> None:
    """Run the notebooks here and write reports/<run>/index.html, recorded runs beside the live one."""
    with refusing():
        values = _checked(typed)
        name = str(values["run"])
        if name == "latest" or (paths.RECORDED / name).is_dir():
            owner = "a link" if name == "latest" else "the recorded runs"
            raise ValueError(f"run: reports/{name} is kept for {owner}; choose another name")
    if values["copies_from"]:
        values["copies_from"] = _from_root(Path(values["copies_from"]))
    from kvnb.report import pages
    from kvnb.report.execute import execute

    folder = paths.REPORTS / name
    _announce(values)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")  # yours, not the project's
    outcomes = [execute("01_copies", {}, folder), execute("02_measure", values, folder)]
    runs = [path for path in (paths.LOCAL / f"{name}.parquet", *pages.recorded().values()) if path.is_file()]
    outcomes.append(execute("03_compare", {"runs": [_from_root(path) for path in runs] or "newest"}, folder))
    _publish(folder, outcomes, runs)


@app.command()
def render(gpu: Annotated[str | None, typer.Option(help="one folder of data/recorded")] = None) -> None:
    """Render the recorded runs into reports/<gpu>/: needs no GPU, writes the same bytes every time."""
    from kvnb.report import pages
    from kvnb.report.execute import execute

    recorded = pages.recorded()
    with refusing():
        if not recorded:
            raise ValueError("no run is recorded yet; `make record` measures one on a GPU")
        if gpu is not None and gpu not in recorded:
            raise ValueError(f"gpu: {parameters.unknown(gpu, recorded)}")
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
@measuring
def measure(**typed: object) -> None:
    """Measure only: write data/local/<run>.parquet, or go on with the one that is there."""
    with refusing():
        _measure(_checked(typed))


@app.command()
@measuring(grid="full")
def record(**typed: object) -> None:
    """Measure a record of this GPU for others: data/recorded/<gpu>/<date>_<grid>_<commit>.parquet."""
    with refusing():
        values = {**_checked(dict(typed)), "run": typed["run"]}
        if values["copies"] != "all" or values["timers"] != "all" or values["copies_from"]:
            raise ValueError("a record takes all copies and all timers of this checkout; `kvnb measure` takes some")
        from kvnb import machine

        facts = machine.describe(machine.resolve_device(str(values["device"])))
        if not facts["gpu"]:
            raise ValueError("device: a record is a GPU's, and this one is a CPU; `kvnb measure` writes to data/local")
        if facts["dirty"]:
            print("kvnb: kvnb/ or csrc/ have uncommitted changes, and the record will say so", file=sys.stderr)
        commit = facts["kvnb_commit"].removeprefix("tree-")[:7]
        values["run"] = values["run"] or f"{facts['utc'][:10]}_{values['grid']}_{commit}"
        _measure(values, paths.RECORDED / gpu_folder(facts["gpu"]) / f"{values['run']}.parquet")


def _measure(values: dict[str, object], path: Path | None = None) -> None:
    from kvnb.bench import run

    _announce(values)
    print(run.measure(**values, path=path))


def gpu_folder(gpu: str) -> str:
    """A GPU's name as the folder of its records: "NVIDIA H200" is h200, "NVIDIA GeForce RTX 4090" is rtx-4090."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\b(nvidia|geforce|tesla)\b", "", gpu.lower())).strip("-")


@app.command()
def readme() -> None:
    """Splice the newest records' answers into README.md."""
    done = subprocess.run([sys.executable, "-m", "cogapp", "-r", "README.md"], cwd=paths.ROOT, check=False)
    raise typer.Exit(done.returncode)
