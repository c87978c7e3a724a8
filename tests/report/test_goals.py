"""Goals: what `kvnb goals` prints equals a recomputation from raw samples by another road. None has to be met here."""

from __future__ import annotations

import shutil

import fixture_runs
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvnb import cli, paths
from kvnb.problem.case import Case
from kvnb.report import answers, goals

PLACE = ["layout", "source", "num_kv_heads", "head_size", "num_tokens"]
SHIPPED = "vllm==0.33.0"


@pytest.fixture(scope="module")
def found(gpu, by_release) -> pd.DataFrame:
    return goals.table([gpu, by_release]).set_index("goal")


def seconds(*runs: answers.Run) -> pd.DataFrame:
    """Rounds of timer graph, a column per copy, from raw samples."""
    rows = pd.concat(run.samples for run in runs)
    rows = rows[(rows["part"] == "write") & (rows["timer"] == "graph") & (rows["status"] == "ok")]
    return rows.pivot(index=["run_id", *PLACE, "worker", "round"], columns="copy", values="seconds")


def medians(ratios: pd.Series | pd.DataFrame) -> pd.Series | pd.DataFrame:
    return ratios.groupby(["run_id", *PLACE]).median().dropna(how="all")


def test_the_issues_rows_are_all_there():
    text = [f"{goal.name} {goal.needed}" for goal in goals.GOALS]
    for heads, decode, prefill in ((8, 1.5, 2.2), (1, 1.4, 2.6), (32, 1.5, 1.12)):
        for layout in ("packed", "NHD"):
            assert f"kvnb over vllm==0.33.0, {heads}x128 {layout}, decode {decode}" in text
            assert f"kvnb over vllm==0.33.0, {heads}x128 {layout}, prefill {prefill}" in text
    assert len(set(text)) == len(text) == 30


@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_means_are_geometric_and_a_case_in_two_runs_counts_once(found, gpu, layout):
    ratios = medians(seconds(gpu)[SHIPPED] / seconds(gpu)["kvnb"]).xs((layout, 32), level=("layout", "num_kv_heads"))
    decode = ratios[ratios.index.get_level_values("num_tokens") <= 256]
    row = found.loc[f"kvnb over vllm==0.33.0, 32x128 {layout}, decode"]
    assert row["measured"] == pytest.approx(np.exp(np.log(decode).mean()))
    assert row["low"] < row["measured"] < row["high"] and row["cells"] == 3
    assert found.loc[f"kvnb over vllm==0.33.0, 8x128 {layout}, decode", "cells"] == 3, "both runs hold NHD, contiguous"


def test_the_worst_cell_is_over_every_run_and_named(found, gpu, by_release):
    wide = seconds(gpu, by_release)
    plainly = [copy for copy in wide if not copy.startswith(("kvnb", "limit"))]
    worst = medians(wide[plainly].div(wide["kvnb"], axis=0))
    row = found.loc["kvnb over any copy launched plainly"]
    assert row["measured"] == pytest.approx(worst.min().min()) and row["met"] == "no"
    assert row["worst"] == f"{worst.min().idxmin()}, 65,536 tokens of 1x128 NHD, produced, full 0123abc"
    assert row["cells"] == worst.notna().sum().sum()
    dependent = medians(wide[[*plainly, "kvnb", "kvnb.again"]].div(wide["kvnb.dependent"], axis=0))
    assert found.loc["kvnb.dependent over any copy", "measured"] == pytest.approx(dependent.min().min())


@pytest.mark.parametrize("copy", ["kvnb", "kvnb.dependent"])
def test_a_worst_cell_says_which_run_it_is_of_and_over_any_copy_every_type_and_state_counts(copy):
    """The older of two runs holds it, in a type and a state that other goals leave out."""
    runs = []
    for grid, commit, us in (("full", "fedcba9876543210", 10), ("releases", "tree-0df2b40c2d", 20)):
        made = fixture_runs._Run(grid, fixture_runs.H200 | {"kvnb_commit": commit}, grid=grid)
        for dtype in ("bfloat16", "float16"):
            case = Case(4096, dtype=dtype)
            made.timed(case, copy, "kernel", "graph", (us if dtype == "float16" else 10) * 1e-6)
            made.timed(case, "torch.index_put", "torch", "graph", 1.2e-5)
        runs.append(answers.Run(made.samples().assign(state="cold")))
    name = "kvnb over any copy launched plainly" if copy == "kvnb" else "kvnb.dependent over any copy"
    row = goals.table(runs).set_index("goal").loc[name]
    assert row["measured"] == pytest.approx(0.6, rel=0.01) and row["cells"] == 4
    assert row["worst"] == "torch.index_put, 4,096 tokens of 8x128 float16 NHD, cold, releases 0df2b40"


def test_copies_launched_dependently_are_not_held_against_the_plain_one(gpu):
    samples = gpu.samples.assign(copy=gpu.samples["copy"].replace({"triton": "sglang"}))
    table = goals.table([answers.Run(samples)]).set_index("goal")
    row = table.loc["kvnb over any copy launched plainly"]
    assert not row["worst"].startswith("sglang")
    assert table.loc["kvnb.dependent over any copy", "cells"] == goals.table([gpu]).set_index("goal").loc[
        "kvnb.dependent over any copy", "cells"
    ]


@pytest.mark.parametrize(("low", "high", "name"), [(128e6, np.inf, "128 MB and more"), (32e6, 128e6, "32 to 128 MB")])
def test_percent_of_the_limit_is_of_the_faster_contiguous_copy(found, gpu, low, high, name):
    wide = seconds(gpu)
    percent = 100 * medians(wide[["limit.copy", "limit.copy.memcpy"]].div(wide["kvnb"], axis=0)).min(axis=1)
    cases = [Case(n, h, layout=layout, cache_bytes=4 << 30) for _, layout, _, h, _, n in percent.index]
    here = percent[[case.layout == "packed" and low <= case.bytes_moved < high for case in cases]]
    row = found.loc[f"kvnb, percent of limit.copy, {name}, packed"]
    assert (row["measured"], row["cells"]) == (pytest.approx(here.min()), len(here))


@pytest.mark.parametrize(("moved", "name"), [(128e6, "128 MB and more"), (32e6, "32 to 128 MB"), (32e6 - 1, "")])
def test_a_range_of_sizes_holds_its_lower_end_and_not_its_upper(moved, name):
    run = fixture_runs._Run("edge", fixture_runs.H200)
    for copy, family in (("kvnb", "kernel"), ("limit.copy", "limit")):
        run.timed(Case(4096, cache_bytes=1 << 30), copy, family, "graph", 1e-5)
    table = goals.table([answers.Run(run.samples().assign(bytes_moved=int(moved)))])
    assert [row.goal for row in table.itertuples() if "limit.copy, " in row.goal and row.cells] == (
        [f"kvnb, percent of limit.copy, {name}, NHD"] if name else []
    )


def test_one_token_is_microseconds_above_the_empty_launch_at_most(found, gpu):
    wide = seconds(gpu)
    for a, b in (("kvnb", "limit.launch"), ("kvnb.dependent", "limit.launch.dependent")):
        above = medians(1e6 * (wide[a] - wide[b])).xs((1, "NHD"), level=("num_tokens", "layout"))
        row = found.loc[f"one token, us of {a} above {b}, NHD"]
        assert (row["bound"], row["measured"]) == ("at most", pytest.approx(above.max()))
        assert row["met"] == ("yes" if above.max() <= 0.65 else "no")


def test_layouts_and_sizes_are_compared_by_their_share_of_the_limit(gpu, found):
    assert found.loc["NHD, HND and packed within 3 % of each other", "met"] == "yes"
    slow = gpu.samples.assign(seconds=gpu.samples["seconds"].mask(
        (gpu.samples["copy"] == "kvnb") & (gpu.samples["layout"] == "HND"), gpu.samples["seconds"] * 1.05
    ))  # fmt: skip
    row = goals.table([answers.Run(slow)]).set_index("goal").loc["NHD, HND and packed within 3 % of each other"]
    assert row["measured"] == pytest.approx(1 / 1.05, rel=0.005) and row["met"] == "no" and row["worst"][:3] == "HND"
    assert row["worst"].endswith(", full 0123abc")


@pytest.mark.parametrize("slower", [1.0, 1.1])
def test_an_odd_size_is_held_against_its_neighbours(slower):
    run = fixture_runs._Run("sizes", fixture_runs.H200)
    for heads, size in ((8, 64), (8, 80), (8, 128), (16, 128), (32, 128)):
        for tokens in (1, 4096):
            case = Case(tokens, heads, size, cache_bytes=1 << 30)
            odd = slower if (heads, size) in goals.ODD_SIZES else 1.02 if size == 64 else 1.0
            run.timed(case, "kvnb", "kernel", "graph", odd * 1.1e-5)
            run.timed(case, "limit.copy", "limit", "graph", 1e-5)
    table = goals.table([answers.Run(run.samples())]).set_index("goal")
    for name, lowest in (("8x80", 1.02), ("16x128", 1.0)):
        row = table.loc[f"{name} no worse than its neighbours"]
        assert row["measured"] == pytest.approx(lowest / slower, rel=0.01)
        assert row["measured"] * 0.99 < row["low"] < row["measured"] < row["high"] < row["measured"] * 1.01
        assert row["met"] == ("yes" if slower == 1.0 else "no")
    assert table.loc["8x192 no worse than its neighbours", "met"] == "not measured"


def test_what_no_run_holds_is_not_measured_and_never_met(old, cpu):
    table = goals.table([old])
    without = table["goal"].str.contains(SHIPPED)
    assert set(table.loc[without, "met"]) == {"not measured"} and not table.loc[without, "cells"].any()
    assert set(goals.table([cpu])["met"]) == {"not measured"} == set(goals.table([])["met"])


def test_the_command_prints_the_table_of_the_newest_records(found, gpu, by_release, tmp_path, monkeypatch, run_files):
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    (tmp_path / "h200").mkdir()
    shutil.copy(run_files[1], tmp_path / "h200" / "2026-11-30_full_0123abc.parquet")
    done = CliRunner().invoke(cli.app, ["goals"])
    assert done.exit_code == 0, done.output
    assert "releases: not recorded" in done.stdout and "full: h200/2026-11-30_full_0123abc.parquet" in done.stdout
    told = goals.told(goals.table([gpu]))
    for row in told.itertuples():
        line = next(line.strip() for line in done.stdout.splitlines() if line.strip().startswith(f"{row.goal} "))
        assert line.split() == " ".join(map(str, row[1:])).split()
    refused = CliRunner().invoke(cli.app, ["goals", "--gpu", "h20"])
    assert (refused.exit_code, "did you mean h200?" in refused.output) == (2, True)


def test_a_fourth_digit_says_why_a_goal_is_not_met(gpu):
    found = goals.table([gpu]).head(3).assign(needed=0.98, measured=[0.9767, 0.98, 1.234], low=0.9721, high=1.2345)
    assert goals.told(found)[["needed", "measured"]].to_numpy().tolist() == [
        ["at least 0.98", "0.9767 [0.9721, 1.234]"],
        ["at least 0.98", "0.98 [0.97, 1.23]"],
        ["at least 0.98", "1.23 [0.97, 1.23]"],
    ]
