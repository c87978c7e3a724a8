"""What a reviewer need not look for: lint, stripped notebooks, README's splices, kvnb's size."""

import re
import subprocess
import sys

import pytest

from kvnb import paths


def tool(name, *arguments):
    pytest.importorskip(name, reason=f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments], cwd=paths.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff():
    tool("ruff", "check", "--no-cache", ".")


def test_notebooks_are_stripped():
    tool("nbstripout", "--verify", "--keep-id", *map(str, sorted(paths.NOTEBOOKS.glob("*.ipynb"))))


def test_readme_says_what_the_record_says():
    tool("cogapp", "--check", "README.md")


def test_every_pin_has_its_reason():
    pins = [line for line in (paths.ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w-]+==\S+( ; [^#]+)? +# \S.*", line)] == []


def test_readmes_links_lead_somewhere():
    text = (paths.ROOT / "README.md").read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (paths.ROOT / target).exists()] == []
