"""Sentences and tables say what the samples say: numbers are recomputed here, by another road."""

from __future__ import annotations

import re

import fixture_runs
import numpy as np
import pandas as pd
import pytest

from kvnb.bench import results
from kvnb.problem.models import MODELS
from kvnb.report import answers


def ratios(run: answers.Run, others: list[str], timer: str = "graph") -> pd.DataFrame:
    """Per case, the smallest of the medians over (worker, round) of others' time / kvnb's, from raw samples."""
    samples = run.samples
    rows = samples[(samples["part"] == "write") & (samples["timer"] == timer) & (samples["status"] == "ok")]
    place = ["layout", "num_kv_heads", "num_tokens"]
    wide = rows.pivot(index=[*place, "worker", "round"], columns="copy", values="seconds")
    medians = wide[others].div(wide["kvnb"], axis=0).groupby(place).median()
    return medians.min(axis=1).rename("speedup").reset_index()


def told(speedups: pd.Series) -> str:
    """How a geometric mean begins."""
    return f"{np.exp(np.log(speedups).mean()):.2f} ["


PYTORCH = [name for name, (family, *_) in fixture_runs.GPU_COPIES.items() if family in ("torch", "compile")]


def test_headline_is_a_recomputation_with_losses_first(gpu):
    best, issue = (ratios(gpu, names) for names in (PYTORCH, ["torch.index_put"]))
    text = answers.headline(gpu)
    start = "NVIDIA H200, timer graph, state produced, margin 2.0%: PyTorch is faster in 2 of 35 cells, by up to "
    worst = f"{1 / best['speedup'].min():.2f} times (torch.index_copy_wide, 65,536 tokens of 1x128 NHD)"
    assert text.startswith(f"{start}{worst}, kvnb in 33 of 35 cells; ")
    first, second = text.split(". Over torch.index_put, the spelling of the issue, it is ")
    for part, rows in ((first, best), (second, issue)):
        tokens = rows["num_tokens"]
        sizes = {"decode": tokens <= 256, "mixed": tokens.between(257, 2047), "prefill": tokens >= 2048}
        for regime, here in sizes.items():
            assert re.search(rf"{re.escape(told(rows['speedup'][here]))}\S+ \S+\] FASTER in {regime}", part)


def test_fixture_medians_are_found_again(gpu):
    cells = gpu.cells().set_index(["copy", "layout", "num_kv_heads", "num_tokens"])["seconds"]
    for case in fixture_runs.gpu_cases():
        known = fixture_runs.known_seconds("triton", case)
        assert cells["triton", case.layout, case.num_kv_heads, case.num_tokens] == pytest.approx(known, rel=0.005)


def test_every_regime_and_layout_has_a_sentence_and_losses_come_first(gpu):
    told_all = answers.sentences(gpu)
    assert len(told_all) == 9
    assert told_all[0].startswith("Prefill, NHD: PyTorch is faster in 2 of 9 cells")
    assert told_all[0].endswith("; turns to PyTorch between 4,096 and 16,384 tokens for 1x128.")
    assert not any("PyTorch is faster" in text or "turns" in text for text in told_all[1:])
    line = next(text for text in told_all if text.startswith("Decode, packed"))
    starts = {"fastest PyTorch copy, mostly torch.compile, is ": PYTORCH, "torch.index_put ": PYTORCH[:1]}
    for start, others in starts.items():
        here = ratios(gpu, others)
        here = here[(here["layout"] == "packed") & (here["num_tokens"] <= 256)]["speedup"]
        assert f"{start}{told(here)}" in line
        assert f"] FASTER (3 cells from {here.min():.2f} to {here.max():.2f})" in line


def test_flips_are_found_in_both_directions(gpu):
    rows = gpu.against(answers.BEST)
    line = rows[(rows["layout"] == "HND")].copy()
    line["verdict"] = ["SLOWER", "UNDECIDED", "FASTER", "SLOWER", "SLOWER", "SAME", "FASTER"]
    assert answers.flips(line) == [
        (1, "turns to PyTorch from the fewest tokens on for 8x128"),
        (32, "turns to kvnb between 1 and 32 tokens for 8x128"),
        (1024, "turns to PyTorch between 256 and 1,024 tokens for 8x128"),
        (16384, "turns to kvnb between 4,096 and 16,384 tokens for 8x128"),
    ]
    both = answers.flips(pd.concat([line, line.assign(num_kv_heads=4)]))
    assert both[0] == (1, "turns to PyTorch from the fewest tokens on for 4x128, 8x128")


def test_verdict_table_counts_lost_cells_and_labels_the_2024_design(gpu):
    table = answers.verdict_table(gpu, [answers.BEST, *gpu.copies]).set_index(["layout", "copy"])
    assert list(table.columns) == ["decode", "mixed", "prefill"]
    assert table.loc[("NHD", answers.BEST), "prefill"].endswith(", 2 SLOWER)")
    assert table.loc[("packed", "kvnb.again"), "prefill"].startswith("1.00 [1.00, 1.00] SAME (3 cells")
    assert ("HND", "torch.index_copy_wide") not in table.index, "it knows NHD only"
    assert {"kvnb", "vllm.scalar", "limit.copy"}.isdisjoint(table.index.get_level_values("copy"))
    assert ("HND", "vllm.scalar (vLLM's 2024 design, rewritten)") in table.index
    assert "no verdict is drawn on vLLM" in answers.NOTE


def test_no_table_or_text_calls_the_2024_design_by_its_bare_name(gpu):
    lost = gpu.samples.assign(status=gpu.samples["status"].mask(gpu.samples["num_tokens"] == 1, "error"))
    tables = [answers.verdict_table(gpu), answers.limits_table(gpu), answers.not_ok(answers.Run(lost))]
    texts = [answers.summary_markdown(gpu), *(table.to_string() for table in tables)]
    texts += [answers.alt(figure, gpu) for figure in answers.FIGURES]
    bare = re.compile(r"vllm\.scalar(?! \(vLLM's 2024 design, rewritten\)| is vLLM's 2024 design, rewritten)")
    assert sum("vllm.scalar" in text for text in texts) >= 6
    assert not any(bare.search(text) for text in texts)


def test_the_fastest_pytorch_copy_is_chosen_cell_by_cell(gpu):
    rows = gpu.against(answers.BEST).set_index(["layout", "num_kv_heads", "num_tokens"])
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
        row, weights = rows.iloc[0], model.weight_bytes / fixture_runs.LIMIT_BYTES_PER_S
        assert float(row["saved per step"].removesuffix(" us")) == pytest.approx(1e6 * saved * model.layers, rel=0.02)
        assert float(row["weights"].removesuffix(" ms")) == pytest.approx(1e3 * weights, rel=0.02)
        assert float(row["share"].removesuffix("%")) == pytest.approx(100 * saved * model.layers / weights, abs=0.1)


def test_weights_of_the_models_are_the_published_sizes_less_the_embedding():
    published = {"Llama-3.1-8B bf16": (16060522496, 4096), "Llama-3.1-70B bf16": (141107412992, 8192)}
    for model in MODELS:
        total, hidden = published[model.name]
        assert model.weight_bytes == total - 2 * 128256 * hidden


def test_cells_that_failed_are_listed_with_their_reasons(gpu):
    assert answers.not_ok(gpu).to_numpy().tolist() == [
        ["error", 1, "torch.compile", "fell back to eager"],
        ["unsupported", 28, "torch.index_copy, torch.index_copy_wide", "flat rows exist in NHD only"],
        ["unsupported", 28, "torch.index_put_packed", "the packed layout only"],
    ]
    facts = answers.provenance(gpu).set_index("what")["value"]
    assert facts["cells without a time"] == "1 error, 56 unsupported"
    assert facts["samples"].endswith("3 workers x up to 5 rounds") and "580.1" in facts["driver, CUDA"]
    assert "(graph, produced)" in facts["noise floor"] and facts["throttled"] == "0.0% of samples"


def test_reasons_that_differ_in_numbers_only_are_one_row(cpu):
    wrong = cpu.samples["copy"] == "torch.index_copy"
    reasons = "slot " + cpu.samples["num_tokens"].astype(str) + ": -0.5 should be untouched"
    samples = cpu.samples.assign(status=cpu.samples["status"].mask(wrong, "wrong"), reason=reasons.where(wrong, ""))
    assert answers.not_ok(answers.Run(samples)).to_numpy().tolist() == [
        ["wrong", 3, "torch.index_copy", "slot 1: -0.5 should be untouched"]
    ]


def test_alt_texts_hold_the_numbers_of_their_figure(gpu):
    rows = gpu.cells(copy="kvnb", layout="NHD", num_kv_heads=8).set_index("num_tokens")["seconds"]
    ends = [answers.duration(rows[tokens]) for tokens in (1, 65536)]
    assert f"1 to 65,536 tokens: kvnb {ends[0]} to {ends[1]}," in answers.alt("latency", gpu)
    assert "kvnb (packed) 95 % to 95 %" in answers.alt("limit", gpu)
    assert answers.alt("heads", gpu).endswith("FASTER (21 cells from 0.60 to 2.30, 2 SLOWER).")
    assert "kvnb (graph) 1.30 us to" in answers.alt("eager", gpu) and "kvnb (eager) 7.4" in answers.alt("eager", gpu)
    assert "torch.index_put (the issue's) (packed, in every call) 9.5" in answers.alt("step", gpu)
    assert "torch.index_put (the issue's) (packed, shared by 32 layers) 5.6" in answers.alt("step", gpu)
    assert all("NVIDIA H200" in answers.alt(figure, gpu) for figure in answers.FIGURES)


def test_a_cpu_run_is_answered_per_regime_and_says_what_it_lacks(cpu):
    start = "Test CPU, 2 threads, timer wall, state produced, margin 2.0%: PyTorch is faster in no cell, kvnb in 0 of"
    assert answers.headline(cpu).startswith(start)
    assert "over the fastest PyTorch copy is 1.00 [1.00, 1.00] SAME in decode, 1.00 [1.00, 1.00] SAME in mixed." in (
        answers.headline(cpu)
    )
    assert [text.split(":")[0] for text in answers.sentences(cpu)] == ["Decode, NHD", "Mixed, NHD"]
    assert "prefill" not in answers.verdict_table(cpu)
    for figure in ("limit", "eager", "step"):
        assert "this run lacks" in answers.alt(figure, cpu)


def test_a_run_drowned_in_noise_says_so(cpu):
    noise = 1 + 0.5 * np.sin(np.arange(len(cpu.samples)) * (1 + (cpu.samples["copy"] == "kvnb.again")))
    run = answers.Run(cpu.samples.assign(seconds=cpu.samples["seconds"] * noise))
    assert re.search(r", a noise floor of \d+% hides smaller differences: PyTorch", answers.headline(run))
    assert "SAME" not in answers.summary_markdown(run).removesuffix(answers.NOTE)


@pytest.mark.parametrize("kept", [["kvnb"], ["torch.index_put"], ["kvnb", "torch.index_copy"], ["limit.launch"]])
def test_a_run_of_few_copies_says_what_it_lacks(gpu, kept):
    few = answers.Run(gpu.samples[gpu.samples["copy"].isin(kept)].reset_index(drop=True))
    if kept == ["kvnb", "torch.index_copy"]:
        assert "over torch.index_put not measured" in answers.sentences(few)[0]
    else:
        assert "no answer" in answers.headline(few) and answers.sentences(few) == []
    for table in (answers.verdict_table, answers.limits_table, answers.worth, answers.not_ok, answers.provenance):
        table(few)
    for figure in answers.FIGURES:
        answers.alt(figure, few)


def test_samples_of_two_runs_are_refused(gpu, cpu):
    with pytest.raises(ValueError, match="of 2 runs: load the file of one"):
        answers.Run(pd.concat([gpu.samples, cpu.samples], ignore_index=True))


def test_summary_is_markdown_with_everything_in_it(gpu):
    summary = answers.summary_markdown(gpu)
    assert summary.startswith(answers.headline(gpu)) and summary.endswith(answers.NOTE)
    table = [line for line in summary.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 15 and len({line.count("|") for line in table}) == 1


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
        results.save(gpu.samples, tmp_path / "recorded" / f"{name}.parquet")
    local = results.save(gpu.samples, tmp_path / "local" / "mine.parquet")
    found = answers.find_runs("newest")
    assert found[0] == local and [path.parent.name for path in found[1:]] == ["a100", "h200"]
    assert found[2].name.startswith("2026-11-30_full")
    assert answers.find_runs([str(local)]) == [local]
