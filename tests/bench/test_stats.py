"""From samples to verdicts, on synthetic runs whose medians are known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvnb.bench import stats
from kvnb.problem.case import MIB, Case

CASE = Case(256, cache_bytes=256 * MIB)
LARGE = Case(16384, cache_bytes=512 * MIB)


def timed(
    copy: str,
    seconds: float = 1e-4,
    *,
    case: Case = CASE,
    rounds: tuple[int, ...] = (10, 10, 10),
    spread: float = 0.001,
    drift=None,
    status: str = "ok",
    seed: int | None = None,
    **columns,
) -> pd.DataFrame:
    """Samples of one cell: rounds per worker, three samples each, `spread` of the seconds apart.

    `drift` `[workers, rounds]` multiplies every sample of a round: what a clock that wanders does to all copies alike.
    """
    rng = np.random.default_rng(sum(map(ord, copy)) if seed is None else seed)
    rows = [
        {
            "worker": worker,
            "round": number,
            "sample": sample,
            "seconds": seconds * (1 + spread * rng.standard_normal()) * (1 if drift is None else drift[worker][number]),
        }
        for worker, count in enumerate(rounds)
        for number in range(count)
        for sample in range(3)
    ]
    fixed = {"run_id": "r", "grid": "quick", "copy": copy, "family": "kernel", "policy": "skip", "part": "write"}
    fixed |= {
        "timer": "graph",
        "state": "produced",
        "status": status,
        "reason": "",
        "launches": 1,
        "calls": 8,
        "graphs": 0,
    }
    fixed |= {"bytes_moved": case.bytes_moved, "sm_clock_mhz": 1980.0, "throttled": "", **case.fields(), **columns}
    return pd.DataFrame(rows).assign(**fixed)


def run(*cells: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(cells, ignore_index=True)


def noise(spread: float = 0.001, **columns) -> pd.DataFrame:
    """The noise copy: the same medians under both names."""
    return run(timed("kvnb", spread=spread, seed=1, **columns), timed("kvnb.again", spread=spread, seed=2, **columns))


# ----------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("low", "high", "margin", "word"),
    [
        (1.021, 1.5, 0.02, "FASTER"),
        (1.02, 1.5, 0.02, "UNDECIDED"),  # the interval touches the margin
        (1.019, 1.5, 0.02, "UNDECIDED"),
        (1.03, 1.5, 0.05, "UNDECIDED"),  # a larger noise floor takes a verdict away
        (0.5, 0.98, 0.02, "SLOWER"),
        (0.5, 1 / 1.02, 0.02, "UNDECIDED"),
        (0.5, 0.99, 0.02, "UNDECIDED"),
        (0.99, 1.01, 0.02, "SAME"),
        (1 / 1.02, 1.02, 0.02, "SAME"),  # inside, ends included
        (0.98, 1.01, 0.02, "UNDECIDED"),
        (0.99, 1.021, 0.02, "UNDECIDED"),
        (0.5, 2.0, 0.02, "UNDECIDED"),
        (1.0, 1.0, 0.02, "SAME"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low, high, margin, word):
    assert stats.verdict(low, high, margin) == word
    reason = stats.reason_for(word, low, high, margin)
    assert f"{low:.3f}" in reason and f"{high:.3f}" in reason and f"{margin:.1%}" in reason


@pytest.mark.parametrize(("low", "high"), [(1.03, 1.2), (0.99, 1.01), (0.9, 1.1), (1.0, 1.02)])
def test_a_verdict_turns_round_with_the_copies(low, high):
    other = {"FASTER": "SLOWER", "SAME": "SAME", "UNDECIDED": "UNDECIDED"}
    assert stats.verdict(1 / high, 1 / low, 0.02) == other[stats.verdict(low, high, 0.02)]


@pytest.mark.parametrize(
    ("b", "word"), [(2.1e-4, "FASTER"), (1.05e-4, "FASTER"), (1.005e-4, "SAME"), (0.995e-4, "SAME"), (0.9e-4, "SLOWER")]
)
def test_compare_finds_the_speedup_that_was_put_in(b, word):
    samples = run(noise(), timed("torch.index_put", b, family="torch"))
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert row["speedup"] == pytest.approx(b / 1e-4, rel=2e-3)
    assert row["low"] <= row["speedup"] <= row["high"]
    assert row["high"] - row["low"] < 0.01
    assert (row["a"], row["b"], row["verdict"], row["margin"]) == ("kvnb", "torch.index_put", word, 0.02)
    assert row["regime"] == "decode"


def test_the_noise_floor_widens_the_margin():
    samples = run(noise(spread=0.2), timed("torch.index_put", 1.05e-4))
    [floor] = stats.noise_floor(samples)["floor"]
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert floor > 0.02
    assert row["margin"] == floor
    assert row["verdict"] != "FASTER"


def test_the_noise_floor_is_that_of_the_timer_and_state():
    quiet, loud = noise(spread=0.001), noise(spread=0.2, timer="eager")
    floors = stats.noise_floor(run(quiet, loud)).set_index("timer")["floor"]
    assert floors["graph"] < 0.01 < floors["eager"]
    table = stats.compare(run(quiet, loud), "kvnb", "kvnb.again").set_index("timer")
    assert table.loc["graph", "margin"] == 0.02
    assert table.loc["eager", "margin"] == floors["eager"]


def test_without_a_noise_copy_the_least_margin_stands():
    samples = run(timed("kvnb"), timed("torch.index_put", 1.1e-4))
    assert len(stats.noise_floor(samples)) == 0
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert (row["margin"], row["verdict"]) == (0.02, "FASTER")
    assert row["reason"].endswith(f" lies above 1 +- 2.0%; {stats.NO_FLOOR}")


# --------------------------------------------------------------------------------------------------- rounds and workers


def test_rounds_are_compared_each_with_itself():
    """A clock that wanders by half moves both copies alike; the speedup stays sharp, the times do not."""
    drift = 1 + 0.5 * np.random.default_rng(0).random((3, 10))
    samples = run(timed("kvnb", 1e-4, drift=drift), timed("torch.index_put", 1.5e-4, drift=drift))
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert row["speedup"] == pytest.approx(1.5, rel=2e-3)
    assert row["high"] - row["low"] < 0.01
    cell = stats.cells(samples).set_index("copy").loc["kvnb"]
    assert (cell["high"] - cell["low"]) / cell["seconds"] > 0.05


def test_workers_that_disagree_widen_the_interval():
    """Thirty rounds of three workers are not thirty independent numbers: an outlying worker must show."""
    drift = np.ones((3, 10))
    drift[2] = 1.3
    [alike] = stats.cells(timed("kvnb")).to_dict("records")
    [apart] = stats.cells(timed("kvnb", drift=drift)).to_dict("records")
    assert alike["high"] / alike["low"] < 1.01
    assert apart["high"] / apart["low"] > 1.25


def test_workers_may_have_different_numbers_of_rounds():
    samples = run(timed("kvnb", rounds=(10, 4, 1)), timed("torch.index_put", 2e-4, rounds=(10, 3, 1)))
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert row["speedup"] == pytest.approx(2, rel=5e-3)  # over the rounds that both have
    assert row["verdict"] == "FASTER"


def test_one_round_of_one_worker_has_an_interval_of_no_width():
    [cell] = stats.cells(timed("kvnb", rounds=(1,))).to_dict("records")
    assert cell["low"] == cell["seconds"] == cell["high"]


def test_an_outlying_sample_moves_no_median():
    samples = timed("kvnb", spread=0)
    samples.loc[samples["sample"] == 0, "seconds"] *= 50
    [cell] = stats.cells(samples).to_dict("records")
    assert cell["seconds"] == cell["high"] == pytest.approx(1e-4)


def test_the_same_samples_give_the_same_numbers_in_any_order():
    samples = run(noise(spread=0.05), timed("torch.index_put", 1.02e-4, spread=0.05))
    shuffled = samples.sample(frac=1, random_state=0)
    first = stats.compare(samples, "kvnb", "torch.index_put")
    pd.testing.assert_frame_equal(first, stats.compare(samples, "kvnb", "torch.index_put"))
    pd.testing.assert_frame_equal(first, stats.compare(shuffled, "kvnb", "torch.index_put"))


def test_an_interval_covers_the_true_median_about_as_often_as_it_says():
    """95 % intervals of a thousand samples: far from it would mean a wrong bootstrap. Fixed seeds."""
    covered = 0
    for seed in range(30):
        [cell] = stats.cells(timed("kvnb", spread=0.05, seed=seed)).to_dict("records")
        covered += cell["low"] <= 1e-4 <= cell["high"]
    assert covered >= 25


def test_an_interval_ends_where_the_binomial_distribution_has_it():
    """The median of 1,001 drawn ranks lies 1.96 * sqrt(1001) / 2 = 31 ranks from the middle; 90 % of it within 26."""
    rounds = pd.DataFrame({"place": 0, "worker": 0, "round": range(1001), "seconds": np.arange(1001.0)})
    [row] = stats.intervals(rounds, ["place"], "seconds").to_dict("records")
    assert row["median"] == 500
    assert [500 - row["low"], row["high"] - 500] == pytest.approx([31, 31], abs=2.4)


# ------------------------------------------------------------------------------------------------------------- cells


def test_cells_have_times_rates_and_counts():
    [cell] = stats.cells(timed("kvnb", 1e-4, spread=0)).to_dict("records")
    assert (cell["seconds"], cell["n"], cell["status"], cell["reason"]) == (pytest.approx(1e-4), 90, "ok", "")
    assert cell["gbps"] == pytest.approx(CASE.bytes_moved / 1e-4 / 1e9)
    assert (cell["launches"], cell["sm_clock_mhz"], cell["throttled"]) == (1, 1980, 0)


def test_throttled_is_the_share_of_samples_with_a_reason():
    samples = timed("kvnb")
    samples.loc[samples["worker"] == 0, "throttled"] = "software power cap"
    samples.loc[samples["worker"] == 1, "throttled"] = None  # NVML could not say
    [cell] = stats.cells(samples).to_dict("records")
    assert cell["throttled"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("status", ["wrong", "unsupported", "out_of_memory", "error"])
def test_a_cell_that_failed_keeps_its_reason_and_has_no_time(status):
    bad = timed("torch.scatter", status=status, rounds=(1,)).assign(seconds=np.nan, reason="because").head(1)
    samples = run(noise(), bad)
    cell = stats.cells(samples).set_index("copy").loc["torch.scatter"]
    assert (cell["status"], cell["reason"], cell["n"]) == (status, "because", 0)
    assert np.isnan(cell["seconds"]) and np.isnan(cell["gbps"])
    assert len(stats.compare(samples, "kvnb", "torch.scatter")) == 0


def test_one_failed_row_takes_the_whole_cell():
    """A copy found wrong by the last worker was not right before."""
    samples = timed("kvnb")
    samples.loc[samples.index[-1], ["status", "reason", "seconds"]] = ["wrong", "slot 3", np.nan]
    [cell] = stats.cells(samples).to_dict("records")
    assert (cell["status"], cell["reason"]) == ("wrong", "slot 3")
    assert np.isnan(cell["seconds"])


def test_a_failed_cell_leaves_the_copys_other_cells():
    bad = timed("kvnb", case=LARGE, status="out_of_memory", rounds=(1,)).head(1).assign(seconds=np.nan, reason="large")
    table = stats.cells(run(timed("kvnb"), bad)).set_index("num_tokens")
    assert table.loc[CASE.num_tokens, "status"] == "ok"
    assert table.loc[LARGE.num_tokens, "status"] == "out_of_memory"


def test_percent_of_limit_takes_the_faster_limit_and_large_cells_only():
    limits = {"limit.copy": 1e-4, "limit.copy.memcpy": 0.8e-4}
    cells = [timed(name, seconds, case=case, spread=0) for name, seconds in limits.items() for case in (CASE, LARGE)]
    cells += [timed("kvnb", 1.6e-4, case=case, spread=0) for case in (CASE, LARGE)]
    cells += [timed("kvnb", 1.6e-4, case=LARGE, spread=0, part="step")]
    table = stats.cells(run(*cells))
    kvnb = table[table["copy"] == "kvnb"].set_index(["num_tokens", "part"])["limit_percent"]
    assert CASE.bytes_moved < stats.LIMIT_BYTES <= LARGE.bytes_moved
    assert kvnb[LARGE.num_tokens, "write"] == pytest.approx(50)
    assert np.isnan(kvnb[CASE.num_tokens, "write"])
    assert np.isnan(kvnb[LARGE.num_tokens, "step"])


def test_percent_of_limit_is_of_the_same_timer_and_state():
    cells = [timed("limit.copy", case=LARGE, state="cold"), timed("kvnb", case=LARGE, state="produced")]
    table = stats.cells(run(*cells)).set_index("copy")
    assert np.isnan(table.loc["kvnb", "limit_percent"])


# ------------------------------------------------------------------------------------------------ selections and timers


def test_a_copy_that_the_run_lacks_is_named_with_those_it_holds():
    with pytest.raises(ValueError, match="copy 'torch.scater' is not in this run; it holds kvnb, kvnb.again"):
        stats.compare(noise(), "kvnb", "torch.scater")


def test_several_policies_of_a_copy_are_ambiguous():
    samples = run(noise(), *(timed("torch.index_put", 2e-4, policy=policy) for policy in ("null_slot", "remap")))
    with pytest.raises(ValueError, match="torch.index_put was measured under several policies: select one"):
        stats.compare(samples, "kvnb", "torch.index_put")
    one = samples[samples["policy"] != "remap"]
    assert len(stats.compare(one, "kvnb", "torch.index_put")) == 1


def test_only_cells_of_the_same_place_are_compared():
    samples = run(timed("kvnb"), timed("torch.index_put", timer="eager"), timed("torch.index_put", case=LARGE))
    assert len(stats.compare(samples, "kvnb", "torch.index_put")) == 0


@pytest.mark.parametrize(("pair", "word"), [(0.9e-6, "FASTER"), (1.5e-6, "UNDECIDED")])
def test_call_gives_no_verdict_near_an_empty_event_pair(pair, word):
    """Copies of 3 and 9 us: three pairs of 0.9 us fit into either, three of 1.5 us only into the slower."""
    cells = [timed("kvnb", 3e-6), timed("torch.index_put", 9e-6), timed("limit.event", pair)]
    samples = run(*(cell.assign(timer="call") for cell in cells), timed("kvnb", 3e-6), timed("torch.index_put", 9e-6))
    table = stats.compare(samples, "kvnb", "torch.index_put").set_index("timer")
    assert table.loc["call", "verdict"] == word
    assert table.loc["graph", "verdict"] == "FASTER"
    short = "the faster takes 3.00 us, less than 3 empty event pairs (1.50 us each)"
    assert (table.loc["call", "reason"] == short) == (word == "UNDECIDED")
    [mean] = stats.summarise(table.query("timer == 'call'"), ["regime"])["verdict"]
    assert mean == word


def test_call_without_a_measured_event_pair_gives_no_verdict():
    samples = run(timed("kvnb", timer="call"), timed("torch.index_put", 2e-4, timer="call"))
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert (row["verdict"], row["reason"]) == ("UNDECIDED", stats.NO_PAIR)


# ---------------------------------------------------------------------------------------------------------- disturbed

CAP = "software power cap"


def versus(*changes, timer: str = "graph") -> dict:
    """kvnb, at 100 us, against a copy of 150 us, after `changes` to their samples."""
    samples = run(noise(timer=timer), timed("torch.index_put", 1.5e-4, timer=timer))
    for change in changes:
        change(samples)
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    return row


def told(column: str, value, rounds, *, workers=(0, 1, 2), copies=("kvnb", "kvnb.again", "torch.index_put")):
    """A change: `value` in a column of these rounds; a factor, where it is a number's."""

    def change(samples: pd.DataFrame) -> None:
        where = samples["round"].isin(rounds) & samples["worker"].isin(workers) & samples["copy"].isin(copies)
        samples.loc[where, column] = samples.loc[where, column] * value if column != "throttled" else value

    return change


EVERY = range(10)


@pytest.mark.parametrize("reason", [CAP, "other process on the GPU", f"{CAP}, other process on the GPU"])
def test_a_verdict_on_disturbed_rounds_is_undecided_and_says_why(reason):
    row = versus(told("throttled", reason, EVERY))
    assert (row["verdict"], row["disturbed"]) == ("UNDECIDED", True)
    assert row["reason"] == f"{reason} in 30 of 30 rounds: too few others"
    assert row["speedup"] == pytest.approx(1.5, rel=2e-3)  # flagged, not taken away


def test_a_disturbed_worker_is_one_too_many():
    """Workers may differ in what they allocated where: without one of them there is no telling."""
    row = versus(told("throttled", CAP, EVERY, workers=[1]))
    assert (row["verdict"], row["reason"]) == ("UNDECIDED", f"{CAP} in 10 of 30 rounds: too few others")


@pytest.mark.parametrize(("touched", "word"), [(range(8), "FASTER"), (range(9), "UNDECIDED")])
def test_a_verdict_stands_on_two_undisturbed_rounds_of_every_worker(touched, word):
    row = versus(told("throttled", CAP, touched))
    assert (row["verdict"], row["disturbed"]) == (word, word == "UNDECIDED")
    assert f"{CAP} in {3 * len(touched)} of 30 rounds" in row["reason"]


def test_a_verdict_that_undisturbed_rounds_do_not_give_is_undecided():
    """While another process ran, the other copy took twice as long; without it, the two are equal."""
    other = "other process on the GPU"
    equal = told("seconds", 1 / 1.5, [7, 8, 9], copies=["torch.index_put"])
    row = versus(told("throttled", other, range(7)), equal)
    assert row["verdict"] == "UNDECIDED"
    assert row["reason"] == f"{other} in 21 of 30 rounds: FASTER with them, SAME without"


@pytest.mark.parametrize(("factor", "rounds"), [(0.97, [9]), (0.97, range(9)), (0.985, range(5))])
def test_a_round_whose_clock_is_off_its_cells_median_by_2_percent_is_disturbed(factor, rounds):
    """Of nine rounds at one clock and one at another, the one; three rounds of thirty take no verdict."""
    row = versus(told("sm_clock_mhz", factor, rounds))
    assert ("clock drift in 3 of 30 rounds, the same without" in row["reason"]) == (factor == 0.97)
    assert (row["verdict"], row["disturbed"]) == ("FASTER", False)


def test_a_clock_that_sinks_for_half_of_a_worker_is_drift():
    row = versus(told("sm_clock_mhz", 0.8, range(4, 10), workers=[2]), told("sm_clock_mhz", 0.8, EVERY, workers=[0]))
    assert row["verdict"] == "UNDECIDED"
    assert "clock drift" in row["reason"] and row["disturbed"]


def test_copies_at_clocks_of_their_own_are_drift():
    """Each within 2 % of the median, and 3 % apart."""
    clocks = {"kvnb": 1.015, "torch.index_put": 0.985}
    row = versus(*(told("sm_clock_mhz", factor, EVERY, copies=[copy]) for copy, factor in clocks.items()))
    assert row["reason"] == "clock drift in 30 of 30 rounds: too few others"


@pytest.mark.parametrize(("timer", "clocked", "word"), [
    ("graph", True, "FASTER"),  # NVML is silent, but the clock held
    ("eager", False, "UNDECIDED"),
    ("wall", False, "FASTER"),  # a CPU
])  # fmt: skip
def test_without_nvml_a_verdict_needs_a_clock_that_held(timer, clocked, word):
    changes = [told("throttled", None, EVERY), *[told("sm_clock_mhz", np.nan, EVERY)] * (not clocked)]
    row = versus(*changes, timer=timer)
    assert row["verdict"] == word
    assert (row["reason"] == "throttling not known in 30 of 30 rounds: too few others") == (word == "UNDECIDED")


def test_undisturbed_verdicts_are_as_they_were():
    row = versus()
    assert (row["verdict"], row["disturbed"]) == ("FASTER", False)
    assert "without" not in row["reason"]


def test_a_place_that_was_disturbed_leaves_others_their_verdicts():
    far = run(timed("kvnb", case=LARGE), timed("torch.index_put", 1.5e-4, case=LARGE)).assign(throttled=CAP)
    samples = run(noise(), timed("torch.index_put", 1.5e-4), far)
    table = stats.compare(samples, "kvnb", "torch.index_put").set_index("num_tokens")
    assert table["verdict"].to_dict() == {CASE.num_tokens: "FASTER", LARGE.num_tokens: "UNDECIDED"}
    assert table["disturbed"].to_dict() == {CASE.num_tokens: False, LARGE.num_tokens: True}


@pytest.mark.parametrize(("slow", "flagged", "hidden"), [
    (range(7), range(7), False),
    (EVERY, EVERY, False),
    (EVERY, range(9), False),  # one round of each worker is too few to tell noise from
    (EVERY, range(8), True),
])  # fmt: skip
def test_disturbed_rounds_set_no_margin(slow, flagged, hidden):
    """In another place one of the two names of kvnb took 10 % longer while another process ran."""
    other = noise(case=LARGE)
    told("seconds", 1.1, slow, copies=["kvnb.again"])(other)
    told("throttled", "other process on the GPU", flagged)(other)
    samples = run(noise(), timed("torch.index_put", 1.05e-4), other)
    [row] = stats.compare(samples, "kvnb", "torch.index_put").to_dict("records")
    assert (row["margin"] > 0.05, row["verdict"]) == (hidden, "SAME" if hidden else "FASTER")


def test_a_floor_of_disturbed_rounds_only_is_better_than_none():
    """And is announced where it sets a margin."""
    quiet, loud = noise(), noise(spread=0.2, timer="eager", throttled=CAP)
    samples = run(quiet, loud, *(timed(copy, 9e-4, timer=timer) for copy in "ab" for timer in ("graph", "eager")))
    floors = stats.noise_floor(samples).set_index("timer")
    assert floors.loc["graph", "floor"] < 0.01 < 0.02 < floors.loc["eager", "floor"]
    assert floors["disturbed"].to_dict() == {"graph": False, "eager": True}
    reason = stats.compare(samples, "a", "b").set_index("timer")["reason"]
    assert reason["eager"].endswith(f"; {stats.DISTURBED_FLOOR}") and "noise floor is" not in reason["graph"]


def test_a_mean_must_follow_from_undisturbed_cells_too():
    table = comparison(("NHD", 4.0, 3.9, 4.1, 0.02), ("NHD", 1.0, 0.99, 1.01, 0.02)).assign(disturbed=[True, False])
    [mean] = stats.summarise(table, ["layout"]).to_dict("records")
    assert (mean["speedup"], mean["verdict"]) == (pytest.approx(2), "UNDECIDED")
    for disturbed, word in ([False, True], "FASTER"), ([True, True], "UNDECIDED"), ([False, False], "FASTER"):
        assert stats.summarise(table.assign(disturbed=disturbed), ["layout"])["verdict"].tolist() == [word]


# ---------------------------------------------------------------------------------------------------------- summaries


def comparison(*rows) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["layout", "speedup", "low", "high", "margin"])


def test_a_summary_is_the_geometric_mean_with_its_extremes():
    table = comparison(("NHD", 4.0, 2.0, 8.0, 0.02), ("NHD", 1.0, 0.5, 2.0, 0.05), ("HND", 0.5, 0.4, 0.6, 0.02))
    summary = stats.summarise(table, ["layout"]).set_index("layout")
    nhd = summary.loc["NHD"]
    assert nhd[["speedup", "low", "high"]].tolist() == pytest.approx([2, 1, 4])
    assert (nhd["smallest"], nhd["largest"], nhd["cells"]) == (1, 4, 2)
    assert nhd["verdict"] == "UNDECIDED"
    assert summary.loc["HND", "verdict"] == "SLOWER"
    assert list(summary.index) == ["NHD", "HND"]


def test_a_summary_takes_the_groups_largest_margin():
    table = comparison(("NHD", 1.04, 1.03, 1.05, 0.02), ("NHD", 1.04, 1.03, 1.05, 0.06))
    assert stats.summarise(table, ["layout"])["verdict"].tolist() == ["SAME"]
    assert stats.summarise(table[:1], ["layout"])["verdict"].tolist() == ["FASTER"]


def test_a_summary_of_nothing_is_an_empty_table():
    summary = stats.summarise(comparison(), ["layout"])
    assert len(summary) == 0
    assert list(summary.columns) == ["layout", "speedup", "low", "high", "smallest", "largest", "cells", "verdict"]
