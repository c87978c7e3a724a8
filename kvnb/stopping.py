"""What signals that end a program do here: all is put away first, then one line says which one it was."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

ENDING = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)  # put back in this order: what Python does at SIGINT may raise
_came: list[int] = []  # signals, since the outermost `stoppable` began
_acts: list[Callable[[], object]] = []  # of each `stoppable` that has begun, the innermost last


class Stopped(BaseException):
    """A signal came. Not KeyboardInterrupt: where that leaves an exec, Python ends by SIGINT whatever else is asked."""


def _raise() -> None:
    raise Stopped


def _heard(number: int, _frame: object) -> None:
    _came.append(number)
    if _acts:
        _acts[-1]()


@contextmanager
def answering(handler: Callable | None = None, ends: bool = False) -> Iterator[None]:
    """For the while, `handler` answers what is ENDING (None: what does so already); one that is ignored, as by nohup,
    stays so. Then all is as before, whoever has set what meanwhile. `ends`: the program does then, and hears no SIGINT.

    Does nothing in another thread than the main one: signals raise nothing there.
    """
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in ENDING if here}
    before = {number: found for number, found in before.items() if found is not None}  # None: not Python's
    try:
        for number, found in before.items():
            signal.signal(number, found if found == signal.SIG_IGN else handler or found)
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, signal.SIG_IGN if ends and number == signal.SIGINT else found)


@contextmanager
def put_off() -> Iterator[None]:
    """What is ENDING comes when this ends. Blocking would not do: the system gives the signal to another thread then,
    as NumPy has some, and Python answers it in this one."""
    came: list[int] = []
    try:
        with answering(lambda number, _frame: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def stoppable(act: Callable[[], object] = _raise, ends: bool = False) -> Iterator[None]:
    """For the while, what is ENDING calls `act`, which has what is inside end, and Stopped is raised once it has. The
    outermost says a line then, last of all, and SystemExit bears the status that shells give that signal.

    Whatever begins something long does so in a `stoppable` of its own, which does not begin after a signal: an import
    may have taken Stopped for an error of its own, as pyarrow does while it imports numpy.
    """
    outer = len(_acts)
    with nullcontext() if outer else _telling(ends):
        try:
            _acts.append(act)
            if _came:
                raise Stopped
            yield
        finally:
            del _acts[outer:]
            if _came:
                raise Stopped


@contextmanager
def _telling(ends: bool) -> Iterator[None]:
    """The line comes last: in the signal's handler, a terminal that is gone would raise OSError amid anything."""
    _came.clear()
    with answering(_heard, ends):
        try:
            yield
        finally:
            _acts.clear()  # amid the line, a further signal does nothing
            if _came:
                try:
                    print(f"\nkvnb: stopped by {signal.Signals(_came[0]).name}", file=sys.stderr)
                except OSError:
                    sys.stderr = None  # else Python writes it again as it ends, and makes that failure the status
                sys.exit(128 + _came[0])
