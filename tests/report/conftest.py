"""Runs that reports are tested on; fixture_runs.py says what is in them."""

from __future__ import annotations

import fixture_runs
import pytest

from kvnb.bench import results
from kvnb.report.answers import Run


@pytest.fixture(scope="session")
def gpu() -> Run:
    return Run(fixture_runs.gpu_run())


@pytest.fixture(scope="session")
def cpu() -> Run:
    return Run(fixture_runs.cpu_run())


@pytest.fixture(scope="session")
def run_files(tmp_path_factory: pytest.TempPathFactory, gpu: Run, cpu: Run) -> list[str]:
    """Run files of both, CPU first."""
    folder = tmp_path_factory.mktemp("runs")
    return [str(results.save(run.samples, folder / f"{name}.parquet")) for name, run in (("cpu", cpu), ("gpu", gpu))]
