"""What signals that end a program do here: all is put away first, then one line says which one it was."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_came: list[int] = []  # signals that no `stoppable` has told yet


class Stopped(BaseException):
    """A signal came. Not KeyboardInterrupt: where that leaves an exec, Python ends by SIGINT whatever else is asked."""


def _raise() -> None:
    raise Stopped


@contextmanager
def stoppable(act: Callable[[], object] = _raise) -> Iterator[None]:
    """For the while, SIGINT, SIGTERM and SIGHUP call `act`, which has what is inside end. However it ends then, a line
    says so, and SystemExit bears the status that shells give that signal. One that is ignored, as by nohup, stays so.

    The line comes last: in the signal's handler, a terminal that is gone would raise OSError amid anything. Whatever
    begins something long does so in a `stoppable` of its own, which does not begin after a signal: an import may have
    taken Stopped for an error of its own, as pyarrow does while it imports numpy.
    """
    if _came:
        raise Stopped

    def heard(number: int, _frame: object) -> None:
        _came.append(number)
        act()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, heard)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _came:
            number = _came[0]
            _came.clear()
            print(f"\nkvnb: stopped by {signal.Signals(number).name}", file=sys.stderr)
            sys.exit(128 + number)
