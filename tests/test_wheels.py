"""needs.txt and the wheelhouse, without an index: pip is replaced by a folder of tiny wheels."""

import json
import sys
import zipfile
from types import SimpleNamespace

import pytest

from kvnb import wheels

ENVIRONMENT = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}


def needs_file(folder, wanted, has=()):
    path = folder / "needs.txt"
    host = {"environment": ENVIRONMENT, "platforms": ["manylinux_2_28_x86_64", "linux_x86_64"], "has": dict(has)}
    path.write_text("\n".join([wheels.HOST + json.dumps(host), *wanted, ""]))
    return str(path)


@pytest.fixture
def index(monkeypatch):
    """A pip that has a (which needs b, and on Python 3.12 c with its extra x), b, c (x: e) and e; returns its calls."""
    requires = {"a": ["b", "c[x]; python_version == '3.12'", "d; python_version < '3'"], "b": ["numpy>=1"]}
    requires |= {"c": ["e; extra == 'x'", "f; extra == 'y'"], "e": []}
    calls = []

    def run(command, **options):
        calls.append(command)
        _, folder, *rest = command[command.index("--dest") :]
        folder = wheels.Path(folder)
        folder.mkdir(exist_ok=True)
        asked = {wheels.requirements.Requirement(line).name for line in rest if line[0].isalpha()}
        for name in asked & requires.keys():
            with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                lines = "".join(f"Requires-Dist: {line}\n" for line in requires[name])
                wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n{lines}\n")
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return calls


def names(folder):
    return sorted(wheel.name.split("-")[0] for wheel in folder.iterdir())


def test_fetches_what_the_host_lacks_and_nothing_it_has(tmp_path, index):
    wheels.fetch(needs_file(tmp_path, ["a==1.0"], has={"numpy": "2.5.2+cu1"}), tmp_path / "house")
    assert names(tmp_path / "house") == ["a", "b", "c", "e"]
    assert index[0][index[0].index("--python-version") + 1] == "3.12.3"
    assert "--platform=manylinux_2_28_x86_64" in index[0]


def test_what_the_host_has_too_old_is_fetched(tmp_path, index):
    wheels.fetch(needs_file(tmp_path, ["b>=1"], has={"b": "0.9", "numpy": "1.26"}), tmp_path / "house")
    assert names(tmp_path / "house") == ["b"]


def test_pips_own_words_tell_why_nothing_fits(tmp_path, monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="ERROR: No matching distribution found for a==9\n")
    monkeypatch.setattr(wheels.subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(ValueError, match="No matching distribution found for a==9"):
        wheels.fetch(needs_file(tmp_path, ["a==9"]), tmp_path / "house")


def test_a_folder_with_wheels_is_not_mixed(tmp_path, index):
    (tmp_path / "old-1-py3-none-any.whl").touch()
    with pytest.raises(ValueError, match="already holds wheels"):
        wheels.fetch(needs_file(tmp_path, ["a==1.0"]), tmp_path)


@pytest.mark.parametrize(("text", "told"), [(None, "does not exist"), ("papermill\n", "no line that begins with '# h")])
def test_a_file_that_is_no_needs_file(tmp_path, text, told):
    path = tmp_path / "needs.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=told):
        wheels.fetch(path, tmp_path / "house")


def test_needs_of_this_python_parse_back(tmp_path):
    wheels.main(["needs", str(tmp_path / "needs.txt")])
    _, host, *wanted = (tmp_path / "needs.txt").read_text().splitlines()
    host = json.loads(host.removeprefix(wheels.HOST))
    assert host["environment"]["python_version"] == ".".join(map(str, sys.version_info[:2]))
    assert host["has"]["packaging"] == wheels.metadata.version("packaging")
    assert wanted == wheels.lacking("test")


def test_missing_requirements_come_with_their_pins(monkeypatch):
    monkeypatch.setattr(wheels, "_packages", lambda path: {})
    missing = wheels.lacking("report")
    assert any(line.startswith("papermill==") for line in missing)
    assert not any(line.startswith("pytest") for line in missing)


def test_what_is_there_but_too_old_is_missing_and_torchs_own_needs_are_not(monkeypatch):
    there = wheels._packages(sys.path) | {"typer": SimpleNamespace(version="0.1")}
    there.pop("sympy", None)
    there.pop("tenacity", None)
    monkeypatch.setattr(wheels, "_packages", lambda path: dict(there))
    missing = {wheels.requirements.Requirement(line).name for line in wheels.lacking("report")}
    assert {"typer", "tenacity"} <= missing  # tenacity is papermill's
    assert "sympy" not in missing  # torch's


def test_a_python_without_pip_is_told_how_to_get_it():
    command = [sys.executable, "-S", "-E", "-m", "kvnb.wheels", "check", "report"]  # -S: no packages at all
    done = wheels.subprocess.run(command, cwd=wheels.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{sys.executable} has no pip; type: {sys.executable} -m ensurepip")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("lacks", "code"),
    [([], None), (["typer==1"], f"{sys.executable} lacks typer==1; type: .* -m pip install typer==1; ")],
)
def test_check_names_what_is_missing(monkeypatch, lacks, code):
    monkeypatch.setattr(wheels, "lacking", lambda purpose: lacks)
    if code is None:
        wheels.main(["check", "report"])
    else:
        with pytest.raises(SystemExit, match=code):
            wheels.main(["check", "report"])
