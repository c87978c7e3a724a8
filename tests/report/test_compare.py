"""Two runs side by side: what a pair of known runs must say, and every pair that must be refused."""

from __future__ import annotations

import re
import subprocess
import sys

import fixture_runs
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvnb import cli, paths
from kvnb.bench import results, stats
from kvnb.report import compare
from kvnb.report.compare import Comparison

LATER = {"run_id": "later", "utc": "2026-12-01T00:00:00Z", "gpu_uuid": "1"}


def rerun(samples: pd.DataFrame, factor: dict[str, float] | None = None, seed: int = 7, **columns) -> pd.DataFrame:
    """The same cells measured again: new noise, the times of some copies by a factor, some columns set anew."""
    noise = 1 + fixture_runs.NOISE * np.random.default_rng(seed).standard_normal(len(samples))
    times = samples["seconds"] * noise * samples["copy"].map(factor or {}).fillna(1)
    return samples.assign(**{"seconds": times, **LATER, **columns})


@pytest.fixture(scope="module")
def first() -> pd.DataFrame:
    samples = fixture_runs.gpu_run()
    return samples[samples["num_kv_heads"] == 8].reset_index(drop=True)


@pytest.fixture
def against(tmp_path, first):
    """The comparison of the first run, as changed, with another."""

    def against(other: pd.DataFrame, base: pd.DataFrame = first) -> Comparison:
        return Comparison(*(results.save(run, tmp_path / f"{name}.parquet") for name, run in zip("ab", (base, other))))

    return against


def of(table: pd.DataFrame, copy: str, **where) -> pd.DataFrame:
    where = {"copy": copy, "timer": "graph", "part": "write", **where}
    return table[(table[list(where)] == pd.Series(where)).all(axis=1)]


def test_a_copy_that_got_twice_as_fast_is_faster_and_the_others_are_the_same(against, first):
    cells = against(rerun(first, {"triton": 0.5, "flashinfer": 1.25})).cells
    assert set(of(cells, "triton")["verdict"]) == {"FASTER"} and set(of(cells, "flashinfer")["verdict"]) == {"SLOWER"}
    assert np.allclose(of(cells, "triton")["speedup"], 2, rtol=0.01)
    assert np.allclose(of(cells, "flashinfer")["speedup"], 0.8, rtol=0.01)
    assert set(of(cells, "torch.index_put")["verdict"]) == {"SAME"}
    assert ((cells["low"] <= cells["speedup"]) & (cells["speedup"] <= cells["high"])).all()
    assert (cells["seconds_a"] / cells["seconds_b"] == cells["speedup"]).all()


def test_sides_are_drawn_apart(first):
    """Rounds that drift alike in both runs: a paired interval would be [1, 1]."""
    drifting = of(first, "kvnb").assign(seconds=lambda run: 1e-6 * (1 + run["round"] / 10 + run["worker"]))
    rounds = stats.by_round(drifting)
    table = compare.speedups(rounds, rounds.sample(frac=1, random_state=0))
    assert (table["speedup"] == 1).all()
    assert (table["low"] < 0.8).all() and (table["high"] > 1.2).all()


def test_each_side_is_drawn_as_within_a_run(first):
    rounds = stats.by_round(of(first, "triton"))
    cells, drawn = compare._resampled(rounds)
    alone = stats.intervals(rounds, compare.CELL, "seconds")
    assert cells["seconds"].tolist() == alone["median"].tolist()
    assert np.allclose(np.percentile(drawn, [2.5, 97.5], axis=1), alone[["low", "high"]].T)


def test_runs_of_different_lengths_are_matched_cell_by_cell(against, first):
    short = first[(first["worker"] < 2) & (first["round"] < 3)]
    mixed = pd.concat([short[short["copy"] == "kvnb"], first[first["copy"] != "kvnb"]])
    cells = against(rerun(mixed)).cells
    assert len(cells) == len(stats.by_round(mixed).drop_duplicates(compare.CELL))
    assert np.allclose(of(cells, "kvnb")["speedup"], 1, rtol=0.02)


# -- the margin


@pytest.mark.parametrize("factor, reach, verdict", [(1.25, 0.25, "SLOWER"), (0.8, 0.25, "FASTER")])
def test_kvnb_again_across_runs_widens_the_margin_where_kvnb_is_the_same_code(against, first, factor, reach, verdict):
    moved = {"kvnb": factor, "kvnb.again": factor}  # another board's allocations, say
    same, other = (against(rerun(first, moved, copy_version=version)) for version in ("0", "1"))
    assert same.same_code and not other.same_code
    assert same.margins.loc[("graph", "produced"), "again"] == pytest.approx(reach, abs=0.015)
    assert other.margins["again"].isna().all()
    assert not {"FASTER", "SLOWER"} & set(of(same.cells, "kvnb")["verdict"])
    assert set(of(other.cells, "kvnb")["verdict"]) == {verdict}
    assert "kvnb is other code in B" in other.caution() and "other code" not in same.caution()


def test_the_drivers_copy_across_runs_widens_the_margin(against, first):
    later = rerun(first, {"triton": 1.04})
    few = (later["copy"] == "limit.copy.memcpy") & (later["num_tokens"] <= 32)  # in two of seven sizes
    compared = against(later.assign(seconds=later["seconds"].where(~few, 1.05 * later["seconds"])))
    assert set(of(compared.cells, "triton")["verdict"]) == {"SAME"}
    assert "limit.copy.memcpy across the runs (5." in compared.caution()
    capped = compared.b.samples.assign(throttled=np.where(few, "software power cap", ""))
    assert set(of(against(capped).cells, "triton")["verdict"]) == {"SLOWER"}  # disturbed rounds set no margin


def test_an_empty_launch_widens_the_margin_by_its_share_of_the_cell(against, first):
    cells = against(rerun(first, {"limit.launch": 1.3})).cells  # 0.74 us become 0.96
    few, many = (of(cells, "kvnb", num_tokens=tokens, layout="NHD").iloc[0] for tokens in (1, 65536))
    assert few["margin"] == pytest.approx(0.3 * 0.74e-6 / few["seconds_a"], rel=0.05)
    assert many["margin"] == stats.LEAST_MARGIN


def test_a_call_of_two_launches_pays_for_two(against, first):
    twice = first.assign(launches=first["launches"].where(first["copy"] != "kvnb", 2))
    few = of(against(rerun(twice, {"limit.launch": 1.3}), twice).cells, "kvnb", num_tokens=1, layout="NHD").iloc[0]
    assert few["margin"] == pytest.approx(2 * 0.3 * 0.74e-6 / few["seconds_a"], rel=0.05)


def test_between_gpus_no_noise_across_runs_is_known(against, first):
    factor = {"limit.launch": 1.3, "limit.copy.memcpy": 2.0, "kvnb": 2.0, "kvnb.again": 2.0}
    compared = against(rerun(first, factor, gpu="NVIDIA H100"))
    assert compared.margins[["again", "memcpy"]].isna().all(axis=None)
    assert set(of(compared.cells, "kvnb")["verdict"]) == {"SLOWER"}
    assert compared.cells["margin"].max() < 0.03
    assert "in no margin" in compared.caution()


def test_a_verdict_rests_on_rounds_that_nothing_disturbed(against, first):
    faster, capped = rerun(first, {"triton": 0.5}), "software power cap"
    few = against(faster.assign(throttled=faster["throttled"].mask(faster["round"] > 0, capped))).cells
    triton = few[few["copy"] == "triton"]
    assert set(triton["verdict"]) == {"UNDECIDED"} and triton["disturbed"].all()
    assert triton["reason"].str.startswith(capped).all() and triton["reason"].str.endswith("of B: too few others").all()
    one = against(faster.assign(throttled=faster["throttled"].mask(faster["round"] == 0, capped))).cells
    assert set(one.loc[one["copy"] == "triton", "verdict"]) == {"FASTER"} and not one["disturbed"].any()
    assert one["reason"].str.endswith("; software power cap in 3 of 15 rounds of B, the same without").all()


def test_a_verdict_that_undisturbed_rounds_of_both_runs_do_not_give_is_withheld(against, first):
    """Twice as fast in all rounds but the last, of which undisturbed ones leave open which is faster."""
    later = rerun(first, {"triton": 0.5})
    later["seconds"] *= np.where((later["copy"] == "triton") & (later["round"] == 4), 3, 1)
    before, after = (run.assign(throttled=np.where(run["round"] < n, "cap", "")) for n, run in ((1, first), (3, later)))
    assert set(of(against(later).cells, "triton")["verdict"]) == {"FASTER"}
    triton = of(against(after, before).cells, "triton")
    assert set(triton["verdict"]) == {"UNDECIDED"} and triton["disturbed"].all()
    told = "cap in 3 of 15 rounds of A, cap in 9 of 15 rounds of B: FASTER with them, UNDECIDED without"
    assert set(triton["reason"]) == {told}


def test_short_calls_are_not_judged(against, first):
    graphs = first[first["timer"] == "graph"]
    base = pd.concat([graphs, of(first, "limit.launch").assign(copy="limit.event")]).assign(timer="call")
    moved = dict.fromkeys(("kvnb", "kvnb.again", "torch.index_put"), 0.2)
    cells = against(rerun(base, moved, copy_version="1"), base).cells
    short = cells[cells["copy"] == "kvnb"].nsmallest(1, "seconds_a").iloc[0]
    assert short["verdict"] == "UNDECIDED"
    told = rf"the faster takes {1e6 * short['seconds_b']:.2f} us, less than 3 empty event pairs \(0\.7\d us each\)"
    assert re.fullmatch(told, short["reason"])
    assert cells[cells["copy"] == "torch.index_put"].nlargest(1, "seconds_a")["verdict"].item() == "FASTER"


@pytest.mark.parametrize("lacking", [["kvnb.again"], ["kvnb.again", "limit.launch", "limit.copy.memcpy"]])
def test_a_run_without_controls_is_compared_and_says_what_is_not_known(against, first, lacking):
    few = first[~first["copy"].isin(lacking)]
    compared = against(rerun(few), few)
    unknown = f"{stats.NO_FLOOR} (A); {stats.NO_FLOOR} (B)"
    assert f"the noise floors ({unknown})" in compared.caution() and "nan" not in compared.caution()
    assert (compared.cells["margin"] >= stats.LEAST_MARGIN).all()
    assert of(compared.cells, "triton")["reason"].str.endswith(f" 1 +- 2.0%; {unknown}").all()


def test_a_margin_from_disturbed_rounds_says_so(against, first):
    kept = first["copy"].isin(["kvnb", "kvnb.again", "triton"])
    base, loud = first[kept], np.where(first[kept]["copy"] == "triton", "", "cap")
    compared = against(rerun(base, throttled=loud), base)
    doubt = f"{stats.DISTURBED_FLOOR} (B); {stats.DISTURBED_FLOOR} (again)"
    assert doubt in compared.caution()
    assert of(compared.cells, "triton")["reason"].str.endswith(f"; {doubt}").all()


# -- what is said


def test_what_differs_is_said_first(against, first):
    compared = against(rerun(first, torch="2.14.0", copy_version=np.where(first["copy"] == "triton", "1", "0")))
    differ = compared.differences().set_index("what")
    assert differ.loc["torch"].tolist() == ["2.13.0", "2.14.0"] and differ.loc["gpu_uuid"].tolist() == ["0", "1"]
    assert differ.loc["sources of triton"].tolist() == ["0", "1"]
    assert not {"gpu", "driver", "cuda"} & set(differ.index)
    assert "they differ in gpu_uuid, torch, sources of copies." in compared.headline()
    told = compared.told()
    places = [told.index(words) for words in ("What differs", "A is a.parquet", "By copy", "slowest", "In one run")]
    assert places == sorted(places) and max(map(len, told.splitlines())) <= 200


def test_means_are_by_copy_and_regime_with_range_and_number_of_cells(against, first):
    table = against(rerun(first, {"triton": 0.5})).means().set_index("copy")
    assert table.index[0] == "kvnb" and table.index[-1].startswith("limit.")
    decode = r"2\.00 \[\S+, \S+\] FASTER \(9 cells from (1\.99|2\.00) to 2\.0\d\)"
    assert re.fullmatch(decode, table.loc["triton", "decode"])
    assert "SAME (3 cells from " in table.loc["kvnb", "mixed"]


def test_headline_counts_are_of_the_cells(against, first):
    compared = against(rerun(first, {"triton": 0.5}))
    cells = of(compared.cells, "triton")
    assert f"FASTER in {len(cells)}, SLOWER in 0" in compared.headline()
    counted = compared.counts().set_index("cells").loc["graph produced write", stats.VERDICTS]
    assert counted.sum() == len(compared.cells.query("timer == 'graph' and part == 'write'"))
    assert counted["FASTER"] == len(cells)


def test_extremes_come_slowest_first_and_hold_no_limit(against, first):
    later = rerun(first, {"triton": 0.5, "flashinfer": 1.25, "limit.copy": 9.0})
    one = (later["copy"] == "flashinfer") & (later["num_tokens"] == 32) & (later["layout"] == "HND")
    table = against(later.assign(seconds=later["seconds"].where(~one, 2 * later["seconds"]))).extremes(2)
    assert table["cell"].iloc[0] == "32 tokens of 8x128 HND" and table["speedup"].iloc[0].startswith("0.40 [")
    assert table["copy"].tolist() == ["flashinfer"] * 2 + ["triton"] * 2
    assert table["verdict"].tolist() == ["SLOWER"] * 2 + ["FASTER"] * 2


def test_cells_in_one_run_only_are_counted_and_named(against, first):
    less = first[(first["copy"] != "flashinfer") & (first["layout"] != "HND")]
    less = less[(less["copy"] != "triton") | (less["timer"] != "eager")]
    wrong = (less["copy"] == "torch.scatter") | ((less["copy"] == "triton") & (less["num_tokens"] == 1))
    lost = {"status": less["status"].mask(wrong, "wrong"), "reason": less["reason"].mask(wrong, "wrong rows")}
    less = less.assign(**lost, seconds=less["seconds"].mask(wrong))
    table = against(rerun(less)).unmatched()
    assert set(table["only in"]) == {"A"}
    why = table.set_index("why")
    assert why.loc["no such copy in the other", "copies"] == "flashinfer"
    assert re.fullmatch("7: .*HND ...", why.loc["no such case in the other", "cases"])
    assert why.loc["wrong in the other", ["cells", "copies"]].tolist() == [2, "triton"]
    assert why.loc["not timed so in the other", "copies"] == "triton"
    timed = stats.by_round(first).drop_duplicates(compare.CELL), stats.by_round(less).drop_duplicates(compare.CELL)
    assert table["cells"].sum() == len(timed[0]) - len(timed[1])


def test_without_a_headline_the_usual_cells_are_told_of(against, first):
    eager = first[first["timer"] == "eager"]
    compared = against(rerun(eager, {"triton": 0.5}), eager)
    assert compared.where["timer"] == "eager" and "timer eager" in compared.headline()
    assert "FASTER" in compared.means().set_index("copy").loc["triton", "decode"]


def test_cpu_runs_are_compared_by_wall_clock(against):
    cpu = fixture_runs.cpu_run()
    compared = against(rerun(cpu, {"torch.index_put": 0.5}), cpu)
    assert compared.where["timer"] == "wall"
    assert set(of(compared.cells, "torch.index_put", timer="wall")["verdict"]) == {"FASTER"}


# -- what is refused


@pytest.fixture
def files(tmp_path, first):
    """Run files, good and bad, by name."""
    (tmp_path / "half.parts").mkdir()
    good = results.save(first, tmp_path / "good.parquet")
    cut = good.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(cut[: len(cut) // 2])
    (tmp_path / "copied.parquet").write_bytes(cut)
    results.save(first, tmp_path / "half.parts" / "0001.parquet")
    results.save(fixture_runs.cpu_run(), tmp_path / "cpu.parquet")
    results.save(rerun(first, seed=1, block_size=32), tmp_path / "elsewhere.parquet")
    results.save(pd.concat([first, rerun(first, gpu_uuid="0")]), tmp_path / "two.parquet")
    results.save(rerun(first, schema_version=1), tmp_path / "old.parquet")
    first.assign(extra=1).to_parquet(tmp_path / "foreign.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("good.parquet", "are one run, gpu-run: give two"),
        ("copied.parquet", "are one run, gpu-run: give two"),
        ("cpu.parquet", "timed on a GPU, .*cpu.parquet on a CPU: give two runs of one kind"),
        ("elsewhere.parquet", "no cell was timed in both .*grid full.*: give runs of one grid"),
        ("cut.parquet", "not a complete run file .*: give a run file"),
        ("half.parts", "not finished: the command that began it goes on"),
        ("half.parts/0001.parquet", "not finished: the command that began it goes on"),
        ("two.parquet", "holds 2 runs: give the file of one"),
        ("old.parquet", "schema version"),
        ("foreign.parquet", "columns differ in .*extra"),
        ("gone.parquet", "does not exist; run files lie in"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(files, other, told):
    for pair in ((files / "good.parquet", files / other), (files / other, files / "good.parquet")):
        with pytest.raises(ValueError, match=told if other != "cpu.parquet" else "give two runs of one kind"):
            Comparison(*pair)


def test_the_command_tells_it_and_refuses_with_code_2(files, first):
    faster = str(results.save(rerun(first, {"triton": 0.5}), files / "faster.parquet"))
    good = str(files / "good.parquet")
    told = CliRunner().invoke(cli.app, ["compare", good, faster])
    assert (told.exit_code, told.stdout) == (0, Comparison(good, faster).told())
    refused = CliRunner().invoke(cli.app, ["compare", good, str(files / "cpu.parquet")])
    assert (refused.exit_code, refused.stdout) == (2, "") and "give two runs of one kind" in refused.stderr


# -- which two


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """Folders for runs of the user and for records; saves a run there."""
    monkeypatch.setattr(paths, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")

    def save(run: pd.DataFrame, name: str):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        return results.save(run, tmp_path / name)

    return save


def test_the_two_newest_runs_of_one_grid_and_gpu_are_found(homes, first):
    small = first[first["num_tokens"] == 1]
    days = [rerun(small, run_id=str(day), utc=f"2026-12-0{day}T00:00:00+00:00") for day in range(1, 6)]
    homes(days[0], "recorded/h200/2026-12-01_full_0000000.parquet")
    older = homes(days[1], "recorded/h200/2026-12-02_full_0000000.parquet")
    newer = homes(days[2], "local/mine.parquet")
    homes(days[2], "recorded/h200/2026-12-03_full_0000000.parquet")  # the same run again
    homes(days[3].assign(gpu="NVIDIA H100"), "recorded/h100/2026-12-04_full_0000000.parquet")
    homes(days[4].assign(grid="quick"), "local/quick.parquet")
    (paths.RECORDED / "h200" / "2026-12-09_witness_0000000.parquet").write_text("another kind of record")
    assert compare.find() == [older, newer]


def test_one_run_alone_says_what_is_needed(homes, first):
    only = homes(first, "local/only.parquet")
    assert compare.find() == [only]
    alone = Comparison(only)
    assert "only.parquet is the only run of grid full on NVIDIA H200 here. `make record`" in alone.headline()
    assert "noise floors" in alone.caution()
    assert alone.differences().set_index("what").loc["gpu", "A"] == "NVIDIA H200"
    assert all(table.empty for table in (alone.means(), alone.extremes(), alone.counts(), alone.unmatched()))


def test_without_runs_or_with_one_name_the_fix_is_said(homes):
    with pytest.raises(ValueError, match="`make measure` measures one"):
        compare.find()
    with pytest.raises(ValueError, match="a, b: give two run files, or neither"):
        compare.find(b="some.parquet")


def test_comparing_loads_neither_torch_nor_what_draws():
    heavy = ("torch", "matplotlib", "seaborn", "scipy", "papermill", "nbconvert")
    code = f"import sys, kvnb.report.compare; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_run_of_two_versions_of_a_copy_is_refused(against, first):
    edited = first.assign(copy_version=first["copy_version"].where(first["num_tokens"] > 1, "1"))
    with pytest.raises(ValueError, match="holds two versions of kvnb: it was resumed after an edit; measure it anew"):
        against(rerun(edited), edited)
