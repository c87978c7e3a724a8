"""What each notebook takes, in one typed table: checked before a kernel starts, and by the notebook again."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvnb import copies
from kvnb.copies.base import TIMERS
from kvnb.problem.case import GRIDS

Check = Callable[[str], str | None]  # what is wrong with a value, or None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a notebook: its default, or a value of that type (of None: a string) that passes `check`."""

    name: str
    default: object
    help: str
    check: Check = lambda value: None
    several: bool = False  # the default, or a list of what passes `check`

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if value is None is self.default or (self.several and value == self.default):
            return None
        kind = list if self.several else int if isinstance(self.default, int) else str
        if type(value) is not kind or value == []:
            words = {list: f'"{self.default}" or a list of names', int: "an int", str: "a string"}
            return f"{value!r} must be {words[kind]}"
        if kind is int:
            return None if value >= 1 else f"{value} must be at least 1"
        return next(filter(None, map(self.check, value if self.several else [value])), None)


def unknown(value: object, valid: Collection[str]) -> str:
    """ "'x' is not one of a, b; did you mean a?", for error messages."""
    near = difflib.get_close_matches(str(value), valid, 1)
    return f"{value!r} is not one of {', '.join(valid)}" + (f"; did you mean {near[0]}?" if near else "")


def _one_of(valid: Collection[str]) -> Check:
    return lambda value: None if value in valid else unknown(value, valid)


def _like(pattern: str, words: str) -> Check:
    return lambda value: None if re.fullmatch(pattern, value) else f"{value!r} must be {words}"


def _file(value: str) -> str | None:
    return None if Path(value).is_file() else f"{value} does not exist"


def _copies_file(value: str) -> None:
    copies.load_from(value)  # raises ValueError where the file will not do; its copies may be named from here on


DEVICE, NAME = "auto, cpu, cuda or cuda:N", "letters, digits, '.', '_' and '-', and begin with a letter or digit"
LIVE = ("auto", "yes", "no")
TABLES: dict[str, tuple[Parameter, ...]] = {
    "01_copies": (),
    "02_measure": (
        Parameter("device", "auto", DEVICE, _like(r"auto|cpu|cuda(:\d+)?", DEVICE)),
        Parameter("grid", "quick", f"the cases: {', '.join(GRIDS)}", _one_of(GRIDS)),
        Parameter("copies_from", None, "a Python file that registers copies of yours", _copies_file),
        Parameter("copies", "all", "all, or names of copies", _one_of(copies.REGISTRY), several=True),
        Parameter("timers", "all", f"all, or some of {', '.join(TIMERS)}", _one_of(TIMERS), several=True),
        Parameter("run", None, "name of the run; an existing one is resumed", _like(r"[A-Za-z0-9][\w.-]*", NAME)),
        Parameter("workers", 3, "processes with fresh allocations"),
        Parameter("rounds", 10, "randomised passes of each worker"),
    ),
    "03_compare": (Parameter("runs", "newest", "newest, or a list of run files", _file, several=True),),
    "04_null_block": (
        Parameter("trace", None, "a CSV of requests in the Azure format; None takes a synthetic one", _file),
        Parameter("runs", "newest", "newest recorded, or a list of run files", _file, several=True),
        Parameter("device", "auto", DEVICE, _like(r"auto|cpu|cuda(:\d+)?", DEVICE)),
        Parameter("live", "auto", "measure now: auto, yes, or no (the same output every time)", _one_of(LIVE)),
    ),
    "05_releases": (Parameter("runs", "newest", "newest recorded, or a list of run files", _file, several=True),),
    "06_timers": (
        Parameter("device", "auto", DEVICE, _like(r"auto|cpu|cuda(:\d+)?", DEVICE)),
        Parameter("run", None, "a run file; None takes the newest, a GPU's where there is one", _file),
        Parameter("live", "auto", "measure on a GPU: auto, yes, or no (show a record)", _one_of(LIVE)),
    ),
    "07_runs": (
        Parameter("a", None, "a run file; None takes the newest but one of the same grid and GPU", _file),
        Parameter("b", None, "a run file; None takes the newest that has another to compare with", _file),
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
