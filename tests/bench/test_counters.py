"""What ncu prints, read; what it cannot do, said."""

from __future__ import annotations

import json
import math
import os
import select
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
    "profiler__replayer_passes": ("pass", "3"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "61.5"),
    "sm__warps_active.avg.per_cycle_active": ("warp", "39.36"),
}
HEADER = [*LAUNCH, *METRICS]
UNITS = [*[""] * len(LAUNCH), *(unit for unit, _ in METRICS.values())]
FIRST = [*LAUNCH.values(), *(value for _, value in METRICS.values())]


def table(*rows: list[str]) -> str:
    lines = [",".join(f'"{value}"' for value in row) for row in rows]
    before = '==PROF== Connected to process 31\n==PROF== Profiling "copy_kernel": 0%....100%\ncalls 1'
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
    told = table(*[[row[i] for i in keep] for row in (HEADER, UNITS, FIRST)])
    [graph] = counters.parse(told.replace("calls 1", "calls 128"))
    assert (graph["passes"], graph["calls"], "block" in graph) == (3, 128, False)
    [graph] = counters.parse(told.replace("profiler__replayer_passes", "p").replace('"Kernel Name"', '"Name"'))
    assert math.isnan(graph["passes"]) and graph["kernel"] == ""


def test_a_metric_that_a_kernel_lacks_is_no_number():
    [kernel] = counters.parse(table(HEADER, UNITS, [*FIRST[:-1], "n/a"]))
    assert kernel["warps"] != kernel["warps"] and kernel["registers"] == 32


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("==WARNING== No kernels were profiled.\n", "profiled no kernel.*No kernels were profiled"),
        (table(HEADER, ["Kbyte" if unit == "byte" else unit for unit in UNITS], FIRST), "printed .*Kbyte"),
        (table([name.replace("dram", "fbpa") for name in HEADER], UNITS, FIRST), "counted no dram__bytes_read.sum"),
        (
            table(HEADER, ["s" if unit == "ns" else unit for unit in UNITS], FIRST),
            "printed gpu__time_duration.sum in s",
        ),
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

    def run(command, seconds):
        fake.asked.append(command)
        if fake.code is None:
            raise subprocess.TimeoutExpired(command, seconds)
        return subprocess.CompletedProcess(command, fake.code, fake.told, "")

    monkeypatch.setattr(counters, "run", run)
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
    counters._ncu("graph", "child")
    line = " ".join(ncu.asked[-1])
    assert "--cache-control none" in line and "--graph-profiling graph" in line and "launch__" not in line


@pytest.mark.parametrize(
    ("told", "code", "reason"),
    [("==ERROR== ERR_NVGPUCTRPERM - The user does not have ...", 1, "run as root"), ("boom", 9, r"failed \(9\): boom"),
     ("", None, "ncu took more than 90 s"),
     (table(HEADER, UNITS, [*FIRST[:-1], "(!) 3"]), 0, r"vllm==0.0.0, call, cold: ValueError: .*'\(!\) 3'")],
)  # fmt: skip
def test_an_ncu_that_fails_is_a_reason(ncu, told, code, reason):
    ncu.told, ncu.code = told, code
    rows = counters.measure(torch.device("cpu"))
    assert rows["dram_read"].isna().all()
    assert rows.loc[rows["copy"] == "vllm==0.0.0", "reason"].str.contains(reason).all()


def without_autograd(act):
    def checked(*arguments):
        assert not torch.is_grad_enabled()
        return act(*arguments)

    return checked


@pytest.mark.parametrize(("timer", "state", "calls"), [("call", "cold", 1), ("graph", "resident", 128)])
def test_the_profiler_is_on_for_one_call_or_one_replay(monkeypatch, capsys, timer, state, calls):
    gpu, marks = FakeGpu(), []
    monkeypatch.setattr(timing, "Gpu", lambda device: gpu)
    for turn in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, turn, lambda: marks.append(len(gpu.log)))
    with gpu, monkeypatch.context() as patch:
        patch.setattr(timing.Stage, "__init__", without_autograd(timing.Stage.__init__))
        counters._serve(json.dumps(CASE.fields()), "torch.index_copy", timer, state, "cpu")
    seen = [what for what, _ in gpu.log[slice(*marks)]]
    before = [what for what, _ in gpu.log[: marks[0]]]
    assert timer == "call" or before[-2:] == ["replay", "synchronize"]  # the caches as a timed replay finds them
    assert seen == (["replay", "synchronize"] if timer == "graph" else ["index_copy_", "index_copy_", "synchronize"])
    assert capsys.readouterr().out == f"calls {calls}\n"


def test_without_ncu_the_table_holds_the_reason_and_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert counters.measure(torch.device("cpu"))["reason"].tolist() == [counters.NO_NCU]
    with pytest.raises(ValueError, match="ncu is not on PATH"):
        counters.record(tmp_path / "counters.parquet", "cpu")
    assert not [*tmp_path.iterdir()]


def test_the_oldest_the_newest_and_the_most_registers_are_counted(ncu, monkeypatch):
    names = ("0.33.0", "0.4.2", "0.11.0", "0.6.6.post1", "0.33.0.cubin", "0.25.0")
    copies = {f"vllm=={v}": Copy(f"vllm=={v}", "yours", ("skip",), lambda inputs: None, ("cpu",)) for v in names}
    monkeypatch.setattr(counters, "REGISTRY", copies | {"limit.copy": REGISTRY["limit.copy"]})
    assert counters.released()[0] == "vllm==0.4.2" and counters.released()[-2:] == [
        "vllm==0.33.0",
        "vllm==0.33.0.cubin",
    ]
    counters.measure(torch.device("cpu"))
    assert sorted(command[-4] for command in ncu.asked) == ["vllm==0.11.0", "vllm==0.33.0", "vllm==0.4.2"]


def test_a_record_that_was_cut_off_goes_on_and_a_whole_one_stays(ncu, monkeypatch, tmp_path):
    path = tmp_path / "h200" / "2026-12-01_counters_0123abc.parquet"
    died = iter([True])

    def count(case, name, *at, counted=counters._count):
        if name == "limit.copy" and next(died, False):
            raise KeyboardInterrupt
        return counted(case, name, *at)

    monkeypatch.setattr(counters, "_count", count)
    with pytest.raises(KeyboardInterrupt):
        counters.record(path, "cpu")
    assert [file.name for file in path.parent.iterdir()] == [f"{path.name}.partial"]
    assert counters.record(path, "cpu") == path == counters.record(path, "cpu")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert len(ncu.asked) == 1  # vllm==0.0.0, once
    read = pd.read_parquet(path)
    assert len(read) == 1 + 1 + len(timing.STATES) and read.columns.tolist() == [
        *counters.COLUMNS,
        *counters.PROVENANCE,
    ]


def test_another_machines_part_is_refused(ncu, monkeypatch, tmp_path):
    path = tmp_path / "counters.parquet"
    part = counters.Record(["copy"], torch.device("cpu"), path)
    part.add([{"copy": "kvnb", "gpu_uuid": ""}])
    about = counters.provenance(torch.device("cpu"))
    monkeypatch.setattr(counters, "provenance", lambda device: about | {"gpu_uuid": "GPU-2"})
    with pytest.raises(ValueError, match=r"counters.parquet.partial was begun with gpu_uuid '', this is 'GPU-2'"):
        counters.record(path, "cpu")
    assert not ncu.asked


@pytest.mark.parametrize(
    ("gpu", "commit", "where"),
    [("NVIDIA H200", "0123abcdef", "h200/2026-12-01_timers_0123abc.parquet"),
     ("NVIDIA GeForce RTX 4090", "tree-89abcdef01", "rtx-4090/2026-12-01_timers_89abcde.parquet")],
)  # fmt: skip
def test_a_record_lies_where_the_notebook_looks(monkeypatch, tmp_path, gpu, commit, where):
    monkeypatch.setattr(counters.paths, "RECORDED", tmp_path)
    about = {"gpu": gpu, "kvnb_commit": commit, "utc": "2026-12-01T09:00:00+00:00"}
    monkeypatch.setattr(counters, "provenance", lambda device: about)
    assert counters.recorded_path("timers", torch.device("cuda")) == tmp_path / where
    with pytest.raises(ValueError, match="timers are recorded on a CUDA GPU, and this is cpu"):
        counters.recorded_path("timers", torch.device("cpu"))


def test_the_command_records_serves_or_says_what_it_takes(monkeypatch, capsys):
    def record(path=None, device="auto"):
        if device == "cuda:9":
            raise ValueError("device 'cuda:9' is not here")
        return path or "the path"

    def told(*argv):
        monkeypatch.setattr(counters.sys, "argv", ["counters.py", *argv])
        try:
            counters.main(record, lambda *values: print("served", *values))
        except SystemExit as left:
            return str(left)
        return capsys.readouterr().out.strip()

    assert [told("record"), told("record", "here"), told("serve", "1", "2")] == ["the path", "here", "served 1 2"]
    assert told("record", "here", "cuda:9") == "kvnb: device 'cuda:9' is not here"
    assert {told(), told("recrod"), told("record", "a", "b", "c")} == {told("-h")} and "record [PATH" in told()


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    os.mkfifo(held := tmp_path / "held")
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        counters.run(["sh", "-c", f"sleep 600 3> {held} & wait"], 1)
    assert select.select([reader], [], [], 60)[0] and os.read(reader, 1) == b""  # nobody holds the other end
    os.close(reader)
    done = counters.run(["sh", "-c", "echo out; echo err >&2; exit 3"], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_launchs_shape_is_no_graphs(monkeypatch):
    kernel = {"dram_read": 1.0, "dram_written": 1.0, "l2": 1.0, "registers": 32.0, "blocks": 7.0, "block": 1.0}
    monkeypatch.setattr(counters, "_ncu", lambda *child: "")
    monkeypatch.setattr(counters, "parse", lambda told: [dict(kernel)])
    monkeypatch.setattr(type(REGISTRY["limit.copy"]), "reason_against", lambda self, *asked: None)
    [row] = counters._count(Case(64), "limit.copy", "graph", "cold", torch.device("cuda"))
    assert (row["dram_read"], row["state"]) == (1.0, "cold")
    assert not {"registers", "blocks", "block", "in_flight"} & row.keys()


@pytest.mark.gpu
def test_on_a_gpu_a_call_is_counted_or_says_why(monkeypatch):
    monkeypatch.setattr(counters, "CALLS", (Case(16384),))
    monkeypatch.setattr(counters, "HAND_WRITTEN", ("kvnb",))
    rows = counters.measure(torch.device("cuda"))
    assert (rows["dram_read"].notna() | rows["reason"].notna()).all()
