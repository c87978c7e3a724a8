"""What each notebook takes, in one typed table: checked before a kernel starts, and by the notebook again."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvnb import copies
from kvnb.copies.base import TIMERS
from kvnb.problem.case import GRIDS

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a notebook. `check(value, values)` says what is wrong with a value of the right type, or None."""

    name: str
    types: tuple[type, ...]
    default: object
    help: str
    check: Callable[[object, dict], str | None] = lambda value, values: None


def unknown(value: str, valid: Iterable[str]) -> str:
    """ "'x' is not one of a, b; did you mean a?", for error messages."""
    valid = list(valid)
    near = difflib.get_close_matches(value, valid, 1)
    return f"{value!r} is not one of {', '.join(valid)}" + (f"; did you mean {near[0]}?" if near else "")


def _one_of(*valid: str) -> Callable[[object, dict], str | None]:
    return lambda value, values: None if value in valid else unknown(value, valid)


def _at_least(least: int) -> Callable[[object, dict], str | None]:
    return lambda value, values: None if value >= least else f"{value} must be at least {least}"


def _names(names: object, valid: Iterable[str]) -> str | None:
    """`names` is "all" or a list of names out of `valid`."""
    if names == "all":
        return None
    if isinstance(names, str) or not names:
        return f'{names!r} must be "all" or a list of names'
    return next((unknown(str(name), valid) for name in names if name not in valid), None)


def _device(value: str, values: dict) -> str | None:
    return None if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) else f"{value!r} must be auto, cpu, cuda or cuda:N"


def _timers(value: object, values: dict) -> str | None:
    return _names(value, TIMERS)


def _copies(value: object, values: dict) -> str | None:
    if value == "all":
        return None
    if values.get("copies_from"):
        copies.load_from(values["copies_from"])
    return _names(value, copies.REGISTRY)


def _copies_from(value: str | None, values: dict) -> str | None:
    if value is not None:
        copies.load_from(value)  # raises ValueError where the file will not do
    return None


def _run(value: str | None, values: dict) -> str | None:
    if value is None or RUN_NAME.fullmatch(value):
        return None
    return f"{value!r} must be letters, digits, '.', '_' and '-', and begin with a letter or digit"


def _runs(value: object, values: dict) -> str | None:
    if value == "newest":
        return None
    if isinstance(value, str) or not value:
        return f'{value!r} must be "newest" or a list of run files'
    return next((f"{path} does not exist" for path in value if not Path(path).is_file()), None)


TABLES: dict[str, tuple[Parameter, ...]] = {
    "01_copies": (),
    "02_measure": (
        Parameter("device", (str,), "auto", "auto, cpu, cuda or cuda:N", _device),
        Parameter("grid", (str,), "quick", f"the cases: {', '.join(GRIDS)}", _one_of(*GRIDS)),
        Parameter("copies", (str, list), "all", "all, or names of copies", _copies),
        Parameter("timers", (str, list), "all", f"all, or some of {', '.join(TIMERS)}", _timers),
        Parameter("run", (str, type(None)), None, "name of the run; an existing one is resumed", _run),
        Parameter("workers", (int,), 3, "processes with fresh allocations", _at_least(1)),
        Parameter("rounds", (int,), 10, "randomised passes of each worker", _at_least(1)),
        Parameter("copies_from", (str, type(None)), None, "a Python file that registers copies of yours", _copies_from),
    ),
    "03_compare": (Parameter("runs", (str, list), "newest", "newest, or a list of run files", _runs),),
}


def check(notebook: str, values: dict[str, object]) -> None:
    """Raise ValueError for the first unknown name, wrong type or wrong value among a notebook's parameters."""
    table = {parameter.name: parameter for parameter in TABLES[notebook]}
    for name, value in values.items():
        if name not in table:
            raise ValueError(f"{notebook}: parameter {unknown(name, table)}")
        types = table[name].types
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
            raise ValueError(f"{name} = {value!r} must be {expected}, not {type(value).__name__}")
        problem = table[name].check(value, values)
        if problem:
            raise ValueError(f"{name}: {problem}")
