"""Sentences and tables say what the samples say: numbers are recomputed here, by another road."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import fixture_runs
import numpy as np
import pandas as pd
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.problem.models import MODELS
from kvnb.report import answers

PLACE = ["layout", "num_kv_heads", "num_tokens"]


def ratios(run: answers.Run, others: list[str], of: str = "kvnb", timer: str = "graph") -> pd.DataFrame:
    """Per case, the smallest of the medians over (worker, round) of others' time / that of `of`, from raw samples, and
    whose it is.
    """
    samples = run.samples
    rows = samples[(samples["part"] == "write") & (samples["timer"] == timer) & (samples["status"] == "ok")]
    wide = rows.pivot(index=[*PLACE, "worker", "round"], columns="copy", values="seconds")
    medians = wide[others].div(wide[of], axis=0).groupby(PLACE).median().dropna(how="all")
    return medians.min(axis=1).rename("speedup").to_frame().assign(fastest=medians.idxmin(axis=1)).reset_index()


def mean(speedups: pd.Series) -> float:
    return np.exp(np.log(speedups).mean())


def told(speedups: pd.Series) -> str:
    """How a geometric mean begins."""
    return f"{mean(speedups):.2f} ["


def sizes(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    tokens = rows["num_tokens"]
    parts = {"decode": tokens <= 256, "mixed": tokens.between(257, 2047), "prefill": tokens >= 2048}
    return {regime: rows[here] for regime, here in parts.items()}


PLAIN = [name for name, (family, *_) in fixture_runs.GPU_COPIES.items() if family == "torch"]
PYTORCH = [*PLAIN, "torch.compile"]
SHIPPED = "vllm==0.33.0"
BEATS = "the fastest PyTorch copy of each case, chosen afterwards, beats"
OUR_KERNEL = "our hand-written kernel (kvnb)"
ABOUT = "NVIDIA H200, torch 2.13.0, timer graph, state produced"


def paces(rows: pd.DataFrame, in_words: bool) -> str:
    """PyTorch's mean speedups in packed; `ratios` are the kernel's."""
    packed = sizes(rows[rows["layout"] == "packed"])
    decode, prefill = (told(1 / packed[regime]["speedup"]).split(" [")[0] for regime in ("decode", "prefill"))
    words, ends = " times as fast" * in_words, r" \[\S+, \S+\]"
    return f"{'packed: ' * in_words}{decode}{ends}{words} in decode, {prefill}{ends} in prefill"


def test_the_answer_is_about_the_kernel_that_vllm_ships_then_ours_compiled_plain_and_the_issues_line(gpu):
    text = answers.answer(gpu)
    lead, rest = text.split(f": {BEATS} ")
    vllm, ours = rest.split(f". It beats {OUR_KERNEL} ")
    vllm = vllm.removeprefix("the kernel that vLLM ships (vllm==0.33.0) ")
    groups = (PYTORCH, PLAIN, ["torch.index_put"])
    for kernel, clauses in ((SHIPPED, vllm.split("; ")), ("kvnb", ours.removesuffix(".").split("; "))):
        begins = ("", "without torch.compile ", "the issue's own line, torch.index_put, ")
        for place, (names, begin, clause) in enumerate(zip(groups, begins, clauses, strict=True)):
            rows = ratios(gpu, names, of=kernel)
            won = 1 / rows["speedup"][1 / rows["speedup"] > 1.02]
            share = f"{begin}in {len(won) or 'none'} of {len(rows)}{' cases' * (place == 0)}"
            most = rf", by up to {won.max():.2f} \[\S+, \S+\] times" if 0 < len(won) <= len(rows) / 4 else ""
            pace = rf" \({paces(rows, in_words=place == 0)}\)" if kernel == SHIPPED or place == 0 else ""
            assert re.fullmatch(re.escape(share) + most + pace, clause), (kernel, clause)
    assert lead == "In mixed and prefill"
    for names in (PYTORCH, PLAIN):
        parts = sizes(ratios(gpu, names, of=SHIPPED)).items()
        shares = {regime: (cells["speedup"] < 1 / 1.02).mean() for regime, cells in parts}
        assert [regime for regime, share in shares.items() if share > 0.5] == ["mixed", "prefill"]
    assert answers.headline(gpu).startswith(f"{ABOUT}. {text} ") and "counts as none." in answers.headline(gpu)


def clauses_of_scope(run: answers.Run) -> tuple[str, str, str]:
    """What it holds for, where the shipped kernel wins, and how it goes eagerly."""
    return re.fullmatch(r"(This .+?\)\.) ?(vllm==.+?\.)?(?: (Called .+\.))?", answers.scope(run)).groups()


def test_the_scope_names_timer_and_state_and_where_the_shipped_kernel_wins(gpu):
    held, shipped, _ = clauses_of_scope(gpu)
    assert held == "This holds in CUDA graphs (timer graph), with caches as a server leaves them (state produced)."
    rows = ratios(gpu, PYTORCH, of=SHIPPED)
    won = rows[rows["speedup"] > 1.02]
    ends = rf"{won['speedup'].min():.2f} \[\S+, \S+\] to {won['speedup'].max():.2f} \[\S+, \S+\]"
    start = rf"faster than the fastest PyTorch copy in {len(won)} of {len(rows)} cases, by {ends} times: packed "
    assert 0 < len(won) < len(rows) and re.match(f"{SHIPPED} is {start}", shipped)
    for layout in answers.LAYOUTS:
        of = (rows["layout"] == layout).sum()
        assert f"{layout} {(won['layout'] == layout).sum()} of {of} (" in shipped
    assert "NHD 6 of 21 (1x128 at 1 to 256 tokens; 8x128 at 1, 32 tokens; 32x128 at 1 token)" in shipped
    slow = gpu.samples["seconds"].where(gpu.samples["copy"] != SHIPPED, 10 * gpu.samples["seconds"])
    _, shipped, _ = clauses_of_scope(answers.Run(gpu.samples.assign(seconds=slow)))
    assert shipped == f"{SHIPPED} is nowhere faster than the fastest PyTorch copy."


def without(run: answers.Run, timer: str, *copies: str) -> pd.DataFrame:
    """Its samples but for those of copies under a timer."""
    return run.samples[~(run.samples["copy"].isin(copies) & (run.samples["timer"] == timer))].reset_index(drop=True)


def test_the_scope_tells_how_it_goes_eagerly(gpu):
    eager, told = ["torch.index_put", "torch.compile"], {}
    for of in (SHIPPED, "kvnb"):
        rows = ratios(gpu, eager, of=of, timer="eager")
        won, compiled = (rows["speedup"] < 1 / 1.02).sum(), (rows["fastest"] == "torch.compile").sum()
        told[of] = rf"{of} in {won or 'none'} of {len(rows)} cases \({paces(rows, in_words=True)}\)"
    start, end = "Called eagerly (timer eager), the fastest PyTorch copy beats ", "and is a compiled one in"
    assert 0 < compiled < len(rows)
    both = f"{re.escape(start)}{' and '.join(told.values())}, {end} {compiled} of them\\."
    assert re.fullmatch(both, clauses_of_scope(gpu)[2])

    samples, why = without(gpu, "eager", SHIPPED), "launched as a cubin"
    absent = f", {end} {compiled} of them; {SHIPPED} has no time there"
    assert clauses_of_scope(answers.Run(samples))[2].endswith(f"{absent}.")
    made = fixture_runs._Run("gpu-run", fixture_runs.H200)
    made.failed(fixture_runs._case(1), SHIPPED, "peer", "eager", "unsupported", why)
    cubin = answers.Run(pd.concat([samples, made.samples()], ignore_index=True))
    text = clauses_of_scope(cubin)[2]
    assert text.endswith(f"{absent} ({why}).") and re.match(re.escape(start) + told["kvnb"] + ", and", text)

    plain = answers.Run(without(gpu, "eager", "torch.compile"))
    assert "Called eagerly" in answers.scope(plain) and "compiled" not in answers.scope(plain)


def test_a_scope_leaves_out_what_a_run_does_not_hold(gpu, old, cpu):
    assert "vllm" not in answers.scope(old) and " Called eagerly (timer eager), " in answers.scope(old)
    held = "This holds call by call (timer wall), with caches as a server leaves them (state produced)."
    assert answers.scope(cpu) == held
    assert "eager" not in answers.scope(answers.Run(without(gpu, "eager", *gpu.copies)))
    assert answers.scope(answers.Run(gpu.samples[gpu.samples["family"] == "torch"])) == ""


def test_without_wheels_the_answer_is_about_kvnb(old):
    text = answers.answer(old)
    worst = 1 / ratios(old, PYTORCH)["speedup"].min()
    assert text.startswith(f"Against kvnb, seldom: {BEATS} {OUR_KERNEL} in 2 of 42 cases, by up to {worst:.2f} [")
    assert SHIPPED not in text


def two_copies(gpu: answers.Run, seconds: float) -> answers.Run:
    """kvnb and index_put, which takes `seconds` times kvnb's time, in the same rounds."""
    samples = gpu.samples[(gpu.samples["timer"] == "graph") & (gpu.samples["part"] == "write")]
    ours = samples[samples["copy"].isin(["kvnb", "kvnb.again"])]
    other = ours[ours["copy"] == "kvnb"].assign(copy="torch.index_put", family="torch", policy="null_slot")
    other = other.assign(seconds=other["seconds"] * seconds)
    return answers.Run(pd.concat([ours, other], ignore_index=True))


@pytest.mark.parametrize("seconds, lead, won", [
    (0.5, "yes", "42 of 42 cases"), (1.0, "no, they are level", "none of 42 cases"), (2.0, "no", "none of 42 cases"),
])  # fmt: skip
def test_the_answer_goes_the_way_of_the_verdicts(gpu, seconds, lead, won):
    pace = f"{1 / seconds:.2f} [{1 / seconds:.2f}, {1 / seconds:.2f}]"
    level = " (SAME)" * (seconds == 1)
    assert answers.answer(two_copies(gpu, seconds)) == (
        f"Against kvnb, {lead}: {BEATS} {OUR_KERNEL} in {won} (packed: {pace}{level} times as fast in decode, "
        f"{pace}{level} in prefill); the issue's own line, torch.index_put, in {won.removesuffix(' cases')} "
        f"({pace}{level} in decode, {pace}{level} in prefill)."
    )


@pytest.mark.parametrize("compiled, plain, lead", [
    ("www", "llw", "Compiled, yes; plain, in prefill"), ("wwl", "wwl", "In decode and mixed"),
    ("www", "www", "Yes"), ("lll", "lll", "No"), ("wll", "lll", "Compiled, in decode; plain, no"),
])  # fmt: skip
def test_the_lead_tells_compiled_copies_from_plain_ones_and_names_the_regimes_they_win(compiled, plain, lead):
    def speedups(name, group):
        verdicts = [{"w": "SLOWER", "l": "FASTER"}[won] for won in (compiled if group == answers.BEST else plain)]
        return pd.DataFrame({"regime": answers.REGIMES, "verdict": verdicts})

    assert answers._lead(SimpleNamespace(shipped=SHIPPED, speedups=speedups), SHIPPED) == lead
    alone = answers._lead(SimpleNamespace(shipped=None, speedups=speedups), "kvnb")
    assert alone == f"Against kvnb, {lead[0].lower()}{lead[1:]}"


@pytest.mark.parametrize("won, lost, same, undecided, lead", [
    (42, 0, 0, 0, "Yes"), (41, 0, 1, 0, "Mostly"), (22, 20, 0, 0, "Mostly"), (18, 24, 0, 0, "In part"),
    (2, 1, 39, 0, "Seldom"), (0, 1, 41, 0, "No"), (0, 0, 42, 0, "No, they are level"), (0, 0, 0, 42, "Not decided"),
    (5, 5, 10, 22, "Not decided"),
])  # fmt: skip
def test_the_lead_is_a_share_of_all_cases(won, lost, same, undecided, lead):
    words = ["SLOWER"] * won + ["FASTER"] * lost + ["SAME"] * same + ["UNDECIDED"] * undecided
    assert answers._often(pd.Series(words)) == lead


def test_the_largest_win_is_one_that_was_won(gpu):
    rows = gpu.against(answers.BEST).head(3).assign(speedup=[0.95, 0.4, 1.5], low=[0.94, 0.4, 1.4],
                                                    high=[0.96, 1.6, 1.6], b="x", layout=["NHD", "HND", "NHD"],
                                                    verdict=["SLOWER", "UNDECIDED", "FASTER"])  # fmt: skip
    told = "in 1 of 3 cases (all NHD, x), by up to 1.05 [1.04, 1.06] times, and loses in 1, by up to 1.50 [1.40, 1.60]"
    assert answers._score(rows) == f"{told}; 1 are level or not decided"


def test_a_score_turned_round_turns_its_interval_round(gpu):
    rows = gpu.against(answers.BEST).head(1).assign(speedup=0.5, low=0.4, high=0.8, verdict="SLOWER", b="x")
    told = answers._score(rows.assign(layout="HND"))
    assert told == "in 1 of 1 case (all HND, x), by up to 2.00 [1.25, 2.50] times, and loses in none"
    rows = rows.assign(speedup=2.0, low=1.25, high=2.5, verdict="FASTER")
    assert answers._score(rows) == "in none of 1 case and loses in 1, by up to 2.00 [1.25, 2.50]"


def test_fixture_medians_are_found_again(gpu):
    cells = gpu.cells().set_index(["copy", "layout", "num_kv_heads", "num_tokens"])["seconds"]
    for case in fixture_runs.gpu_cases():
        known = fixture_runs.known_seconds("triton", case)
        assert cells["triton", case.layout, case.num_kv_heads, case.num_tokens] == pytest.approx(known, rel=0.005)


def test_each_regime_asks_where_pytorch_wins_then_vllm_then_kvnb(gpu, old):
    starts = [f"{regime}, {who}:" for regime in ("Decode", "Mixed", "Prefill") for who in ("PyTorch", SHIPPED, "kvnb")]
    texts = answers.sentences(gpu)
    assert [" ".join(text.split(" ")[:2]) for text in texts] == starts
    assert len(answers.sentences(old)) == 6 and not any("vllm" in text for text in answers.sentences(old))
    pytorch, vllm, ours = texts[6:]
    assert "; faster than kvnb in 2 of 18 cells, by 1.29" in pytorch
    assert "NHD 2 of 9 (1x128 at 16,384, 65,536 tokens, torch.index_copy_wide); with timer eager, faster" in pytorch
    assert vllm.endswith("copy in none of 18 cells; faster than kvnb in none of 18 cells.")
    assert f"kvnb: faster than {SHIPPED} in 18 of 18 cells: packed " in ours
    for rival, names in ((SHIPPED, [SHIPPED]), ("the fastest PyTorch copy", PYTORCH)):
        clause = next(clause for clause in ours.split("; ") if f"faster than {rival} in" in clause)
        for layout in answers.LAYOUTS:
            rows = ratios(gpu, names)
            here = sizes(rows[rows["layout"] == layout])["prefill"]["speedup"]
            cells = f"({len(here)} cells from {here.min():.2f} to {here.max():.2f}"
            assert re.search(rf"{layout} {re.escape(told(here))}\S+ \S+\] [A-Z]+ {re.escape(cells)}[,)]", clause)


def test_cells_that_are_won_are_named_by_width_sizes_and_spelling(gpu):
    rows = gpu.speedups(answers.BEST, SHIPPED)
    rows = rows[rows["layout"] == "NHD"].assign(verdict="SLOWER")
    assert answers._places(rows, answers.BEST) == ""
    won = [(1, 32), (1, 256), (8, 1), (8, 32), (8, 256), (32, 1), (32, 32), (32, 256)]
    here = [place in won for place in zip(rows["num_kv_heads"], rows["num_tokens"])]
    rows = rows.assign(verdict=rows["verdict"].mask(here, "FASTER"), a="torch.x")
    assert answers._places(rows, answers.BEST) == (
        "NHD 8 of 21 (8x128, 32x128 at 1 to 256 tokens, torch.x; 1x128 at 32, 256 tokens, torch.x)"
    )
    assert answers._places(rows, SHIPPED).endswith("(8x128, 32x128 at 1 to 256 tokens; 1x128 at 32, 256 tokens)")
    spellings = rows["a"].where(rows["num_kv_heads"] != 8, "torch.y")
    assert answers._places(rows.assign(a=spellings), answers.BEST).endswith(
        "(1x128 at 32, 256 tokens, torch.x; 8x128 at 1 to 256 tokens, torch.y; 32x128 at 1 to 256 tokens, torch.x)"
    )


def test_where_a_copy_mostly_wins_its_spellings_are_counted(gpu):
    rows = gpu.speedups(answers.BEST, SHIPPED).query("layout == 'NHD'").assign(verdict="FASTER")
    rows["a"] = ["torch.y"] * 5 + ["torch.x"] * 16
    assert answers._places(rows, answers.BEST) == "NHD 21 of 21 (torch.x 16, torch.y 5)"
    assert answers._places(rows, SHIPPED) == "NHD 21 of 21"
    rows.iloc[:9, rows.columns.get_loc("verdict")] = "SAME"
    assert answers._places(rows, answers.BEST) == "NHD 12 of 21 (torch.x 12)"
    rows.iloc[:11, rows.columns.get_loc("verdict")] = "SAME"
    assert answers._places(rows, answers.BEST).startswith("NHD 10 of 21 (8x128 at ")


def test_verdict_table_counts_lost_cells_and_labels_the_2024_design(gpu):
    table = answers.verdict_table(gpu, [answers.BEST, *gpu.copies]).set_index(["layout", "kvnb's speedup over"])
    assert list(dict.fromkeys(table.index.get_level_values("layout"))) == ["packed", "NHD", "HND"]
    assert list(table.columns) == ["decode", "mixed", "prefill"]
    assert table.loc[("NHD", answers.BEST), "prefill"].endswith(", 2 SLOWER)")
    assert table.loc[("packed", "kvnb.again"), "prefill"].startswith("1.00 [1.00, 1.00] SAME (6 cells")
    assert ("HND", "torch.index_copy_wide") not in table.index, "it knows NHD only"
    assert {"kvnb", "vllm.scalar", "limit.copy"}.isdisjoint(table.index.get_level_values(1))
    assert ("HND", "vllm.scalar (vLLM's 2024 design, rewritten)") in table.index
    assert "no verdict on vLLM rests on it" in answers.NOTE


def test_the_issues_table_is_the_kernel_that_vllm_ships_over_pytorchs(gpu, old):
    assert answers.issue_table(old).empty
    table = answers.issue_table(gpu).set_index(["layout", f"{SHIPPED}'s speedup over"])
    for copy, names in (("torch.index_put (the issue's)", PLAIN[:1]), (answers.PLAIN, PLAIN)):
        rows = ratios(gpu, names, of=SHIPPED)
        for regime, here in sizes(rows[rows["layout"] == "NHD"]).items():
            assert table.loc[("NHD", copy), regime].startswith(told(here["speedup"]))
    assert table.loc[("NHD", answers.PLAIN), "prefill"].split()[3] == "SLOWER"


def test_by_width_the_shipped_kernel_is_held_against_the_fastest_pytorch_copy(gpu):
    table = answers.width_table(gpu)
    assert list(zip(table["layout"], table["KV heads"])) == [
        ("packed", 8), ("packed", 32), ("NHD", 1), ("NHD", 8), ("NHD", 32), ("HND", 8),
    ]  # fmt: skip
    assert list(table.columns[2:]) == ["decode", "mixed", "prefill"]
    fastest = ratios(gpu, PYTORCH, of=SHIPPED)
    alone = pd.concat(gpu.speedups(SHIPPED, copy) for copy in PYTORCH).rename(columns={"b": "fastest"})
    rows = fastest.merge(alone[[*PLACE, "fastest", "low", "high"]], on=[*PLACE, "fastest"], validate="1:1")
    odd, ties = [], []
    for told in table.to_dict("records"):
        width = rows[(rows["layout"] == told["layout"]) & (rows["num_kv_heads"] == told["KV heads"])]
        for regime, here in sizes(width).items():
            ends = f"{mean(here['speedup']):.2f} [{mean(here['low']):.2f}, {mean(here['high']):.2f}] "
            counts = here["fastest"].value_counts()
            most = f"; {', '.join(counts[counts == counts.max()].index)}"
            most += f" ({counts.max()} of {len(here)})" if len(counts) > 1 else ""
            assert told[regime].startswith(ends) and told[regime].endswith(most)
            verdict, *but = told[regime].removeprefix(ends).removesuffix(most).split(", but ")
            if mean(here["low"]) > 1.021 or mean(here["high"]) < 1 / 1.021:
                assert verdict == ("FASTER" if mean(here["speedup"]) > 1 else "SLOWER")
            lost = (here["speedup"] > 1.02 if verdict == "SLOWER" else here["speedup"] < 1 / 1.02).sum()
            other = "FASTER" if verdict == "SLOWER" else "SLOWER"
            assert but == ([f"{lost} of {len(here)} {other}"] if lost else [])
            odd, ties = odd + but, ties + [most] * (len(counts) > 1)
    assert odd and ties, "the fixture holds what a mean hides, and two spellings"


def test_two_spellings_that_are_fastest_equally_often_are_both_named(gpu):
    rows = gpu.speedups(SHIPPED, answers.BEST).query("layout == 'NHD' and num_kv_heads == 8 and regime == 'decode'")
    assert answers._with_spelling(rows.assign(b=["torch.x", "torch.y", "torch.z"])).endswith(
        "; torch.x, torch.y, torch.z (1 of 3 each)"
    )


def test_by_width_only_the_usual_problem_counts(gpu):
    few = gpu.samples[gpu.samples["copy"].isin([SHIPPED, "torch.index_put"])].reset_index(drop=True)
    dear = few["seconds"].where(few["copy"] != SHIPPED, 5 * few["seconds"])
    unusual = [{"head_size": 64, "value_head_size": 64}, {"head_size": 128, "value_head_size": 64}]
    unusual += [{"dtype": "float16"}, {"source": "qkv"}, {"slots": "decode"}, {"block_size": 32}]
    others = [few.assign(seconds=dear, **odd) for odd in (*unusual, {"cache_bytes": 64 << 30})]
    usual = answers.width_table(answers.Run(few))
    assert len(usual) == 6 and (usual == answers.width_table(answers.Run(pd.concat([few, *others])))).all(axis=None)


def test_by_width_a_run_without_the_shipped_kernel_says_nothing_and_a_gap_is_said(gpu, old, cpu):
    assert answers.width_table(old).empty and answers.width_table(cpu).empty
    gap = (gpu.samples["num_kv_heads"] == 1) & (gpu.samples["num_tokens"] == 1024)
    table = answers.width_table(answers.Run(gpu.samples[~gap].reset_index(drop=True)))
    assert table.set_index(["layout", "KV heads"])["mixed"].eq("not measured").tolist() == [0, 0, 1, 0, 0, 0]


def test_only_a_record_without_wheels_says_so(gpu, old, cpu):
    missing = "Until vLLM's wheels are measured"
    assert missing in answers.note([old, cpu]) and missing not in answers.note([cpu, gpu])


def test_no_table_or_text_calls_the_2024_design_by_its_bare_name(gpu):
    lost = gpu.samples.assign(status=gpu.samples["status"].mask(gpu.samples["num_tokens"] == 1, "error"))
    tables = [answers.verdict_table(gpu), answers.limits_table(gpu), answers.not_ok(answers.Run(lost))]
    texts = [answers.headline(gpu), answers.note([gpu]), *answers.sentences(gpu)]
    texts += [table.to_string() for table in tables]
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
        rows = table[(table["model"] == model.name) & (table["tokens"] == 32)]
        rows = rows[rows["rival"] == answers.label("torch.index_put")]
        row, weights = rows.iloc[0], model.weight_bytes / fixture_runs.LIMIT_BYTES_PER_S
        assert SHIPPED in set(table["rival"])
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
        ["error", 2, "torch.compile", "fell back to eager"],
        ["unsupported", 42, "torch.index_copy, torch.index_copy_wide", "flat rows exist in NHD only"],
        ["unsupported", 14, "flashinfer", "its op takes K and V apart"],
        ["unsupported", 28, "torch.index_put_packed", "the packed layout only"],
    ]
    facts = answers.provenance(gpu).set_index("what")["value"]
    assert facts["cells without a time"] == "2 error, 84 unsupported"
    assert facts["samples"].endswith("3 workers x up to 5 rounds") and "580.1" in facts["driver, CUDA"]
    assert "(graph, produced)" in facts["noise floor"] and facts["disturbed"] == "0.0% of rounds"


def test_reasons_that_differ_in_numbers_only_are_one_row(cpu):
    wrong = cpu.samples["copy"] == "torch.index_copy"
    reasons = "slot " + cpu.samples["num_tokens"].astype(str) + ": -0.5 should be untouched"
    samples = cpu.samples.assign(status=cpu.samples["status"].mask(wrong, "wrong"), reason=reasons.where(wrong, ""))
    assert answers.not_ok(answers.Run(samples)).to_numpy().tolist() == [
        ["wrong", 3, "torch.index_copy", "slot 1: -0.5 should be untouched"]
    ]


def test_alt_texts_hold_the_numbers_of_their_figure(gpu):
    for layout in ("packed", "NHD"):
        rows = gpu.cells(copy="kvnb", layout=layout, num_kv_heads=8).set_index("num_tokens")["seconds"]
        ends = [answers.duration(rows[tokens]) for tokens in (1, 65536)]
        line = f"8x128 {layout}, 1 to 65,536 tokens"
        assert line in answers.alt("latency", gpu, layout)
        assert f"kvnb {ends[0]} to {ends[1]}," in answers.alt("latency", gpu, layout)
    assert answers.alt("latency", gpu) == answers.alt("latency", gpu, "packed")
    assert "kvnb (packed) 95 % to 95 %" in answers.alt("limit", gpu)
    heads = answers.alt("heads", gpu, "NHD")
    assert "FASTER (21 cells from 0.60 to 2.30, 2 SLOWER); the fastest PyTorch copy wins in 2 of 21 cases (" in heads
    assert ": fastest is kvnb.dependent at 1 token, and kvnb" in answers.alt("latency", gpu)
    assert ": fastest (packed) is " in answers.alt("limit", gpu)
    assert "kvnb (graph) 1.30 us to" in answers.alt("eager", gpu) and "kvnb (eager) 7.4" in answers.alt("eager", gpu)
    assert "torch.index_put (the issue's) (packed, in every call) 9.5" in answers.alt("step", gpu)
    assert "torch.index_put (the issue's) (packed, shared by 32 layers) 5.6" in answers.alt("step", gpu)
    drawn = [figure for figure in answers.FIGURES if figure != "releases"]
    assert all("NVIDIA H200" in answers.alt(figure, gpu) for figure in drawn)


def test_a_cpu_run_is_answered_and_says_what_it_lacks(cpu):
    start = "Test CPU, 2 threads, torch 2.13.0, timer wall, state produced. Against kvnb, no, they are level: "
    assert answers.headline(cpu).startswith(f"{start}{BEATS} {OUR_KERNEL} in none of 3 cases (NHD: 1.00 [1.00, 1.00]")
    assert re.search(r"torch\.index_put, in none of 3 \(0\.50 \[\S+, \S+\] in decode\)\.", answers.headline(cpu))
    starts = ["Decode, PyTorch", "Decode, kvnb", "Mixed, PyTorch", "Mixed, kvnb"]
    assert [text.split(":")[0] for text in answers.sentences(cpu)] == starts
    assert "prefill" not in answers.verdict_table(cpu)
    for figure in ("limit", "eager", "step"):
        assert "this run lacks" in answers.alt(figure, cpu)


def test_a_run_drowned_in_noise_says_so(cpu):
    noise = 1 + 0.5 * np.sin(np.arange(len(cpu.samples)) * (1 + (cpu.samples["copy"] == "kvnb.again")))
    run = answers.Run(cpu.samples.assign(seconds=cpu.samples["seconds"] * noise))
    assert re.search(r" A noise floor of \d+% hides smaller differences\.", answers.headline(run))
    told = [answers.headline(run), *answers.sentences(run), answers.verdict_table(run).to_string()]
    assert "SAME" not in "".join(told)


def test_too_few_workers_are_said(cpu):
    run = answers.Run(cpu.samples[cpu.samples["worker"] < 2].reset_index(drop=True))
    assert "from 2 workers (not 3: they are too short) of up to 5 rounds" in answers.headline(run)
    assert "not 3" not in answers.headline(cpu)


def test_copies_without_any_time_are_named(gpu):
    lost = gpu.samples["copy"] == "torch.compile"
    run = answers.Run(gpu.samples.assign(status=gpu.samples["status"].mask(lost, "error")))
    assert answers.certainty(run).endswith(" Without a time in this run: torch.compile. No compiled copy was timed.")
    told = answers.certainty(answers.Run(gpu.samples[~lost].reset_index(drop=True)))
    assert told.endswith(" No compiled copy was timed.") and "Without" not in told
    assert "Without" not in answers.certainty(gpu) and "compiled" not in answers.certainty(gpu)


@pytest.mark.parametrize("kept", [["kvnb"], ["torch.index_put"], ["kvnb", "torch.index_copy"], ["limit.launch"]])
def test_a_run_of_few_copies_says_what_it_lacks(gpu, kept):
    few = answers.Run(gpu.samples[gpu.samples["copy"].isin(kept)].reset_index(drop=True))
    if kept == ["kvnb", "torch.index_copy"]:
        assert "; the issue's own line, torch.index_put, was not measured." in answers.headline(few)
    else:
        assert "No answer" in answers.headline(few) and answers.sentences(few) == []
    for table in (answers.verdict_table, answers.limits_table, answers.worth, answers.not_ok, answers.provenance):
        table(few)
    for figure in answers.FIGURES:
        answers.alt(figure, few)


def test_samples_of_two_runs_are_refused(gpu, cpu):
    with pytest.raises(ValueError, match="of 2 runs: load the file of one"):
        answers.Run(pd.concat([gpu.samples, cpu.samples], ignore_index=True))


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
    with pytest.raises(ValueError, match="make record GRID=releases"):
        answers.find_runs("newest", grid="releases")
    releases = results.save(gpu.samples, tmp_path / "recorded" / "h200" / "2026-11-30_releases_0123abc.parquet")
    assert answers.find_runs("newest", grid="releases") == [releases]
    assert answers.recorded()["h200"].name.startswith("2026-11-30_full")
    (dangles := tmp_path / "local" / "x.parquet").symlink_to("nowhere")
    with pytest.raises(results.RunFileError, match=f"{dangles} is not a complete run file .*rm {dangles}"):
        answers.find_runs("newest")


def test_a_larger_cache_is_another_line(gpu):
    many = pd.concat([gpu.samples, gpu.samples.assign(cache_bytes=64 << 30)], ignore_index=True)
    run = answers.Run(many)
    assert run.line["cache"] == "" and {"", "64 GiB cache"} == set(run.cells()["cache"])
    rows = run.cells(copy="kvnb", num_kv_heads=8, layout="packed")
    assert set(rows.apply(answers.line_name, axis=1)) == {"8x128", "8x128 64 GiB cache"}
    for figure in answers.FIGURES:
        assert answers.figure_data(figure, run).shape == answers.figure_data(figure, gpu).shape


# -- releases


def test_releases_are_ordered_by_version_and_cubins_beside_ops_are_not_releases(by_release, gpu):
    assert by_release.releases == [f"vllm=={version}" for version in fixture_runs.RELEASES]
    assert by_release.shipped == "vllm==0.33.0" and gpu.releases == [SHIPPED]
    assert [answers.release(copy) for copy in ("vllm==0.6.6.post1", "vllm==0.25.0.cubin", "vllm", "vllm.scalar")] == [
        "0.6.6.post1", "", "", "",
    ]  # fmt: skip


def release_ratios(run: answers.Run, a: str, b: str, layout: str, source: str) -> pd.Series:
    """Medians per size of b's time / a's, from raw samples."""
    rows = run.samples[(run.samples["layout"] == layout) & (run.samples["source"] == source)]
    wide = rows.pivot(index=["num_tokens", "worker", "round"], columns="copy", values="seconds")
    return (wide[b] / wide[a]).groupby("num_tokens").median()


def test_the_answer_by_release_names_the_worst_and_the_best_step(by_release, gpu, facts):
    text = answers.release_headline(by_release)
    since = release_ratios(by_release, "vllm==0.33.0", "vllm==0.4.2", "NHD", "contiguous")
    assert f"for the same 8x128 NHD problem is {told(since[:3])}" in text
    assert re.search(r"hurt most was vllm==0\.10\.1 \(0\.5\d \[.* over vllm==0\.10\.0, .*thread 22 to 48\)", text)
    assert re.search(r"helped most was vllm==0\.25\.0 \(1\.6\d? .*over vllm==0\.17\.0, .*thread 56 to 40\)", text)
    assert "fewer than two releases" in answers.release_headline(gpu)


def test_each_release_that_changed_something_has_a_sentence_hurt_first(by_release, facts):
    texts = answers.release_sentences(by_release)
    starts = [text.split(":")[0] for text in texts]
    assert starts[:2] == [
        "The same problem, vllm==0.10.1 over vllm==0.10.0", "The same problem, vllm==0.25.0 over vllm==0.17.0",
    ]  # fmt: skip
    step = release_ratios(by_release, "vllm==0.10.1", "vllm==0.10.0", "NHD", "contiguous")
    assert f"hurt decode of 8x128 {told(step[:3])}" in texts[0] and ": helped" in texts[1]
    changed = next(text for text in texts if "now called with packed, qkv" in text)
    assert changed.startswith("As called, vllm==0.33.0 over vllm==0.25.0")
    assert "1.00 in decode of 8x128" in changed and "[" not in changed, "two cases: no interval"
    assert "no mean clears the margin with vllm==0.6.6.post1, vllm==0.8.5, vllm==0.10.0, vllm==0.11.0" in texts[-2]


def test_a_release_whose_changed_call_takes_half_the_time_has_a_speedup_of_two(by_release, facts):
    samples = by_release.samples
    newest = (samples["copy"] == "vllm==0.33.0") & (samples["layout"] == "packed")
    run = answers.Run(samples.assign(seconds=samples["seconds"].where(~newest, samples["seconds"] / 2)))
    [changed] = [text for text in answers.release_sentences(run) if "now called with packed, qkv" in text]
    assert "a speedup from case to case of 2.00 in decode of 8x128" in changed


def test_times_by_release_are_of_the_same_problem_and_of_the_default_call(by_release, facts):
    table = answers.release_table(by_release).set_index(["problem", "release"])
    assert table.loc[("the same problem", "0.33.0"), "called with"] == "NHD, contiguous"
    newest = table.loc[("as called", "0.33.0")]
    assert table.loc["as called", "ran as"].to_dict() == {  # the fixture has one release in both ways
        name.removeprefix("vllm=="): "op" if name == "vllm==0.25.0" else "cubin" for name in by_release.releases
    }
    assert (newest["called with"], newest["registers"]) == ("packed, qkv", "40")
    rows = by_release.samples
    rows = rows[(rows["copy"] == "vllm==0.33.0") & (rows["layout"] == "packed") & (rows["num_tokens"] == 4096)]
    assert newest["4,096"] == f"{rows['seconds'].median() * 1e6:.1f} us"
    assert "vllm==0.10.1 48" in answers.alt("releases", by_release)
    few = answers.Run(by_release.samples[by_release.samples["copy"] == "kvnb"].reset_index(drop=True))
    assert "this run lacks two releases" in answers.alt("releases", few)


def test_a_release_of_which_nothing_is_known_has_times_for_the_same_problem_only(by_release, monkeypatch):
    unknown, name = {"registers": None, "layout": "", "source": "", "backend": "", "note": ""}, "vllm==0.17.0"
    known = fixture_runs.release_facts
    monkeypatch.setattr(answers, "release_facts", lambda copy: unknown if copy == name else known(copy))
    table = answers.release_table(by_release).set_index(["release", "problem"])
    assert set(table.loc["0.17.0", "registers"]) == {"not known"} and table.loc["0.4.2", "registers"].iloc[0] == "29"
    assert table.loc[("0.17.0", "as called"), ["called with", "4,096"]].tolist() == ["not known", "not measured"]
    drawn = answers.figure_data("releases", by_release)
    assert set(drawn.loc[drawn["copy"] == name, "panel"]) == {answers.SAME}
    assert f"{name} not known" in answers.alt("releases", by_release)


def test_op_and_cubin_of_a_release_are_compared(by_release, gpu):
    assert "for vllm==0.25.0, the op's speedup over the cubin is from 1.00 to 1.00 in 21 cells (21 SAME)" in (
        answers.agreement(by_release)
    )
    table = answers.op_and_cubin(by_release)
    assert list(table["problem"]) == ["8x128 NHD", "8x128 qkv NHD", "8x128 qkv packed"]
    assert "not measured" in answers.agreement(gpu) and answers.op_and_cubin(gpu).empty


def test_a_releases_op_is_compared_as_python_calls_it(by_release):
    assert answers.op_from_python(by_release).empty
    of = by_release.samples
    graphs = of[(of["timer"] == "graph") & of["copy"].isin(["kvnb", "vllm==0.25.0"]) & (of["source"] == "contiguous")]
    as_fast = 2 * graphs["seconds"].where(graphs["copy"] == "kvnb").groupby(graphs["num_tokens"]).transform("median")
    called = graphs.assign(timer="eager", seconds=as_fast.where(graphs["copy"] != "kvnb", as_fast / 2))
    table = answers.op_from_python(answers.Run(pd.concat([of, called], ignore_index=True)))
    assert table[["release", "timer", "over", "problem"]].to_numpy().tolist() == [
        ["vllm==0.25.0", "eager", "kvnb", "8x128 NHD"]
    ]
    assert table.loc[0, "decode"].startswith("0.50 [0.50, 0.50] SLOWER")


def test_a_peer_that_beats_our_kernel_is_told_before_one_that_does_not(gpu):
    samples = gpu.samples[gpu.samples["copy"].isin(["kvnb", "kvnb.again", "flashinfer"])]
    slow, kvnb = samples["copy"] == "flashinfer", samples[samples["copy"] == "kvnb"]
    samples = samples.assign(seconds=samples["seconds"].where(~slow, 4 * samples["seconds"]))
    samples.loc[slow, "copy_version"] = "23715aa3ec, flashinfer-python 0.7.4"
    faster = kvnb.assign(copy="sglang", family="peer", seconds=kvnb["seconds"] / 1.5)
    run = answers.Run(pd.concat([samples, faster], ignore_index=True))
    first, second = answers.peers(run).split(": ", 1)[1].split("; ")
    most = run.speedups("sglang", "kvnb").sort_values("speedup", kind="stable").iloc[-1]
    cells = len(run.speedups("sglang", "kvnb"))
    assert first.startswith(f"sglang is faster than kvnb in {cells} of {cells} cells, up to {most['speedup']:.2f} [")
    assert most["speedup"] == pytest.approx(1.5, rel=1e-3)
    lost = f"flashinfer is faster than kvnb in 0 of {len(run.against('flashinfer'))} cells"
    assert second == f"{lost}. Installed: flashinfer-python 0.7.4."
    unknown = answers.Run(samples.assign(copy_version="23715aa3ec"))
    assert answers.peers(unknown).endswith(f": {lost}. Installed: the run does not say which.")
    table = answers.peers_table(run).set_index(["over", "problem"])
    assert table.loc[("sglang", "8x128 NHD"), "decode"].startswith("0.67 [0.67, 0.67] SLOWER")
    assert answers.peers(answers.Run(samples[samples["copy"].str.startswith("kvnb")])) == ""


def test_what_releases_cannot_do_is_listed(by_release):
    packed = "packed, slices of the fused projection"
    assert answers.release_failures(by_release).to_numpy().tolist() == [
        [packed, "unsupported", "vllm==0.4.2", 7, "its kernel knows no head stride"],
        [packed, "wrong", "vllm==0.8.5", 7, "slot 1: -0.5 should be untouched"],
    ]


def test_what_a_release_fails_is_told_by_problem_and_no_refusal_of_a_timer_or_state_is_among_it():
    made = fixture_runs._Run("failures", fixture_runs.H200, grid="releases")
    plain, tiny, turned = (fixture_runs._case(*at) for at in ((256,), (1,), (32,)))
    turned, packed = replace(turned, source="transposed"), replace(plain, layout="packed", source="qkv")
    for case in (plain, turned, packed):
        made.timed(case, "kvnb", "kernel", "graph", 2e-6)
    for copy in ("kvnb", "vllm==0.10.0", "vllm==0.4.2"):
        made.failed(tiny, copy, "kernel" if copy == "kvnb" else "peer", "graph", "unsupported", "needs too many sets")
    for copy in ("vllm==0.10.0", "vllm==0.4.2"):
        made.timed(plain, copy, "peer", "graph", 2e-6)
        made.failed(plain, copy, "peer", "eager", "unsupported", "the host's part is kvnb's")
        made.failed(turned, copy, "peer", "graph", "wrong", f"{copy} turned")
    made.failed(packed, "vllm==0.4.2", "peer", "graph", "wrong", "packed wrongly")
    made.failed(packed, "vllm==0.10.0", "peer", "graph", "unsupported", "misaligned")
    made.failed(packed, "vllm", "peer", "graph", "wrong", "no wheel's")
    packed = "packed, slices of the fused projection"
    assert answers.release_failures(answers.Run(made.samples())).to_numpy().tolist() == [
        [packed, "unsupported", "vllm==0.10.0", 1, "misaligned"],
        [packed, "wrong", "vllm==0.4.2", 1, "packed wrongly"],
        ["NHD, transposed heads", "wrong", "vllm==0.4.2, vllm==0.10.0", 2, "vllm==0.10.0 turned"],
    ]


def test_a_run_of_every_policy_is_told_by_the_default_ones(padding_file):
    run = answers.load(padding_file)
    assert set(run.samples.loc[run.samples["copy"] == "kvnb", "policy"]) == {"skip"}
    assert set(run.samples.loc[run.samples["copy"] == "torch.index_put", "policy"]) == {"null_slot"}
    whole = results.load(padding_file)
    assert set(whole.loc[whole["copy"] == "kvnb", "policy"]) > {"skip"}
    assert ". It beats our hand-written kernel (kvnb) in none of 9 cases (" in answers.headline(run)
    assert len(answers.provenance(run))


def test_the_newest_local_run_is_not_one_of_grid_padding(padding_file, tmp_path, monkeypatch, run_files):
    monkeypatch.setattr(paths, "LOCAL", tmp_path)
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    for age, file in enumerate((padding_file, run_files[0])):
        os.utime(shutil.copy(file, tmp_path / f"{age}.parquet"), (1000 - age, 1000 - age))
    assert answers.find_runs() == [tmp_path / "1.parquet"]


def test_scattered_rows_are_held_against_rows_in_slot_order():
    made = fixture_runs._Run("order", fixture_runs.H200)
    spread = fixture_runs._case(16384)
    in_order = replace(spread, slots="prefill", block_size=16384)
    for case, us in ((spread, 36.0), (in_order, 33.0), (replace(spread, slots="prefill"), 90.0)):
        made.timed(case, "kvnb", "kernel", "graph", us * 1e-6)
        made.timed(case, "limit.copy.memcpy", "limit", "graph", 35.0e-6)
        made.timed(case, "limit.copy", "limit", "graph", 32.0e-6)
    told = answers.scattered(answers.Run(made.samples()))
    blocks = r", 90\.\d us with whole blocks of 16 in random order \(16,384 tokens of 8x128 NHD\)"
    assert re.search(r"kvnb 36\.\d us against 33\.\d us, 1\.09 times as long" + blocks, told)
    assert re.search(r"limit\.copy 32\.\d us against 32\.\d us, 1\.00 times as long", told)
    assert answers.scattered(answers.Run(made.samples().query("block_size == 16"))) == ""
    without = answers.scattered(answers.Run(made.samples().query("block_size > 16 or slots == 'random'")))
    assert "1.09 times as long (16,384 tokens of 8x128 NHD)" in without


def with_limit(tokens: dict[int, float], machine: dict = fixture_runs.H200) -> answers.Run:
    """kvnb at these shares of limit.copy's speed, by number of tokens."""
    made = fixture_runs._Run("limit", machine)
    timer = "graph" if machine["gpu"] else "wall"
    for n, share in tokens.items():
        made.timed(fixture_runs._case(n), "kvnb", "kernel", timer, 1e-5 / share)
        made.timed(fixture_runs._case(n), "limit.copy", "limit", timer, 1e-5)
    return answers.Run(made.samples().assign(l2_bytes=60_000_000))


def test_where_kvnb_passes_the_limit_it_is_told_with_how_often_and_how_far(gpu):
    why = " at most 45 MB, three quarters of L2: what is copied stays there, and from one wave of threads up to that "
    why += "size limit.copy's own shape is not the best at every size."
    told = "kvnb itself, launched plainly, passes 100 % too: in "
    few = with_limit({256: 1.5, 4096: 1.05, 5000: 1.03, 16384: 0.94})  # 256 tokens are quoted nowhere
    assert answers.beyond_limit(few) == f"{told}2 of 3 cells, up to 105 % (4,096 tokens of 8x128 NHD). All move{why}"
    large = answers.beyond_limit(with_limit({4096: 1.05, 16384: 1.08}))
    assert large == f"{told}2 of 2 cells, up to 108 % (16,384 tokens of 8x128 NHD). 1 of them move{why}"
    assert answers.beyond_limit(with_limit({16384: 1.08})).endswith("NHD).")
    assert answers.beyond_limit(with_limit({4096: 1.05}, fixture_runs.H200 | {"gpu": ""})).endswith("NHD).")
    assert answers.beyond_limit(with_limit({4096: 0.97})) == answers.beyond_limit(gpu) == ""


@pytest.mark.parametrize("slower, way, cases", [
    ((0.96, 0.95, 0.94), "less", "1"), ((1.06, 1.04, 1.05), "more", "1"), ((1.06, 0.94, 1.05), "more", "none"),
])  # fmt: skip
def test_what_placement_does_to_one_kernel_is_told(slower, way, cases):
    made = fixture_runs._Run("placed", fixture_runs.H200)
    for tokens, copy in itertools.product((*range(1, 21), 4096), ("kvnb", "kvnb.again")):
        made.timed(fixture_runs._case(tokens), copy, "kernel", "graph", 1e-5)
    samples = made.samples().assign(seconds=1e-5)
    far = (samples["copy"] == "kvnb.again") & (samples["num_tokens"] == 4096)
    samples.loc[far, "seconds"] *= samples.loc[far, "worker"].map(dict(enumerate(slower)))
    so = ": workers repeat it, so that a single FASTER or SLOWER by so little can be placement" * (cases != "none")
    assert answers.placed(answers.Run(samples)) == (
        "Within a case placement moves a copy too, as each has its slots and its graph elsewhere in memory (NVIDIA "
        f"H200, grid full): kvnb.again, the same kernel as kvnb, takes up to 5.0% {way} time (4,096 tokens of 8x128 "
        f"NHD), and its interval lies beyond the margin of 2.0% in {cases} of 21 cases{so}."
    )


def test_of_placement_nothing_is_said_without_graphs_of_both(gpu, cpu):
    assert answers.placed(cpu) == ""
    assert answers.placed(answers.Run(gpu.samples[gpu.samples["copy"] != "kvnb.again"].reset_index(drop=True))) == ""
