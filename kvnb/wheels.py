"""Wheels for a host that reaches no package registry: what it lacks, and a folder of exactly that.

    there:      python3 -m kvnb.wheels needs --out needs.txt
    elsewhere:  python3 -m kvnb.wheels fetch needs.txt --to wheelhouse
    there:      make report PYTHON=python3 VENV= WHEELS=wheelhouse

Runs on a bare Python with pip: standard library only, since what it would import may be what is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

try:
    from packaging import markers, tags
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ModuleNotFoundError:  # a bare Python: pip carries the same library
    from pip._vendor.packaging import markers, tags
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PURPOSES = {"report": [], "test": ["test"]}  # purpose -> the extras it needs beside the dependencies
PRIVATE_MARKERS = ("platform_release", "platform_version")  # a host's kernel build: no wheel asks for it


class WheelsError(ValueError):
    """What is missing or malformed, and what to type."""


def lacking(purpose: str) -> list[str]:
    """Requirements of a purpose (a key of PURPOSES) that this Python lacks, those of installed packages included.

    A missing one that requirements.txt pins is returned with its pin.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in PURPOSES[purpose] for line in project["optional-dependencies"][extra]),
    ]
    pins = {canonicalize_name(pin.name): pin for pin in _pins()}
    installed = _installed()
    missing, seen = {}, set()
    queue = [(Requirement(line), True) for line in wanted]
    while queue:
        requirement, ours = queue.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(requirement))
        version = installed.get(name)
        if version is None:
            missing[name] = str(pins.get(name, requirement))
        elif ours and not requirement.specifier.contains(version, prereleases=True):
            missing[name] = str(requirement)
        elif name != "torch":  # a torch that is there brought what it needs in its own way
            queue += [(Requirement(line), False) for line in metadata.requires(name) or []]
    return sorted(missing.values())


def _pins() -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def _installed() -> dict[str, str]:
    versions: dict[str, str] = {}
    for found in metadata.distributions():  # in the order of sys.path: the first of a name is the one imported
        versions.setdefault(canonicalize_name(found.metadata["Name"]), found.version)
    return versions


def needs() -> str:
    """The text of needs.txt: this Python's version, the wheel platforms it takes, what it has, what it lacks."""
    environment = {name: value for name, value in markers.default_environment().items() if name not in PRIVATE_MARKERS}
    platforms = dict.fromkeys(tag.platform for tag in tags.sys_tags() if tag.platform != "any")
    return "\n".join(
        [
            "# What a Python lacks for `make report` and `make test`; `make wheelhouse NEEDS=needs.txt` fetches it.",
            f"# python: {json.dumps(environment)}",
            f"# platforms: {' '.join(platforms)}",
            *(f"# has: {name}=={version}" for name, version in sorted(_installed().items())),
            *lacking("test"),
            "",
        ]
    )


def fetch(needs_file: Path, folder: Path) -> list[Path]:
    """Download into `folder` the wheels that `needs_file` asks for, and what these need beyond what the host has.

    What the host has is a constraint, so nothing it has is fetched or upgraded. Raises WheelsError when the file is no
    needs.txt, when `folder` already holds wheels, or when pip finds no wheels that fit.
    """
    header, wanted = _parse(needs_file)
    if any(folder.glob("*.whl")):
        raise WheelsError(
            f"{folder} already holds wheels, and two versions of a package would clash: remove it or name another"
        )
    environment = json.loads(header["python"][0])
    has = dict(line.split("==", 1) for line in header["has"])
    for line in wanted:  # there, but too old: fetched all the same
        has.pop(canonicalize_name(Requirement(line).name), None)
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", environment["python_full_version"]]
    target += [part for platform in header["platforms"][0].split() for part in ("--platform", platform)]
    missing = wanted
    while (
        missing
    ):  # pip evaluates markers for the Python that runs it: what the host's own markers add comes in a next turn
        chosen = _resolve(wanted, has, target)
        _pip(
            "download",
            "--no-deps",
            "--dest",
            folder,
            *target,
            *(f"{name}=={chosen[name]}" for name in chosen if name not in has),
        )
        missing = _unmet(folder, has, environment)
        wanted = wanted + missing
    return sorted(folder.glob("*.whl"))


def _resolve(wanted: list[str], has: dict[str, str], target: list[str]) -> dict[str, str]:
    """Name -> version of everything that `wanted` needs on the target, without downloading it."""
    with tempfile.TemporaryDirectory() as scratch:
        constraints, report = Path(scratch, "has.txt"), Path(scratch, "report.json")
        constraints.write_text("".join(f"{name}=={version.split('+')[0]}\n" for name, version in has.items()))
        where = ("--target", scratch, "--report", report, "-c", constraints)
        _pip("install", "--dry-run", "--ignore-installed", *where, *target, *wanted)
        chosen = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {canonicalize_name(package["name"]): package["version"] for package in chosen}


def _unmet(folder: Path, has: dict[str, str], environment: dict[str, str]) -> list[str]:
    """Requirements of the wheels in `folder`, by the host's markers, that neither the folder nor the host meets."""
    wheels = {canonicalize_name(wheel.name.split("-")[0]): wheel for wheel in folder.glob("*.whl")}
    unmet = set()
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = Parser().parsestr(archive.read(inside).decode()).get_all("Requires-Dist", [])
        for requirement in map(Requirement, lines):
            applies = requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""})
            if applies and canonicalize_name(requirement.name) not in {*wheels, *has}:
                requirement.marker = None
                unmet.add(str(requirement))
    return sorted(unmet)


def _parse(needs_file: Path) -> tuple[dict[str, list[str]], list[str]]:
    if not needs_file.is_file():
        raise WheelsError(
            f"{needs_file} does not exist; write it on the host that lacks packages: make needs PYTHON=python3"
        )
    header: dict[str, list[str]] = {"python": [], "platforms": [], "has": []}
    wanted = []
    for line in needs_file.read_text().splitlines():
        known = re.fullmatch(r"# (python|platforms|has): (.+)", line)
        if known:
            header[known[1]].append(known[2])
        elif line.strip() and not line.startswith("#"):
            wanted.append(line.strip())
    if not header["python"] or not header["platforms"]:
        raise WheelsError(f"{needs_file} lacks its '# python:' or '# platforms:' line; make it with: make needs")
    return header, wanted


def _pip(verb: str, *arguments: object) -> None:
    command = [sys.executable, "-m", "pip", verb, "--progress-bar", "off", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        told = done.stdout[max(0, done.stdout.find("ERROR")) :]  # what conflicts comes after it
        raise WheelsError(f"pip {verb} failed:\n{told.strip()}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m kvnb.wheels", description="Wheels for a host without a package registry."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("check", help="exit 1, saying what is missing, unless this Python has what a purpose needs")
    verb.add_argument("purpose", choices=PURPOSES)
    verb = verbs.add_parser("needs", help="write what this Python lacks")
    verb.add_argument("--out", type=Path, default=Path("needs.txt"))
    verb = verbs.add_parser("fetch", help="download what a needs.txt asks for")
    verb.add_argument("needs", type=Path)
    verb.add_argument("--to", type=Path, default=Path("wheelhouse"))
    chosen = parser.parse_args(arguments)
    try:
        if chosen.verb == "needs":
            chosen.out.write_text(needs())
            print(f"{chosen.out}: {len(_parse(chosen.out)[1])} missing")
        elif chosen.verb == "fetch":
            wheels = fetch(chosen.needs, chosen.to)
            print(f"{chosen.to}: {len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 1e6:.1f} MB")
        elif missing := lacking(chosen.purpose):
            raise WheelsError(
                f"{sys.executable} lacks {', '.join(missing)}.\nInstall these, or see 'offline GPU host' in README.md"
            )
    except WheelsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
