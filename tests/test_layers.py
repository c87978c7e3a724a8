"""The floor plan: rooms and files import only what lies below them."""

import subprocess
import sys

import pytest

from kvnb import paths


def test_the_contracts_of_layers_hold():
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run([*command, "--no-cache"], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
