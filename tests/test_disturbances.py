"""What NVML says disturbs a GPU, from a library in NVML's place that says it on demand, through the real pynvml.

Each scenario is a process of its own that forks from one that has imported everything: `began` is where the run began,
`us` the process that asks, `stranger` one outside the run.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import warnings

import pytest
import torch

from kvnb import machine, paths

LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu, compute; } Process;
typedef struct { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; } Sample;

static int failure(const char* what) {  /* FAIL_<what>: an NVML error code */
  const char* code = getenv(what);
  return code ? atoi(code) : 0;
}

static unsigned listed(Process* processes, Sample* samples) {  /* PIDS: pid:percent pid:percent */
  unsigned count = 0, pid, busy;
  int length;
  for (const char* at = getenv("PIDS"); sscanf(at, "%u:%u%n", &pid, &busy, &length) == 2; at += length, ++count) {
    if (processes) processes[count] = (Process){.pid = pid};
    if (samples) samples[count] = (Sample){.pid = pid, .sm = busy};
  }
  return count;
}

int nvmlInitWithFlags(unsigned flags) { return failure("FAIL_INIT"); }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) { return *device = stdin, failure("FAIL_HANDLE"); }
int nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* mask) {
  *mask = atoi(getenv("MASK"));
  return failure("FAIL_REASONS");
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* found) {
  if (failure("FAIL_PROCESSES")) return failure("FAIL_PROCESSES");
  *count = listed(found, 0);
  return *count && !found ? 7 : 0;
}
int nvmlDeviceGetProcessUtilization(void* device, Sample* found, unsigned* count, unsigned long long since) {
  if (failure("FAIL_UTILIZATION")) return failure("FAIL_UTILIZATION");
  *count = listed(0, found);
  return found ? 0 : 7;
}
const char* nvmlErrorString(int error) { return "as told"; }
"""
ASK = """
import json, multiprocessing, os, sys, warnings
from kvnb import machine
context, scenarios = multiprocessing.get_context("fork"), json.loads(sys.argv[1])
names = {"stranger": os.getppid(), "began": os.getpid(), "ended": 2**22 + 1}

def answer(pipe, told):
    names["us"] = os.getpid()
    pids = [f"{names[name]}:{busy}" for name, busy in told.pop("pids", {"us": 90}).items()]
    os.environ.update({"MASK": "1", "PIDS": " ".join(pids), **told})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = machine.disturbances("GPU-0")
    pipe.send((said, [str(one.message) for one in warned]))

for name, told in scenarios.items():
    mine, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs, told))
    process.start()
    print(json.dumps([name, *mine.recv()]))
    process.join()
"""
US, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LOST = {"us": 90}, "3", "4", "6", "15"
OTHER = machine.OTHERS
SCENARIOS = {  # what NVML is told to say; what kvnb makes of it, and a part of its warning
    "clean": ({}, "", None),
    "idle GPU": ({"MASK": "1", "pids": {}}, "", None),
    "power": ({"MASK": str(0x4 | 0x1)}, "software power cap", None),
    "heat and power": ({"MASK": str(0x40 | 0x80)}, "hardware thermal, power brake", None),
    "stranger": ({"pids": US | {"stranger": 3}}, OTHER, "other processes compute on this GPU: "),
    "stranger and heat": ({"MASK": "32", "pids": US | {"stranger": 3}}, f"software thermal, {OTHER}", "other proc"),
    "idle stranger": ({"pids": US | {"stranger": 0}}, "", None),
    "nobody was busy": ({"pids": US | {"stranger": 9}, "FAIL_UTILIZATION": NOT_FOUND}, "", None),
    "not known who was busy": ({"pids": US | {"stranger": 0}, "FAIL_UTILIZATION": NOT_SUPPORTED}, OTHER, "other proc"),
    "of this run": ({"pids": US | {"began": 99}}, "", None),
    "ended meanwhile": ({"pids": US | {"ended": 50}}, OTHER, "other processes"),
    "container": ({"pids": {"stranger": 50}}, "", "lists processes on the GPU without this one"),
    "processes hidden": ({"FAIL_PROCESSES": NO_PERMISSION}, "", "does not say which processes are on the GPU"),
    "reasons hidden": ({"FAIL_REASONS": NO_PERMISSION}, None, "gives no throttle reasons of GPU-0"),
    "GPU lost": ({"FAIL_HANDLE": LOST}, None, "gives no throttle reasons of GPU-0"),
    "no rights": ({"FAIL_INIT": NO_PERMISSION}, None, "no NVML, so driver, throttle reasons and other proc"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple]:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(LIBRARY)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    asked = json.dumps({name: told for name, (told, _, _) in SCENARIOS.items()})
    places = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(paths.ROOT)}
    command = [sys.executable, "-c", ASK, asked]
    done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=True)
    return {name: (said, warned) for name, said, warned in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NVML is found by LD_LIBRARY_PATH on Linux")
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_nvml_says_is_what_is_recorded_and_what_it_hides_is_announced(answers, name):
    _, expected, warning = SCENARIOS[name]
    said, warned = answers[name]
    assert said == expected
    assert len(warned) == (warning is not None), warned
    assert all(warning in text for text in warned)


SPINNER = """
import os, select, sys, torch
rows = torch.rand(4096, 4096, device="cuda")
print("ready", flush=True)
while not select.select([int(sys.argv[1])], [], [], 0)[0]:
    rows @ rows
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_another_process_on_the_gpu_is_seen():
    """One that shell started and left, so that it is no child of this run; it ends when its pipe closes."""
    torch.zeros(1, device="cuda")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = machine.throttled(torch.device("cuda", 0))
    if any("NVML" in str(one.message) for one in warned):
        pytest.skip(f"NVML hides processes here: {warned[0].message}")
    if OTHER in (before or ""):
        pytest.skip("another process computes on this GPU already: run this test alone")
    ends, held = os.pipe()
    command = ["sh", "-c", '"$0" -c "$1" "$2" &', sys.executable, SPINNER, str(ends)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[ends])
    try:
        assert select.select([started.stdout], [], [], 120)[0] and started.stdout.readline() == b"ready\n"
        deadline, said = time.monotonic() + 30, ""
        with pytest.warns(UserWarning, match="other processes compute on this GPU"):
            while OTHER not in (said or "") and time.monotonic() < deadline:
                said = machine.throttled(torch.device("cuda", 0))
    finally:
        os.close(held)
        os.close(ends)
        started.stdout.read()  # until the spinner has ended
        started.wait()
    assert OTHER in said
