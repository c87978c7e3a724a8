"""The run file: one parquet row per sample, one schema, written with pyarrow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvnb import paths

SCHEMA_VERSION = 2
STATUSES = ("ok", "wrong", "unsupported", "out_of_memory", "error")

# name, type, unit, meaning
_COLUMNS = [
    ("run_id", pa.string(), "", "one execution on one machine"),
    ("schema_version", pa.int32(), "", "version of this schema"),
    ("grid", pa.string(), "", "named list of cases"),
    ("copy", pa.string(), "", "one way to write the rows"),
    ("family", pa.string(), "", "family of the copy: decides its colour"),
    ("copy_version", pa.string(), "", "hash of the copy's sources"),
    ("policy", pa.string(), "", "where padded rows go"),
    ("part", pa.string(), "", "step: once per model step; write: once per layer"),
    ("timer", pa.string(), "", "how the call was timed"),
    ("state", pa.string(), "", "what the caches held before the call"),
    ("worker", pa.int32(), "", "process number, from 0; -1 in rows that were not measured"),
    ("round", pa.int32(), "", "randomised pass over the case's copies, from 0"),
    ("sample", pa.int32(), "", "measured time within the round, from 0"),
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
    ("throttled", pa.string(), "", "throttle reasons that NVML gave around the round; empty: none; null: not known"),
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
CELL_FIELDS = ("policy", "part", "timer", "state")


class RunFileError(ValueError):
    """A run file that cannot be used as it is; the message names the file and what to do."""


def write(rows: list[dict] | pa.Table, path: Path) -> Path:
    """Write rows as a run file, complete or not at all: a temporary name beside `path`, then a rename.

    Raises RunFileError for a row that lacks a column, has an unknown one, or carries an unknown status.
    """
    table = rows if isinstance(rows, pa.Table) else _table(rows)
    with paths.whole(path) as partial:
        pq.write_table(table.cast(SCHEMA), partial, compression="zstd", compression_level=9)
    return path


def _table(rows: list[dict]) -> pa.Table:
    names = set(SCHEMA.names)
    for row in rows:
        if row.keys() != names:
            raise RunFileError(f"row lacks {sorted(names - row.keys())} or has unknown {sorted(row.keys() - names)}")
        if row["status"] not in STATUSES:
            raise RunFileError(f"status {row['status']!r} is not one of {', '.join(STATUSES)}")
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def save(samples, path: str | Path) -> Path:
    """Write a DataFrame of samples (the columns of SCHEMA) to `path`; returns the path."""
    missing = [name for name in SCHEMA.names if name not in samples.columns]
    if missing:
        raise RunFileError(f"{path}: samples lack the columns {missing}")
    return write(pa.Table.from_pandas(samples[SCHEMA.names], schema=SCHEMA, preserve_index=False), Path(path))


def read(path: Path) -> pa.Table:
    """The samples of one run file, of schema version 1 as of 2. Raises RunFileError where it is not a complete one."""
    table = _table_in(path)
    if table.schema.names == [name for name in SCHEMA.names if name != "padded"]:
        table = _from_version_1(table)
    if table.schema.names != SCHEMA.names:
        odd = sorted(set(table.schema.names) ^ set(SCHEMA.names))
        raise RunFileError(f"{path} is not a run file of schema version {SCHEMA_VERSION}: columns differ in {odd}")
    versions = set(table["schema_version"].to_pylist())
    if versions - {SCHEMA_VERSION}:
        raise RunFileError(f"{path} has schema version {versions}, this kvnb reads {SCHEMA_VERSION}; measure again")
    return table


def _table_in(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, partitioning=None, columns=columns)
    except PermissionError as error:
        raise RunFileError(f"{path} may not be read: {error}") from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        advice = "give a run file, or, if a run left it so, delete it and measure again"
        raise RunFileError(f"{path} is not a complete run file ({error}): {advice}") from error


def _from_version_1(table: pa.Table) -> pa.Table:
    """Version 1 had no column `padded`: all padding was scattered."""
    if set(table["schema_version"].to_pylist()) != {1}:
        return table
    place, version = SCHEMA.get_field_index("padded"), SCHEMA.get_field_index("schema_version")
    table = table.set_column(version, SCHEMA.field(version), pa.repeat(pa.scalar(2, pa.int32()), len(table)))
    return table.add_column(place, SCHEMA.field(place), pa.repeat("scattered", len(table)))


def first(path: str | Path) -> dict:
    """run_id, utc, grid and the machine of a run file, from its first row. Raises RunFileError for another file."""
    return _table_in(Path(path), ["run_id", "utc", "grid", *MACHINE_FIELDS]).slice(0, 1).to_pylist()[0]


def load(*paths: str | Path):
    """Samples of one or more run files of one machine as a DataFrame: one row per sample, the columns of SCHEMA.

    Raises RunFileError for a missing or foreign file, and for files of different GPUs, torch versions or commits:
    load those one by one and compare cells.
    """
    import pandas as pd

    if not paths:
        raise RunFileError("load() needs the path of a run file")
    frames = []
    for path in map(Path, paths):
        if not path.is_file():
            raise RunFileError(f"{path} does not exist; run files lie in data/local and data/recorded")
        frames.append(read(path).to_pandas())
    samples = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    for name in ("gpu_uuid", "cpu", "torch", "kvnb_commit"):
        if samples[name].nunique(dropna=False) > 1:
            raise RunFileError(
                f"these run files differ in {name} ({', '.join(map(str, samples[name].unique()))}): load each alone"
            )
    return samples


def newest(folder: str, grid: str, recorded: Path | None = None) -> Path | None:
    """The newest recorded run of a grid on a GPU: `data/recorded/<folder>/<date>_<grid>_<sha7>.parquet`, or None.

    So are the other records of a GPU found, which have a name in place of a grid's."""
    found = list((recorded or paths.RECORDED).joinpath(folder).glob(f"????-??-??_{grid}_*.parquet"))
    day = max((path.name[:10] for path in found), default="")
    latest = [path for path in found if path.name.startswith(day)]
    if len(latest) > 1:  # of one day: as they began
        latest.sort(key=lambda path: _table_in(path, ["utc"])["utc"][0].as_py())
    return latest[-1] if latest else None
