"""How a call is timed: timers, states, and the loop that visits a case's copies in a new random order every round.

Timers (each sample is the time of one call):
  graph   a CUDA graph of K calls, elapsed / K; under 10 us the slope between a graph of K and one of 2 K calls, so that
          what a replay costs by itself cancels out (where it is not above 0, something disturbed it: taken again)
  call    one call between two events, the queue kept full so that no host time lies between them
  host    time for the Python call to return, nothing waited for
  eager   N calls and one synchronise, / N: dispatch and guards included
  wall    the same on a CPU

States (what the caches hold before a call; sized by the bytes a call touches, not by tensor sizes):
  produced  K and V in L2, as the kernel that made them leaves them; slots rotate over 3 x L2 and more
  cold      sources rotate over 3 x L2 and more, too
  resident  the same call again; only where all it touches fits in a quarter of L2
host, eager and wall rotate over at most BATCH_CALLS (wall: WALL_SETS) slot sets: small calls find some in cache.

Slots rotate without larger graphs: a graph reads its slot sets from fixed buffers, and the next sets are copied into
those before every replay. Timer `call` reaches its states by reading a buffer of 2 x L2 (a flush by writing would
leave dirty lines whose write-back the copy would pay for), and, for `produced`, writing the sources anew.

A load can ask L2 to keep its line. What one copy keeps is released before the next is timed by graph or call; what it
keeps itself, such as the slots, which a graph's replays read at the same addresses, as a server's layers do, stays.

Everything that touches a clock or a GPU goes through a Bench, so that tests run the same loop on a fake one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import ceil, inf
from typing import Protocol

import numpy as np
import torch

from kvnb import build, machine
from kvnb.bench.check import Expectation, WrongCopy
from kvnb.copies import base
from kvnb.copies.base import Copy
from kvnb.copies.torch_compile import graphs_made
from kvnb.problem import inputs as inputs_of
from kvnb.problem import slots as slot_sets
from kvnb.problem.case import Case

STATES = base.STATES
ROTATION = 3  # slots and sources rotate over this many times the L2
RESIDENT_SHARE = 4  # resident: everything in a 1/4 of L2
GRAPH_BYTES = 10  # a graph moves this many times the L2 where LEAST_CALLS and MOST_CALLS allow
LEAST_CALLS, MOST_CALLS = 4, 128  # calls in a graph
MOST_SETS = 512  # source sets of state cold
BATCH_CALLS = 32  # calls behind a sample of host, well below the depth of the launch queue, and slot sets of eager
BATCH_SECONDS = 0.5e-3  # least length of a sample of eager and wall
WALL_SETS = 128  # slot sets of wall
MOST_BATCH_SECONDS = 0.1  # length beyond which a batch gets fewer calls
VISITS_AT_MOST = 3  # of a cell in a round, where the first are disturbed
SLOPE_BELOW = 10e-6  # s per call under which timer graph takes the slope
SAMPLES = 3  # samples per visit,
LONG_SECONDS = 10e-3  # and 1 where a sample lasts longer than this
FILL_NS, PROBE_NS = 200_000, 50_000  # clock probes: while the host fills the queue; after the batch
CYCLES_PER_NS = 2  # for a GPU without the probe, whose clock is not known
ASK_SECONDS = 0.1  # at least, from one question to NVML to the next: many a round is shorter than its answer
SETTLED, SETTLE_SECONDS = 0.99, 2.0  # preamble: until the clock is within 1 % of the best, at most so long


@dataclass(frozen=True)
class Cell:
    """One thing to time in a case."""

    copy: Copy
    policy: str
    part: str
    timer: str
    state: str


@dataclass(frozen=True)
class Plan:
    """How a cell's calls rotate: calls per sample, source sets, and slot sets (`fills` buffers of `rows` sets each)."""

    calls: int
    sources: int
    rows: int
    fills: int


class Bench(Protocol):
    """The clock and the GPU (or CPU) that timers use. Events, probes and graphs are opaque to them."""

    device: torch.device
    cache_bytes: int

    def capture(self, calls: Sequence[Callable[[], object]]) -> Graph: ...
    def mark(self) -> object: ...
    def seconds_between(self, first: object, second: object) -> float: ...
    def probe(self, nanoseconds: int) -> object: ...
    def clock_mhz(self, probe: object) -> float: ...
    def settle(self) -> None: ...
    def flush(self) -> None: ...
    def release(self) -> None: ...
    def synchronize(self) -> None: ...
    def now(self) -> float: ...
    def throttled(self) -> str | None: ...


@dataclass(frozen=True)
class Graph:
    """A captured graph: `replay()` and how many nodes (kernels, copies, fills) it holds."""

    replay: Callable[[], None]
    nodes: int


class Gpu:
    """Bench of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        self.cache_bytes = machine.cache_bytes(device)
        self.best_mhz = 0.0
        without = build.problem("cuda")
        if without:
            warnings.warn(f"no clock probe: sm_clock_mhz stays empty ({without})", stacklevel=2)
        self._ops = None if without else build.load_for("cuda")
        self._side = torch.cuda.Stream(device)
        self._flushed = torch.zeros(2 * self.cache_bytes // 16 * 16, dtype=torch.uint8, device=device)
        self._sink = torch.zeros(4, dtype=torch.uint8, device=device)

    def capture(self, calls: Sequence[Callable[[], object]]) -> Graph:
        """A graph of `calls`, in order. Not torch.cuda.graph(): that empties the allocator each time."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.synchronize()
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        nodes = _nodes(graph.raw_cuda_graph())
        if nodes == 0:  # an empty pair of events
            return Graph(lambda: None, 0)
        graph.instantiate()
        return Graph(graph.replay, nodes)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1e3

    def probe(self, nanoseconds: int) -> torch.Tensor | None:
        if self._ops is None:
            torch.cuda._sleep(nanoseconds * CYCLES_PER_NS)
            return None
        out = torch.empty(2, dtype=torch.int64, device=self.device)
        self._ops.clock_probe(out, nanoseconds)
        return out

    def clock_mhz(self, probe: torch.Tensor | None) -> float | None:
        if probe is None:
            return None
        cycles, nanoseconds = probe.tolist()
        mhz = 1e3 * cycles / nanoseconds
        self.best_mhz = max(self.best_mhz, mhz)
        return mhz

    def settle(self) -> None:
        """Keep the GPU busy until its clock rests: within 1 % of the last probe's and of this process's best."""
        deadline = self.now() + SETTLE_SECONDS
        last, mhz = 0.0, 0.0
        while self.now() < deadline and (
            last == 0 or mhz < SETTLED * self.best_mhz or abs(mhz / last - 1) > 1 - SETTLED
        ):
            for _ in range(50):
                self.flush()
            last, mhz = mhz, self.clock_mhz(self.probe(PROBE_NS)) or 0.0

    def flush(self) -> None:
        """Read a buffer of 2 x L2."""
        if self._ops is None:
            self._flushed.view(torch.int64).amax()
        else:
            self._ops.flush(self._flushed, self._sink)

    def release(self) -> None:
        """Lines that loads asked L2 to keep become lines like all others: a flush passes them by."""
        from cuda.bindings import runtime

        [error] = runtime.cudaCtxResetPersistingL2Cache()
        if error != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaCtxResetPersistingL2Cache failed: {error.name}")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def now(self) -> float:
        return time.perf_counter()

    def throttled(self) -> str | None:
        return machine.throttled(self.device)


def _nodes(raw_graph: int) -> int:
    from cuda.bindings import runtime

    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=raw_graph))[:3]
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaGraphGetNodes failed: {error.name}")
    return count


class Cpu:
    """Bench of the CPU: timer wall only."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.cache_bytes = machine.cache_bytes(self.device)

    def settle(self) -> None:
        """Nothing to do: the first batch of every cell is a warm-up."""

    def synchronize(self) -> None:
        """A CPU call is over when it returns."""

    def now(self) -> float:
        return time.perf_counter()

    def throttled(self) -> None:
        return None


def plan(case: Case, timer: str, state: str, cache_bytes: int, moved: int | None = None) -> Plan | str:
    """How the calls of a cell rotate, or why this state is not given; `moved`: bytes of a call, None for the case's."""
    moved = case.bytes_moved if moved is None else moved
    touched = max(1, case.written_tokens * case.token_bytes)  # by reading, and as much by writing
    rotating = ROTATION * cache_bytes
    if state == "resident":
        if 2 * touched * RESIDENT_SHARE > cache_bytes:
            return (
                f"a call touches {2 * touched / 1e6:.1f} MB, more than a quarter of the {cache_bytes / 1e6:.0f} MB L2"
            )
        rotating = 1
    sources = ceil(rotating / touched) if state == "cold" and timer != "call" else 1
    if sources > MOST_SETS:
        return f"would need {sources} input sets, more than {MOST_SETS}: timer call after a flush stands for it"
    calls = min(MOST_CALLS, max(LEAST_CALLS, ceil(GRAPH_BYTES * cache_bytes / max(1, moved))))
    if timer != "graph":
        most = WALL_SETS if timer == "wall" else BATCH_CALLS
        rows = max(sources, min(most, ceil(rotating / touched)))
        return Plan(BATCH_CALLS if timer == "host" else rows, sources, rows, 1)
    calls = ceil(calls / sources) * sources
    fills = max(1, ceil(rotating / (calls * touched)))
    return Plan(calls, sources, 1 if state == "resident" else 3 * calls, fills)


class Stage:
    """The tensors that all cells of a case share: sources, slot sets per policy, what the caches must hold."""

    def __init__(self, bench: Bench, case: Case, plans: Sequence[Plan]) -> None:
        self.bench, self.case = bench, case
        self.inputs = inputs_of.make(case, bench.device, source_sets=max(p.sources for p in plans))
        self._unplaced = slot_sets.sets(case, max(p.rows * p.fills for p in plans), bench.device)
        slot_sets.validate(self._unplaced, case.num_slots, case.num_tokens)
        self._under: dict[str, inputs_of.Inputs] = {}
        self._expected: Expectation | None = None
        self._expected_for: object = None

    def under(self, policy: str) -> inputs_of.Inputs:
        if policy not in self._under:
            self._under[policy] = self.inputs.under(policy, self._unplaced)
        return self._under[policy]

    def expect(self, policy: str, sets: torch.Tensor, sources: list[int], tag: tuple) -> Expectation:
        """What the caches must hold after calls with these slot sets and sources; kept while `tag` stays."""
        inputs = self.under(policy)
        if self._expected is None:
            self._expected = Expectation(inputs)
        self._expected.inputs = inputs
        if self._expected_for != tag or self.case.padded_tokens:
            self._expected.reset()
            self._expected.apply_sets(inputs.keys, inputs.values, sets, sources)
            self._expected_for = tag
        self._expected.reset_caches()
        return self._expected


def _aligned(sets: torch.Tensor) -> torch.Tensor:
    """Slot sets whose rows begin at multiples of 16 bytes, as a slot_mapping does: compiled copies clone others."""
    return torch.nn.functional.pad(sets, (0, 1))[..., :-1] if sets.shape[-1] % 2 else sets


class Timed:
    """A cell made ready: bound, warmed up, captured.

    Both kinds have `visit`, which yields samples (seconds of one call, SM clock in MHz or None), and `verify`, which
    runs exactly what is timed on poisoned caches and raises WrongCopy.
    """

    def __init__(self, stage: Stage, cell: Cell, plan: Plan) -> None:
        self.stage, self.cell, self.plan, self.bench = stage, cell, plan, stage.bench
        self.inputs = stage.under(cell.policy)
        self.pool = _aligned(self.inputs.slots[: plan.rows * plan.fills].view(plan.fills, plan.rows, -1))
        self.launches: int | None = None
        self.samples = SAMPLES
        self._fill = 0
        before = graphs_made() if cell.copy.family == "compile" else 0
        self._step = cell.copy.bind(self.inputs)
        self._warm_up()
        self.graphs = graphs_made() - before if cell.copy.family == "compile" else 0

    def _warm_up(self) -> None:
        """Compile, load and set up whatever the first call does, outside of every measurement."""
        self._step(self.pool[0, 0])(self.inputs.keys[0], self.inputs.values[0])
        self.bench.synchronize()

    def _call(self, write: Callable, number: int) -> Callable[[], object]:
        source = number % self.plan.sources
        key, value = self.inputs.keys[source], self.inputs.values[source]
        return lambda: write(key, value)

    @property
    def _writes_rows(self) -> bool:
        """Whether there is something to verify: a step writes no rows."""
        return self.cell.part == "write" and base.writes_rows(self.cell.copy.name, self.cell.copy.family)

    def _expected(self, sources: Iterable[int], sets: torch.Tensor) -> Expectation:
        tag = (self.cell.policy, type(self), self.plan, len(sets))
        return self.stage.expect(self.cell.policy, sets, [i % self.plan.sources for i in sources], tag)


class GraphTimed(Timed):
    """Timer graph. Slot sets lie in a buffer that every sample fills anew; a graph of the copy's steps follows it."""

    def __init__(self, stage: Stage, cell: Cell, plan: Plan) -> None:
        super().__init__(stage, cell, plan)
        bench, calls = self.bench, plan.calls
        self.buffer = _aligned(self.pool[0].clone())
        rows = [0] * 3 * calls if plan.rows == 1 else range(3 * calls)
        self.longer_rows, self.shorter_rows = rows[: 2 * calls], rows[2 * calls :]
        self._restep: Graph | None = None
        one = self._calls([0])
        self.launches = bench.capture(one).nodes
        self.shorter = self._capture(self.shorter_rows)
        self.longer: Graph | None = None
        seconds = self._estimate()
        if seconds < SLOPE_BELOW:
            self.longer = self._capture(self.longer_rows)
        if seconds * calls > LONG_SECONDS:
            self.samples = 1
        self.verify()

    def _calls(self, rows: Sequence[int]) -> list[Callable[[], object]]:
        if self.cell.part == "step":
            return [lambda row=row: self._step(self.buffer[row]) for row in rows]
        return [self._call(self._writes[row], i) for i, row in enumerate(rows)]

    @cached_property
    def _writes(self) -> list[Callable]:
        """A write per row of the buffer. Steps that launch work are captured: a refill carries them out again."""
        bound: list[Callable] = []
        bind_all = [lambda row=row: bound.append(self._step(row)) for row in self.buffer]
        if self.cell.copy.steps(self.stage.case, self.cell.policy):
            self._restep = self.bench.capture(bind_all)
        else:
            for bind in bind_all:
                bind()
        return bound

    def _capture(self, rows: Sequence[int]) -> Graph:
        graph = self.bench.capture(self._calls(rows))
        if graph.nodes != len(rows) * self.launches:
            raise RuntimeError(
                f"the graph of {len(rows)} calls holds {graph.nodes} nodes, not {self.launches} per call"
            )
        return graph

    def _estimate(self) -> float:
        self.refill()
        self.shorter.replay()
        first = self.bench.mark()
        self.shorter.replay()
        last = self.bench.mark()
        self.bench.synchronize()
        return self.bench.seconds_between(first, last) / self.plan.calls

    def refill(self) -> None:
        """The next slot sets, and what the copy's steps make of them, in place."""
        if self.plan.rows > 1:
            self.buffer.copy_(self.pool[self._fill])
            self._fill = (self._fill + 1) % self.plan.fills
        if self._restep is not None:
            self._restep.replay()

    def visit(self) -> Iterator[tuple[float, float | None]]:
        bench = self.bench
        bench.release()
        self.refill()
        for graph in filter(None, (self.shorter, self.longer)):
            graph.replay()  # thrown away: the caches still hold what the last copy left
        before = bench.probe(FILL_NS)
        marks = []
        for _ in range(self.samples):
            self.refill()
            trail = [bench.mark()]
            for graph in filter(None, (self.shorter, self.longer)):
                graph.replay()
                trail.append(bench.mark())
            marks.append(trail)
        after = bench.probe(PROBE_NS)
        bench.synchronize()
        clocks = [bench.clock_mhz(probe) for probe in (before, after)]
        mhz = None if None in clocks else sum(clocks) / 2
        for trail in marks:
            spans = [bench.seconds_between(a, b) for a, b in pairwise(trail)]
            seconds = (spans[-1] - (spans[0] if self.longer else 0.0)) / self.plan.calls
            if seconds <= 0:
                raise Disturbed(f"a slope of {seconds:.3g} s: something else ran on the GPU between two events")
            yield seconds, mhz

    def verify(self) -> None:
        if not self._writes_rows:
            return
        self._fill = 0
        self.refill()
        rows = [*(self.longer_rows if self.longer else ()), *self.shorter_rows]
        sources = [*(range(len(self.longer_rows)) if self.longer else ()), *range(len(self.shorter_rows))]
        resident = self.plan.rows == 1  # the same call over and over: once says it all
        expected = self._expected(sources[-1:] if resident else sources, self.buffer[rows[-1:] if resident else rows])
        for graph in filter(None, (self.longer, self.shorter)):
            graph.replay()
        expected.compare(self.cell.copy)


class EagerTimed(Timed):
    """Timers that call from Python: call, host, eager, wall."""

    def __init__(self, stage: Stage, cell: Cell, plan: Plan) -> None:
        super().__init__(stage, cell, plan)
        self.rows = [i % plan.rows for i in range(plan.calls)]
        slots = self.pool[0]
        if cell.part == "step":
            self.calls = [lambda row=slots[row]: self._step(row) for row in self.rows]
        else:
            writes = [self._step(row) for row in slots]
            self.calls = [self._call(writes[row], i) for i, row in enumerate(self.rows)]
        self._next = 0
        self.repeats = 1
        self._shorten()
        self.verify()
        if cell.timer in ("eager", "wall"):
            batch = self._batch() * len(self.calls)
            self.repeats = max(1, ceil(BATCH_SECONDS / max(batch, 1e-9)))
            if batch > LONG_SECONDS:
                self.samples = 1

    def _shorten(self) -> None:
        """Keep a batch of a very slow copy (one that touches the whole cache, say) under MOST_BATCH_SECONDS."""
        start = self.bench.now()
        self.calls[0]()
        self.bench.synchronize()
        count = max(1, int(MOST_BATCH_SECONDS / max(self.bench.now() - start, 1e-9)))
        self.rows, self.calls = self.rows[:count], self.calls[:count]

    def _batch(self) -> float:
        """Seconds per call of one batch."""
        bench, calls = self.bench, self.calls
        bench.synchronize()
        start = bench.now()
        for _ in range(self.repeats):
            for call in calls:
                call()
        if self.cell.timer != "host":
            bench.synchronize()
        seconds = bench.now() - start
        bench.synchronize()
        return seconds / (self.repeats * len(calls))

    def visit(self) -> Iterator[tuple[float, float | None]]:
        if self.cell.timer == "call":
            yield from self._visit_calls()
            return
        self._batch()  # thrown away: what the last copy left in the caches
        for _ in range(self.samples):
            yield self._batch(), None

    def _visit_calls(self) -> Iterator[tuple[float, float | None]]:
        bench, marks, probes = self.bench, [], []
        bench.release()
        for _ in range(1 + SAMPLES):
            call = self.calls[self._next % len(self.calls)]
            self._next += 1
            if self.cell.state != "resident":
                bench.flush()
            if self.cell.state == "produced":
                self._produce()
            probes.append(bench.probe(FILL_NS))
            marks.append((bench.mark(), call(), bench.mark()))
        bench.synchronize()
        for (first, _, last), probe in list(zip(marks, probes, strict=True))[1:]:  # the first call is thrown away
            yield bench.seconds_between(first, last), bench.clock_mhz(probe)

    def _produce(self) -> None:
        """Write the sources anew, as the projection before a copy does: they are in L2, and dirty."""
        for source in (self.inputs.keys[0], self.inputs.values[0]):
            source.mul_(1) if source.is_floating_point() and source.element_size() > 1 else source.copy_(source.clone())

    def verify(self) -> None:
        if not self._writes_rows:
            return
        expected = self._expected(range(len(self.rows)), self.pool[0][self.rows])
        for call in self.calls:
            call()
        self.bench.synchronize()
        expected.compare(self.cell.copy)


class Disturbed(RuntimeError):
    """A visit that something else on the machine took part in."""


class Poisoned(RuntimeError):
    """The device no longer answers after what `row` tells of: this process is lost, and its case begins anew."""

    def __init__(self, row: dict) -> None:
        super().__init__(row["reason"])
        self.row = row


@torch.no_grad()  # as servers run
def measure_case(
    bench: Bench,
    case: Case,
    cells: Sequence[Cell],
    *,
    rounds: int,
    seed: int,
    on_visit: Callable[[Cell, str], None] = lambda cell, stage: None,
) -> list[dict]:
    """Rows of every cell of one case in this process: samples, or one row that says why there are none.

    Raises Poisoned when a failure took the device along.
    """
    rows: list[dict] = []
    plans = {cell: plan(case, cell.timer, cell.state, bench.cache_bytes, bytes_moved(cell, case)) for cell in cells}
    rows += [row_of(cell, case, status="unsupported", reason=p) for cell, p in plans.items() if isinstance(p, str)]
    cells = [cell for cell in cells if not isinstance(plans[cell], str)]
    if not cells:
        return rows
    made: list[Stage] = []
    failed = _failure(bench, cells[0], case, lambda: made.append(Stage(bench, case, [plans[cell] for cell in cells])))
    if failed:
        return rows + [row_of(cell, case, status=failed["status"], reason=failed["reason"]) for cell in cells]
    [stage] = made
    bench.settle()
    ready: dict[Cell, Timed] = {}
    samples: dict[Cell, list[dict]] = {}

    def attempt(cell: Cell, what: str, act: Callable[[], object]) -> bool:
        """Do it; where it fails, the cell's only row is the one that says so."""
        on_visit(cell, what)
        failed = _failure(bench, cell, case, act)
        if failed:
            rows.append(failed)
            samples.pop(cell, None)
        return not failed

    for cell in cells:
        if attempt(cell, "prepare", lambda cell=cell: ready.__setitem__(cell, _ready(stage, cell, plans[cell]))):
            samples[cell] = []
    order = np.random.default_rng(seed)
    before, asked, since = bench.throttled(), bench.now(), 0
    for number in range(rounds):
        for cell in order.permutation(np.array([*samples], dtype=object)):
            visit = partial(_samples, ready[cell], case, number)
            attempt(cell, "round", lambda visit=visit, kept=samples[cell]: kept.extend(visit()))
        if number < rounds - 1 and bench.now() - asked < ASK_SECONDS:
            continue
        after = bench.throttled()
        for row in (row for kept in samples.values() for row in kept if row["round"] >= since):
            row["throttled"] = _either(before, after)
        before, asked, since = after, bench.now(), number + 1
    for cell in list(samples):
        attempt(cell, "verify", ready[cell].verify)
    return rows + [row for kept in samples.values() for row in kept]


def _ready(stage: Stage, cell: Cell, plan: Plan) -> Timed:
    timed = (GraphTimed if cell.timer == "graph" else EagerTimed)(stage, cell, plan)
    if timed.launches is None and cell.timer != "wall" and cell.policy != "filter":
        timed.launches = stage.bench.capture([timed.calls[0]]).nodes
    return timed


def _either(before: str | None, after: str | None) -> str | None:
    """What was said before rounds or after them: reasons once each, None where neither is known."""
    known = [said for said in (before, after) if said is not None]
    return ", ".join(dict.fromkeys(filter(None, ", ".join(known).split(", ")))) if known else None


def _samples(timed: Timed, case: Case, number: int) -> Iterator[dict]:
    cell = timed.cell
    repeats = getattr(timed, "repeats", 1)
    calls = {"call": 1, "graph": timed.plan.calls}.get(cell.timer) or len(timed.calls) * repeats
    for sample, (seconds, mhz) in _undisturbed(timed):
        yield row_of(
            cell, case, round=number, sample=sample, seconds=seconds, launches=timed.launches, calls=calls,
            graphs=timed.graphs, sm_clock_mhz=mhz,
        )  # fmt: skip


def _undisturbed(timed: Timed) -> list[tuple[int, tuple[float, float | None]]]:
    """Numbered samples of a visit. One that was disturbed is taken again, and its samples are numbered on: a run file's
    `sample` shows it. Raises Disturbed where no visit of VISITS_AT_MOST is undisturbed."""
    for again in range(VISITS_AT_MOST):
        try:
            taken = list(timed.visit())
            for seconds, _ in taken:
                if not 0 < seconds < inf:
                    raise Disturbed(f"a time of {seconds:.3g} s")
            return list(enumerate(taken, start=again * len(taken)))
        except Disturbed as error:
            last = error
    raise last


def _failure(bench: Bench, cell: Cell, case: Case, act: Callable[[], object]) -> dict | None:
    """Do it; a failure becomes the row that says so. Raises Poisoned where the device is lost with it."""
    try:
        act()
        return None
    except WrongCopy as error:
        status, reason = "wrong", str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        status, reason = "out_of_memory", _first_line(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001  whatever a copy raises costs its own cell, not the run
        full = "can't allocate memory" in str(error)  # a plain RuntimeError is all that torch raises on a CPU
        status, reason = "out_of_memory" if full else "error", reason_of(error)
    failed = row_of(cell, case, status=status, reason=reason)
    try:
        bench.synchronize()
    except RuntimeError as error:
        raise Poisoned(failed) from error
    return failed


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def bytes_moved(cell: Cell, case: Case) -> int:
    """Fewest bytes a call of the cell moves: nothing for a launch, the index for a step."""
    return base.bytes_moved(cell.copy.name, cell.copy.family, cell.part, case)


def row_of(cell: Cell, case: Case, *, status: str = "ok", reason: str = "", **measured) -> dict:
    """A row of the run file without the run's and the machine's columns; copy_version is the run's to fill in.

    What of `reason` no file could hold, such as half a surrogate pair, is escaped.
    """
    blank = dict.fromkeys(("copy_version", "seconds", "launches", "calls", "graphs", "sm_clock_mhz", "throttled"))
    return {
        "copy": cell.copy.name,
        "family": cell.copy.family,
        "policy": cell.policy,
        "part": cell.part,
        "timer": cell.timer,
        "state": cell.state,
        "round": -1,
        "sample": -1,
        "status": status,
        "reason": reason.encode(errors="backslashreplace").decode(),
        **case.fields(),
        "bytes_moved": bytes_moved(cell, case),
        **blank,
        **measured,
    }
