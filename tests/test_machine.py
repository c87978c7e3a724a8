"""What a run file says of the sources that measured it."""

from __future__ import annotations

import subprocess

import pytest

from kvnb import machine, paths


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A checkout of some sources, committed."""
    monkeypatch.delenv("KVNB_COMMIT", raising=False)
    for name in ("kvnb/bench/run.py", "kvnb/report/words.py", "csrc/copy.cu", "README.md"):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    someone = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), (*someone, "commit", "-q", "-m", "all")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "CSRC", tmp_path / "csrc")
    yield tmp_path
    machine.source_state.cache_clear()


def state() -> tuple[str, bool | None]:
    machine.source_state.cache_clear()  # a process takes it once
    return machine.source_state()


def test_a_commit_is_dirty_where_what_measures_was_edited_and_not_known_to_be_where_git_cannot_say(sources):
    head, dirty = state()
    assert (len(head), dirty) == (40, False)
    (sources / "README.md").write_text("2\n")
    assert state() == (head, False)
    (sources / "csrc" / "copy.cu").write_text("2\n")
    assert state() == (head, True)
    (sources / ".git" / "index").write_text("junk")
    assert state() == (head, None)


def test_without_git_the_sources_themselves_are_named(sources, monkeypatch):
    (sources / ".git").rename(sources / "moved")
    assert state() == (f"tree-{machine.code()}", None)
    monkeypatch.setenv("KVNB_COMMIT", "0123abc")
    assert state() == ("0123abc", None)


@pytest.mark.parametrize(
    ("name", "another"),
    [("kvnb/bench/run.py", True), ("csrc/copy.cu", True), ("kvnb/new.py", True), ("kvnb/report/words.py", False),
     ("README.md", False), ("kvnb/bench/run.pyc", False)],
)  # fmt: skip
def test_code_is_what_measures_and_not_what_reports(sources, name, another):
    before = machine.code()
    (sources / name).write_text("2\n")
    assert (machine.code() != before) == another
