"""needs.txt and the wheelhouse, without an index: pip is replaced by a folder of tiny wheels."""

import json
import sys
import zipfile

import pytest

from kvnb import wheels

HOST = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}


def needs_file(folder, wanted, has=()):
    path = folder / "needs.txt"
    lines = [f"# python: {json.dumps(HOST)}", "# platforms: manylinux_2_28_x86_64 linux_x86_64"]
    path.write_text("\n".join([*lines, *(f"# has: {line}" for line in has), *wanted, ""]))
    return path


@pytest.fixture
def index(monkeypatch):
    """A pip that knows a, b and c: a needs b, and c on Python 3.12 only, which the pip at hand does not see."""
    requires = {"a": ["b", "c; python_version == '3.12'", "d; python_version < '3'"], "b": ["numpy>=1"], "c": []}
    calls = []

    def pip(verb, *arguments):
        calls.append(list(map(str, arguments)))
        options = calls[-1]
        if verb == "install":
            names = {"a", "b", "numpy"} | {wheels.Requirement(line).name for line in options if line[0].isalpha()} & {
                "c"
            }
            chosen = [{"metadata": {"name": name, "version": "1.0"}} for name in sorted(names)]
            with open(options[options.index("--report") + 1], "w") as report:
                json.dump({"install": chosen}, report)
            return
        folder = wheels.Path(options[options.index("--dest") + 1])
        folder.mkdir(exist_ok=True)
        for name in (line.split("==")[0] for line in options if "==" in line):
            with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                lines = "".join(f"Requires-Dist: {line}\n" for line in requires[name])
                wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\n{lines}\n")

    monkeypatch.setattr(wheels, "_pip", pip)
    return calls


def test_fetches_what_the_host_lacks_and_nothing_it_has(tmp_path, index):
    found = wheels.fetch(needs_file(tmp_path, ["a==1.0"], has=["numpy==2.5.2+cu1"]), tmp_path / "house")
    assert [wheel.name[0] for wheel in found] == ["a", "b", "c"]
    assert index[0][index[0].index("--python-version") + 1] == "3.12.3"
    assert "manylinux_2_28_x86_64" in index[0]


def test_a_folder_with_wheels_is_not_mixed(tmp_path, index):
    (tmp_path / "old-1-py3-none-any.whl").touch()
    with pytest.raises(wheels.WheelsError, match="already holds wheels"):
        wheels.fetch(needs_file(tmp_path, ["a==1.0"]), tmp_path)


@pytest.mark.parametrize(("text", "told"), [(None, "does not exist"), ("papermill\n", "lacks its '# python:'")])
def test_a_file_that_is_no_needs_file(tmp_path, text, told):
    path = tmp_path / "needs.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(wheels.WheelsError, match=told):
        wheels.fetch(path, tmp_path / "house")


def test_needs_of_this_python_parse_back(tmp_path):
    path = tmp_path / "needs.txt"
    path.write_text(wheels.needs())
    header, wanted = wheels._parse(path)
    assert json.loads(header["python"][0])["python_version"] == ".".join(map(str, sys.version_info[:2]))
    assert wanted == wheels.lacking("test")


def test_missing_requirements_come_with_their_pins(monkeypatch):
    monkeypatch.setattr(wheels, "_installed", dict)
    missing = wheels.lacking("report")
    assert any(line.startswith("papermill==") for line in missing)
    assert not any(line.startswith("pytest") for line in missing)


def test_what_is_there_but_too_old_is_missing_and_torchs_own_needs_are_not(monkeypatch):
    there = wheels._installed() | {"typer": "0.1"}
    there.pop("sympy", None)
    there.pop("tenacity", None)
    monkeypatch.setattr(wheels, "_installed", lambda: there)
    missing = {wheels.Requirement(line).name: line for line in wheels.lacking("report")}
    assert missing["typer"].startswith("typer>=")
    assert "tenacity" in missing  # papermill's
    assert "sympy" not in missing  # torch's
