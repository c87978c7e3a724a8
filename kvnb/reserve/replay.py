"""A request trace through continuous batching with chunked prefill: padded shares, capacity, the allocator's time.

No tokens are computed. A step takes STEP_SECONDS, and SECONDS_PER_TOKEN for each of its tokens: about a dense 8B model
on one data-centre GPU. What share of a batch is padding follows from the batch's size alone; this model of time, like
`load`, only decides how often each size comes up. The scheduler is the common one: running requests, oldest first; what
is left of the token budget to the prompts that wait; where blocks run out, the youngest request starts over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from kvnb.reserve.pool import OutOfBlocks, Pool

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # https://github.com/Azure/AzurePublicDataset
CAPTURED = {  # batch sizes that CUDA graphs are captured for: vLLM's list, and a shorter one
    "8 and 16 apart": (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)),
    "powers of two": tuple(2**i for i in range(10)),
}
NUM_BLOCKS = 30_720  # 60 GiB of blocks of 2 MiB: Llama-3.1-8B, block size 16
STEP_SECONDS = 5e-3  # 15 GB of weights to read, and launches
SECONDS_PER_TOKEN = 25e-6  # 16 GFLOP


def read_trace(path: str | Path) -> pd.DataFrame:
    """A trace in the Azure LLM inference format (CSV), as columns arrival (seconds), context, generated (tokens).

    Raises ValueError naming the file, the line (the header is line 1), what stands there and what it must be.
    """
    raw = pd.read_csv(path, dtype=str, skip_blank_lines=False) if Path(path).is_file() else None
    if raw is None or raw.empty or not {*COLUMNS} <= {*raw}:
        found = "is no file" if raw is None else f"has columns {', '.join(raw)} and {len(raw)} lines below them"
        raise ValueError(f"trace {path} {found}; it must have columns {', '.join(COLUMNS)} and a line for each request")
    when = pd.to_datetime(raw["TIMESTAMP"], errors="coerce", format="ISO8601", utc=True)
    context, generated = (pd.to_numeric(raw[name], errors="coerce") for name in COLUMNS[1:])
    whole = "a whole number of at least 1"
    for name, bad, needed in (
        ("TIMESTAMP", when.isna(), "a date and time, such as 2023-11-16 18:17:03.97996"),
        ("TIMESTAMP", when.diff() < pd.Timedelta(0), "no earlier than the line before: sort the lines by it"),
        ("ContextTokens", ~(context >= 1) | (context % 1 != 0), whole),
        ("GeneratedTokens", ~(generated >= 1) | (generated % 1 != 0), whole),
    ):
        if bad.any():
            row = int(bad.to_numpy().argmax())
            raise ValueError(f"trace {path}, line {row + 2}: {name} is {raw[name].iloc[row]}; it must be {needed}")
    arrival = (when - when.iloc[0]).dt.total_seconds()
    return pd.DataFrame({"arrival": arrival, "context": context.astype(int), "generated": generated.astype(int)})


def synthetic_trace(requests: int = 1500, per_second: float = 8.0, seed: int = 0) -> pd.DataFrame:
    """A trace as read_trace gives it, drawn: Poisson arrivals, prompts of 700 and answers of 150 tokens in the median,
    both lognormal with a tail to thousands. It stands for chat, and for no server in particular."""
    draw = np.random.default_rng(seed)
    arrival = np.cumsum(draw.exponential(1 / per_second, requests))
    context, generated = (draw.lognormal(np.log(median), 1.0, requests).clip(1, 8000) for median in (700, 150))
    return pd.DataFrame({"arrival": arrival, "context": context.astype(int), "generated": generated.astype(int)})


@dataclass
class _Request:
    name: int
    context: int
    generated: int
    done: int = 0  # tokens generated so far
    computed: int = 0  # tokens whose K and V are in the pool

    @property
    def ahead(self) -> int:
        """Tokens known but not computed: 1 while it decodes; more of a prompt, or of what a preemption lost."""
        return self.context + self.done - self.computed


@dataclass(frozen=True)
class Replay:
    """What happened. `steps`: of every step its start in seconds, whether requests still arrive, decode and prefill
    (tokens), preempted, running, waiting (requests), free (blocks). `calls`: pool method -> nanoseconds of each."""

    steps: pd.DataFrame
    calls: dict[str, list[int]]


def replay(
    trace: pd.DataFrame, num_blocks: int = NUM_BLOCKS, *, block_size: int = 16, reserve: bool = True, load: float = 1.0,
    max_num_seqs: int = 256, token_budget: int = 8192,
) -> Replay:  # fmt: skip
    """Serve a trace to its end. `load` 2: requests arrive twice as fast; `token_budget`: the most tokens of a step.

    Raises ValueError for a load, max_num_seqs or token_budget that serves nothing, and, from Pool, where the usable
    blocks cannot hold the trace's longest request.
    """
    if not (load > 0 and max_num_seqs > 0 and token_budget > 0):
        given = f"load = {load}, max_num_seqs = {max_num_seqs}, token_budget = {token_budget}"
        raise ValueError(f"{given}: each must be above 0, else no request is ever served")
    longest = int((trace["context"] + trace["generated"]).max()) - 1  # a request's last token needs no slot
    server = _Server(Pool(num_blocks, block_size, reserve, longest), max_num_seqs, token_budget)
    sizes = zip(trace["context"].tolist(), trace["generated"].tolist())
    coming = deque((at / load, _Request(name, *size)) for name, (at, size) in enumerate(zip(trace["arrival"], sizes)))
    now, steps = 0.0, []
    while coming or server.waiting or server.running:
        if not server.waiting and not server.running:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            server.waiting.append(coming.popleft()[1])
        steps.append({"seconds": now, "arriving": bool(coming), **server.step()})
        now += STEP_SECONDS + SECONDS_PER_TOKEN * (steps[-1]["decode"] + steps[-1]["prefill"])
    return Replay(pd.DataFrame(steps), server.calls)


class _Server:
    """Continuous batching over a pool."""

    def __init__(self, pool: Pool, max_num_seqs: int, token_budget: int) -> None:
        self.pool, self.max_num_seqs, self.token_budget = pool, max_num_seqs, token_budget
        self.running: list[_Request] = []  # oldest first
        self.waiting: deque[_Request] = deque()
        self.calls: dict[str, list[int]] = {"allocate": [], "append": [], "free": []}

    def step(self) -> dict[str, int]:
        """One model step, as a row of Replay.steps."""
        scheduled: list[tuple[_Request, int]] = []
        budget, preempted = self._go_on(scheduled)
        if not preempted:
            self._admit(scheduled, budget)
        decode = sum(request.done > 0 and request.ahead == 1 for request, _ in scheduled)
        row = {"decode": decode, "prefill": sum(tokens for _, tokens in scheduled) - decode, "preempted": preempted}
        row |= {"running": len(self.running), "waiting": len(self.waiting), "free": self.pool.num_free}
        for request, tokens in scheduled:
            request.computed += tokens
            request.done += request.ahead == 0  # the last known token gives the next one
            if request.done == request.generated:
                self._call("free", request)
                self.running.remove(request)
        return row

    def _go_on(self, scheduled: list[tuple[_Request, int]]) -> tuple[int, int]:
        """Schedule running requests, oldest first; the youngest starts over where blocks run out. Returns the token
        budget that is left, and how many were preempted."""
        budget, position, preempted = self.token_budget, 0, 0
        while position < len(self.running) and budget:
            request = self.running[position]
            tokens = min(request.ahead, budget)
            if self._call("append", request, tokens):
                scheduled.append((request, tokens))
                budget, position = budget - tokens, position + 1
                continue
            youngest = self.running.pop()  # not scheduled yet: those up to `position` are older
            self._call("free", youngest)
            youngest.computed = 0
            self.waiting.appendleft(youngest)
            preempted += 1
        return budget, preempted

    def _admit(self, scheduled: list[tuple[_Request, int]], budget: int) -> None:
        """Start waiting requests, first come first served, while budget, seats and blocks last."""
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            tokens = min(self.waiting[0].ahead, budget)
            if not self._call("allocate", self.waiting[0], tokens):
                return
            self.running.append(self.waiting.popleft())
            scheduled.append((self.running[-1], tokens))
            budget -= tokens

    def _call(self, method: str, request: _Request, *tokens: int) -> bool:
        """Call the pool and note the time; whether there were blocks enough."""
        call, start = getattr(self.pool, method), time.perf_counter_ns()
        try:
            call(request.name, *tokens)
        except OutOfBlocks:
            return False
        self.calls[method].append(time.perf_counter_ns() - start)
        return True


def padded_shares(steps: pd.DataFrame) -> pd.DataFrame:
    """Padding of each step under each capture list, while requests arrive (the end of a trace is all small batches).

    Columns captured (the list's name), prefill (whether the step had any), batch (its tokens), rows (the next captured
    size; batch itself beyond the largest: no graph, no padding), share (of rows, 0 to 1). Empty where none arrived.
    """
    steps = steps[steps["arriving"]]
    batch, tables = (steps["decode"] + steps["prefill"]).to_numpy(), []
    for name, captured in CAPTURED.items():
        sizes = np.array(captured)
        rows = np.where(batch > sizes[-1], batch, sizes.take(np.searchsorted(sizes, batch), mode="clip"))
        columns = {"captured": name, "prefill": steps["prefill"] > 0, "batch": batch, "rows": rows}
        tables.append(pd.DataFrame(columns | {"share": 1 - batch / rows}))
    return pd.concat(tables, ignore_index=True)


def rank_share(batch: int, rows: int, ranks: int) -> float:
    """Share of a context-parallel rank's rows that are padding: the mean over ranks, which is exact, as each token of
    the batch belongs to one of them and all run all rows. Raises ValueError unless 0 < batch <= rows and ranks > 0."""
    if ranks < 1 or not 0 < batch <= rows:
        raise ValueError(f"batch = {batch}, rows = {rows}, ranks = {ranks}: needs 0 < batch <= rows and ranks > 0")
    return 1 - batch / (rows * ranks)


def capacity(trace: pd.DataFrame, num_blocks: int, reserved: Iterable[int] = (0, 1), **options) -> pd.DataFrame:
    """The same trace on `num_blocks` blocks, so many of them `reserved`: requests held, preempted, how long it took."""
    table = []
    for blocks in reserved:  # a pool reserves one: of several, the others are as good as not there
        steps = replay(trace, num_blocks - max(0, blocks - 1), reserve=blocks > 0, **options).steps
        row = {"usable blocks": num_blocks - blocks, "most held": steps["running"].max()}
        row |= {"held in the mean": steps["running"].mean(), "preempted": steps["preempted"].sum()}
        table.append(row | {"steps": len(steps), "seconds": steps["seconds"].iloc[-1]})
    return pd.DataFrame(table)


def allocator_times(trace: pd.DataFrame, usable: int = NUM_BLOCKS, rounds: int = 3, **options) -> pd.DataFrame:
    """Time of a pool call in a replay, by method, without the reserve and with it, on the same number of usable blocks.

    Nanoseconds: a round's mean, a reading of the clock included; of `rounds` rounds, in turn, the median and the range.
    """
    means = []
    for reserve in (False, True) * rounds:
        calls = replay(trace, usable + reserve, reserve=reserve, **options).calls
        means += [{"method": m, "reserve": reserve, "calls": len(ns), "ns": np.mean(ns)} for m, ns in calls.items()]
    rows = pd.DataFrame(means).groupby(["method", "calls", "reserve"])["ns"].agg(["median", "min", "max"])
    return rows.add_suffix(" ns").reset_index()
