"""Every way to write the rows. REGISTRY (name -> Copy) feeds every check, run, figure and test."""

from __future__ import annotations

import faulthandler
import importlib.util
import re
import traceback
from pathlib import Path

from kvnb.copies import installed, kernels, limits, releases, torch_compile, torch_index, triton_copy
from kvnb.copies.base import Copy
from kvnb.stopping import answering

__all__ = ["REGISTRY", "Copy", "load_from", "register"]

REGISTRY: dict[str, Copy] = {}
_registered: list[str] = []  # every name that was, in order


def register(copy: Copy) -> Copy:
    """Add a copy to the registry; a file that is run again registers its own again. Raises ValueError for a name that
    another file's has or that COPIES cannot list, and for a source that is no file."""
    if not isinstance(copy, Copy):
        raise ValueError(f"register takes a Copy(name, family, policies, bind), not {copy!r}")
    if not isinstance(copy.name, str) or not re.fullmatch(r"(?!all$)[^\s,]+", copy.name) or not copy.name.isprintable():
        told = "a name must be text without spaces, commas and line breaks, and not 'all', for COPIES to list it"
        raise ValueError(f"copy {copy.name!r}: {told}")
    if lost := [path for path in (copy.file, *copy.sources) if not Path(path).is_file()]:
        raise ValueError(f"copy {copy.name!r}: {lost[0]} must be a file, whose text is part of its version")
    if copy.name in REGISTRY and REGISTRY[copy.name].file != copy.file:
        raise ValueError(f"copy {copy.name!r} is registered already; give yours another name")
    REGISTRY[copy.name] = copy
    _registered.append(copy.name)
    return copy


def load_from(path: str | Path) -> list[str]:
    """Run a Python file that registers copies of its own (COPIES_FROM=my_copy.py); returns their names.

    Raises ValueError where the file is missing, is no .py, raises or exits itself (naming its line), adds nothing, or
    registers a name twice.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"copies_from: {path} does not exist")
    if path.suffix != ".py":
        raise ValueError(f"copies_from: {path} must be a Python file, with a name that ends in .py")
    begun = len(_registered)
    spec = importlib.util.spec_from_file_location(f"kvnb_copies_from_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # what ends Python itself, as os.abort() or a segfault, prints the file and its line
    try:
        with answering():  # it may set what is not its own, as `signal.signal(SIGINT, SIG_DFL)` does
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        at = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"copies_from: {path}{at}: {type(error).__name__}: {error}") from error
    added = _registered[begun:]
    if twice := [name for name in added if added.count(name) > 1]:
        raise ValueError(f"copies_from: {path} registers copy {twice[0]!r} twice; give one of them another name")
    if not added:
        raise ValueError(f"copies_from: {path} registers no copy; end it with kvnb.copies.register(Copy(...))")
    return added


for _module in (kernels, torch_index, torch_compile, triton_copy, releases, installed, limits):
    for _copy in _module.COPIES:
        register(_copy)
