"""What ncu prints, read; what it cannot do, said."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from test_timing import CASE, FakeGpu

from kvnb.bench import counters, timing
from kvnb.copies import REGISTRY, Copy
from kvnb.problem.case import Case

LAUNCH = {  # what ncu 2025.3 prints before the metrics
    **{"ID": "0", "Process ID": "31", "Process Name": "python3.12", "Host Name": "host"},
    **{"Kernel Name": "void copy_kernel<(int)2>(Problem, int)", "Context": "1", "Stream": "7"},
    **{"Block Size": "(128, 1, 1)", "Grid Size": "(1024, 1, 1)", "Device": "0", "CC": "9.0"},
}
METRICS = {
    "dram__bytes_read.sum": ("byte", "67,240,448"),
    "dram__bytes_write.sum": ("byte", "8,192"),
    "gpu__time_duration.sum": ("ns", "33,504"),
    "launch__block_size": ("", "128"),
    "launch__grid_size": ("", "1,024"),
    "launch__registers_per_thread": ("register/thread", "32"),
    "lts__t_bytes.sum": ("byte", "140,000,256"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "61.5"),
    "sm__warps_active.avg.per_cycle_active": ("warp", "39.36"),
}
HEADER = [*LAUNCH, *METRICS]
UNITS = [*[""] * len(LAUNCH), *(unit for unit, _ in METRICS.values())]
FIRST = [*LAUNCH.values(), *(value for _, value in METRICS.values())]


def table(*rows: list[str]) -> str:
    lines = [",".join(f'"{value}"' for value in row) for row in rows]
    before = '==PROF== Connected to process 31\n==PROF== Profiling "copy_kernel": 0%....100% - 3 passes\ncalls 1'
    return "\n".join([before, "==PROF== Disconnected from process 31", *lines]) + "\n"


def test_a_table_is_read_with_its_thousands_and_units():
    [kernel] = counters.parse(table(HEADER, UNITS, FIRST))
    assert kernel == {
        "kernel": "void copy_kernel<(int)2>(Problem, int)", "dram_read": 67_240_448, "dram_written": 8192,
        "l2": 140_000_256, "registers": 32, "blocks": 1024, "block": 128, "warps": 39.36, "occupancy": 61.5,
        "seconds": pytest.approx(33.504e-6), "passes": 3, "calls": 1,
    }  # fmt: skip


def test_a_graph_is_one_row_without_launch_metrics():
    keep = [i for i, name in enumerate(HEADER) if not name.startswith(("launch", "lts", "sm__"))]
    told = table(*[[row[i] for i in keep] for row in (HEADER, UNITS, FIRST)]).replace("3 passes", "1 pass")
    [graph] = counters.parse(told.replace("calls 1", "calls 128"))
    assert (graph["passes"], graph["calls"], "block" in graph) == (1, 128, False)


def test_a_metric_that_a_kernel_lacks_is_no_number():
    [kernel] = counters.parse(table(HEADER, UNITS, [*FIRST[:-1], "n/a"]))
    assert kernel["warps"] != kernel["warps"] and kernel["registers"] == 32


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("==WARNING== No kernels were profiled.\n", "profiled no kernel.*No kernels were profiled"),
        (table(HEADER, ["Kbyte" if unit == "byte" else unit for unit in UNITS], FIRST), "printed .*Kbyte"),
        (table([name.replace("dram", "fbpa") for name in HEADER], UNITS, FIRST), "counted no dram__bytes_read.sum"),
    ],
)
def test_what_cannot_be_read_says_so(told, reason):
    with pytest.raises(counters.NoCounters, match=reason):
        counters.parse(told)


@pytest.fixture
def ncu(monkeypatch):
    """An ncu that prints `told` and ends with `code`; its command lines in `asked`."""
    copy = Copy("vllm==0.0.0", "yours", ("skip",), lambda inputs: None, ("cpu",))
    monkeypatch.setattr(counters, "REGISTRY", {copy.name: copy, "limit.copy": REGISTRY["limit.copy"]})
    monkeypatch.setattr(counters, "CALLS", (Case(16384),))
    monkeypatch.setattr(counters.shutil, "which", lambda name: "ncu")
    fake = SimpleNamespace(told=table(HEADER, UNITS, FIRST), code=0, asked=[])

    def run(command, **_):
        fake.asked.append(command)
        return subprocess.CompletedProcess(command, fake.code, fake.told, "")

    monkeypatch.setattr(counters, "subprocess", SimpleNamespace(run=run))
    return fake


def test_a_row_per_kernel_with_what_an_sm_waits_for_and_reasons_for_the_rest(ncu):
    rows = counters.measure(torch.device("cpu"))
    counted = rows[rows["copy"] == "vllm==0.0.0"].iloc[0]
    assert (counted["threads"], counted["bytes_moved"]) == (131_072, Case(16384).bytes_moved)
    assert counted["in_flight"] == pytest.approx(39.36 * 32 * 16384 * 4096 / 131_072)
    assert rows.loc[rows["copy"] == "limit.copy", "reason"].str.contains("not on cpu").all()
    [command] = ncu.asked
    line = " ".join(command)
    assert "--clock-control none" in line and "--profile-from-start off" in line and "--cache-control all" in line
    assert {*counters.PROVENANCE} <= {*rows.columns}


@pytest.mark.parametrize(
    ("told", "code", "reason"),
    [("==ERROR== ERR_NVGPUCTRPERM - The user does not have ...", 1, "run as root"), ("boom", 9, r"failed \(9\): boom")],
)
def test_an_ncu_that_fails_is_a_reason(ncu, told, code, reason):
    ncu.told, ncu.code = told, code
    rows = counters.measure(torch.device("cpu"))
    assert rows["dram_read"].isna().all()
    assert rows.loc[rows["copy"] == "vllm==0.0.0", "reason"].str.contains(reason).all()


@pytest.mark.parametrize(("timer", "state", "calls"), [("call", "cold", 1), ("graph", "resident", 128)])
def test_the_profiler_is_on_for_one_call_or_one_replay(monkeypatch, capsys, timer, state, calls):
    gpu, marks = FakeGpu(), []
    monkeypatch.setattr(timing, "Gpu", lambda device: gpu)
    for turn in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, turn, lambda: marks.append(len(gpu.log)))
    with gpu:
        counters._serve(json.dumps(CASE.fields()), "torch.index_copy", timer, state, "cpu")
    seen = [what for what, _ in gpu.log[slice(*marks)]]
    assert seen == (["replay", "synchronize"] if timer == "graph" else ["index_copy_", "index_copy_", "synchronize"])
    assert capsys.readouterr().out == f"calls {calls}\n"


def test_without_ncu_the_record_holds_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    read = pd.read_parquet(counters.record(tmp_path / "counters.parquet", "cpu"))
    assert read["reason"].tolist() == ["ncu is not on PATH: it comes with the CUDA toolkit, or as Nsight Compute"]


@pytest.mark.gpu
def test_on_a_gpu_a_call_is_counted_or_says_why(monkeypatch):
    monkeypatch.setattr(counters, "CALLS", (Case(16384),))
    monkeypatch.setattr(counters, "HAND_WRITTEN", ("kvnb",))
    rows = counters.measure(torch.device("cuda"))
    assert (rows["dram_read"].notna() | rows["reason"].notna()).all()
