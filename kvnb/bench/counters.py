"""What Nsight Compute counts while a copy runs: DRAM and L2 bytes, registers, occupancy, bytes in flight.

Each cell has a process of its own: all is set up as timing.py times it, then the profiler is on for one flushed call
(ncu empties the caches before each pass) or for one replay of the timed graph, counted whole and in one pass, with the
caches as they are. ncu leaves the clocks alone. What it cannot count becomes a row that says why.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from math import nan
from pathlib import Path

import pandas as pd
import torch

from kvnb import machine, paths
from kvnb.bench import timing
from kvnb.copies import REGISTRY
from kvnb.problem.case import Case

HAND_WRITTEN = ("kvnb", "kvnb.dependent", "vllm.scalar", "triton", "flashinfer", "limit.copy")  # and every vllm==X
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
DURATION, SECONDS = "gpu__time_duration.sum", {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6}
COLUMNS = [
    *("copy", "case", "timer", "state", "kernel", *MEMORY.values(), *KERNEL.values(), "seconds"),
    *("bytes_moved", "calls", "passes", "threads", "in_flight", "reason"),
]
FORBIDDEN = "ERR_NVGPUCTRPERM"
PROVENANCE = ("gpu", "gpu_uuid", "driver", "cuda", "torch", "kvnb_commit", "dirty", "utc")


class NoCounters(RuntimeError):
    """ncu did not count; the message says why and what to do."""


def measure(device: torch.device) -> pd.DataFrame:
    """A row per kernel of a call of every hand-written copy, and per graph of limit.copy in each state.

    Columns: copy, case, timer, state, kernel, the columns of MEMORY and KERNEL (bytes; warps per SM; occupancy in %),
    seconds, bytes_moved (a call's), calls, passes, threads, in_flight (bytes: what an SM's active threads read, so the
    most it can wait for at a time), reason (why there are no numbers), and PROVENANCE.
    """
    names = [name for name in REGISTRY if name in HAND_WRITTEN or name.startswith("vllm==")]
    wanted = [(case, name, "call", "cold") for case in CALLS for name in names]
    wanted += [(CHAIN, "limit.copy", "graph", state) for state in timing.STATES]
    if shutil.which("ncu"):
        rows = [row for cell in wanted for row in _count(*cell, device)]
    else:
        rows = [{"reason": "ncu is not on PATH: it comes with the CUDA toolkit, or as Nsight Compute"}]
    return pd.DataFrame(rows, columns=COLUMNS).assign(**provenance(device))


def provenance(device: torch.device) -> dict:
    """The columns that say where and when a table was made."""
    about = machine.describe(device)
    return {name: about[name] for name in PROVENANCE}


def save(table: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as parquet, complete or not at all; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    table.to_parquet(partial, compression="zstd", index=False)
    os.replace(partial, path)
    return path


def record(path: str | Path, device: str = "auto") -> Path:
    """Count on a GPU and save the table, as `data/recorded/<gpu>/<date>_counters_<sha7>.parquet` for one."""
    return save(measure(machine.resolve_device(device)), path)


def _count(case: Case, name: str, timer: str, state: str, device: torch.device) -> list[dict]:
    copy = REGISTRY[name]
    place = {"copy": name, "case": str(case), "timer": timer, "state": state, "bytes_moved": case.bytes_moved}
    reason = copy.reason_against(case, copy.policies[0], timer, device.type)
    try:
        kernels = [] if reason else parse(_ncu(timer, json.dumps(case.fields()), name, timer, state, str(device)))
    except NoCounters as error:
        kernels, reason = [], str(error)
    for kernel in kernels:
        if "block" in kernel:  # not a graph's
            threads = kernel["threads"] = kernel["blocks"] * kernel["block"]
            kernel["in_flight"] = kernel["warps"] * 32 * case.written_tokens * case.token_bytes / threads
    return [{**place, **kernel} for kernel in kernels] or [{**place, "reason": reason}]


def _ncu(timer: str, *child: str) -> str:
    """What ncu and the child print."""
    options = "--csv --page raw --print-units base --clock-control none --profile-from-start off --cache-control "
    options += "none --graph-profiling graph" if timer == "graph" else "all"
    metrics = ",".join([DURATION, *MEMORY, *(KERNEL if timer == "call" else ())])
    command = ["ncu", *options.split(), "--metrics", metrics, sys.executable, "-m", "kvnb.bench.counters", *child]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
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
    Raises NoCounters where the table or a metric is missing, and for units that are not base units.
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
    passes = max(map(int, re.findall(r"- (\d+) pass", told)), default=None)
    calls = int((re.findall(r"^calls (\d+)", told, re.MULTILINE) or [1])[0])
    kernels = []
    for row in rows:
        value = dict(zip(header, row))
        counts = {name: number(value[metric]) for metric, name in (MEMORY | KERNEL).items() if metric in value}
        counts |= {"seconds": number(value[DURATION]) * SECONDS[unit[DURATION]], "passes": passes, "calls": calls}
        kernels.append({"kernel": value["Kernel Name"], **counts})
    return kernels


def shown(counted: pd.DataFrame) -> pd.DataFrame:
    """The calls of a table as a notebook shows them; DRAM bytes as shares of what the call reads, and writes."""
    calls = counted[counted["timer"].isna() | (counted["timer"] == "call")]
    whole = calls["bytes_moved"] / 2e2
    columns = {
        "time, us": 1e6 * calls["seconds"], "DRAM read, %": calls["dram_read"] / whole,
        "DRAM written, %": calls["dram_written"] / whole, "L2, MB": calls["l2"] / 1e6, "registers": calls["registers"],
        "threads": calls["threads"], "occupancy, %": calls["occupancy"],
        "in flight, KB per SM": calls["in_flight"] / 1e3,
    }  # fmt: skip
    text = {name: column.astype(float).map("{:,.4g}".format).replace("nan", "") for name, column in columns.items()}
    return calls[["copy", "case"]].assign(**text, why=calls["reason"]).astype(object).fillna("")


def number(text: str) -> float:
    return nan if text in ("", "n/a") else float(text.replace(",", ""))


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
    _serve(*sys.argv[1:])
