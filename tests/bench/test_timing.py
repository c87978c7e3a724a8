"""The loop that times, on a fake GPU with a virtual clock: what is thrown away, what rotates, what is held to the bits.

FakeGpu executes every op on the CPU and charges for it in virtual nanoseconds, on two clocks that run apart until
somebody waits, as a host and a GPU do. Captured ops do not run before their graph is replayed, and then write into
the tensors that they were captured with.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvnb.bench import results, timing
from kvnb.bench.timing import Cell, Graph, Plan, measure_case, plan
from kvnb.copies import REGISTRY, Copy, limits
from kvnb.problem.case import MIB, Case

HOST, EVENT, REPLAY, COLD = 2_000, 700, 9_000, 400_000  # ns: a launch, an event, a replay, a kernel on cold caches
OTHER = 1_000  # ns of any op that COST does not name
COST = {"aten::index_copy_": 3_000, "aten::index_put_": 8_000, "aten::scatter_": 20_000}  # ns
READS = {"aten::index_copy_": (3, 2), "aten::index_put_": (2, 1)}  # which arguments are the rows and the slots
CLOCK = 1980.0  # MHz

CASE = Case(1, 2, 16, block_size=16, cache_bytes=1 << 18, dtype="float32")
L2 = 16 << 10  # of CASE's 256-byte calls, 128 do not cover 3 x this: two fills
FAST, SLOW, SLOWEST = "torch.index_copy", "torch.index_put", "torch.scatter"


class FakeGpu(TorchDispatchMode):
    """A Bench, and what it did: `log` holds (what, [(address of the rows, slots) of each write]), in order."""

    device = torch.device("cpu")

    def __init__(self, cache_bytes: int = L2) -> None:
        super().__init__()
        self.cache_bytes = cache_bytes
        self.host = self.gpu = self.waited_for = 0  # ns
        self.warm: str | None = None  # the write whose data and code the caches hold
        self.log: list[tuple[str, list]] = []
        self.recording: list[tuple] | None = None
        self.replaying = self.lost = self.throttles = False
        self.settled = 0
        self.mhz = CLOCK

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.replaying or op.is_view:
            return op(*args, **kwargs)
        if self.recording is not None:
            return self._record(op, args, kwargs)
        self.host += HOST
        self._log(op._schema.name, [self._launch(op, args)])
        return op(*args, **kwargs)

    def _record(self, op, args, kwargs):
        """Captured, not carried out: a new tensor holds nothing, and one to be written stays as it is."""
        in_place = op._schema.is_mutable
        out = args[0] if in_place else op(*args, **kwargs).zero_()
        self.recording.append((op, args, kwargs, None if in_place else out))
        return out

    def _launch(self, op, args) -> tuple:
        """Time on the GPU's clock; returns (rows, slots) of a write."""
        name = op._schema.name
        self.gpu = max(self.gpu, self.host) + COST.get(name, OTHER)
        if name in COST and name != self.warm:
            self.gpu += COLD
            self.warm = name
        if name not in READS:
            return ()
        rows, slots = (args[i] for i in READS[name])
        slots = slots[0] if isinstance(slots, list) else slots
        return rows.data_ptr(), tuple(slots.tolist())

    def _log(self, what: str, writes: list[tuple] = ()) -> None:
        self.log.append((what.removeprefix("aten::"), [write for write in writes if write]))

    def release(self) -> None:
        self._log("release")

    def capture(self, calls) -> Graph:
        self.recording = []
        try:
            for call in calls:
                call()
        finally:
            nodes, self.recording = self.recording, None
        return Graph(lambda: self._replay(nodes), len(nodes))

    def _replay(self, nodes: list[tuple]) -> None:
        self.host += HOST
        self.gpu = max(self.gpu, self.host) + REPLAY
        self.replaying, writes = True, []
        for op, args, kwargs, out in nodes:
            writes.append(self._launch(op, args))
            made = op(*args, **kwargs)
            if out is not None:
                out.copy_(made)
        self.replaying = False
        self._log("replay", writes)

    def mark(self) -> int:
        at = max(self.gpu, self.host)
        self.gpu = at + EVENT
        self._log("mark")
        return at

    def seconds_between(self, first: int, second: int) -> float:
        assert second <= self.waited_for, "read before it was reached"
        return (second - first) / 1e9

    def probe(self, nanoseconds: int) -> float:
        self.gpu = max(self.gpu, self.host) + nanoseconds
        self._log("probe")
        self.mhz += 1.0
        return self.mhz

    def clock_mhz(self, probe: float) -> float:
        return probe

    def settle(self) -> None:
        self.settled += 1

    def flush(self) -> None:
        self.gpu = max(self.gpu, self.host) + OTHER
        self.warm = None
        self._log("flush")

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("device-side assert")
        self.host = self.waited_for = self.gpu = max(self.gpu, self.host)
        self._log("synchronize")

    def now(self) -> float:
        return self.host / 1e9

    def throttled(self) -> str:
        return "software power cap" if self.throttles else ""


class Run:
    """measure_case on a fake GPU: its rows, and the log of each visit."""

    def __init__(self, *cells: Cell, case: Case = CASE, rounds: int = 3, seed: int = 0, gpu=None, also=None) -> None:
        self.gpu = gpu or FakeGpu()
        self.stages: list[tuple[Cell, str]] = []
        self._begun: list[int] = []

        def on_visit(cell: Cell, stage: str) -> None:
            self.stages.append((cell, stage))
            self._begun.append(len(self.gpu.log))
            if also:
                also(cell, stage, len(self.visited(cell)))

        with self.gpu:
            self.rows = measure_case(self.gpu, case, cells, rounds=rounds, seed=seed, on_visit=on_visit)

    def visited(self, cell: Cell) -> list[int]:
        return [i for i, at in enumerate(self.stages) if at == (cell, "round")]

    def logs(self, cell: Cell) -> list[list]:
        ends = [*self._begun[1:], len(self.gpu.log)]
        return [self.gpu.log[self._begun[i] : ends[i]] for i in self.visited(cell)]

    def of(self, cell: Cell) -> list[dict]:
        return [row for row in self.rows if row["copy"] == cell.copy.name and row["timer"] == cell.timer]

    def seconds(self, cell: Cell) -> list[float]:
        return [row["seconds"] for row in self.of(cell)]


def cell(copy: str | Copy, timer: str = "graph", state: str = "produced", part: str = "write") -> Cell:
    copy = REGISTRY[copy] if isinstance(copy, str) else copy
    return Cell(copy, copy.policies[0], part, timer, state)


def bent(bend, name: str = "bent", right: str = FAST) -> Copy:
    """A right copy that calls `bend(inputs, slot_mapping, key, value)` after each write."""

    def bind(inputs):
        step = REGISTRY[right].bind(inputs)
        return lambda slots: lambda key, value: (step(slots)(key, value), bend(inputs, slots, key, value))

    return Copy(name, "yours", ("null_slot",), bind, ("cpu",))


def raising(error: Exception, name: str, where: str) -> Copy:
    """A copy that raises in bind, in step, or in write."""

    def at(here: str) -> None:
        if here == where:
            raise error

    def bind(inputs):
        at("bind")
        return lambda slots: at("step") or (lambda key, value: at("write"))

    return Copy(name, "yours", ("null_slot",), bind, ("cpu",))


def names(log: list[tuple]) -> list[str]:
    return [what for what, _ in log]


def writes(logs: list[list]) -> list[tuple]:
    """(rows, slots) of every write of K; a call writes K, then V."""
    return [write for log in logs for _, made in log for write in made][::2]


# --------------------------------------------------------------------------------------------- what a sample's time is


def test_under_10_us_the_slope_removes_what_a_replay_costs():
    fast = cell(FAST)
    assert Run(fast).seconds(fast) == pytest.approx([2 * 3_000e-9] * 9)


def test_from_10_us_on_a_graphs_time_is_shared_by_its_calls():
    slow = cell(SLOW)
    run = Run(slow)
    calls = plan(CASE, "graph", "produced", L2).calls
    assert run.seconds(slow) == pytest.approx([(2 * 8_000 + (REPLAY + EVENT) / calls) / 1e9] * 9)
    assert {row["calls"] for row in run.of(slow)} == {calls}


def test_what_the_last_copy_left_in_the_caches_is_in_no_sample():
    """Three copies take turns and find each other's data in the caches, which costs the first kernel COLD."""
    for timer in ("graph", "eager", "host", "wall"):
        cells = [cell(name, timer) for name in (FAST, SLOW, SLOWEST)]
        run = Run(*cells)
        for one in cells:
            assert len(run.of(one)) == 9
            assert run.seconds(one) == pytest.approx([run.seconds(one)[0]] * 9), one


def test_call_times_one_call_and_an_event():
    for name, kernel in ((FAST, 3_000), (SLOW, 8_000)):
        one, other = cell(name, "call", "resident"), cell(SLOWEST, "call", "resident")
        assert Run(one, other).seconds(one) == pytest.approx([(2 * kernel + EVENT) / 1e9] * 9)
        cold = cell(name, "call", "cold")
        assert Run(cold).seconds(cold) == pytest.approx([(2 * kernel + EVENT + COLD) / 1e9] * 9)


def test_call_hides_a_host_that_is_slower_than_the_gpu():
    gpu = FakeGpu()

    def thinks(inputs, slots, key, value) -> None:
        gpu.host += 100_000

    call = cell(bent(thinks), "call", "resident")
    assert Run(call, gpu=gpu).seconds(call) == pytest.approx([(2 * 3_000 + EVENT) / 1e9] * 9)


def test_an_empty_pair_of_events_is_measured():
    event = cell("limit.event", "call", "resident")
    assert Run(event).seconds(event) == pytest.approx([EVENT / 1e9] * 9)


def test_host_waits_for_nothing_and_eager_for_all():
    for name, eager in ((FAST, 2 * 3_000), (SLOW, 2 * 8_000)):
        host, both = cell(name, "host"), cell(name, "eager")
        run = Run(host, both)
        assert run.seconds(host) == pytest.approx([2 * HOST / 1e9] * 9)
        assert all(0 <= seconds - eager / 1e9 < HOST / 1e9 for seconds in run.seconds(both))  # the first launch shows


def test_the_first_call_is_a_warm_up():
    """It compiles for a second here, and could not be captured. Without a warm-up a batch would be cut to one call."""
    for timer in ("graph", "host", "eager", "wall"):
        gpu, compiled = FakeGpu(), []

        def compiles(inputs, slots, key, value, gpu=gpu, compiled=compiled) -> None:
            if not compiled:
                assert gpu.recording is None, "compiles while it is captured"
                gpu.host += 1_000_000_000
            compiled.append(True)

        one, same = cell(bent(compiles), timer), cell(FAST, timer)
        run = Run(one, same, gpu=gpu)
        assert run.seconds(one) == pytest.approx(run.seconds(same))
        assert [row["calls"] for row in run.of(one)] == [row["calls"] for row in run.of(same)]


def test_a_long_sample_is_taken_once_and_a_very_long_batch_is_cut(monkeypatch):
    monkeypatch.setitem(COST, "aten::index_put_", 1_000_000)
    graph, eager = cell(SLOW), cell(SLOW, "eager")
    run = Run(graph, eager)
    assert [len(run.of(one)) for one in (graph, eager)] == [3, 3]
    assert {row["calls"] for row in run.of(eager)} == {timing.BATCH_CALLS}
    monkeypatch.setitem(COST, "aten::index_put_", 10_000_000)
    cut = Run(eager)
    assert {row["calls"] for row in cut.of(eager)} == {int(timing.MOST_BATCH_SECONDS / 20e-3) - 1}  # one: COLD
    assert cut.seconds(eager) == pytest.approx([20e-3] * 3, rel=1e-3)


def test_a_batch_is_long_enough_for_a_clock():
    eager = cell(FAST, "eager")
    [calls] = {row["calls"] for row in Run(eager).of(eager)}
    assert timing.BATCH_SECONDS <= calls * 2 * 3_000e-9 < 2 * timing.BATCH_SECONDS


# -------------------------------------------------------------------------------------------- what happens in a visit

SAMPLE = ["copy_", "mark", "replay", "mark"]


def test_a_visit_discards_a_replay_and_refills_before_every_sample():
    slow, fast = cell(SLOW), cell(FAST)
    run = Run(slow, fast)
    for log in run.logs(slow):
        assert names(log) == ["release", "copy_", "replay", "probe", *3 * SAMPLE, "probe", "synchronize"]
    for log in run.logs(fast):  # K calls, then 2 K
        both = [*SAMPLE, "replay", "mark"]
        assert names(log) == ["release", "copy_", "replay", "replay", "probe", *3 * both, "probe", "synchronize"]
    assert run.gpu.settled == 1


def test_a_resident_call_has_no_slots_to_refill():
    resident = cell(FAST, state="resident")
    for log in Run(resident).logs(resident):
        assert "copy_" not in names(log)
        assert names(log).count("replay") == 2 + 2 * 3


@pytest.mark.parametrize(
    "state, made_ready", [("resident", []), ("cold", ["flush"]), ("produced", ["flush", "mul_", "mul_"])]
)
def test_call_flushes_and_produces_before_a_probe_fills_the_queue(state, made_ready):
    call = cell(FAST, "call", state)
    each = [*made_ready, "probe", "mark", "index_copy_", "index_copy_", "mark"]
    for log in Run(call).logs(call):
        assert names(log) == ["release", *4 * each, "synchronize"]  # the first of four is thrown away


def test_copies_are_visited_in_a_new_order_every_round_that_the_seed_decides():
    cells = [cell(name, timer) for name in (FAST, SLOW) for timer in ("host", "wall", "eager")]

    def orders(seed: int) -> list[tuple]:
        visits = [at for at, stage in Run(*cells, rounds=6, seed=seed).stages if stage == "round"]
        return [tuple(visits[i : i + len(cells)]) for i in range(0, len(visits), len(cells))]

    first = orders(seed=1)
    assert all(Counter(order) == Counter(cells) for order in first)
    assert len(set(first)) > 3
    assert orders(seed=1) == first
    assert orders(seed=2) != first


def test_samples_carry_the_clock_around_them_and_what_throttled(monkeypatch):
    monkeypatch.setattr(timing, "ASK_SECONDS", 0)
    graph, call = cell(FAST), cell(FAST, "call")
    gpu = FakeGpu()

    def power_cap(at: Cell, stage: str, visits: int) -> None:
        gpu.throttles = visits == 2  # from the second round's first visit to its last

    run = Run(graph, call, rounds=4, gpu=gpu, also=power_cap)
    for one in (graph, call):
        said = [row["throttled"] for row in run.of(one)]  # before a round or after it
        assert said == [""] * 3 + ["software power cap"] * 6 + [""] * 3
    clocks = [row["sm_clock_mhz"] for row in run.of(graph)]
    assert [clocks.count(clock) for clock in sorted(set(clocks))] == [3] * 4  # one before and after each visit
    assert all(clock % 1 == 0.5 for clock in clocks)  # the mean of two probes that follow one another
    assert len({row["sm_clock_mhz"] for row in run.of(call)}) == 12  # one before each call
    host = cell(FAST, "host")
    assert {row["sm_clock_mhz"] for row in Run(host).of(host)} == {None}


def test_a_round_carries_every_reason_that_was_given_around_it_once(monkeypatch):
    monkeypatch.setattr(timing, "ASK_SECONDS", 0)

    class Told(FakeGpu):
        given = iter(["software power cap", "software power cap, power brake", None, None, "", ""])

        def throttled(self) -> str | None:
            return next(self.given)

    run = Run(cell(FAST), rounds=5, gpu=Told())
    both = "software power cap, power brake"
    assert [row["throttled"] for row in run.of(cell(FAST))][::3] == [both, both, None, "", ""]


def test_short_rounds_share_an_answer_about_what_throttles(monkeypatch):
    """NVML is asked before the first round, after the last, and between where ASK_SECONDS have passed."""

    class Told(FakeGpu):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[int] = []

        def now(self) -> int:
            return Counter(what for what, _ in self.log)["release"]  # one per visit: each round lasts a second

        def throttled(self) -> str:
            self.asked.append(self.now())
            return str(len(self.asked))

    for seconds, asked, said in (
        (0, [0, 1, 2, 3, 4, 5], ["1, 2", "2, 3", "3, 4", "4, 5", "5, 6"]),
        (2, [0, 2, 4, 5], ["1, 2", "1, 2", "2, 3", "2, 3", "3, 4"]),
        (4, [0, 4, 5], ["1, 2"] * 4 + ["2, 3"]),
        (9, [0, 5], ["1, 2"] * 5),
    ):
        monkeypatch.setattr(timing, "ASK_SECONDS", seconds)
        run = Run(cell(FAST), rounds=5, gpu=Told())
        assert (run.gpu.asked, [row["throttled"] for row in run.of(cell(FAST))][::3]) == (asked, said)


# ------------------------------------------------------------------------------------------------------- what rotates


def reuse_distances(keys: list) -> list[int]:
    """For everything that comes back: how many others lay between."""
    last, distances = {}, []
    for i, key in enumerate(keys):
        if key in last:
            distances.append(i - last[key])
        last[key] = i
    return distances


@pytest.mark.parametrize("name", [FAST, SLOW])
def test_a_slot_comes_back_only_after_3_x_l2_of_others(name):
    produced = cell(name)
    assert plan(CASE, "graph", "produced", L2).fills == 2
    made = writes(Run(produced, rounds=4).logs(produced))
    needed = 3 * L2 / CASE.token_bytes
    assert min(reuse_distances([slots for _, slots in made])) >= needed
    assert len({slots for _, slots in made}) >= needed
    assert len({rows for rows, _ in made}) == 1  # what the producing kernel left in L2


def test_cold_sources_come_back_only_after_3_x_l2_of_others():
    cold = cell(FAST, state="cold")
    made = writes(Run(cold).logs(cold))
    assert min(reuse_distances([rows for rows, _ in made])) >= 3 * L2 / CASE.token_bytes
    assert min(reuse_distances([slots for _, slots in made])) >= 3 * L2 / CASE.token_bytes


def test_resident_is_the_same_call_again():
    for timer in ("graph", "call"):
        resident = cell(FAST, timer, "resident")
        made = writes(Run(resident).logs(resident))
        assert len(made) >= 12
        assert len(set(made)) == 1


@pytest.mark.parametrize("tokens", [1, 32, 256, 4096, 65536])
@pytest.mark.parametrize("l2", [50 * MIB, 126 * MIB])
def test_plans_cover_the_caches_or_say_why_not(tokens, l2):
    case = Case(tokens)
    touched = case.num_tokens * case.token_bytes
    for timer in ("graph", "call", "host", "eager"):
        for state in timing.STATES:
            made = plan(case, timer, state, l2)
            if isinstance(made, str):
                too_large = state == "resident" and 8 * touched > l2
                too_many = state == "cold" and timer != "call" and 512 * touched < 3 * l2
                assert too_large or too_many
                assert ("quarter of the" in made) == too_large
                assert ("timer call after a flush" in made) == too_many
                continue
            assert made.calls % made.sources == 0 or timer != "graph"
            if state == "cold" and timer != "call":
                assert made.sources * touched >= 3 * l2
            else:
                assert made.sources == 1
            if timer == "graph":
                assert made.calls * case.bytes_moved >= 10 * l2 or made.calls >= timing.MOST_CALLS
                assert made.calls >= timing.LEAST_CALLS
                assert made.rows == (1 if state == "resident" else 3 * made.calls)  # K and 2 K calls, all different
                assert made.fills * made.calls * touched >= 3 * l2 or state == "resident"
            if state == "resident":
                assert (made.rows, made.fills) == (1, 1)


def test_a_state_that_is_not_given_is_a_row_that_says_why():
    large = Case(64, 2, 16, cache_bytes=1 << 18)  # 8 KB by reading, as much by writing; a quarter of L2 is 4 KB
    resident, cold = cell(FAST, state="resident"), cell(FAST, state="cold")
    run = Run(resident, case=large)
    assert [(row["status"], row["seconds"]) for row in run.rows] == [("unsupported", None)]
    assert run.rows[0]["reason"] == "a call touches 0.0 MB, more than a quarter of the 0 MB L2"
    run = Run(cold, cell(FAST), gpu=FakeGpu(256 << 10))
    assert [row["reason"] for row in run.rows if row["status"] == "unsupported"] == [
        "would need 3072 input sets, more than 512: timer call after a flush stands for it"
    ]
    assert len(run.rows) == 1 + 9


# ------------------------------------------------------------------------------------------- steps that launch kernels


def test_steps_are_carried_out_again_at_every_refill():
    """index_put in HND computes block and offset per step: captured once, replayed whenever the slots are new."""
    case = Case(3, 2, 16, block_size=16, cache_bytes=1 << 18, layout="HND", dtype="float32")
    write, step = cell(SLOW), cell(SLOW, part="step")
    run = Run(write, step, case=case)
    assert [row["status"] for row in run.of(write)] == ["ok"] * 18  # verified before and after: the slots were right
    for log in run.logs(write):
        assert names(log)[:4] == ["release", "copy_", "replay", "replay"]  # slots, steps, and what is thrown away
    steps = [row for row in run.rows if row["part"] == "step"]
    assert len(steps) == 9
    assert {row["launches"] for row in steps} == {2}  # // and %
    assert [row["seconds"] for row in steps] == pytest.approx([2 * OTHER / 1e9] * 9)
    assert {row["bytes_moved"] for row in steps} == {8 * 3}


# ------------------------------------------------------------------------------------------------ rows, and what fails

RUN_COLUMNS = {"run_id": "r", "schema_version": results.SCHEMA_VERSION, "grid": "quick", "worker": 0}
MACHINE = dict.fromkeys(results.MACHINE_FIELDS)


def test_an_ok_cell_gives_rounds_x_samples_whole_rows():
    cells = [cell(FAST, timer, state) for timer in ("graph", "call") for state in timing.STATES]
    cells += [cell(FAST, "host"), cell(FAST, "eager"), cell(SLOW)]
    rows = Run(*cells, rounds=4).rows
    found = Counter((row["copy"], row["timer"], row["state"]) for row in rows)
    assert found == {(one.copy.name, one.timer, one.state): 4 * timing.SAMPLES for one in cells}
    for key in found:
        mine = [(row["round"], row["sample"]) for row in rows if (row["copy"], row["timer"], row["state"]) == key]
        assert sorted(mine) == [(number, sample) for number in range(4) for sample in range(3)]
    table = results._table([{**row, **RUN_COLUMNS, **MACHINE} for row in rows])
    assert table["seconds"].null_count == table["calls"].null_count == 0
    assert set(table["launches"].to_pylist()) == {2}
    assert set(table["bytes_moved"].to_pylist()) == {CASE.bytes_moved}
    assert all(row.items() >= CASE.fields().items() for row in rows)


@pytest.mark.parametrize("disturbed", [0, 1, timing.VISITS_AT_MOST - 1, timing.VISITS_AT_MOST])
def test_a_disturbed_visit_is_taken_again_and_its_samples_say_so(disturbed):
    class Visited:
        visits = 0

        def visit(self):
            self.visits += 1
            yield 1e-6, None
            if self.visits <= disturbed:
                raise timing.Disturbed("a slope of -1e-06 s")
            yield 2e-6, None

    if disturbed == timing.VISITS_AT_MOST:
        with pytest.raises(timing.Disturbed, match="a slope of"):
            timing._undisturbed(Visited())
    else:
        first = 2 * disturbed
        assert timing._undisturbed(Visited()) == [(first, (1e-6, None)), (first + 1, (2e-6, None))]


def test_a_wrong_copy_is_never_timed():
    def negates(inputs, slots, key, value) -> None:
        inputs.key_cache.view(-1, 32).index_copy_(0, slots, -key.view(1, -1))

    for timer in ("graph", "call", "host", "eager", "wall"):
        wrong, right = cell(bent(negates), timer), cell(SLOW, timer)
        run = Run(wrong, right)
        assert run.visited(wrong) == []
        [row] = run.of(wrong)
        assert (row["status"], row["seconds"], row["round"]) == ("wrong", None, -1)
        assert "key_cache slot" in row["reason"]
        assert [row["status"] for row in run.of(right)] == ["ok"] * 9
        results._table([{**row, **RUN_COLUMNS, **MACHINE}])


def launches(name: str) -> Copy:
    """A limit whose calls launch something that writes no row."""
    elsewhere = torch.zeros(1)
    return Copy(name, "limit", ("skip",), lambda inputs: lambda slots: lambda key, value: elsewhere.add_(1), ("cpu",))


@pytest.mark.parametrize("timer", ["graph", "call"])
def test_a_limit_that_copies_other_bytes_is_never_timed(timer):
    copies = cell(launches("limit.copy.nothing"), timer)
    run = Run(copies)
    [row] = run.of(copies)
    assert (run.visited(copies), row["status"]) == ([], "wrong")
    assert row["reason"].startswith("limit.copy.nothing: no region of the key storage holds the last rows")


@pytest.mark.parametrize("timer", ["graph", "call"])
@pytest.mark.parametrize("state", timing.STATES)
def test_a_limit_writes_to_as_many_places_as_a_copy_does(timer, state):
    places = set()

    def copy(key_to, key_from, value_to, value_from):
        places.add(key_to.data_ptr())
        key_to.copy_(key_from)
        value_to.copy_(value_from)

    seen = Copy("limit.copy.seen", "limit", ("skip",), lambda inputs: limits._bind(inputs, copy), ("cpu",))
    run = Run(cell(seen, timer, state))
    assert [row["status"] for row in run.rows] == ["ok"] * 9
    assert len(places) - 1 == plan(CASE, timer, state, L2).rows, "and one for warming up"


@pytest.mark.parametrize("timer", ["graph", "call"])
def test_for_a_launch_nothing_is_made_to_hold_it_against(monkeypatch, timer):
    """What 384 calls of a large problem must write takes seconds to make."""
    launch, copy = cell(launches("limit.launch.here"), timer), cell(FAST, timer)
    monkeypatch.setattr(timing.Stage, "expect", lambda *asked: pytest.fail("made what the caches must hold"))
    assert [row["status"] for row in Run(launch).of(launch)] == ["ok"] * 9
    with pytest.raises(pytest.fail.Exception, match="made what the caches must hold"):
        Run(copy)


@pytest.mark.parametrize("timer", ["graph", "call", "host", "eager", "wall"])
def test_a_copy_that_goes_wrong_while_it_is_timed_leaves_no_sample(timer):
    factor = torch.ones(())

    def scales(inputs, slots, key, value) -> None:
        inputs.key_cache.view(-1, 32).index_copy_(0, slots, key.view(1, -1) * factor)

    def turn(at: Cell, stage: str, visits: int) -> None:
        if visits == 2:
            factor.fill_(2.0)

    late, right = cell(bent(scales), timer), cell(SLOW, timer)
    run = Run(late, right, also=turn)
    assert len(run.visited(late)) == 3
    assert [row["status"] for row in run.of(late)] == ["wrong"]
    assert [row["status"] for row in run.of(right)] == ["ok"] * 9


@pytest.mark.parametrize("where", ["bind", "step", "write"])
def test_a_copy_that_raises_costs_its_own_cell(where):
    failing = raising(RuntimeError("no such kernel\nmany more lines"), "fails", where)
    full = raising(torch.OutOfMemoryError("tried to allocate 1 TiB"), "fills", where)
    for timer in ("graph", "call", "eager"):
        bad, large, right = cell(failing, timer), cell(full, timer), cell(FAST, timer)
        run = Run(bad, right, large)
        assert [(row["status"], row["reason"]) for row in run.of(bad)] == [("error", "RuntimeError: no such kernel")]
        assert [(row["status"], row["reason"]) for row in run.of(large)] == [
            ("out_of_memory", "tried to allocate 1 TiB")
        ]
        assert [row["status"] for row in run.of(right)] == ["ok"] * 9


def test_a_copy_that_raises_in_a_later_round_leaves_one_row():
    fails = []

    def bend(inputs, slots, key, value) -> None:
        if fails:
            raise ValueError("came late")

    def turn(at: Cell, stage: str, visits: int) -> None:
        if visits == 2:
            fails.append(True)

    bad, right = cell(bent(bend), "host"), cell(SLOW, "host")
    run = Run(bad, right, rounds=5, also=turn)
    assert [(row["status"], row["reason"]) for row in run.of(bad)] == [("error", "ValueError: came late")]
    assert len(run.visited(bad)) <= 2  # and never again
    assert len(run.of(right)) == 15


@pytest.mark.parametrize(
    "error, status",
    [(torch.OutOfMemoryError("no room"), "out_of_memory"), (RuntimeError("DefaultCPUAllocator"), "error")],
)
def test_a_case_that_does_not_fit_is_a_row_per_cell(monkeypatch, error, status):
    def make(*_, **__):
        raise error

    monkeypatch.setattr(timing.inputs_of, "make", make)
    rows = Run(cell(FAST), cell(SLOW, "call")).rows
    assert [(row["copy"], row["timer"]) for row in rows] == [(FAST, "graph"), (SLOW, "call")]
    assert all(row["status"] == status and str(error) in row["reason"] for row in rows)


def test_a_graph_that_holds_other_nodes_than_its_calls_is_an_error():
    turn = []

    def launches_more_later(inputs, slots, key, value) -> None:
        turn.append(True)
        if len(turn) > 2:  # the warm-up, and the capture of one call
            inputs.key_cache.add(0)

    odd = cell(bent(launches_more_later))
    [row] = Run(odd).rows
    calls = plan(CASE, "graph", "produced", L2).calls
    assert row["status"] == "error"
    assert row["reason"] == f"RuntimeError: the graph of {calls} calls holds {3 * calls} nodes, not 2 per call"


def test_a_lost_device_is_told_with_the_cell_that_lost_it():
    gpu = FakeGpu()

    def loses(inputs, slots, key, value) -> None:
        gpu.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(timing.Poisoned) as lost:
        Run(cell(bent(loses), "eager"), cell(FAST), gpu=gpu)
    assert (lost.value.row["copy"], lost.value.row["status"]) == ("bent", "error")
    assert "illegal memory access" in lost.value.row["reason"]


# --------------------------------------------------------------------------------------------------- the fake is a GPU


def test_the_fake_runs_captured_work_at_its_replay_only():
    gpu, made = FakeGpu(), []
    a = torch.zeros(3)
    with gpu:
        graph = gpu.capture([lambda: made.append(a + 1), lambda: a.mul_(3)])
        assert graph.nodes == 2
        assert made[0].tolist() == a.tolist() == [0, 0, 0]
        a.fill_(5)
        graph.replay()
        assert (made[0].tolist(), a.tolist()) == ([6] * 3, [15] * 3)
        first, second = gpu.mark(), gpu.mark()
        with pytest.raises(AssertionError, match="read before it was reached"):
            gpu.seconds_between(first, second)
        gpu.synchronize()
        assert gpu.seconds_between(first, second) == EVENT / 1e9


def test_plans_are_values():
    assert plan(CASE, "graph", "produced", L2) == Plan(calls=128, sources=1, rows=384, fills=2)
