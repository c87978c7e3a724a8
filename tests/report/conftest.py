"""Runs that reports are tested on; fixture_runs.py says what is in them."""

from __future__ import annotations

from pathlib import Path

import fixture_runs
import pytest

from kvnb.bench import results
from kvnb.report import answers, null_block
from kvnb.report.answers import Run
from kvnb.report.null_block import PaddedRun


@pytest.fixture(scope="session")
def gpu() -> Run:
    return Run(fixture_runs.gpu_run())


@pytest.fixture(scope="session")
def old(gpu: Run) -> Run:
    """The GPU run as it was before vLLM's wheels were measured."""
    return Run(gpu.samples[~gpu.samples["copy"].isin(fixture_runs.WITHOUT_WHEELS)].reset_index(drop=True))


@pytest.fixture(scope="session")
def by_release() -> Run:
    return Run(fixture_runs.releases_run())


@pytest.fixture(scope="session")
def padding_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results.save(fixture_runs.padding_run(), tmp_path_factory.mktemp("padding") / "padding.parquet")


@pytest.fixture(scope="session")
def padded(padding_file: Path) -> PaddedRun:
    return null_block.load(padding_file)


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of releases, as fixture_runs has it."""
    monkeypatch.setattr(answers, "release_facts", fixture_runs.release_facts)


@pytest.fixture(scope="session")
def cpu() -> Run:
    return Run(fixture_runs.cpu_run())


@pytest.fixture(scope="session")
def run_files(tmp_path_factory: pytest.TempPathFactory, gpu: Run, cpu: Run) -> list[str]:
    """Run files of both, CPU first."""
    folder = tmp_path_factory.mktemp("runs")
    return [str(results.save(run.samples, folder / f"{name}.parquet")) for name, run in (("cpu", cpu), ("gpu", gpu))]
