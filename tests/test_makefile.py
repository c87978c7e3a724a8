"""The Makefile: verbs listed, misspelt variables refused, values quoted, faults of set-up told, what clean leaves."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from programs import script

from kvnb import paths, wheels

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


KEPT = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def make(*arguments, folder=paths.ROOT, **environment):
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(
        command, cwd=folder, env=KEPT | environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of what set-up needs of this checkout, in a folder whose name has a space."""
    copy = tmp_path / "my arch home" / "kvnb"
    (copy / "kvnb").mkdir(parents=True)
    (copy / "tests").mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "kvnb/__init__.py", "kvnb/wheels.py"):
        shutil.copy(paths.ROOT / name, copy / name)
    return copy


def lies_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


OFFLINE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
OFFLINE |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def test_make_alone_lists_every_verb():
    told = make().stdout
    phony = re.search(r"^\.PHONY: (.*)$", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for verb in {*phony} - {"set-up", "python"}:
        assert re.search(rf"^  {verb} +\w", told, re.MULTILINE), verb


@pytest.mark.parametrize(("given", "meant"), [("GRD=full", "GRID"), ("copies=kvnb", "COPIES"), ("ROUND=3", "ROUNDS")])
def test_a_misspelt_variable_is_refused_before_anything_runs(given, meant):
    done = make("report", given)
    assert done.returncode == 2
    assert f"did you mean {meant}" in done.stderr
    assert done.stdout == ""


def test_values_reach_the_command_line_whole():
    recipe = make("-n", "report", "VENV=", "GRID=full", "COPIES_FROM=my copy.py").stdout
    assert '--grid "$GRID"' in recipe
    assert '--copies-from "$COPIES_FROM"' in recipe
    assert "--device" not in recipe


HEARS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with open(sys.argv[1], "w") as told:
    print(os.getppid(), file=told, flush=True)
    print(signal.sigwait({signal.SIGTERM}).name, file=told)
"""


@pytest.mark.parametrize("verb", ["report", "measure", "render", "record", "compare"])
def test_a_signal_to_make_reaches_what_runs(tmp_path, verb):
    """It reaches make's own children only: no shell may be between."""
    os.mkfifo(told := tmp_path / "told")
    (tmp_path / "hears.py").write_text(HEARS)
    python = f'[ "$2" = kvnb ] && exec {sys.executable} {tmp_path / "hears.py"} {told}; exec {sys.executable} "$@"'
    words = ["make", verb, f"PYTHON={script(tmp_path / 'python', python)}", "VENV=", "A=a", "B=b"]
    with open(os.open(told, os.O_RDONLY | os.O_NONBLOCK)) as heard:
        process = subprocess.Popen(words, cwd=paths.ROOT, env=KEPT, stderr=subprocess.PIPE, process_group=0)
        try:
            assert select.select([heard], [], [], 60)[0], process.communicate()
            assert int(heard.readline()) == process.pid
            process.terminate()
            os.set_blocking(heard.fileno(), True)
            assert heard.read() == "SIGTERM\n"
        finally:
            with suppress(ProcessLookupError):  # where all of them have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_variables_of_the_environment_do_not_count():
    assert "--run" not in make("-n", "report", "VENV=", RUN="left over").stdout


MADE = (".venv/kvnb-made", ".venv/lib/x", "build/site-42/x", "kvnb.egg-info/x", "kvnb/__pycache__/x", ".ruff_cache/x")
MADE += (".pytest_cache/x", ".hypothesis/x", ".import_linter_cache/x", "tests/report/__pycache__/x")
NOT_MADE = (
    "data/local/run.parquet",
    "data/recorded/__pycache__/x",
    "reports/mine/index.html",
    "build/yours/x",
    "a.egg-info/x",
)
NOT_MADE += ("venv/x", "notes/__pycache__/x", "wheelhouse/a.whl", "needs.txt", "kvnb/mine.py")


def test_clean_removes_what_make_made_and_nothing_else(tree):
    here = lies_in(tree)
    for name in (*MADE, *NOT_MADE):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    (tree / "reports" / "latest").symlink_to("mine")
    (tree / ".venv" / "data").symlink_to("../data")  # a link out of what is removed
    done = make("clean", folder=tree)
    assert done.returncode == 0
    assert "rm -rf .venv\n" in done.stdout
    kept = {*NOT_MADE, "reports/latest"}
    folders = {str(parent) for name in (*kept, "tests/report/x") for parent in Path(name).parents} - {"."}
    assert lies_in(tree) == here | kept | folders


@pytest.mark.parametrize("held", ["pyvenv.cfg", "kvnb-0.6.0.tar.gz", "kvnb-42"])
@pytest.mark.parametrize("venv", [".venv", "data", "reports"])
def test_clean_and_set_up_leave_an_environment_that_make_did_not_make(tree, venv, held):
    """Whatever its files are called: only make's own mark, kvnb-made, counts."""
    (tree / venv / "bin").mkdir(parents=True)
    (tree / venv / "bin" / "python").touch()
    (tree / venv / held).touch()
    done = make("clean", f"VENV={venv}", folder=tree)
    assert done.returncode == 0
    assert lies_in(tree / venv) == {"bin", "bin/python", held}
    assert f"{venv} stays: make did not make it\n" in done.stdout
    done = make("set-up", f"VENV={venv}", folder=tree, **OFFLINE)
    assert done.returncode == 2
    assert f"{venv} is there, and make did not make it: use it as it is, make set-up PYTHON={venv}/bin/" in done.stderr
    assert lies_in(tree / venv) == {"bin", "bin/python", held}


def test_a_python_that_is_not_there_is_named():
    done = make("report", "PYTHON=no-such-python")
    assert done.returncode == 2
    assert "no-such-python is not there; name a Python 3.11 or later: make report PYTHON=python3.12" in done.stderr


def test_an_old_python_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 10, 1, 'final', 0)\n")
    old = script(tmp_path / "old python", f'PYTHONPATH="{tmp_path}" exec {sys.executable} "$@"')
    done = make("report", f"PYTHON={old}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{old} is Python 3.10; kvnb needs 3.11 or later: make report PYTHON=python3.12\n")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["VENV=my venv"], "VENV='my venv' contains a space, which make cannot take: name another"),
        (["WHEELS=house"], f"make report PYTHON={sys.executable} VENV= WHEELS=house"),
        (["VENV=", "WHEELS=no-such"], "WHEELS=no-such: no wheels there; make wheelhouse fetches them"),
    ],
)
def test_variables_that_do_not_go_together_are_refused(given, told):
    done = make("report", *given)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""


def wheel(folder: Path, name: str = "kvnb_probe-1.0-py3-none-any.whl") -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as file:
        file.writestr("kvnb_probe.py", "")
        info = "kvnb_probe-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvnb-probe\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_without_a_network_a_wheelhouse_gives_what_python_lacks(tree):
    """In a folder with a space, as the wheelhouse is."""
    project = tree / "pyproject.toml"
    needing = re.sub(
        r"^dependencies = .*?^]", 'dependencies = ["kvnb-probe>=1"]', project.read_text(), flags=re.M | re.S
    )
    project.write_text(needing)
    set_up = ("set-up", "VENV=")
    lacking = make(*set_up, folder=tree, **OFFLINE)
    assert lacking.returncode == 2
    python = sys.executable
    assert f"{python} lacks kvnb-probe>=1; type: {python} -m pip install 'kvnb-probe>=1'; " in lacking.stderr
    assert f"without a network: make needs PYTHON={python}" in lacking.stderr

    house = tree / "wheel house"
    wheel(house, "kvnb_probe-1.0-cp27-cp27m-win32.whl")
    foreign = make(*set_up, f"WHEELS={house}", folder=tree, **OFFLINE)
    assert foreign.returncode == 2
    assert f"WHEELS={house} does not fit {python}: make needs PYTHON={python} here" in foreign.stderr

    shutil.rmtree(house)
    wheel(house)
    done = make(*set_up, f"WHEELS={house}", folder=tree, **OFFLINE)
    assert done.returncode == 0, done.stderr
    assert len(list(tree.glob("build/site-*/kvnb_probe.py"))) == 1
    assert "pip" not in make(*set_up, f"WHEELS={house}", folder=tree, **OFFLINE).stdout


def test_without_a_network_and_without_a_wheelhouse_the_message_says_how(tree):
    """And what was begun is ours to go on with, or to remove."""
    quick = script(
        tree / "python",
        f'[ "$2" = venv ] && set -- "$@" --without-pip --system-site-packages; exec {sys.executable} "$@"',
    )
    for _ in range(2):  # a second try meets what the first left
        done = make("set-up", f"PYTHON={quick}", folder=tree, **OFFLINE)
        assert done.returncode == 2
        assert re.search("No matching distribution|No module named pip", done.stderr)  # the latter: of a bare Debian
        assert "pip could not get the packages" in done.stderr
        assert "make needs PYTHON=python3" in done.stderr
        assert (tree / ".venv" / "pyvenv.cfg").exists()
    make("clean", folder=tree)
    assert not (tree / ".venv").exists()


def test_requirements_meet_the_lower_bounds():
    """Every dependency has a pin, and the pin lies within pyproject's bounds."""
    import tomllib

    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    bounds = [
        *project["dependencies"],
        *(line for group in project["optional-dependencies"].values() for line in group),
    ]
    pins = {name: line.partition("==")[2].partition(";")[0].strip() for name, line in wheels.pins().items()}
    for bound in map(wheels.requirements.Requirement, bounds):
        assert bound.specifier.contains(pins[bound.name]), bound
