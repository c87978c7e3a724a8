"""The run file: one schema, complete or not there, and refused where it is not what it should be."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.bench.results import RunFileError
from kvnb.copies import REGISTRY
from kvnb.copies.base import PARTS, bytes_moved
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
    made |= {"graphs": None, "sm_clock_mhz": 1980.5, "throttled": None}
    made |= Case(16, cache_bytes=MIB).fields() | MACHINE | columns
    case = Case(**{name: made[name] for name in CASE_FIELDS if name in ("num_tokens", "padding")}, cache_bytes=MIB)
    return {"bytes_moved": bytes_moved(made["copy"], made["family"], made["part"], case)} | made


FAILED = {
    "seconds": None,
    "status": "unsupported",
    "reason": "runs on cuda, not on cpu",
    "sm_clock_mhz": None,
    "worker": -1,
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Of a run that kvnb keeps; its folder is not there yet, and a shell splits its name."""
    monkeypatch.setattr(paths, "LOCAL", tmp_path / "new folder")
    return paths.LOCAL / "run.parquet"


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
    rows = [row(), row(**FAILED), row(sample=2, throttled="software power cap", graphs=3)]
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
        ([row(), row(status="fine")], "is not written: it holds status 'fine', not one of ok, wrong, unsupported"),
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is made of /dev/full, which is not here")
def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_of_the_new_one(path):
    results.write([row()], path)
    before = path.read_bytes()
    paths.partial_of(path).symlink_to("/dev/full")
    with pytest.raises(RunFileError, match=r"run.parquet cannot be written \(.*No space left on device\): make room"):
        results.write([row(sample=2)], path)
    assert path.read_bytes() == before
    assert [left.name for left in path.parent.iterdir()] == ["run.parquet"]


def test_a_write_leaves_nothing_but_the_file_and_takes_along_what_killed_ones_left(path):
    """Those of this host, that is: of another one's processes, nothing is known."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path.parent.mkdir()
    mine = paths.partial_of(path).name
    left = {who: mine.replace(f"@{os.getpid()}.", f"@{pid}.") for who, pid in (("alive", 1), ("dead", dead.pid))}
    left["elsewhere"] = left["dead"].replace(f"@{platform.node()}@", "@elsewhere@")
    left |= {"another file's": left["dead"].replace("run", "other"), "foreign": ".mine.partial"}
    for name in left.values():
        (path.parent / name).touch()
    results.write([row()], path)
    kept = {who for who, name in left.items() if (path.parent / name).exists()}
    assert kept == {"alive", "elsewhere", "foreign"}
    for who in kept:
        (path.parent / left[who]).unlink()
    assert [left.name for left in path.parent.iterdir()] == ["run.parquet"]


@pytest.mark.parametrize("name", ["README.md", "run.parquet", "local/README.md", "r.parts/settings.json"])
@pytest.mark.parametrize("take", [results.load, results.read, results.first])
def test_what_kvnb_did_not_write_is_refused_and_nobody_is_told_to_remove_it(tmp_path, monkeypatch, name, take):
    monkeypatch.setattr(paths, "LOCAL", tmp_path / "local")
    (path := tmp_path / name).parent.mkdir(exist_ok=True)
    for write in (lambda: path.write_text("not parquet"), lambda: pq.write_table(pa.table({"speed": [1.0]}), path)):
        write()
        with pytest.raises(RunFileError, match=r" is not a .*run file .* give a run file: .*`make measure`") as told:
            take(path)
        assert str(path) in str(told.value) and "rm " not in str(told.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(path, share):
    """Whatever is left of it."""
    results.write([row(sample=number) for number in range(100)], path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    for take in (results.load, results.read, results.first):
        with pytest.raises(RunFileError, match=r"run\.parquet is not a complete run file .*: `make measure RUN=run`"):
            take(path)


def test_a_bit_that_changed_on_the_disk_is_noticed_or_changes_nothing(path):
    times = np.random.default_rng(0).random(1000)
    results.write([row(sample=number, seconds=seconds) for number, seconds in enumerate(times)], path)
    whole, wanted, refused = path.read_bytes(), results.read(path), 0
    for place in np.random.default_rng(1).choice(len(whole), 50, replace=False):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            assert results.read(path).equals(wanted)
        except RunFileError:
            refused += 1
    assert refused > 25


@pytest.mark.parametrize("damage", [(b"kvnb_commit", b"kvnb_\xf9ommit"), (b"GPU-1", b"GPU-2")], ids=["name", "value"])
def test_bytes_that_are_not_what_was_written_are_told_with_the_files_name(path, damage):
    results.write([row()], path)
    path.write_bytes(path.read_bytes().replace(*damage))
    with pytest.raises(RunFileError, match=r"run\.parquet is not a complete run file .*measure again"):
        results.read(path)


def test_an_encoding_that_this_arrow_does_not_know_is_told_with_the_files_name(path):
    results.write([row(sample=number) for number in range(200)], path)
    whole, causes, wanted = path.read_bytes(), set(), {pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError}
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for place in np.random.default_rng(2).permutation(np.arange(footer, len(whole) - 8)):  # till each was met
        if causes >= wanted:
            break
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            results.read(path)
        except RunFileError as error:
            causes.add(type(error.__cause__))
    assert causes >= wanted


def test_what_the_system_cannot_do_is_not_blamed_on_the_file(path):
    results.write([row()], path)
    results.read(path)  # so that nothing else remains to be opened
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), most))
        try:
            with pytest.raises(RunFileError, match=r"run\.parquet cannot be read \(.*Too many open files") as told:
                results.read(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    assert "may be sound" in str(told.value) and "rm " not in str(told.value)


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        ("my r.parts", r"`rm '\S+/my r\.parts/run\.parquet'`, and the command that began the run measures this case"),
        ("recorded/h200", r"`git checkout -- \S+` brings back the recorded one"),
        ("local", r"`rm \S+`, and measure again: `make measure RUN=run` with the GRID it had"),
    ],
)
def test_a_damaged_file_is_named_with_what_replaces_it(tmp_path, monkeypatch, folder, advice):
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(paths, "LOCAL", tmp_path / "local")
    path = tmp_path / folder / "run.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1")
    with pytest.raises(RunFileError, match=advice) as told:
        results.read(path)
    assert str(path) in str(told.value)


HAND_EDITED = {
    "no row": ([], "holds no row"),
    "a value gone": ([row(layout=None)], "lacks values in layout"),
    "another status": ([row(status="fine")], "holds status 'fine', not one of ok, wrong"),
    "another family": ([row(family="kernal")], "holds family 'kernal', not one of kernel, .*; did you mean kernel?"),
    "another grid": ([row(grid="ful")], "holds grid 'ful', not one of quick, full, .*; did you mean full?"),
    "another policy": ([row(policy="skipp")], "holds policy 'skipp', not one of skip, .*; did you mean skip?"),
    "another part": ([row(part="", bytes_moved=128)], "holds part '', not one of step, write"),
    "another state": ([row(state="prodcued")], "holds state 'prodcued', not one of .*; did you mean produced?"),
    **{
        f"{name} {least - 1}": ([row(**{name: least - 1})], f"holds {name} {least - 1}, less than {least}")
        for name, least in results.LEAST.items()
    },
    **{f"no {name}": ([row(**{name: ""})], f"holds an empty {name}") for name in results.NEVER_EMPTY},
    **{
        f"a clock of {mhz} MHz": ([row(), row(sample=2, sm_clock_mhz=mhz)], "holds an sm_clock_mhz that no clock has")
        for mhz in (-1.0, 0.0, float("inf"), float("nan"))
    },
    **{
        f"a sample of {name} -1": ([row(), row(**{name: -1})], "has samples of worker, round or sample -1, which say")
        for name in ("worker", "round", "sample")
    },
    "no reason": ([row(status="error", seconds=None)], "has a reason where status is ok, or none where it is not"),
    "a reason of a time": ([row(), row(sample=2, reason="no")], "has a reason where status is ok, or none where it"),
    "a graph on a CPU": ([row(gpu="")], "has timer wall beside a GPU, or another one without"),
    "a GPU's wall": ([row(timer="wall")], "has timer wall beside a GPU, or another one without"),
    "two families": ([row(), row(sample=2, family="torch")], "holds kvnb in two families"),
    "two outcomes": ([row(), row(**FAILED | {"worker": 0})], "holds 1 cells with two outcomes in one worker"),
    "another timer": ([row(timer="graphs")], "holds timer 'graphs', not one of graph, .*; did you mean graph?"),
    "no time of day": ([row(utc="2026-01-02")], "holds utc '2026-01-02', not a time as 2026-"),
    "no time zone": ([row(utc="2026-01-02T03:04:05")], "holds utc '2026-01-02T03:04:05', not a time as 2026-"),
    "no time in words": ([row(utc="yesterday")], "holds utc 'yesterday', not a time as 2026-"),
    "more bytes": ([row(bytes_moved=7)], "holds bytes_moved 7, not 131200, for kvnb, 16 tokens .* part write"),
    "a launch's bytes": ([row(copy="limit.launch", family="limit", bytes_moved=1)], "holds bytes_moved 1, not 0, for"),
    "a step's bytes": ([row(part="step", bytes_moved=131200)], "holds bytes_moved 131200, not 128, for kvnb, .* step"),
    "ok without a time": ([row(), row(sample=2, seconds=None)], "has seconds where status is not ok, or none where"),
    "a time that is none": ([row(seconds=float("nan"))], "has seconds where status is not ok, or none where it is"),
    "an endless time": ([row(seconds=float("inf"))], "has seconds where status is not ok, or none where it is"),
    "a time of an error": ([row(status="error", reason="no")], "has seconds where status is not ok, or none where"),
    "a time below 0": ([row(), row(sample=2, seconds=-1e-6)], "holds times of 0 s or less"),
    "no time at all": ([row(seconds=0.0)], "holds times of 0 s or less"),
    "an odd case": ([row(), row(layout="NHDD")], "holds a case that cannot be: layout = 'NHDD' must be one of NHD"),
    "a sample twice": ([row(), row(seconds=1.0)], "holds 1 samples twice"),
    "two machines": ([row(), row(sample=2, cpu="another")], "holds one run with more than one cpu"),
    "two kernels": ([row(), row(sample=2, copy_version="b")], "holds two versions of kvnb: it was resumed after an"),
}


@pytest.mark.parametrize(("rows", "message"), HAND_EDITED.values(), ids=HAND_EDITED)
def test_a_file_edited_by_hand_is_refused_whole(path, rows, message):
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=results.SCHEMA), path)
    with pytest.raises(RunFileError, match=rf"run\.parquet {message}.*; `rm \S.*RUN=run`") as told:
        results.load(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize(("rows", "message"), HAND_EDITED.values(), ids=HAND_EDITED)
def test_what_would_be_refused_is_not_written(path, rows, message):
    results.write([row(sample=9)], path)
    before = path.read_bytes()
    with pytest.raises(RunFileError, match=rf"run\.parquet is not written: it {message}"):
        results.write(rows, path)
    assert path.read_bytes() == before


def test_a_slope_of_an_empty_launch_below_0_is_read_as_it_was_recorded(path):
    """data/recorded/h200 has such, of schema version 1."""
    rows = [row(copy="limit.launch", family="limit", seconds=-1e-8), row()]
    results.write(rows, path)
    assert results.read(path).to_pylist() == rows


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_that_another_tool_saved_is_read_as_it_was_written(path, version):
    """Whole numbers with nulls are floats in pandas, strings are large, a selection keeps its row numbers."""
    rows = [row(), row(**FAILED), row(sample=2, graphs=3)]
    results.write(rows, path)
    frame = pd.read_parquet(path).set_axis([5, 2, 9]).assign(schema_version=version)
    names = [name for name in reversed(results.SCHEMA.names) if (version, name) != (1, "padded")]
    frame[names].to_parquet(path)
    assert pq.read_schema(path).types != results.SCHEMA.types and "__index_level_0__" in pq.read_schema(path).names
    assert results.read(path).to_pylist() == rows
    assert results.read(path).schema.equals(results.SCHEMA, check_metadata=True)


@pytest.mark.parametrize(("name", "value"), [("launches", 1.5), ("calls", 1 << 40), ("seconds", "fast")])
def test_a_value_of_another_kind_is_refused_and_not_rounded(path, name, value):
    results.write([row()], path)
    pd.read_parquet(path).assign(**{name: value}).to_parquet(path)
    with pytest.raises(RunFileError, match=rf"run\.parquet holds a {name} that is no (int32|double); `rm "):
        results.read(path)


@pytest.mark.parametrize("columns", [{"speed": [1.0]}, {"run_id": ["r"], "speed": [1.0]}, {}])
def test_a_parquet_file_of_something_else_is_refused(path, columns):
    results.write([row()], path)
    pq.write_table(pa.table(columns) if columns else pq.read_table(path).drop_columns("seed"), path)
    told = f"is not a run file of schema version 2: columns differ in .*{'speed' if columns else 'seed'}.*; give a run"
    with pytest.raises(RunFileError, match=told):
        results.read(path)


@pytest.mark.parametrize(
    ("version", "advice"),
    [(0, "measure again"), (1, "measure again"), (3, "read it with the kvnb that wrote it, or a newer one")],
)
def test_another_schema_version_is_refused(path, version, advice):
    results.write([row(schema_version=version)], path)
    with pytest.raises(RunFileError, match=rf"has schema version .*{version}.*, this kvnb reads 2; {advice}"):
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


def test_a_run_that_is_given_twice_is_not_counted_twice(path):
    first, second = two(path)
    copied = first.with_name("copied.parquet")
    copied.write_bytes(first.read_bytes())
    for given in ([first, first], [first, second, copied]):
        with pytest.raises(RunFileError, match="these run files hold 1 samples twice: give each run once"):
            results.load(*given)


@pytest.mark.parametrize("name", results.SAME_MACHINE)
def test_runs_of_different_machines_are_not_mixed(path, name):
    other = {"threads": 7, "l2_bytes": 7, "dirty": True}.get(name, "another")
    with pytest.raises(RunFileError, match=f"these run files differ in {name} .*{other}.*: load each alone"):
        results.load(*two(path, **{name: other}))


def test_runs_of_different_kernels_are_not_mixed(path):
    with pytest.raises(RunFileError, match=r"differ in the version of kvnb \(0123456789, later\): load each alone"):
        results.load(*two(path, copy_version="later"))


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


def test_of_records_of_a_day_the_latest_that_is_sound_is_the_newest(tmp_path, capsys):
    """Damaged ones are said; where there are only such, whoever reads the newest is told."""
    for day, commit, hour in ((1, "b", 8), (2, "b", 8), (2, "0", 12), (2, "f", 10)):
        began = row(utc=f"2026-02-{day:02d}T{hour:02d}:00:00+00:00")
        results.write([began], tmp_path / "h200" / f"2026-02-{day:02d}_full_{commit * 7}.parquet")
    order = ["2026-02-02_full_0000000", "2026-02-02_full_fffffff", "2026-02-02_full_bbbbbbb", "2026-02-01_full_bbbbbbb"]
    for damaged, name in enumerate(order):
        assert results.newest("h200", "full", tmp_path).stem == name
        told = capsys.readouterr().err.splitlines()
        assert sorted(line.partition(".parquet is not a complete")[0][-23:] for line in told) == sorted(order[:damaged])
        (tmp_path / "h200" / f"{name}.parquet").write_bytes(b"PAR1")
    assert results.newest("h200", "full", tmp_path).stem == "2026-02-02_full_fffffff"
    assert capsys.readouterr().err == ""


def test_bytes_moved_of_a_row_are_what_was_timed():
    """results and timing know one rule."""
    from kvnb.bench import timing

    case = Case(16, cache_bytes=MIB, padding=0.5)
    for copy in REGISTRY.values():
        for part in PARTS:
            moved = timing.bytes_moved(timing.Cell(copy, "skip", part, "graph", "produced"), case)
            assert moved == bytes_moved(copy.name, copy.family, part, case)
