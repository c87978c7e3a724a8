"""Wheels for a host that reaches no package registry: what it lacks, and a folder of exactly that.

    there:      python3 -m kvnb.wheels needs needs.txt
    elsewhere:  python3 -m kvnb.wheels fetch needs.txt wheelhouse
    there:      make report PYTHON=python3 VENV= WHEELS=wheelhouse

Runs on a bare Python with pip: standard library only, since what it would import may be what is missing.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

try:
    from packaging import markers, requirements, tags, utils
except ModuleNotFoundError:  # a bare Python: pip carries the same library
    try:
        from pip._vendor.packaging import markers, requirements, tags, utils
    except ModuleNotFoundError:
        sys.exit(f"{sys.executable} has no pip; type: {sys.executable} -m ensurepip (Debian: apt install python3-pip)")

ROOT = Path(__file__).resolve().parent.parent
PURPOSES = {"report": [], "test": ["test"]}  # purpose -> the extras it needs beside the dependencies
HOST = "# host: "  # begins the line of needs.txt that says what wheels must fit


def _packages(path: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Name -> package in these folders or wheels; the first of a name, which is the one imported."""
    found = list(metadata.distributions(path=list(path)))
    return {utils.canonicalize_name(package.metadata["Name"]): package for package in reversed(found)}


def _unmet(wanted: Iterable[str], has: dict[str, str], packages: dict, environment: dict[str, str]) -> set[str]:
    """Which of `wanted`, and of all that these need in turn by `packages`, `has` (name -> version) does not meet."""
    unmet, seen, queue = set(), set(), [(line, ("",)) for line in wanted]
    while queue:
        line, extras = queue.pop()
        requirement = requirements.Requirement(line)
        marker, name = requirement.marker, utils.canonicalize_name(requirement.name)
        if line in seen or (marker and not any(marker.evaluate(environment | {"extra": extra}) for extra in extras)):
            continue
        seen.add(line)
        if name not in has or not requirement.specifier.contains(has[name], prereleases=True):
            requirement.marker = None
            unmet.add(str(requirement))
        elif name in packages:
            queue += [(needed, ("", *requirement.extras)) for needed in packages[name].requires or []]
    return unmet


def pins() -> dict[str, str]:
    """Name -> requirement of requirements.txt."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return {utils.canonicalize_name(line.partition("==")[0]): line for line in lines if line}


def lacking(purpose: str) -> list[str]:
    """Requirements of a purpose (a key of PURPOSES) that this Python lacks, with their pins where they have one.

    What its packages need counts too, torch apart: one that is there brought what it needs in its own way.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum((project["optional-dependencies"][extra] for extra in PURPOSES[purpose]), project["dependencies"])
    packages = _packages(sys.path)
    has = {name: package.version for name, package in packages.items()}
    packages.pop("torch", None)
    unmet, pinned = _unmet(wanted, has, packages, markers.default_environment()), pins()
    return sorted(pinned.get(utils.canonicalize_name(requirements.Requirement(line).name), line) for line in unmet)


def check(purpose: str) -> None:
    """Raise ValueError, naming what is missing, unless this Python has what a purpose needs."""
    if missing := lacking(purpose):
        install = shlex.join([sys.executable, "-m", "pip", "install", *missing])
        raise ValueError(
            f"{sys.executable} lacks {', '.join(missing)}; type: {install}; without a network: make needs "
            f"PYTHON={sys.executable}, and on as 'Offline GPU host' in README.md says"
        )


def needs(file: str) -> None:
    """Write needs.txt: what wheels must fit on this host, what it has, and a line for each requirement it lacks."""
    platforms = list(dict.fromkeys(tag.platform for tag in tags.sys_tags() if tag.platform != "any"))
    has = {name: package.version for name, package in _packages(sys.path).items()}
    host = {"environment": markers.default_environment(), "platforms": platforms, "has": has}
    about = "# What a Python lacks for `make report` and `make test`; `make wheelhouse NEEDS=needs.txt` fetches it."
    missing = lacking("test")
    Path(file).write_text("\n".join([about, HOST + json.dumps(host), *missing, ""]))
    print(f"{file}: {len(missing)} missing")


def fetch(needs_file: str, to: str) -> None:
    """Download into folder `to` the wheels that a needs.txt asks for, and what these need beyond what the host has.

    Raises ValueError for a file that is no needs.txt, a folder that holds wheels already, and where none are found.
    """
    folder = Path(to)
    if not Path(needs_file).is_file():
        raise ValueError(f"{needs_file} does not exist; on the host that lacks packages: make needs PYTHON=python3")
    lines = Path(needs_file).read_text().splitlines()
    host = next((json.loads(line.removeprefix(HOST)) for line in lines if line.startswith(HOST)), None)
    if host is None:
        raise ValueError(f"{needs_file} has no line that begins with '{HOST}'; make it with: make needs")
    if any(folder.glob("*.whl")):
        raise ValueError(f"{folder} already holds wheels, and two versions would clash: remove it or name another")
    wanted = missing = {line for line in lines if line and not line.startswith("#")}
    while missing:  # pip reads markers for the Python that runs it: what wheels need is told by the host's, in turns
        for wheel in folder.glob("*.whl"):
            wheel.unlink()
        _download(sorted(wanted), folder, host)
        wheels = _packages(map(str, folder.glob("*.whl")))
        has = host["has"] | {name: package.version for name, package in wheels.items()}
        missing = _unmet(wanted, has, wheels, host["environment"])
        wanted = wanted | missing
    wheels = list(folder.glob("*.whl"))
    print(f"{folder}: {len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 1e6:.1f} MB")


def _download(wanted: list[str], folder: Path, host: dict) -> None:
    target = ["--only-binary=:all:", "--python-version", host["environment"]["python_full_version"]]
    target += [f"--platform={platform}" for platform in host["platforms"]]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), *target, *wanted]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ValueError(f"pip download failed:\n{done.stdout.strip()}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m kvnb.wheels", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    for verb in (check, needs, fetch):
        taking = verbs.add_parser(verb.__name__, description=verb.__doc__)
        taking.set_defaults(verb=verb)
        for name in inspect.signature(verb).parameters:
            taking.add_argument(name, choices=PURPOSES if name == "purpose" else None)
    chosen = vars(parser.parse_args(arguments))
    try:
        chosen.pop("verb")(**chosen)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
