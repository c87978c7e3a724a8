"""What Nsight Compute counts while a copy runs: DRAM and L2 bytes, registers, occupancy, bytes in flight.

Each cell has a process of its own: all is set up as timing.py times it, then the profiler is on for one flushed call
(ncu empties the caches before each pass) or for one replay of the timed graph, counted whole, with the caches as they
are: in one pass where ncu can (column `passes`), as a second would find what the first left there. ncu leaves the
clocks alone. What it cannot count becomes a row that says why.

On a GPU: python -m kvnb.bench.counters record
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from kvnb import machine, paths
from kvnb.bench import timing
from kvnb.copies import REGISTRY, releases
from kvnb.problem.case import Case

HAND_WRITTEN = ("kvnb", "kvnb.dependent", "vllm.scalar", "triton", "flashinfer", "sglang", "limit.copy")
MOST_REGISTERS = "vllm==0.11.0"  # counted with the oldest and the newest release
CALLS = (Case(256), Case(16384))  # 8 x 128 bf16 NHD
CHAIN = Case(1024)  # its graphs show what a state is: a call fits into a quarter of L2
MEMORY = {"dram__bytes_read.sum": "dram_read", "dram__bytes_write.sum": "dram_written"}  # ncu's name: our column
KERNEL = {
    "lts__t_bytes.sum": "l2",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "blocks",
    "launch__block_size": "block",
    "sm__warps_active.avg.per_cycle_active": "warps",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
PASSES = "profiler__replayer_passes"
DURATION, SECONDS = "gpu__time_duration.sum", {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6}
COLUMNS = [
    *("copy", "case", "timer", "state", "kernel", *MEMORY.values(), *KERNEL.values(), "seconds"),
    *("bytes_moved", "calls", "passes", "threads", "in_flight", "reason"),
]
FORBIDDEN = "ERR_NVGPUCTRPERM"
NO_NCU = "ncu is not on PATH: it comes with the CUDA toolkit, or as Nsight Compute"
NCU_SECONDS = 90  # for a cell
PROVENANCE = ("gpu", "gpu_uuid", "driver", "cuda", "torch", "kvnb_commit", "dirty", "utc")
SAME_MACHINE = ("gpu_uuid", "torch", "kvnb_commit")  # what both parts of a record must share


class NoCounters(RuntimeError):
    """ncu did not count; the message says why and what to do."""


# -- a record that grows


class CutOff(RuntimeError):
    """A record got to a part only; the message says where that lies."""


class Record:
    """Rows of a table and where they were made; with a path, on disk after every `add`.

    They lie in `<path>.partial` until `finish`. A record that was cut off is gone on with; raises ValueError where
    another GPU, torch or commit began it.
    """

    def __init__(self, columns: list[str], device: torch.device, path: Path | None = None) -> None:
        self.columns, self.path, self.made_here = [*columns, *PROVENANCE], path, provenance(device)
        self.partial = path and path.with_name(f"{path.name}.partial")
        self.rows: list[dict] = []
        if path and self.partial.exists():
            self.rows = pd.read_parquet(self.partial).to_dict("records")
        for name in SAME_MACHINE:
            if others := {row[name] for row in self.rows} - {self.made_here[name]}:
                raise ValueError(f"{self.partial} was begun with {name} {others.pop()!r}, this is "
                                 f"{self.made_here[name]!r}: go on with it there, or delete it")  # fmt: skip

    def holds(self, **where: str) -> bool:
        return any(all(row.get(name) == value for name, value in where.items()) for row in self.rows)

    def add(self, rows: list[dict]) -> None:
        self.rows += [row | self.made_here for row in rows]
        if self.path:
            save(self.table(), self.partial)

    def table(self) -> pd.DataFrame:
        types = {"holds": "boolean"} if "holds" in self.columns else {}
        return pd.DataFrame(self.rows, columns=self.columns).astype(types)

    def finish(self) -> None:
        os.replace(self.partial, self.path)


def provenance(device: torch.device) -> dict:
    """The columns that say where and when a table was made."""
    about = machine.describe(device)
    return {name: about[name] for name in PROVENANCE}


def save(table: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as parquet, complete or not at all; returns the path."""
    path = Path(path)
    with paths.whole(path) as partial:
        table.to_parquet(partial, compression="zstd", index=False)
    return path


def recorded_path(name: str, device: torch.device) -> Path:
    """`data/recorded/<gpu>/<date>_<name>_<sha7>.parquet`. Raises ValueError on a CPU."""
    if device.type != "cuda":
        raise ValueError(f"device: {name} are recorded on a CUDA GPU, and this is {device}")
    return paths.record(name, provenance(device))


def recorded(name: str, measure: Callable, path: str | Path | None, device: str) -> Path:
    """`measure(device, path)`, unless the file is there already. Raises CutOff where it got to a part only."""
    here = machine.resolve_device(device)
    path = Path(path) if path else recorded_path(name, here)
    if not path.exists():
        measure(here, path)
    if not path.exists():
        raise CutOff(f"the GPU stopped answering. {path}.partial holds what there is; the same command goes on")
    return path


def main(record: Callable, serve: Callable) -> None:
    """`python -m <module> record [PATH [DEVICE]]`, and `serve`, which is for children."""
    verb, values = sys.argv[1:2], sys.argv[2:]
    if verb == ["serve"]:
        serve(*values)
    elif verb == ["record"] and len(values) <= 2:
        try:
            print(record(*values))
        except (ValueError, CutOff) as error:
            raise SystemExit(f"kvnb: {error}") from error
    else:
        raise SystemExit("usage: record [PATH [DEVICE]]; without PATH it goes to data/recorded")


# -- counting


def measure(device: torch.device, path: Path | None = None) -> pd.DataFrame:
    """A row per kernel of a call of hand-written copies, and per graph of limit.copy in each state; kept at `path`.

    Columns: copy, case, timer, state, kernel, the columns of MEMORY and KERNEL (bytes; warps per SM; occupancy in %),
    seconds, bytes_moved (a call's), calls, passes, threads, in_flight (bytes: what an SM's active threads read, so the
    most it can wait for at a time), reason (why there are no numbers), and PROVENANCE.
    """
    kept = Record(COLUMNS, device, path)
    shipped = [name for name in released() if not name.endswith(".cubin")]  # an op's kernel
    some = {*shipped[:1], *shipped[-1:], MOST_REGISTERS, *HAND_WRITTEN}
    wanted = [(case, name, "call", "cold") for case in CALLS for name in REGISTRY if name in some]
    wanted += [(CHAIN, "limit.copy", "graph", state) for state in timing.STATES]
    if not shutil.which("ncu"):
        if path:
            raise ValueError(NO_NCU)
        kept.add([{"reason": NO_NCU}])
        wanted = []
    for case, name, timer, state in tqdm(wanted, desc="counters", disable=path is None):
        if not kept.holds(case=str(case), copy=name, timer=timer, state=state):
            kept.add(_count(case, name, timer, state, device))
    if path:
        kept.finish()
    return kept.table()


def released() -> list[str]:
    """The `vllm==X` in REGISTRY, oldest first."""
    names = (name for name in REGISTRY if name.startswith("vllm=="))
    return sorted(names, key=lambda name: releases.numbers(name.removeprefix("vllm==")))


def record(path: str | Path | None = None, device: str = "auto") -> Path:
    """Count on a GPU into `path`, None: `recorded_path`; a record that was cut off is gone on with. Returns the path.

    Raises ValueError where there is no such device, no ncu, or a partial record of another machine.
    """
    return recorded("counters", measure, path, device)


def _count(case: Case, name: str, timer: str, state: str, device: torch.device) -> list[dict]:
    """Rows of a cell. Whatever fails costs this cell, and is its row."""
    copy = REGISTRY[name]
    place = {"copy": name, "case": str(case), "timer": timer, "state": state, "bytes_moved": case.bytes_moved}
    try:
        if reason := copy.reason_against(case, copy.policies[0], timer, device.type):
            raise NoCounters(reason)
        kernels = parse(_ncu(timer, json.dumps(case.fields()), name, timer, state, str(device)))
    except NoCounters as error:
        return [{**place, "reason": str(error)}]
    except Exception as error:  # noqa: BLE001  a table of a form that parse does not know, or a copy that cannot say
        return [{**place, "reason": f"{name}, {timer}, {state}: {type(error).__name__}: {error}"}]
    if timer == "graph":  # ncu may print a launch's shape for it, which is none of its kernels'
        return [{**place, **{k: v for k, v in kernel.items() if k not in KERNEL.values()}} for kernel in kernels]
    for kernel in kernels:
        threads = kernel["threads"] = kernel["blocks"] * kernel["block"]
        kernel["in_flight"] = kernel["warps"] * 32 * case.written_tokens * case.token_bytes / threads
    return [{**place, **kernel} for kernel in kernels]


def run(command: list[str], seconds: float) -> subprocess.CompletedProcess:
    """A command's output. Raises TimeoutExpired after `seconds`, when it and all that it started have been ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=paths.ROOT, text=True, start_new_session=True, **pipes) as process:
        try:
            told = process.communicate(timeout=seconds)
        finally:
            if process.returncode is None:  # its children too: they would hold the pipes open
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, *told)


def _ncu(timer: str, *child: str) -> str:
    """What ncu and the child print."""
    options = "--csv --page raw --print-units base --clock-control none --profile-from-start off --cache-control "
    options += "none --graph-profiling graph" if timer == "graph" else "all"
    metrics = ",".join([DURATION, PASSES, *MEMORY, *(KERNEL if timer == "call" else ())])
    command = ["ncu", *options.split(), "--metrics", metrics, sys.executable, "-m", "kvnb.bench.counters", "serve"]
    try:
        done = run([*command, *child], NCU_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoCounters(f"ncu took more than {NCU_SECONDS} s") from error
    told = done.stdout + done.stderr
    if FORBIDDEN in told:
        raise NoCounters("ncu may not read the GPU's counters: run as root, or see developer.nvidia.com/" + FORBIDDEN)
    if done.returncode:
        raise NoCounters(f"ncu failed ({done.returncode}): {' '.join(told.split())[-200:]}")
    return told


def parse(told: str) -> list[dict]:
    """Kernels out of `ncu --csv --page raw --print-units base`: kernel, the columns of MEMORY and KERNEL, seconds,
    passes, calls.

    The first line names columns, the second their units; ncu's own lines begin with ==, the child's says `calls N`.
    Raises NoCounters where the table, a metric or that line is missing, and for units that are not base units.
    """
    lines = list(csv.reader(line for line in told.splitlines() if line.startswith('"')))
    if len(lines) < 3:
        raise NoCounters(f"ncu profiled no kernel: {' '.join(told.split())[-200:]}")
    header, units, *rows = lines
    unit = dict(zip(header, units))
    if missing := {DURATION, *MEMORY} - unit.keys():
        raise NoCounters(f"ncu counted no {', '.join(sorted(missing))}")
    if unit[DURATION] not in SECONDS or {unit[metric] for metric in MEMORY} != {"byte"}:
        raise NoCounters(f"ncu printed {', '.join(f'{name} in {unit[name]}' for name in (DURATION, *MEMORY))}")
    if not (calls := re.findall(r"^calls (\d+)", told, re.MULTILINE)):
        raise NoCounters("the child did not say how many calls were counted")
    kernels = []
    for row in rows:
        value = dict(zip(header, row))
        counts = {name: number(value[metric]) for metric, name in (MEMORY | KERNEL).items() if metric in value}
        seconds, passes = number(value[DURATION]) * SECONDS[unit[DURATION]], number(value.get(PASSES, ""))
        counts |= {"seconds": seconds, "passes": passes, "calls": int(calls[0])}
        kernels.append({"kernel": value.get("Kernel Name", ""), **counts})  # a graph may have none
    return kernels


def number(text: str) -> float:
    return nan if text in ("", "n/a") else float(text.replace(",", ""))


@torch.no_grad()
def _serve(fields: str, name: str, timer: str, state: str, device: str) -> None:
    """The child: sets up a cell, then one call or replay with the profiler on."""
    case, copy, bench = Case(**json.loads(fields)), REGISTRY[name], timing.Gpu(torch.device(device))
    plan = timing.plan(case, timer, state, bench.cache_bytes)
    if isinstance(plan, str):
        raise SystemExit(plan)
    kind = timing.GraphTimed if timer == "graph" else timing.EagerTimed
    timed = kind(timing.Stage(bench, case, [plan]), timing.Cell(copy, copy.policies[0], "write", timer, state), plan)
    if timer == "graph":
        timed.refill()
        timed.shorter.replay()  # the caches as a timed replay finds them
        timed.refill()
    act, calls = (timed.shorter.replay, plan.calls) if timer == "graph" else (timed.calls[-1], 1)
    bench.synchronize()
    torch.cuda.profiler.start()
    act()
    bench.synchronize()
    torch.cuda.profiler.stop()
    print(f"calls {calls}")


if __name__ == "__main__":
    main(record, _serve)
