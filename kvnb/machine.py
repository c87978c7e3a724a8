"""What this machine is: the machine columns of a run file, cache sizes, and what NVML says disturbs the GPU."""

from __future__ import annotations

import datetime
import hashlib
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from kvnb import paths

# NVML's clock event reasons that mean "slower than asked for" (nvml.h: nvmlClocksEventReason*)
THROTTLE_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
OTHERS = "other process on the GPU"
BUSY_SECONDS = 5  # how far back a process counts as busy: NVML samples a few times per second
ASSUMED_CPU_CACHE = 32 << 20
ANSWER_SECONDS = 20  # after which a program that only says what it is counts as hanging


def resolve_device(device: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:N" as a torch.device. Raises ValueError naming the devices there are.

    Warns where "auto" becomes the CPU beside a GPU that torch cannot use.
    """
    unused = gpu_unused() if device.startswith(("auto", "cuda")) else None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if unused:
            warnings.warn(f"measuring the CPU: {unused}", stacklevel=2)
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device == "cuda" and len(there) > 1:
        device = "cuda:0"
    if device not in there:
        valid = f"valid: auto, {', '.join(there)}"
        raise ValueError(f"device {device!r} is not here; " + "; ".join(filter(None, (valid, unused))))
    return torch.device(device)


def gpu_unused() -> str | None:
    """Why torch uses no GPU although the driver lists one, and what to type; None: it does, is told not to, or none."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or hidden in ("", "-1") or not (found := _listed_gpus()):
        return None
    if torch.version.cuda is None:
        why = f"is built without CUDA; type: {sys.executable} -m pip install --force-reinstall torch"
    else:
        why = f"for CUDA {torch.version.cuda} cannot use it: update the driver (nvidia-smi names the CUDA it knows)"
        why += f", or unset CUDA_VISIBLE_DEVICES={hidden}" if hidden else ""
    return f"this machine has {found}, but torch {torch.__version__} {why}"


@cache
def _listed_gpus() -> str:
    """Names of the GPUs that the driver lists, or "" without a driver, or with one that hangs, as a warning tells."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except OSError:
        return ""
    except subprocess.TimeoutExpired as error:
        warnings.warn(f"{error}: the driver hangs, so a GPU that torch does not see stays unknown", stacklevel=2)
        return ""
    return ", ".join(re.findall(r"^GPU \d+: (.+?) \(UUID", done.stdout, re.MULTILINE))


def describe(device: torch.device) -> dict:
    """The machine columns of a run file, results.MACHINE_FIELDS."""
    gpu = device.type == "cuda"
    commit, dirty = source_state()
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else "",
        "gpu_uuid": gpu_uuid(device) if gpu else "",
        "driver": driver_version() if gpu else "",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "l2_bytes": cache_bytes(device),
        "kvnb_commit": commit,
        "dirty": dirty,
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def gpu_uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def cache_bytes(device: torch.device) -> int:
    """L2 of a GPU, or the last-level cache of the CPU (32 MiB where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1] in units), default=ASSUMED_CPU_CACHE)


@cache
def source_state() -> tuple[str, bool | None]:
    """(commit, dirty) of what is measured, dirty None where git cannot say. Without git: tree-<code()>, None;
    KVNB_COMMIT overrides."""
    told = os.environ.get("KVNB_COMMIT")
    if told:
        return told, None
    head = _git("rev-parse", "HEAD")
    if head is None:
        return f"tree-{code()}", None
    changes = _git("status", "--porcelain", "--", "kvnb", "csrc")
    return head, None if changes is None else bool(changes)


def code() -> str:
    """Ten hex digits over the sources of csrc/ and kvnb/, less those that only report: equal where measuring is."""
    digest = hashlib.sha256()
    for folder in (paths.ROOT / "kvnb", paths.CSRC):
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder.parent)
            if path.suffix in (".py", ".cu", ".cpp", ".h") and inner.parts[:2] != ("kvnb", "report"):
                digest.update(inner.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(paths.ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def _nvml():
    """NVML ready for use, or None, said once: without it driver and throttled stay empty."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, AttributeError) as error:
        reason: object = error
    except pynvml.NVMLError as error:  # drivers in containers may hide it
        reason = error
    else:
        return pynvml
    warnings.warn(f"no NVML, so driver, throttle reasons and other processes stay unknown: {reason}", stacklevel=2)
    return None


def driver_version() -> str:
    nvml = _nvml()
    return str(nvml.nvmlSystemGetDriverVersion()) if nvml else ""


def throttled(device: torch.device) -> str | None:
    """What NVML says disturbs a GPU, see `disturbances`; None on a CPU."""
    return disturbances(gpu_uuid(device)) if device.type == "cuda" else None


def disturbances(uuid: str) -> str | None:
    """Why NVML says the GPU runs slower than asked, and OTHERS where a process outside this run computes on it.

    Comma-separated; "": nothing; None: NVML cannot say, as a warning tells once.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        warnings.warn(f"NVML gives no throttle reasons of {uuid}: {error}", stacklevel=2)
        return None
    reasons = [reason for bit, reason in THROTTLE_REASONS.items() if mask & bit]
    return ", ".join(reasons + [OTHERS] * bool(_others(nvml, handle)))


def _others(nvml, handle) -> list[int]:
    """Processes outside this run that compute on the GPU: those that did something there, where NVML counts it.

    An idle one, such as a notebook with a tensor on the GPU, disturbs nothing. In a container NVML may not see any.
    """
    try:
        pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except nvml.NVMLError as error:
        warnings.warn(f"NVML does not say which processes are on the GPU: {error}", stacklevel=2)
        return []
    if pids and os.getpid() not in pids:
        warnings.warn("NVML lists processes on the GPU without this one: others cannot be told from it", stacklevel=2)
        return []
    busy = _busy(nvml, handle)
    found = [pid for pid in sorted(pids) if (busy is None or pid in busy) and not _of_this_run(pid)]
    if found:
        warnings.warn(f"other processes compute on this GPU: {', '.join(map(str, found))}", stacklevel=2)
    return found


def _busy(nvml, handle) -> set[int] | None:
    """Processes that kept the GPU busy in the last BUSY_SECONDS; None where NVML does not count."""
    since = int((time.time() - BUSY_SECONDS) * 1e6)
    try:
        counted = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as error:
        return set() if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND) else None  # none was; not told
    return {one.pid for one in counted if one.smUtil or one.memUtil}


def _of_this_run(pid: int) -> bool:
    """Whether a process descends from the one in which this run began."""
    began = multiprocessing.parent_process() or multiprocessing.current_process()
    while pid > 1 and pid != began.pid:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or belongs to another container
            return False
    return pid == began.pid
