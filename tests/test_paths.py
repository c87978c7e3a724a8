"""A lock has one holder at any moment, also while its file goes."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, contextmanager

import pytest

from kvnb import paths


@contextmanager
def hold(folder, instead="do something else"):
    with paths.held(folder / "run" / "lock", folder / "run" / "owner", "writes it", "make room", instead):
        yield


def assert_held(folder) -> None:
    """By this process, and by its name."""
    with pytest.raises(ValueError, match=rf"^process {os.getpid()} on .* writes it: wait for it, or do something"):
        hold(folder).__enter__()


def test_who_comes_while_the_holder_lets_go_is_not_disturbed(tmp_path, monkeypatch):
    remove = paths._remove
    with ExitStack() as second:

        def overtaken(path):
            remove(path)
            if path.name == "lock":
                monkeypatch.undo()
                second.enter_context(hold(tmp_path))

        monkeypatch.setattr(paths, "_remove", overtaken)
        with hold(tmp_path):
            assert_held(tmp_path)
        assert_held(tmp_path)
    assert [*(tmp_path / "run").iterdir()] == []


def test_a_lock_whose_file_goes_before_it_is_locked_is_no_lock(tmp_path, monkeypatch):
    """Its holder removed it and let go, after we opened it."""
    flock = fcntl.flock

    def late(*arguments):
        monkeypatch.undo()
        (tmp_path / "run" / "lock").unlink()
        return flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold(tmp_path, instead=None):
        assert_held(tmp_path)
