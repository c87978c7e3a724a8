"""Synthetic runs with known medians: what the report says about them can be recomputed by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from kvnb.bench import results
from kvnb.copies.base import bytes_moved
from kvnb.problem.case import Case, grid
from kvnb.problem.slots import null_slots

WORKERS, ROUNDS, NOISE = 3, 5, 0.002
TOKENS = (1, 32, 256, 1024, 4096, 16384, 65536)
CPU_TOKENS = (1, 64, 1024)
LIMIT_BYTES_PER_S = 4.0e12
# copy: (family, launch in us, share of the limit's speed); seconds = launch + bytes_moved / (share x limit)
GPU_COPIES = {
    "kvnb": ("kernel", 1.3, 0.95),
    "kvnb.again": ("kernel", 1.3, 0.95),
    "kvnb.dependent": ("kernel", 0.9, 0.95),
    "vllm.scalar": ("kernel", 1.8, 0.45),
    "vllm==0.33.0": ("peer", 2.1, 0.40),
    "flashinfer": ("peer", 1.9, 0.88),
    "torch.index_put": ("torch", 5.5, 0.22),
    "torch.index_copy": ("torch", 4.5, 0.33),
    "torch.index_copy_wide": ("torch", 3.0, 0.93),
    "torch.index_put_packed": ("torch", 3.5, 0.60),
    "torch.compile": ("compile", 2.2, 0.43),
    "triton": ("triton", 1.5, 0.90),
    "limit.copy": ("limit", 1.2, 1.0),
    "limit.copy.memcpy": ("limit", 2.1, 0.99),
    "limit.launch": ("limit", 0.74, np.inf),
    "limit.launch.dependent": ("limit", 0.60, np.inf),
}
EAGER_US = {"vllm==0.33.0": 14.0}
EAGER_US |= {"kvnb": 7.4, "kvnb.again": 7.4, "torch.index_put": 27.0, "torch.compile": 31.0, "triton": 22.0}
FLAT_ONLY = ("torch.index_copy", "torch.index_copy_wide")
ONE_HEAD_KVNB = 0.5  # kvnb's share of the limit at one head: the fixture's flip, to torch.index_copy_wide


WITHOUT_WHEELS = ("vllm==0.33.0", "flashinfer")  # copies that the first records lack


def known_seconds(copy: str, case: Case, timer: str = "graph") -> float:
    """The median that a synthetic cell is built around."""
    _, launch, share = GPU_COPIES[copy]
    if copy in ("kvnb", "kvnb.again") and case.num_kv_heads == 1:
        share = ONE_HEAD_KVNB
    if timer == "eager":
        launch = EAGER_US[copy]
    return launch * 1e-6 + case.bytes_moved / (share * LIMIT_BYTES_PER_S)


def gpu_cases() -> list[Case]:
    heads = [(1, "NHD"), (8, "NHD"), (32, "NHD"), (8, "HND"), (8, "packed"), (32, "packed")]
    return [_case(tokens, h, layout=layout) for h, layout in heads for tokens in TOKENS]


def _case(tokens: int, heads: int = 8, **fields) -> Case:
    """A case with the cache that grids give it."""
    return Case(tokens, heads, cache_bytes=max(1 << 30, 2 * tokens * heads * 256 * 2), **fields)


def reason_against(copy: str, case: Case) -> str:
    if copy in FLAT_ONLY and case.layout != "NHD":
        return "flat rows exist in NHD only"
    if copy == "torch.index_put_packed" and case.layout != "packed":
        return "the packed layout only"
    if copy == "flashinfer" and case.layout == "packed":
        return "its op takes K and V apart"
    return ""


H200 = {"gpu": "NVIDIA H200", "gpu_uuid": "0", "driver": "580.1", "cuda": "13.0", "cpu": "X", "threads": 16}


def gpu_run() -> pd.DataFrame:
    """Copies by `graph`, some by `eager` at 8x128 NHD and packed; index_put's step in HND and packed; one failure."""
    run = _Run("gpu-run", H200)
    for case in gpu_cases():
        for copy, (family, *_) in GPU_COPIES.items():
            if reason := reason_against(copy, case):
                run.failed(case, copy, family, "graph", "unsupported", reason)
            elif copy == "torch.compile" and case.num_tokens == 1 and case.num_kv_heads == 32:
                run.failed(case, copy, family, "graph", "error", "fell back to eager")
            else:
                run.timed(case, copy, family, "graph", known_seconds(copy, case))
            if copy in EAGER_US and case.num_kv_heads == 8 and case.layout != "HND":
                run.timed(case, copy, family, "eager", known_seconds(copy, case, "eager"))
        if case.layout != "NHD":
            run.timed(case, "torch.index_put", "torch", "graph", 4e-6, part="step")
    return run.samples()


# release: (registers, launch in us, share of the limit, the default backend's layout and source)
RELEASES = {
    "0.4.2": (29, 1.8, 0.45, "NHD", "qkv"),
    "0.6.6.post1": (29, 1.8, 0.45, "NHD", "qkv"),
    "0.8.5": (22, 1.8, 0.45, "NHD", "qkv"),
    "0.10.0": (22, 1.8, 0.45, "NHD", "qkv"),
    "0.10.1": (48, 2.1, 0.25, "NHD", "qkv"),
    "0.11.0": (56, 2.1, 0.25, "NHD", "qkv"),
    "0.17.0": (56, 2.1, 0.25, "NHD", "qkv"),
    "0.25.0": (40, 2.1, 0.40, "NHD", "qkv"),
    "0.33.0": (40, 2.1, 0.40, "packed", "qkv"),
}
LAST_WITH_OP = "0.25.0"  # beside its cubin
CALLS = (("NHD", "contiguous"), ("NHD", "qkv"), ("packed", "qkv"))


def release_seconds(version: str, case: Case) -> float:
    _, launch, share, *_ = RELEASES[version]
    return launch * 1e-6 + case.bytes_moved / (share * LIMIT_BYTES_PER_S)


def releases_run() -> pd.DataFrame:
    """Grid `releases`: nine releases, one as op and cubin, and kvnb; 0.4.2 refuses packed, 0.8.5 writes it wrongly."""
    run = _Run("releases-run", H200, grid="releases")
    for (layout, source), tokens in itertools.product(CALLS, TOKENS):
        case = _case(tokens, layout=layout, source=source)
        for copy in ("kvnb", "kvnb.again"):
            run.timed(case, copy, "kernel", "graph", known_seconds("kvnb", case))
        for version in RELEASES:
            copy = f"vllm=={version}"
            if layout == "packed" and version == "0.4.2":
                run.failed(case, copy, "peer", "graph", "unsupported", "its kernel knows no head stride")
            elif layout == "packed" and version == "0.8.5":
                run.failed(case, copy, "peer", "graph", "wrong", f"slot {tokens}: -0.5 should be untouched")
            else:
                run.timed(case, copy, "peer", "graph", release_seconds(version, case))
            if version == LAST_WITH_OP:
                run.timed(case, f"{copy}.cubin", "peer", "graph", release_seconds(version, case))
    return run.samples()


def release_facts(copy: str) -> dict:
    """In place of answers.release_facts."""
    registers, _, _, layout, source = RELEASES[copy.removeprefix("vllm==")]
    return {"registers": registers, "layout": layout, "source": source, "backend": "some/file.py", "note": ""}


# copy: the policies it has, of those that grid `padding` measures
POLICIES = {
    "kvnb": ("skip", "null_slot", "null_block", "null_blocks"),
    "kvnb.again": ("skip", "null_slot", "null_block", "null_blocks"),
    "vllm==0.33.0": ("skip", "null_slot", "null_block", "null_blocks"),
    "torch.index_put": ("null_slot", "null_block", "null_blocks", "remap", "filter", "last_slot"),
    "torch.index_copy_wide": ("null_slot", "null_block", "null_blocks", "remap", "filter"),
    "triton": ("skip",),
    "limit.copy": ("skip",),
}
COLLISION_S = 7e-9  # each further padded row of a slot, once FREE_ROWS have found it free
FREE_ROWS = 16


def padded_seconds(copy: str, case: Case, policy: str, timer: str = "graph") -> float:
    """The median of a cell of grid `padding`: rows that go to one slot wait for each other from FREE_ROWS on."""
    slots = 1 if policy == "last_slot" else null_slots(case, policy)
    per_slot = case.padded_tokens / slots if slots else 0
    waiting = COLLISION_S * max(0.0, per_slot - FREE_ROWS)
    return known_seconds(copy, case, timer) + waiting


def padding_run() -> pd.DataFrame:
    """Grid `padding`: free up to FREE_ROWS padded rows a slot, then ever dearer; eager `filter` beside null_slot."""
    run = _Run("padding-run", H200, grid="padding")
    for case, (copy, policies) in itertools.product(grid("padding"), POLICIES.items()):
        family = GPU_COPIES[copy][0]
        for policy in policies:
            if reason := reason_against(copy, case) or "cannot be captured" * (policy == "filter"):
                run.failed(case, copy, family, "graph", "unsupported", reason, policy)
            else:
                run.timed(case, copy, family, "graph", padded_seconds(copy, case, policy), policy=policy)
            if copy == "torch.index_put" and case.padding in (0.12, 0.75):
                run.timed(case, copy, family, "eager", padded_seconds(copy, case, policy, "eager"), policy=policy)
                if policy in ("remap", "filter"):
                    seconds = 140e-6 if policy == "filter" else 9e-6
                    run.timed(case, copy, family, "eager", seconds, part="step", policy=policy)
            if copy == "torch.index_put" and policy == "remap":
                run.timed(case, copy, family, "graph", 2.5e-6, part="step", policy=policy)
    return run.samples()


def cpu_run() -> pd.DataFrame:
    """A run on a CPU: timer `wall`, kvnb twice as fast as index_put and level with index_copy."""
    machine = {"gpu": "", "gpu_uuid": "", "driver": "", "cuda": "", "cpu": "Test CPU", "threads": 2}
    run = _Run("cpu-run", machine)
    for case in (Case(tokens, 8, cache_bytes=1 << 26) for tokens in CPU_TOKENS):
        for copy, family, slowness in (
            ("kvnb", "kernel", 1.0),
            ("kvnb.again", "kernel", 1.0),
            ("torch.index_put", "torch", 2.0),
            ("torch.index_copy", "torch", 1.0),
            ("limit.copy.memcpy", "limit", 0.9),
        ):
            run.timed(case, copy, family, "wall", slowness * (2e-6 + case.bytes_moved / 1e10))
    return run.samples()


class _Run:
    """Collects rows of the run file's schema."""

    def __init__(self, run_id: str, machine: dict, grid: str = "full") -> None:
        self.rows: list[dict] = []
        self.rng = np.random.default_rng(4698)
        fixed = {"schema_version": results.SCHEMA_VERSION, "grid": grid, "l2_bytes": 1 << 25}
        fixed["utc"] = "2026-11-30T00:00:00Z"
        software = {"torch": "2.13.0", "triton": "3.5", "python": "3.12", "kvnb_commit": "0123abc", "dirty": False}
        self.run = {"run_id": run_id, **fixed, **software, **machine}

    def _row(
        self, case: Case, copy: str, family: str, timer: str, part: str = "write", policy: str = "skip"
    ) -> dict:
        place = {"copy": copy, "family": family, "copy_version": "0", "policy": policy, "part": part, "timer": timer}
        counts = {"launches": 1, "calls": 10, "graphs": 0, "throttled": ""}
        counts["bytes_moved"] = bytes_moved(copy, family, part, case)
        where = {"state": "produced", "worker": -1, "round": 0, "sample": 0, "sm_clock_mhz": 1980.0}
        return {**self.run, **place, **case.fields(), **counts, **where, "seconds": None}

    def failed(
        self, case: Case, copy: str, family: str, timer: str, status: str, reason: str, policy: str = "skip"
    ) -> None:
        row = self._row(case, copy, family, timer, policy=policy)
        self.rows.append({**row, "status": status, "reason": reason})

    def timed(
        self, case: Case, copy: str, family: str, timer: str, seconds: float, part: str = "write", policy: str = "skip"
    ) -> None:
        row = {**self._row(case, copy, family, timer, part, policy), "status": "ok", "reason": ""}
        for worker in range(WORKERS):
            for turn in range(ROUNDS):
                noisy = seconds * (1 + NOISE * self.rng.standard_normal())
                self.rows.append({**row, "worker": worker, "round": turn, "seconds": noisy})

    def samples(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)[results.SCHEMA.names]
