"""The run file: one schema, complete or not there, and refused where it is not what it should be."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvnb.bench import results
from kvnb.bench.results import RunFileError
from kvnb.problem.case import CASE_FIELDS, MIB, Case

MACHINE = {
    "gpu": "Test GPU",
    "gpu_uuid": "GPU-1",
    "driver": "600.1",
    "cuda": "13.0",
    "torch": "2.13.0",
    "triton": "3.6",
}
MACHINE |= {
    "python": "3.12.1",
    "cpu": "Test CPU",
    "threads": 8,
    "l2_bytes": 50 * MIB,
    "kvnb_commit": "a" * 40,
    "dirty": False,
}
MACHINE |= {"utc": "2026-01-02T03:04:05+00:00"}


def row(**columns) -> dict:
    made = {
        "run_id": "r",
        "schema_version": results.SCHEMA_VERSION,
        "grid": "quick",
        "copy": "kvnb",
        "family": "kernel",
    }
    made |= {"copy_version": "0123456789", "policy": "skip", "part": "write", "timer": "graph", "state": "produced"}
    made |= {
        "worker": 0,
        "round": 3,
        "sample": 1,
        "seconds": 1.5e-6,
        "status": "ok",
        "reason": "",
        "launches": 1,
        "calls": 8,
    }
    made |= {"graphs": None, "bytes_moved": 1 << 33, "sm_clock_mhz": 1980.5, "throttled": None}
    return made | Case(16, cache_bytes=MIB).fields() | MACHINE | columns


FAILED = {
    "seconds": None,
    "status": "unsupported",
    "reason": "runs on cuda, not on cpu",
    "sm_clock_mhz": None,
    "worker": -1,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "run.parquet"


# ------------------------------------------------------------------------------------------------------------- schema


def test_every_column_says_its_unit_and_meaning():
    assert set(results.SCHEMA.names) >= {*CASE_FIELDS, *results.MACHINE_FIELDS, *results.CELL_FIELDS}
    for field in results.SCHEMA:
        assert field.metadata[b"meaning"]
        assert b"unit" in field.metadata
    units = {field.name: field.metadata[b"unit"].decode() for field in results.SCHEMA}
    assert (units["seconds"], units["bytes_moved"], units["sm_clock_mhz"], units["status"]) == ("s", "B", "MHz", "")


def test_units_and_meanings_are_in_the_file(path):
    results.write([row()], path)
    assert pq.read_schema(path).field("seconds").metadata[b"unit"] == b"s"
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_rows_come_back_as_they_went_in(path):
    rows = [row(), row(**FAILED), row(sample=2, throttled="software power cap", dirty=None, graphs=3)]
    assert results.write(rows, path) == path
    assert results.read(path).to_pylist() == rows


def test_a_frame_comes_back_as_it_went_in(path):
    results.write([row(), row(**FAILED)], path)
    samples = results.load(path)
    assert list(samples.columns) == results.SCHEMA.names
    again = results.load(results.save(samples, str(path.with_name("again.parquet"))))
    pd.testing.assert_frame_equal(samples, again)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{k: v for k, v in row().items() if k != "seed"}], r"row lacks \['seed'\]"),
        ([row(colour="red")], r"unknown \['colour'\]"),
        ([row(), row(status="fine")], "status 'fine' is not one of ok, wrong, unsupported, out_of_memory, error"),
    ],
    ids=["missing column", "unknown column", "unknown status"],
)
def test_a_row_that_is_not_of_the_schema_is_refused(path, rows, message):
    with pytest.raises(RunFileError, match=message):
        results.write(rows, path)
    assert not path.exists()


def test_a_frame_without_a_column_is_refused(path):
    samples = pd.DataFrame([row()]).drop(columns=["timer", "state"])
    with pytest.raises(RunFileError, match=r"run\.parquet: samples lack the columns \['timer', 'state'\]"):
        results.save(samples, path)
    assert not path.exists()


def test_a_refused_write_leaves_the_old_file(path):
    results.write([row()], path)
    before = path.read_bytes()
    with pytest.raises(RunFileError):
        results.write([row(status="fine")], path)
    assert path.read_bytes() == before


def test_a_write_that_dies_half_way_leaves_the_old_file(path, monkeypatch):
    results.write([row()], path)
    before = path.read_bytes()

    def dies(table, where, **options):
        where.write_bytes(b"PAR1")
        raise OSError("no space left on device")

    monkeypatch.setattr(results.pq, "write_table", dies)
    with pytest.raises(OSError, match="no space"):
        results.write([row(sample=2)], path)
    assert path.read_bytes() == before
    assert list(path.parent.glob("*.parquet")) == [path]  # what is left of the new one is hidden, and no run file


def test_a_write_leaves_nothing_but_the_file(path):
    results.write([row()], path)
    assert [left.name for left in path.parent.iterdir()] == ["run.parquet"]


def test_a_file_of_another_kind_is_refused(path):
    path.parent.mkdir()
    path.write_text("not parquet")
    with pytest.raises(
        RunFileError, match=r"run\.parquet is not a complete run file .*give a run file, or, .* measure again"
    ):
        results.read(path)


def test_a_truncated_file_is_refused(path):
    results.write([row()] * 100, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunFileError, match="not a complete run file"):
        results.load(path)


def test_a_parquet_file_of_something_else_is_refused(path):
    path.parent.mkdir()
    pq.write_table(pa.table({"run_id": ["r"], "speed": [1.0]}), path)
    with pytest.raises(RunFileError, match="is not a run file of schema version 2: columns differ in .*'speed'"):
        results.read(path)


@pytest.mark.parametrize("version", [0, 1, 3])
def test_another_schema_version_is_refused(path, version):
    results.write([row(schema_version=version)], path)
    with pytest.raises(RunFileError, match=rf"schema version .*{version}.*, this kvnb reads 2; measure again"):
        results.read(path)


@pytest.mark.parametrize("version", [1, 3])
def test_version_1_is_read_as_it_was_meant(path, version):
    """It had no column `padded`: padding was scattered. A later version without it is not known."""
    results.write([row(schema_version=version, padding=0.5, seconds=2e-6)], path)
    pq.write_table(pq.read_table(path).drop_columns("padded"), path)
    if version == 1:
        [read] = results.read(path).to_pylist()
        assert read == row(padding=0.5, seconds=2e-6)
        assert (read["padded"], read["schema_version"]) == ("scattered", results.SCHEMA_VERSION)
    else:
        with pytest.raises(RunFileError, match="is not a run file of schema version 2: columns differ in .*'padded'"):
            results.read(path)


def test_a_missing_file_is_refused(path):
    with pytest.raises(RunFileError, match=r"run\.parquet does not exist; run files lie in"):
        results.load(path)
    with pytest.raises(RunFileError, match="needs the path of a run file"):
        results.load()


# -------------------------------------------------------------------------------------------------------- several files


def two(path, **second):
    other = path.with_name("other.parquet")
    results.write([row()], path)
    results.write([row(run_id="s", **second)], other)
    return path, other


def test_runs_of_one_machine_are_loaded_together(path):
    samples = results.load(*two(path, grid="full", utc="2026-02-03T00:00:00+00:00"))
    assert samples["run_id"].tolist() == ["r", "s"]
    assert samples.index.tolist() == [0, 1]


@pytest.mark.parametrize(
    "differing", [{"gpu_uuid": "GPU-2"}, {"torch": "2.14.0"}, {"kvnb_commit": "b" * 40}], ids=lambda d: next(iter(d))
)
def test_runs_that_differ_are_not_mixed(path, differing):
    [(name, value)] = differing.items()
    with pytest.raises(RunFileError, match=f"these run files differ in {name} .*{value}.*: load each alone"):
        results.load(*two(path, **differing))


def test_two_machines_without_a_gpu_are_not_mixed(path):
    first = path.with_name("first.parquet")
    results.write([row(gpu="", gpu_uuid="", cpu="Test CPU")], first)
    results.write([row(gpu="", gpu_uuid="", cpu="Another CPU")], path)
    with pytest.raises(RunFileError, match="differ in cpu"):
        results.load(first, path)


def test_the_newest_record_of_a_grid_is_found_by_its_date(tmp_path):
    names = [
        "2026-01-31_full_aaaaaaa",
        "2026-02-01_full_0000000",
        "2025-12-31_full_fffffff",
        "2026-03-01_quick_aaaaaaa",
    ]
    folder = tmp_path / "h200"
    folder.mkdir()
    for name in (*names, "2027-01-01_full"):  # the last one has no commit: not a record
        (folder / f"{name}.parquet").touch()
    assert results.newest("h200", "full", tmp_path) == folder / "2026-02-01_full_0000000.parquet"
    assert results.newest("h200", "quick", tmp_path) == folder / "2026-03-01_quick_aaaaaaa.parquet"
    assert results.newest("h200", "padding", tmp_path) is None
    assert results.newest("b200", "full", tmp_path) is None


def test_of_two_records_of_a_day_the_later_is_the_newest(tmp_path):
    for commit, hour in (("bbbbbbb", 8), ("0000000", 12), ("fffffff", 10)):
        began = row(utc=f"2026-02-01T{hour:02d}:00:00+00:00")
        results.write([began], tmp_path / "h200" / f"2026-02-01_full_{commit}.parquet")
    assert results.newest("h200", "full", tmp_path).stem == "2026-02-01_full_0000000"
