"""What a machine lacks costs what needs it, and nothing else: the other copies run, and the reason is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import python_path

from kvnb import paths

CASE = """
    import kvnb
    from kvnb import build
    from kvnb.copies import REGISTRY
    case = kvnb.Case(4, num_kv_heads=2, head_size=16, cache_bytes=1 << 20)
    kvnb.check(REGISTRY["torch.index_put"], case, "cpu")
    print(REGISTRY["torch.index_put"].reason_on(case, "null_slot", "cpu"))
    print(REGISTRY["kvnb"].reason_on(case, "skip", "cpu"))
    print(REGISTRY["torch.compile"].reason_on(case, "null_slot", "cpu"))
"""


def told(code: str, *wrapper: str, **environment: str | None) -> list[str]:
    """Lines that a fresh Python prints, in this environment (None: unset); it must succeed."""
    given = {**os.environ, "PYTHONPATH": python_path(paths.ROOT), **environment}
    env = {name: value for name, value in given.items() if value is not None}
    command = [*wrapper, sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def read_only(tmp_path) -> tuple[Path, list[str]]:
    """A folder in which nobody may write, and the command before which that holds."""
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    if os.geteuid():
        return home, []
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o ro none "{home}" && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root may write in every folder, and may mount nothing here")
    return home, mount


def test_a_read_only_home_costs_the_ops_only_and_one_variable_brings_them_back(read_only, tmp_path):
    home, before = read_only
    given = {"HOME": str(home), "XDG_CACHE_HOME": ""}
    index_put, kvnb, compiled = told(CASE, *before, KVNB_CACHE="", **given)
    assert (index_put, compiled) == ("None", "None")
    assert kvnb.startswith(f"cannot build in {home}")
    assert kvnb.endswith("name a folder that can be written: KVNB_CACHE=/some/folder")
    caches = """
        import os
        from kvnb import paths
        paths.CACHE.mkdir()
        print(paths.CACHE, os.environ["TRITON_CACHE_DIR"], os.environ["MPLCONFIGDIR"], os.environ["IPYTHONDIR"])
    """
    unset = dict.fromkeys(("TRITON_CACHE_DIR", "MPLCONFIGDIR", "IPYTHONDIR"))
    [places] = told(caches, *before, KVNB_CACHE=str(tmp_path / "elsewhere"), **given, **unset)
    assert all(place.startswith(str(tmp_path / "elsewhere")) for place in places.split())
    assert len(places.split()) == 4


def test_no_compiler_costs_the_ops_only(tmp_path):
    (tmp_path / "bin").mkdir()
    given = {"PATH": str(tmp_path / "bin"), "KVNB_CACHE": str(tmp_path / "cache"), "CXX": "g++"}
    index_put, kvnb, compiled = told(CASE, **given)
    assert (index_put, compiled) == ("None", kvnb)
    assert kvnb.startswith("no C++ compiler (g++) on PATH; install one (Debian, Ubuntu: apt install g++")


def test_a_cache_named_relative_to_here_is_the_same_from_elsewhere(tmp_path):
    """Notebooks run in the repository's root, whatever the folder that `kvnb` was called in."""
    code = f"""
        import os
        os.chdir({str(tmp_path)!r})
        from kvnb import paths
        os.chdir("/")
        print(paths.CACHE)
    """
    assert told(code, KVNB_CACHE="cache") == [str(tmp_path / "cache")]


def test_the_package_names_an_old_python_itself(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 10, 1, 'final', 0)\n")
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path, paths.ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "kvnb"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "ImportError: kvnb needs Python 3.11 or later, this is 3.10: make report PYTHON=python3.12"
