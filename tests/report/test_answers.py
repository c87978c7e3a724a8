"""Sentences and tables say what the samples say: numbers are recomputed here, by another road."""

from __future__ import annotations

import fixture_runs
import numpy as np
import pandas as pd
import pytest

from kvnb.bench import results
from kvnb.problem.models import MODELS
from kvnb.report import answers


def ratios(samples: pd.DataFrame, others: list[str], timer: str = "graph") -> pd.DataFrame:
    """Per case, the smallest of the medians over (worker, round) of others' time / kvnb's, from raw samples."""
    rows = samples[(samples["part"] == "write") & (samples["timer"] == timer) & (samples["status"] == "ok")]
    place = ["layout", "num_kv_heads", "num_tokens"]
    wide = rows.pivot(index=[*place, "worker", "round"], columns="copy", values="seconds")
    medians = wide[others].div(wide["kvnb"], axis=0).groupby(place).median()
    return medians.min(axis=1).rename("speedup").reset_index()


def geometric_mean(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean()))


PYTORCH = [name for name, (family, *_) in fixture_runs.GPU_COPIES.items() if family in ("torch", "compile")]


def test_headline_is_a_recomputation_with_losses_first(gpu):
    best, issue = (ratios(gpu, names) for names in (PYTORCH, ["torch.index_put"]))
    text = answers.headline(gpu)
    told = "NVIDIA H200, timer graph, state produced, margin 2.0%: PyTorch is faster in 2 of 35 cells, by up to "
    assert text.startswith(told)
    assert f"by up to {1 / best['speedup'].min():.2f} times (torch.index_copy_wide, 65,536 tokens of 1x128 NHD)" in text
    assert f"kvnb is {geometric_mean(best['speedup']):.2f} times as fast as the fastest PyTorch copy (FASTER; " in text
    assert f"It is {geometric_mean(issue['speedup']):.2f} times as fast as torch.index_put, the spelling of" in text
    assert f"35 cells from {best['speedup'].min():.2f} to {best['speedup'].max():.2f}" in text


def test_fixture_medians_are_found_again(gpu):
    cells = answers.cells(gpu, status="ok").set_index(["copy", "layout", "num_kv_heads", "num_tokens"])["seconds"]
    for case in fixture_runs.gpu_cases():
        known = fixture_runs.known_seconds("triton", case)
        assert cells["triton", case.layout, case.num_kv_heads, case.num_tokens] == pytest.approx(known, rel=0.005)


def test_every_regime_and_layout_has_a_sentence_and_losses_come_first(gpu):
    told = answers.sentences(gpu)
    assert len(told) == 9
    assert told[0].startswith("Prefill, NHD: PyTorch is faster in 2 of 9 cells")
    assert told[0].endswith("; 1x128 turns to PyTorch between 4,096 and 16,384 tokens.")
    assert not any("PyTorch is faster" in text or "turns" in text for text in told[1:])
    here = ratios(gpu, PYTORCH)
    here = here[(here["layout"] == "packed") & (here["num_tokens"] <= 256)]["speedup"]
    line = next(text for text in told if text.startswith("Decode, packed"))
    assert f"kvnb is {geometric_mean(here):.2f} times as fast as" in line
    assert f"3 cells from {here.min():.2f} to {here.max():.2f}; mostly torch.compile" in line


def test_flips_are_found_in_both_directions(gpu):
    rows = answers.against(gpu, answers.BEST)
    line = rows[(rows["layout"] == "HND")].copy()
    line["verdict"] = ["SLOWER", "UNDECIDED", "FASTER", "SLOWER", "SLOWER", "SAME", "FASTER"]
    assert answers.flips(line) == [
        (1, "8x128 is PyTorch's from 1 token"),
        (32, "8x128 turns to kvnb between 1 and 32 tokens"),
        (1024, "8x128 turns to PyTorch between 256 and 1,024 tokens"),
        (16384, "8x128 turns to kvnb between 4,096 and 16,384 tokens"),
    ]


def test_verdict_table_counts_lost_cells_and_labels_the_2024_design(gpu):
    table = answers.verdict_table(gpu).set_index(["regime", "layout"])
    assert list(table.index[:2]) == [("decode", "NHD"), ("decode", "HND")]
    assert table.loc[("prefill", "NHD"), answers.BEST].endswith(", 2 SLOWER")
    assert "vllm.scalar (vLLM's 2024 design, rewritten)" in table and "vllm.scalar" not in table
    assert "no verdict is drawn on vLLM" in answers.NOTE
    every = answers.every_copy(gpu).set_index(["layout", "copy"])
    assert every.loc[("HND", "torch.index_copy_wide"), "decode"] == "not measured"
    assert every.loc[("packed", "kvnb.again"), "prefill"].startswith("1.00 [1.00, 1.00] SAME; 3 cells")


def test_the_fastest_pytorch_copy_is_chosen_cell_by_cell(gpu):
    rows = answers.against(gpu, answers.BEST).set_index(["layout", "num_kv_heads", "num_tokens"])
    assert rows.loc[("NHD", 8, 1), "b"] == "torch.compile"
    assert rows.loc[("NHD", 8, 65536), "b"] == "torch.index_copy_wide"
    assert rows.loc[("NHD", 32, 1), "b"] == "torch.index_copy_wide", "torch.compile failed in this cell"


def test_limits_table(gpu):
    table = answers.limits_table(gpu).set_index("copy")
    kvnb, launch = table.loc["kvnb"], fixture_runs.GPU_COPIES["limit.launch"][1]
    assert kvnb["take"] == "1.30 us" and float(kvnb["in empty launches"]) == pytest.approx(1.3 / launch, rel=0.01)
    assert float(kvnb["% of limit.copy"]) == pytest.approx(95, abs=1)
    assert "limit.launch" not in table.index


def test_worth_is_layers_times_the_difference(gpu):
    case = next(case for case in fixture_runs.gpu_cases() if case.num_tokens == 32 and case.num_kv_heads == 8)
    saved = fixture_runs.known_seconds("torch.index_put", case) - fixture_runs.known_seconds("kvnb", case)
    table = answers.worth(gpu)
    for model in MODELS:
        rows = table[(table["model"] == model.name) & (table["tokens"] == 32) & (table["rival"] == "torch.index_put")]
        told, weights = rows.iloc[0], model.weight_bytes / fixture_runs.LIMIT_BYTES_PER_S
        assert float(told["saved per step"].removesuffix(" us")) == pytest.approx(1e6 * saved * model.layers, rel=0.02)
        assert float(told["weights"].removesuffix(" ms")) == pytest.approx(1e3 * weights, rel=0.02)
        assert float(told["share"].removesuffix("%")) == pytest.approx(100 * saved * model.layers / weights, abs=0.1)


def test_weights_of_the_models_are_the_published_sizes_less_the_embedding():
    published = {"Llama-3.1-8B bf16": (16060522496, 4096), "Llama-3.1-70B bf16": (141107412992, 8192)}
    for model in MODELS:
        total, hidden = published[model.name]
        assert model.weight_bytes == total - 2 * 128256 * hidden


def test_cells_that_failed_are_listed_with_their_reasons(gpu):
    failed = answers.not_ok(gpu).set_index("copy")
    assert failed.loc["torch.compile"].tolist() == ["error", "fell back to eager", 1]
    assert failed.loc["torch.index_copy", "cells"] == 14
    facts = answers.provenance(gpu).set_index("what")["value"]
    assert "1 error (fell back to eager)" in facts["cells without a time"]
    assert facts["samples"].endswith("3 workers x up to 5 rounds") and "580.1" in facts["driver, CUDA"]
    assert "(graph, produced)" in facts["noise floor"] and facts["throttled"] == "0.0% of samples"


def test_alt_texts_hold_the_numbers_of_their_figure(gpu):
    rows = answers.cells(gpu, copy="kvnb", layout="NHD", num_kv_heads=8).set_index("num_tokens")["seconds"]
    ends = [answers.duration(rows[tokens]) for tokens in (1, 65536)]
    assert f"from 1 to 65,536 tokens: kvnb {ends[0]} to {ends[1]}," in answers.alt("latency", gpu)
    assert "kvnb (packed) 95 %" in answers.alt("limit", gpu)
    assert answers.alt("heads", gpu).endswith("SLOWER in 2 of 21 cells.")
    assert "kvnb 1.30 us and 7.4" in answers.alt("eager", gpu)
    assert "torch.index_put (8x128 packed) 1" in answers.alt("step", gpu)
    assert all("NVIDIA H200" in answers.alt(figure, gpu) for figure in answers.MISSING)


def test_a_cpu_run_is_answered_and_says_what_it_lacks(cpu):
    told = "Test CPU, 2 threads, timer wall, state produced, margin 2.0%: PyTorch is faster in no cell; "
    assert answers.headline(cpu).startswith(told)
    assert "2.00 times as fast as torch.index_put" in answers.headline(cpu)
    assert "Prefill, NHD: not measured in this run for both kvnb and a PyTorch copy." in answers.sentences(cpu)
    for figure in ("limit", "eager", "step"):
        assert answers.alt(figure, cpu) == answers.MISSING[figure]


@pytest.mark.parametrize("kept", [["kvnb"], ["torch.index_put"], ["kvnb", "torch.index_copy"], ["limit.launch"]])
def test_a_run_of_few_copies_says_what_it_lacks(gpu, kept):
    few = gpu[gpu["copy"].isin(kept)].reset_index(drop=True)
    if kept == ["kvnb", "torch.index_copy"]:
        assert "torch.index_put was not measured" in answers.sentences(few)[0]
    else:
        assert "no answer" in answers.headline(few)
        assert all("not measured" in text for text in answers.sentences(few))
    tables = answers.verdict_table, answers.every_copy, answers.limits_table, answers.worth, answers.provenance
    assert all(isinstance(make(few), pd.DataFrame) for make in tables)
    assert all(answers.alt(figure, few) for figure in answers.MISSING)


def test_samples_of_two_runs_are_refused(gpu, cpu):
    with pytest.raises(ValueError, match="give those of one run"):
        answers.headline(pd.concat([gpu, cpu], ignore_index=True))


def test_summary_is_markdown_with_everything_in_it(gpu):
    summary = answers.summary_markdown(gpu)
    assert summary.startswith(answers.headline(gpu)) and summary.endswith(answers.NOTE)
    table = [line for line in summary.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 9 and len({line.count("|") for line in table}) == 1


def test_durations_read_in_three_digits():
    read = {7.4e-7: "0.74 us", 9.994e-4: "999 us", 1.2e-3: "1.20 ms", 2.5: "2.50 s", -1e-10: "0.00 us"}
    assert {seconds: answers.duration(seconds) for seconds in read} == read


def test_newest_runs_are_found_and_none_is_an_error(tmp_path, monkeypatch, gpu):
    monkeypatch.setattr("kvnb.paths.LOCAL", tmp_path / "local")
    monkeypatch.setattr("kvnb.paths.RECORDED", tmp_path / "recorded")
    with pytest.raises(ValueError, match="make measure"):
        answers.find_runs("newest")
    names = ["h200/2026-11-30_full_0123abc", "h200/2026-11-29_full_0123abc", "a100/2026-11-30_quick_0123abc"]
    for name in names:
        results.save(gpu, tmp_path / "recorded" / f"{name}.parquet")
    local = results.save(gpu, tmp_path / "local" / "mine.parquet")
    found = answers.find_runs("newest")
    assert found[0] == local and [path.parent.name for path in found[1:]] == ["a100", "h200"]
    assert found[2].name.startswith("2026-11-30_full")
    assert answers.find_runs([str(local)]) == [local]
