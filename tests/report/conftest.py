"""Runs that reports are tested on; fixture_runs.py says what is in them."""

from __future__ import annotations

import fixture_runs
import pandas as pd
import pytest

from kvnb.bench import results


@pytest.fixture(scope="session")
def gpu() -> pd.DataFrame:
    return fixture_runs.gpu_run()


@pytest.fixture(scope="session")
def cpu() -> pd.DataFrame:
    return fixture_runs.cpu_run()


@pytest.fixture(scope="session")
def run_files(tmp_path_factory: pytest.TempPathFactory, gpu: pd.DataFrame, cpu: pd.DataFrame) -> list[str]:
    """Run files of both, CPU first."""
    folder = tmp_path_factory.mktemp("runs")
    return [str(results.save(samples, folder / f"{name}.parquet")) for name, samples in (("cpu", cpu), ("gpu", gpu))]
