"""The Makefile: verbs listed, misspelt variables refused, values quoted, no way to data/ or reports/ through clean."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from kvnb import paths, wheels

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(
        command, cwd=paths.ROOT, env=kept | environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_make_alone_lists_every_verb():
    told = make().stdout
    for verb in "report test lab measure render record readme lint needs wheelhouse clean help".split():
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


def test_variables_of_the_environment_do_not_count():
    assert "--run" not in make("-n", "report", "VENV=", RUN="left over").stdout


def test_clean_stays_away_from_data_and_reports():
    recipe = make("-n", "clean").stdout
    assert recipe
    assert "data" not in recipe
    assert "reports" not in recipe


def test_an_old_python_is_named():
    done = make("report", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "no-such-python is not there" in done.stderr


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
