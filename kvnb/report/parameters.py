"""What each notebook takes, in one typed table: checked before a kernel starts, and by the notebook again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvnb import copies
from kvnb.copies.base import TIMERS, nearest, unknown
from kvnb.problem.case import GRIDS

Check = Callable[[str], str | None]  # what is wrong with a value, or None
KINDS = {int: "an int, in digits", str: "a string (papermill -r, or quoted in YAML)"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a notebook: its default, or a value of that type (of None: a string) that passes.

    `valid`: all that pass. `several`: the default, or a list of what passes.
    """

    name: str
    default: object
    help: str
    check: Check = lambda value: None
    valid: Collection[str] = ()
    several: bool = False

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if value is None is self.default or (self.several and value == self.default):
            return None
        kind = list if self.several else int if isinstance(self.default, int) else str
        if type(value) is not kind or value == []:
            wanted = f'"{self.default}" or a list of names' if self.several else KINDS[kind]
            return f"{value!r} must be {wanted}{self._choice}"
        if kind is int:
            return None if value >= 1 else f"{value} must be at least 1"
        names = value if self.several else [value]
        return next(filter(None, (self._problem_of(name, names) for name in names)), None)

    def _problem_of(self, name: object, names: list) -> str | None:
        if type(name) is not str:
            return f"{name!r} must be {KINDS[str]}{self._choice}"
        if names.count(name) > 1:
            return f"{name!r} is there {names.count(name)} times"
        return unknown(name, self.valid) if self.valid and name not in self.valid else self.check(name)

    @property
    def _choice(self) -> str:
        return f"; valid: {', '.join(self.valid)}" if self.valid else f": {self.help}"


def _like(pattern: str, words: str) -> Check:
    return lambda value: None if re.fullmatch(pattern, value) else f"{value!r} must be {words}"


def _file(value: str) -> str | None:
    path = Path(value)
    if path.is_file():
        return None
    beside = [str(other) for other in path.parent.glob("*") if other.is_file()]
    return f"{value or path} {'is a folder' if path.is_dir() else 'does not exist'}{nearest(path, beside)}"


def _run_file(value: str) -> str | None:
    problem = _file(value)
    return problem and f"{problem} (run files lie in data/local and data/recorded/<gpu>)"


def _copies_file(value: str) -> str | None:
    """Where the file will do, its copies may be named from here on; ValueError where it fails or registers none."""
    if problem := _file(value):
        return problem
    copies.load_from(value)
    return None


DEVICE = "auto, cpu, cuda or cuda:N"
NAME = "letters, digits, '.', '_' and '-', 100 at most, and begin with a letter or digit"
LIVE = ("auto", "yes", "no")
TABLES: dict[str, tuple[Parameter, ...]] = {
    "01_copies": (),
    "02_measure": (
        Parameter("device", "auto", DEVICE, _like(r"auto|cpu|cuda(:\d+)?", DEVICE)),
        Parameter("grid", "quick", f"the cases: {', '.join(GRIDS)}", valid=GRIDS),
        Parameter("copies_from", None, "a Python file that registers copies of yours", _copies_file),
        Parameter("copies", "all", "all, or names of copies", valid=copies.REGISTRY, several=True),
        Parameter("timers", "all", f"all, or some of {', '.join(TIMERS)}", valid=TIMERS, several=True),
        Parameter("run", None, "name of the run; an existing one is resumed", _like(r"(?a)(?!_)\w[\w.-]{0,99}", NAME)),
        Parameter("workers", 3, "processes with fresh allocations"),
        Parameter("rounds", 10, "randomised passes of each worker"),
    ),
    "03_compare": (Parameter("runs", "newest", "newest, or a list of run files", _run_file, several=True),),
    "04_null_block": (
        Parameter("trace", None, "a CSV of requests in the Azure format; None takes a synthetic one", _file),
        Parameter("runs", "newest", "newest recorded, or a list of run files", _run_file, several=True),
        Parameter("device", "auto", DEVICE, _like(r"auto|cpu|cuda(:\d+)?", DEVICE)),
        Parameter("live", "auto", "measure now: auto, yes, or no (the same output every time)", valid=LIVE),
    ),
    "05_releases": (Parameter("runs", "newest", "newest recorded, or a list of run files", _run_file, several=True),),
    "06_timers": (
        Parameter("device", "auto", DEVICE, _like(r"auto|cpu|cuda(:\d+)?", DEVICE)),
        Parameter("run", None, "a run file; None takes the newest, a GPU's where there is one", _run_file),
        Parameter("live", "auto", "measure on a GPU: auto, yes, or no (show a record)", valid=LIVE),
    ),
    "07_runs": (
        Parameter("a", None, "a run file; None takes the newest but one of the same grid and GPU", _run_file),
        Parameter("b", None, "a run file; None takes the newest that has another to compare with", _run_file),
    ),
}


def check(notebook: str, values: Mapping[str, object]) -> None:
    """Raise ValueError for an unknown name, else for the first wrong type or value among a notebook's parameters."""
    table = {parameter.name: parameter for parameter in TABLES[notebook]}
    for name in values:
        if name not in table:
            raise ValueError(f"{notebook}: parameter {unknown(name, table)}")
    for name in table:
        if name in values and (problem := table[name].problem(values[name])):
            raise ValueError(f"{name}: {problem}")
