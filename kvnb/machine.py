"""What this machine is: the machine columns of a run file, cache sizes, and what NVML says about throttling."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
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
ASSUMED_CPU_CACHE = 32 << 20


def resolve_device(device: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:N" as a torch.device. Raises ValueError naming the devices there are."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device == "cuda" and len(there) > 1:
        device = "cuda:0"
    if device not in there:
        raise ValueError(f"device {device!r} is not here; valid: auto, {', '.join(there)}")
    return torch.device(device)


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
    """(commit, dirty) of what is measured. Without git: tree-<hash of sources>, None; KVNB_COMMIT overrides."""
    told = os.environ.get("KVNB_COMMIT")
    if told:
        return told, None
    head = _git("rev-parse", "HEAD")
    if head is not None:
        return head, bool(_git("status", "--porcelain", "--", "kvnb", "csrc"))
    digest = hashlib.sha256()
    for folder in (paths.ROOT / "kvnb", paths.CSRC):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cpp", ".h"):
                digest.update(path.relative_to(paths.ROOT).as_posix().encode() + path.read_bytes())
    return f"tree-{digest.hexdigest()[:10]}", None


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
    warnings.warn(f"no NVML, so driver and throttle reasons stay unknown: {reason}", stacklevel=2)
    return None


def driver_version() -> str:
    nvml = _nvml()
    return str(nvml.nvmlSystemGetDriverVersion()) if nvml else ""


def throttled(device: torch.device) -> str | None:
    """Why NVML says the GPU runs slower than asked, comma-separated; "": it does not; None: NVML cannot say."""
    nvml = _nvml() if device.type == "cuda" else None
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError:
        return None
    return ", ".join(reason for bit, reason in THROTTLE_REASONS.items() if mask & bit)
