"""A lock has one holder at any moment, also while its file goes; a user may have no home."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import nbformat
import pytest
from programs import python_path

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


def homeless(code, *arguments, **environment):
    """A fresh Python whose user the system does not know, and whose environment names no home."""
    if os.geteuid():
        pytest.skip("only root can become a user whom the system does not know")
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "KVNB_CACHE", "XDG_CACHE_HOME")}
    kept |= {"PYTHONPATH": python_path(paths.ROOT), **environment}
    command = [sys.executable, "-c", f"import os\nos.setresuid(987654, -1, -1)\n{code}", *arguments]
    return subprocess.run(command, env=kept, capture_output=True, text=True, check=False, timeout=120)


def test_a_user_without_a_home_is_told_what_to_name():
    done = homeless("from kvnb.__main__ import main\nmain()", "goals")
    told = "kvnb: this user has no home folder: name one, HOME=/some/folder, or a cache, KVNB_CACHE=/some/folder\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_named_cache_is_home_enough_for_notebooks(tmp_path):
    """Jupyter's own folders, for which no variable was named, are in it; kernels and what they start inherit it."""
    cells = [nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_code_cell("import os, matplotlib\nprint(os.environ['HOME'], matplotlib.get_cachedir())")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "01_copies.ipynb")
    done = homeless(
        "import sys\nfrom pathlib import Path\nfrom kvnb import paths\nfrom kvnb.report import execute\n"
        "from jupyter_core.paths import jupyter_config_dir\n"
        "paths.NOTEBOOKS = Path(sys.argv[1])\n"
        "outcome = execute.execute('01_copies', {}, paths.NOTEBOOKS / 'out')\n"
        "print(outcome.path.name, outcome.failure, jupyter_config_dir())",
        tmp_path,
        KVNB_CACHE=str(tmp_path / "cache"),
    )
    home = tmp_path / "cache" / "home"
    assert done.stdout == f"01_copies.ipynb () {home / '.jupyter'}\n", done.stderr
    printed = nbformat.read(tmp_path / "out" / "01_copies.ipynb", as_version=4).cells[-1].outputs[0].text
    assert printed.split()[0] == str(home)
