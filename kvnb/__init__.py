"""kvnb: does PyTorch's index copy outperform a hand-written CUDA kernel for writing the paged KV cache?

Names load on first use, so that `import kvnb` costs nothing and the command line can refuse a wrong parameter at once.
"""

import sys
from importlib import import_module

if sys.version_info < (3, 11):  # noqa: UP036  said here, before anything fails on its syntax
    this = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(f"kvnb needs Python 3.11 or later, this is {this}: make report PYTHON=python3.12")

__version__ = "0.1.0"

_HOMES = {
    "Case": "kvnb.problem.case",
    "grid": "kvnb.problem.case",
    "check": "kvnb.bench.check",
    "measure": "kvnb.bench.run",
    "load": "kvnb.bench.results",
    "cells": "kvnb.bench.stats",
    "compare": "kvnb.bench.stats",
    "summarise": "kvnb.bench.stats",
    "noise_floor": "kvnb.bench.stats",
    "explore": "kvnb.report.explore",
}
_MODULES = ("bench", "build", "copies", "machine", "paths", "problem", "report", "reserve")
__all__ = [*_HOMES, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"kvnb.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvnb' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
