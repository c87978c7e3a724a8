"""The run file: one parquet row per sample, one schema, written with pyarrow."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvnb import paths
from kvnb.copies.base import FAMILIES, PARTS, STATES, TIMERS, bytes_moved, nearest
from kvnb.problem.case import CASE_FIELDS, GRIDS, Case
from kvnb.problem.slots import POLICIES

SCHEMA_VERSION = 2
STATUSES = ("ok", "wrong", "unsupported", "out_of_memory", "error")
KNOWN = {"status": STATUSES, "grid": GRIDS, "family": FAMILIES, "policy": POLICIES}
KNOWN |= {"part": PARTS, "timer": TIMERS, "state": STATES}
LEAST = {"worker": -1, "round": -1, "sample": -1, "launches": 0, "calls": 1, "graphs": 0, "threads": 1, "l2_bytes": 0}
NEVER_EMPTY = ("run_id", "copy", "copy_version")

# name, type, unit, meaning
_COLUMNS = [
    ("run_id", pa.string(), "", "one execution on one machine"),
    ("schema_version", pa.int32(), "", "version of this schema"),
    ("grid", pa.string(), "", "named list of cases"),
    ("copy", pa.string(), "", "one way to write the rows"),
    ("family", pa.string(), "", "family of the copy: decides its colour"),
    ("copy_version", pa.string(), "", "hash of the copy's sources, and what of other packages it ran"),
    ("policy", pa.string(), "", "where padded rows go"),
    ("part", pa.string(), "", "step: once per model step; write: once per layer"),
    ("timer", pa.string(), "", "how the call was timed"),
    ("state", pa.string(), "", "what the caches held before the call"),
    ("worker", pa.int32(), "", "process number, from 0; -1 in rows that were not measured"),
    ("round", pa.int32(), "", "randomised pass over the case's copies, from 0"),
    ("sample", pa.int32(), "", "measured time within the round, from 0; higher where a disturbed visit was retaken"),
    ("seconds", pa.float64(), "s", "time of one call; null unless status is ok"),
    ("status", pa.string(), "", "ok, wrong, unsupported, out_of_memory or error"),
    ("reason", pa.string(), "", "why status is not ok"),
    ("num_tokens", pa.int64(), "tokens", "length of slot_mapping"),
    ("num_kv_heads", pa.int64(), "heads", "KV heads of a row"),
    ("head_size", pa.int64(), "elements", "elements of a K head"),
    ("value_head_size", pa.int64(), "elements", "elements of a V head"),
    ("block_size", pa.int64(), "slots", "slots of a block"),
    ("cache_bytes", pa.int64(), "B", "bytes of the K and V caches together"),
    ("dtype", pa.string(), "", "torch dtype of rows and caches"),
    ("layout", pa.string(), "", "how the cache lies in memory: NHD, HND or packed"),
    ("source", pa.string(), "", "contiguous, or qkv: a slice of the fused projection"),
    ("slots", pa.string(), "", "slot pattern: decode, prefill, mixed or random"),
    ("padding", pa.float64(), "share", "share of slot_mapping that is padding"),
    ("padded", pa.string(), "", "where in slot_mapping padding lies: scattered or tail"),
    ("seed", pa.int64(), "", "seed of inputs and slots"),
    ("launches", pa.int32(), "launches", "kernel, copy and fill nodes per call in a captured graph"),
    ("calls", pa.int32(), "calls", "calls behind one sample: K of a graph, N of a batch"),
    ("graphs", pa.int32(), "graphs", "graphs that torch.compile made for this cell"),
    ("bytes_moved", pa.int64(), "B", "fewest bytes a call moves: rows read and written once, index read once"),
    ("sm_clock_mhz", pa.float64(), "MHz", "SM clock around the sample, cycles against the global timer"),
    ("throttled", pa.string(), "", "throttle reasons of NVML around the round, or a few; empty: none; null: not known"),
    ("gpu", pa.string(), "", "GPU name; empty on a CPU run"),
    ("gpu_uuid", pa.string(), "", "GPU UUID"),
    ("driver", pa.string(), "", "GPU driver version"),
    ("cuda", pa.string(), "", "CUDA version torch was built for"),
    ("torch", pa.string(), "", "torch version"),
    ("triton", pa.string(), "", "triton version"),
    ("python", pa.string(), "", "Python version"),
    ("cpu", pa.string(), "", "CPU model"),
    ("threads", pa.int32(), "threads", "torch's CPU threads"),
    ("l2_bytes", pa.int64(), "B", "L2 of the GPU, last-level cache of the CPU"),
    ("kvnb_commit", pa.string(), "", "commit measured, or tree-<hash> of the sources where there is no git"),
    ("dirty", pa.bool_(), "", "uncommitted changes in kvnb/ or csrc/; null: not known"),
    ("utc", pa.string(), "", "when the run began, ISO 8601"),
]
SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"unit": unit, "meaning": meaning}) for name, kind, unit, meaning in _COLUMNS]
)
MACHINE_FIELDS = (
    "gpu",
    "gpu_uuid",
    "driver",
    "cuda",
    "torch",
    "triton",
    "python",
    "cpu",
    "threads",
    "l2_bytes",
    "kvnb_commit",
    "dirty",
    "utc",
)
SAME_MACHINE = tuple(name for name in MACHINE_FIELDS if name != "utc")  # what samples told of together must share
CELL_FIELDS = ("policy", "part", "timer", "state")
SAMPLE_FIELDS = ("run_id", *CASE_FIELDS, "copy", *CELL_FIELDS, "worker", "round", "sample")  # no two rows share them
NULLABLE = {"seconds", "launches", "calls", "graphs", "sm_clock_mhz", "throttled", "dirty"}
GIVE = "give a run file: they lie in data/local and data/recorded/<gpu>, and `make measure` makes one"


class RunFileError(ValueError):
    """A run file that cannot be used as it is; the message names the file and what to do."""


def write(rows: list[dict] | pa.Table, path: Path) -> Path:
    """Write rows as a run file, complete or not at all: a temporary name beside `path`, then a rename.

    Raises RunFileError for rows that `read` would refuse, and where the file cannot be written: nothing is left of it
    then, and a file that was there is as it was.
    """
    table = (rows if isinstance(rows, pa.Table) else _table(rows)).cast(SCHEMA)
    if wrong := _wrong(table):
        raise RunFileError(f"{path} is not written: it {wrong}")
    try:
        with paths.whole(path) as partial:
            pq.write_table(table, partial, compression="zstd", compression_level=9, write_page_checksum=True)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written ({error}): make room, or choose another folder") from error
    return path


def _table(rows: list[dict]) -> pa.Table:
    names = set(SCHEMA.names)
    for row in rows:
        if row.keys() != names:
            raise RunFileError(f"row lacks {sorted(names - row.keys())} or has unknown {sorted(row.keys() - names)}")
    try:
        return pa.Table.from_pylist(rows, schema=SCHEMA)
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise RunFileError(f"a row cannot be stored: {error}") from error


def save(samples, path: str | Path) -> Path:
    """Write a DataFrame of samples (the columns of SCHEMA) to `path`; returns the path."""
    missing = [name for name in SCHEMA.names if name not in samples.columns]
    if missing:
        raise RunFileError(f"{path}: samples lack the columns {missing}")
    return write(pa.Table.from_pandas(samples[SCHEMA.names], schema=SCHEMA, preserve_index=False), Path(path))


def read(path: Path) -> pa.Table:
    """The samples of one run file, of schema version 1 as of 2, by kvnb or saved again by another tool: what that made
    of types and order is undone where no value is lost. Raises RunFileError where it is not a complete one, or holds
    what kvnb does not write: the message names the file and how to replace it."""
    table = _table_in(path)
    table = table.drop_columns([name for name in table.schema.names if re.fullmatch(r"__index_level_\d+__", name)])
    if "padded" not in table.schema.names and "schema_version" in table.schema.names:
        table = _from_version_1(table)
    if sorted(table.schema.names) != sorted(SCHEMA.names):
        odd = sorted(set(table.schema.names) ^ set(SCHEMA.names)) or "names that are there twice"
        told = f"{path} is not a run file of schema version {SCHEMA_VERSION}: columns differ in {odd}"
        raise RunFileError(f"{told}; {GIVE}")
    versions = sorted(set(table["schema_version"].to_pylist()) - {SCHEMA_VERSION}, key=str)
    if versions:
        newer = all(isinstance(version, int) and version > SCHEMA_VERSION for version in versions)
        advice = "read it with the kvnb that wrote it, or a newer one" if newer else "measure again"
        raise RunFileError(f"{path} has schema version {versions}, this kvnb reads {SCHEMA_VERSION}; {advice}")
    columns = {}
    for field in SCHEMA:
        try:
            columns[field.name] = table[field.name].cast(field.type)
        except pa.ArrowException as error:
            raise RunFileError(f"{path} holds a {field.name} that is no {field.type}; {_instead(path)}") from error
    table = pa.table(columns, schema=SCHEMA)
    if wrong := _wrong(table):
        raise RunFileError(f"{path} {wrong}; {_instead(path)}")
    return table


def _instead(path: Path) -> str:
    """What to type to get a sound file in the place of this one: nothing is removed but what kvnb keeps there."""
    name, folder = shlex.quote(str(path)), path.resolve().parent
    if paths.RECORDED in folder.parents:
        return f"`git checkout -- {name}` brings back the recorded one"
    if path.suffix == ".parquet" and folder.suffix == ".parts":
        return f"`rm {name}`, and the command that began the run measures this case again"
    if path.suffix == ".parquet" and folder == paths.LOCAL.resolve():
        return f"`rm {name}`, and measure again: `make measure RUN={path.stem}` with the GRID it had"
    return GIVE


def _wrong(table: pa.Table) -> str:
    """What no run file holds, in words that follow its name; else empty."""
    return _missing_values(table) or _wrong_values(table) or _contradicting_values(table) or _mixed_up(table)


def _missing_values(table: pa.Table) -> str:
    if not len(table):
        return "holds no row"
    lacking = [name for name in SCHEMA.names if name not in NULLABLE and table[name].null_count]
    return f"lacks values in {', '.join(lacking)}" if lacking else ""


def _wrong_values(table: pa.Table) -> str:
    for name, valid in KNOWN.items():
        for value in set(table[name].unique().to_pylist()) - set(valid):
            return f"holds {name} {value!r}, not one of {', '.join(valid)}{nearest(value, valid)}"
    for value in table["utc"].unique().to_pylist():
        if not _is_time(value):
            return f"holds utc {value!r}, not a time as 2026-11-30T08:49:36+00:00"
    for name, least in LEAST.items():
        if (found := pc.min(table[name]).as_py()) is not None and found < least:
            return f"holds {name} {found}, less than {least}"
    for name in NEVER_EMPTY:
        if "" in table[name].unique().to_pylist():
            return f"holds an empty {name}"
    clock = table["sm_clock_mhz"].drop_null()
    if not pc.all(pc.and_(pc.greater(clock, 0), pc.is_finite(clock)), min_count=0).as_py():
        return "holds an sm_clock_mhz that no clock has"
    timed = pc.fill_null(pc.is_finite(table["seconds"]), False)
    fine = pc.equal(table["status"], "ok")
    if not pc.all(pc.equal(timed, fine)).as_py() or not pc.all(pc.equal(table["seconds"].is_valid(), fine)).as_py():
        return "has seconds where status is not ok, or none where it is"
    if not pc.all(pc.equal(pc.equal(table["reason"], ""), fine)).as_py():
        return "has a reason where status is ok, or none where it is not"
    if any(pc.any(pc.and_(fine, pc.less(table[name], 0))).as_py() for name in ("worker", "round", "sample")):
        return "has samples of worker, round or sample -1, which say that nothing was measured"
    if not pc.all(pc.equal(pc.equal(table["gpu"], ""), pc.equal(table["timer"], "wall"))).as_py():
        return "has timer wall beside a GPU, or another one without"
    # Time 2 K less time K of an empty launch could be negative before such slopes were measured again: records hold it.
    no_slope = pc.not_equal(table["family"], "limit")
    if pc.any(pc.and_(pc.less_equal(table["seconds"], 0), no_slope)).as_py():
        return "holds times of 0 s or less"
    keys = [*CASE_FIELDS, "copy", "family", "part", "bytes_moved"]
    for row in table.select(keys).group_by(keys).aggregate([]).to_pylist():
        try:
            case = Case(**{name: row[name] for name in CASE_FIELDS})
        except ValueError as error:
            return f"holds a case that cannot be: {error}"
        moved = bytes_moved(row["copy"], row["family"], row["part"], case)
        if row["bytes_moved"] != moved:
            return f"holds bytes_moved {row['bytes_moved']}, not {moved}, for {row['copy']}, {case}, part {row['part']}"
    return ""


def _contradicting_values(table: pa.Table) -> str:
    families = table.group_by(["copy", "family"]).aggregate([])["copy"].to_pylist()
    for copy in {name for name in families if families.count(name) > 1}:
        return f"holds {copy} in two families"
    cell = ["run_id", *CASE_FIELDS, "copy", *CELL_FIELDS, "worker"]
    outcomes = table.group_by([*cell, "status"]).aggregate([])
    contradict = len(outcomes) - len(outcomes.group_by(cell).aggregate([]))
    return f"holds {contradict} cells with two outcomes in one worker" if contradict else ""


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None and text[4:11:3] == "--T"
    except ValueError:
        return False


def _mixed_up(table: pa.Table) -> str:
    """Whether one run's rows contradict each other: two machines, two versions of a copy, one sample twice."""
    for_all = table.group_by(["run_id", *SAME_MACHINE, "utc", "grid"]).aggregate([])
    if len(for_all) > len(for_all["run_id"].unique()):
        varying = [name for name in (*SAME_MACHINE, "utc", "grid") if len(for_all[name].unique()) > 1]
        return f"holds one run with more than one {varying[0]}"
    versions = table.group_by(["run_id", "copy"]).aggregate([("copy_version", "count_distinct")])
    twice = versions.filter(pc.greater(versions["copy_version_count_distinct"], 1))["copy"].to_pylist()
    if twice:
        return f"holds two versions of {twice[0]}: it was resumed after an edit; measure it anew"
    again = _samples_twice(table)
    return f"holds {again} samples twice" if again else ""


def _samples_twice(table: pa.Table) -> int:
    return len(table) - len(table.group_by([*SAMPLE_FIELDS]).aggregate([]))


def _table_in(path: Path, columns: list[str] | None = None) -> pa.Table:
    if path.exists() and not path.is_file():
        raise RunFileError(f"{path} is no file, and so no run file: move it away; {GIVE}")
    try:
        table = pq.read_table(path, partitioning=None, columns=columns, page_checksum_verification=True)
        _ = table.schema.names  # which are decoded only now
        return table
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        why = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, MemoryError) or getattr(error, "errno", None):  # the system's; Arrow's have no number
            raise RunFileError(f"{path} cannot be read ({why}): mend that first, the file may be sound") from error
        raise RunFileError(f"{path} is not a complete run file ({why}): {_instead(path)}") from error


def _from_version_1(table: pa.Table) -> pa.Table:
    """Version 1 had no column `padded`: all padding was scattered."""
    if set(table["schema_version"].to_pylist()) != {1}:
        return table
    version = pa.repeat(pa.scalar(2, pa.int32()), len(table))
    table = table.set_column(table.schema.get_field_index("schema_version"), "schema_version", version)
    return table.append_column("padded", pa.repeat("scattered", len(table)))


def first(path: str | Path) -> dict:
    """run_id, utc, grid and the machine of a run file, from its first row. Raises RunFileError for another file."""
    return _first(Path(path), ["run_id", "utc", "grid", *MACHINE_FIELDS])


def _first(path: Path, columns: list[str]) -> dict:
    rows = _table_in(path, columns).slice(0, 1).to_pylist()
    if not rows:
        raise RunFileError(f"{path} holds no row; {_instead(path)}")
    return rows[0]


def load(*paths: str | Path):
    """Samples of one or more run files of one machine as a DataFrame: one row per sample, the columns of SCHEMA.

    Raises RunFileError for a missing or foreign file, for one that is given twice, and for files that differ in
    anything of the machine or in a copy's version: load those one by one and compare cells.
    """
    if not paths:
        raise RunFileError("load() needs the path of a run file")
    tables = []
    for path in map(Path, paths):
        if not path.is_file():
            raise RunFileError(f"{path} does not exist; run files lie in data/local and data/recorded")
        tables.append(read(path))
    table = pa.concat_tables(tables)
    if len(tables) > 1 and (again := _samples_twice(table)):
        raise RunFileError(f"these run files hold {again} samples twice: give each run once")
    samples = table.to_pandas()
    for name in SAME_MACHINE:
        if samples[name].nunique(dropna=False) > 1:
            found = ", ".join(map(str, samples[name].unique()))
            raise RunFileError(f"these run files differ in {name} ({found}): load each alone")
    versions = samples.groupby("copy", observed=True)["copy_version"].nunique()
    if (versions > 1).any():
        copy = versions.idxmax()
        found = ", ".join(samples.loc[samples["copy"] == copy, "copy_version"].unique())
        raise RunFileError(f"these run files differ in the version of {copy} ({found}): load each alone")
    return samples


def newest(folder: str, grid: str, recorded: Path | None = None) -> Path | None:
    """The newest recorded run of a grid on a GPU: `data/recorded/<folder>/<date>_<grid>_<sha7>.parquet`, or None.

    So are the other records of a GPU found, which have a name in place of a grid's. Of one day, it is the last to
    begin. A damaged one is said on stderr and left out, unless there is no other: who reads it is told why."""
    found = sorted((recorded or paths.RECORDED).joinpath(folder).glob(f"????-??-??_{grid}_*.parquet"), reverse=True)
    damaged = []
    for _, of_day in itertools.groupby(found, key=lambda path: path.name[:10]):
        began = {}
        for path in of_day:
            try:
                began[path] = str(_first(path, ["utc"])["utc"])
            except RunFileError as error:
                damaged.append(f"kvnb: a recorded run left out: {error}")
        if began:
            print(*damaged, sep="\n", end="\n" * bool(damaged), file=sys.stderr)
            return max(began, key=began.get)
    return next(iter(found), None)
