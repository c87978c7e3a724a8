"""Copy: one way to write the rows, and the registry that every check, run, figure and test reads."""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvnb.problem.case import Case
from kvnb.problem.slots import NULL_POLICIES as NULL
from kvnb.problem.slots import POLICIES

if TYPE_CHECKING:
    from torch import Tensor

    from kvnb.problem.inputs import Inputs

    Write = Callable[[Tensor, Tensor], object]
    Step = Callable[[Tensor], Write]

__all__ = [
    "FAMILIES", "GPU_TIMERS", "NULL", "STATES", "TIMERS", "Copy", "bytes_moved", "nearest", "unknown", "writes_rows",
]  # fmt: skip
FAMILIES = ("kernel", "torch", "compile", "triton", "peer", "limit", "yours")
GPU_TIMERS = ("graph", "call", "host", "eager")
TIMERS = (*GPU_TIMERS, "wall")
PARTS = ("step", "write")
STATES = ("produced", "cold", "resident")
CHOICES = {"family": FAMILIES, "policies": POLICIES, "devices": ("cuda", "cpu"), "timers": TIMERS}


def unknown(value: object, valid: Collection[str]) -> str:
    """ "'x' is not one of a, b; did you mean a?", for error messages."""
    return f"{value!r} is not one of {', '.join(valid)}" + nearest(value, valid)


def nearest(value: object, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value), list(valid), 1)
    return f"; did you mean {near[0]}?" if near else ""


def writes_rows(copy: str, family: str) -> bool:
    """Whether a copy's calls write anything: a launch that does nothing, or an empty pair of events, bounds those."""
    return family != "limit" or copy.startswith("limit.copy")


def bytes_moved(copy: str, family: str, part: str, case: Case) -> int:
    """Fewest bytes a call of a copy's part moves: nothing for a launch, the index for a step."""
    if not writes_rows(copy, family):
        return 0
    return case.bytes_moved if part == "write" else 8 * case.num_tokens


def anything(case: Case, policy: str, timer: str) -> str | None:
    return None


def nothing(case: Case, policy: str) -> bool:
    return False


@dataclass(frozen=True)
class Copy:
    """One way to write K and V rows into a paged cache.

    name       unique; what tables and figures call it
    family     one of FAMILIES: decides the colour
    policies   where it can send padded rows, its default first (problem.slots.POLICIES)
    bind       `bind(inputs) -> step`, once per cache; `step(slot_mapping) -> write`, once per model step;
               `write(key, value)`, once per layer. Its docstring says what the copy is
    devices    device types it runs on
    timers     timers that mean something for it
    supports   `supports(case, policy, timer) -> reason | None`: why this cell cannot be measured
    steps      `steps(case, policy) -> bool`: whether `step` launches work worth a row of its own
    sources    further files whose change makes this another version of the copy

    Raises ValueError for what is none of these, with what is valid.
    """

    name: str
    family: str
    policies: tuple[str, ...]
    bind: Callable[[Inputs], Step]
    devices: tuple[str, ...] = ("cuda",)
    timers: tuple[str, ...] = TIMERS
    supports: Callable[[Case, str, str], str | None] = anything
    steps: Callable[[Case, str], bool] = nothing
    sources: tuple[Path, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ValueError(f"copy {self.name!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        for what, valid in CHOICES.items():
            value = getattr(self, what)
            names = (value,) if what == "family" else value
            if not isinstance(names, tuple) or not names:
                yield f"{what} {value!r} must be a tuple of some of {', '.join(valid)}"
            yield from (f"{what} {unknown(name, valid)}" for name in names if name not in valid)
            yield from (f"{what} {value!r} has {name} twice" for name in names if names.count(name) > 1)
        for what in ("bind", "supports", "steps"):
            if not callable(getattr(self, what)):
                yield f"{what} {getattr(self, what)!r} must be a function, see help(kvnb.copies.Copy)"

    @property
    def title(self) -> str:
        """First line of bind's docstring."""
        return (inspect.getdoc(self.bind) or self.name).splitlines()[0]

    def title_in(self, version: str) -> str:
        """`title` as it was where a run file has this `version`, its copy_version."""
        return self.title

    @property
    def file(self) -> Path:
        """The file that defines bind. Raises ValueError where none does."""
        try:
            return Path(inspect.getsourcefile(self.bind)).resolve()
        except TypeError as error:
            told = f"copy {self.name!r}: bind {self.bind!r} must be a function of a file, whose text is its version"
            raise ValueError(told) from error

    @property
    def version(self) -> str:
        """Ten hex digits over the sources that make this copy: stored as copy_version in every row."""
        digest = hashlib.sha256()
        for path in (self.file, *self.sources):
            digest.update(Path(path).read_bytes())
        return digest.hexdigest()[:10]

    def reason_against(self, case: Case, policy: str, timer: str, device: str) -> str | None:
        """Why this copy cannot be measured in this cell, or None. Raises TypeError where `supports` says neither."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device}"
        if policy not in self.policies:
            return f"policy {policy} is not one of its policies: {', '.join(self.policies) or 'none'}"
        if timer not in self.timers:
            return f"timer {timer} says nothing about it"
        reason = self.supports(case, policy, timer)
        if not isinstance(reason, str | None):
            raise TypeError(f"supports returned {reason!r}: it must say why in words, or None")
        return reason or None

    def reason_on(self, case: Case, policy: str, device: str) -> str | None:
        """Why no timer of a device type can measure this copy here, or None where one can."""
        timers = [timer for timer in self.timers if (timer == "wall") == (device == "cpu")]
        reasons = [self.reason_against(case, policy, timer, device) for timer in timers]
        if not reasons:
            reasons = [f"none of its timers, {', '.join(self.timers)}, runs on {device}"]
        return None if None in reasons else reasons[0]
