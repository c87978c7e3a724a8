"""The replay: every token served once, limits kept, repeatable; capture sizes; ranks; what a trace may look like."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnb.reserve import replay
from kvnb.reserve.pool import Pool

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINES = "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8"
SIZES = st.integers(1, 60)


@st.composite
def traces(draw) -> pd.DataFrame:
    rows = draw(st.lists(st.tuples(st.floats(0, 0.5), SIZES, SIZES), min_size=1, max_size=12))
    return pd.DataFrame(rows, columns=["arrival", "context", "generated"]).sort_values("arrival", ignore_index=True)


@given(
    trace=traces(), spare=st.integers(0, 20), reserve=st.booleans(), seats=st.integers(1, 6), budget=st.integers(1, 90)
)
def test_every_request_is_served_within_the_limits(trace, spare, reserve, seats, budget):
    longest = (trace["context"] + trace["generated"]).max() - 1
    usable = -(-longest // 16) + spare
    options = {"reserve": reserve, "max_num_seqs": seats, "token_budget": budget}
    done = replay.replay(trace, usable + reserve, **options)
    steps = done.steps
    tokens = steps["decode"] + steps["prefill"]
    assert tokens.between(1, budget).all()
    assert steps["running"].between(1, seats).all()
    assert steps["free"].between(0, usable).all()
    assert steps["seconds"].is_monotonic_increasing
    needed = (trace["context"] + trace["generated"] - 1).sum()
    assert tokens.sum() == needed if not steps["preempted"].sum() else tokens.sum() >= needed
    assert len(done.calls["allocate"]) == len(done.calls["free"]) == len(trace) + steps["preempted"].sum()
    assert replay.replay(trace, usable + reserve, **options).steps.equals(steps)


def test_a_request_decodes_one_token_a_step_after_its_prompt_came_in_chunks():
    trace = pd.DataFrame({"arrival": [0.0], "context": [20], "generated": [4]})
    steps = replay.replay(trace, 10, token_budget=8).steps
    assert steps["prefill"].tolist() == [8, 8, 4, 0, 0, 0]  # the prompt's last chunk gives the first token
    assert steps["decode"].tolist() == [0, 0, 0, 1, 1, 1]


def test_the_youngest_gives_way_and_is_next_to_start_over():
    rows = [(0.0, 16, 20), (0.0, 16, 20), (0.0, 5, 1)]  # the third would fit at once, but came later
    trace = pd.DataFrame(rows, columns=["arrival", "context", "generated"])
    steps = replay.replay(trace, 4, max_num_seqs=2).steps  # 3 usable blocks; the first two want a second one at once
    assert steps["preempted"].sum() == 1
    assert steps["running"].iloc[0] == 2
    over = steps.index[steps["preempted"] == 1][0]
    assert (steps["running"].iloc[over : over + 2] == 1).all()


def test_a_step_that_preempts_admits_nobody():
    trace = pd.DataFrame({"arrival": [0.0, 0.0], "context": [64, 64], "generated": [8, 8]})
    steps = replay.replay(trace, 10, token_budget=32).steps  # 9 usable blocks: one to go on, for two
    over = steps.index[steps["preempted"] == 1][0]
    assert steps.loc[over, ["decode", "prefill", "running", "waiting"]].tolist() == [1, 0, 1, 1]
    assert steps.loc[over + 1, "prefill"] == 31  # beside one decoded token


def test_the_longest_request_must_fit_before_anything_starts():
    trace = pd.DataFrame({"arrival": [0.0], "context": [16], "generated": [17]})
    assert len(replay.replay(trace, 2, reserve=False).steps) == 17
    with pytest.raises(ValueError, match="max_model_len = 32 needs 2 blocks.* at least 3 blocks"):
        replay.replay(trace, 2)


@pytest.mark.parametrize("limit", [{"load": 0}, {"max_num_seqs": 0}, {"token_budget": 0}, {"load": float("nan")}])
def test_limits_that_serve_nothing_are_refused(limit):
    with pytest.raises(ValueError, match=f"{next(iter(limit))} = .* must be above 0"):
        replay.replay(replay.synthetic_trace(3), **limit)


def test_capture_lists_are_those_of_engines():
    eight_apart, powers = replay.CAPTURED.values()
    assert len(eight_apart) == 51 and eight_apart[:5] == (1, 2, 4, 8, 16) and eight_apart[-1] == powers[-1] == 512
    assert {240, 248, 256, 272, 288} <= {*eight_apart} and 264 not in eight_apart


def test_padding_is_what_is_missing_to_the_next_captured_size():
    steps = {"arriving": True, "decode": [1, 3, 9, 256, 257, 512, 13], "prefill": [0, 0, 0, 0, 0, 0, 500]}
    table = replay.padded_shares(pd.DataFrame(steps)).set_index("captured")
    assert table["rows"]["8 and 16 apart"].tolist() == [1, 4, 16, 256, 272, 512, 513]
    assert table["rows"]["powers of two"].tolist() == [1, 4, 16, 256, 512, 512, 513]
    assert table["share"]["8 and 16 apart"].tolist()[:3] == [0, 0.25, 7 / 16]
    assert table["prefill"]["powers of two"].tolist() == [False] * 6 + [True]


def test_the_end_of_a_trace_is_left_out_of_its_shares():
    steps = replay.replay(replay.synthetic_trace(20)).steps
    assert not steps["arriving"].iloc[-1]
    assert len(replay.padded_shares(steps)) == 2 * steps["arriving"].sum()


@given(
    positions=st.lists(st.integers(0, 1000), min_size=1, max_size=40), spare=st.integers(0, 9), ranks=st.integers(1, 8)
)
def test_a_ranks_share_is_the_mean_of_counting_tokens_on_every_rank(positions, spare, ranks):
    rows = len(positions) + spare
    padded = [rows - sum(position % ranks == rank for position in positions) for rank in range(ranks)]
    assert replay.rank_share(len(positions), rows, ranks) == pytest.approx(sum(padded) / ranks / rows)


def test_four_ranks_leave_three_quarters_of_their_rows_padded():
    assert [replay.rank_share(8192, 8192, ranks) for ranks in (1, 2, 4, 8)] == [0, 0.5, 0.75, 0.875]
    with pytest.raises(ValueError, match="needs 0 < batch <= rows and ranks > 0"):
        replay.rank_share(9, 8, 2)


def test_capacity_compares_n_blocks_with_n_less_one():
    table = replay.capacity(replay.synthetic_trace(40), 700, token_budget=512)
    assert table["usable blocks"].tolist() == [700, 699]
    steps = replay.replay(replay.synthetic_trace(40), 692, reserve=False, token_budget=512).steps
    fewer = replay.capacity(replay.synthetic_trace(40), 700, (0, 8), token_budget=512)
    assert fewer["usable blocks"].tolist() == [700, 692] and fewer["held in the mean"][1] == steps["running"].mean()
    assert (table["most held"] <= 40).all()


def test_the_allocators_times_come_by_method_with_and_without_the_reserve():
    trace = replay.synthetic_trace(10)
    table = replay.allocator_times(trace, 2000, rounds=2)
    assert table[["method", "reserve"]].to_numpy().tolist() == [
        [method, reserve] for method in ("allocate", "append", "free") for reserve in (False, True)
    ]
    assert (table["min ns"] <= table["median ns"]).all() and (table["median ns"] <= table["max ns"]).all()
    assert table.loc[table["method"] == "free", "calls"].tolist() == [10, 10]


def test_the_synthetic_trace_is_seeded_and_fits_the_default_pool():
    trace = replay.synthetic_trace(50)
    assert trace.equals(replay.synthetic_trace(50)) and not trace.equals(replay.synthetic_trace(50, seed=1))
    assert trace["arrival"].is_monotonic_increasing
    Pool(replay.NUM_BLOCKS, 16, max_model_len=16_000)


def test_a_trace_is_read_as_seconds_and_tokens(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + LINES)
    trace = replay.read_trace(path)
    assert trace.to_numpy().tolist() == [[0, 4808, 10], [pytest.approx(0.052), 3180, 8]]
    assert trace["context"].dtype == int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n" + "2023-11-16 18:17:03,1", "it must have columns TIMESTAMP, ContextTokens, Gen"),
        (HEADER, "and 0 lines below them"),
        (HEADER + LINES + "\nyesterday,3,4", "line 4: TIMESTAMP is yesterday; it must be a date"),
        (HEADER + LINES + "\n2023-11-16 18:17:01,3,4", "line 4: TIMESTAMP is 2023-11-16 18:17:01; .* sort the lines"),
        (HEADER + LINES + "\n2023-11-16 18:17:05,many,4", "line 4: ContextTokens is many; .* whole number"),
        (HEADER + LINES + "\n2023-11-16 18:17:05,0,4", "line 4: ContextTokens is 0; .* at least 1"),
        (HEADER + LINES + "\n2023-11-16 18:17:05,3,1.5", "line 4: GeneratedTokens is 1.5; .* whole number"),
        (HEADER + LINES + "\n2023-11-16 18:17:05,3,", "line 4: GeneratedTokens is nan; .* whole number"),
        (HEADER + LINES + "\n2023-11-16 18:17:05,3,inf", "line 4: GeneratedTokens is inf; .* whole number"),
    ],
)
def test_a_defect_of_a_trace_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        replay.read_trace(path)


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing.csv is no file; it must have columns TIMESTAMP"):
        replay.read_trace(tmp_path / "nothing.csv")
