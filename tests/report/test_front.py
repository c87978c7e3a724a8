"""What the front page says is what the runs say: numbers are recomputed here from raw samples."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from kvnb import paths
from kvnb.bench import results
from kvnb.report import answers, front, null_block

SHIPPED = "vllm==0.33.0"


def medians(run: answers.Run, a: str, b: str) -> np.ndarray:
    """Of the packed decode cases, the medians over (worker, round) of b's time / a's."""
    rows = run.samples.query("part == 'write' and timer == 'graph' and status == 'ok' and layout == 'packed'")
    rows = rows[rows["num_tokens"] <= 256]
    wide = rows.pivot(index=["num_kv_heads", "num_tokens", "worker", "round"], columns="copy", values="seconds")
    return (wide[b] / wide[a]).groupby(level=[0, 1]).median().to_numpy()


def cell_of(table: front.Matrix, layout: str, regime: str, copy: str) -> front.Cell | None:
    [cells] = [cells for *place, cells in table.rows if place == [layout, regime]]
    return cells[table.copies.index(copy)]


@pytest.mark.parametrize("kernel", [SHIPPED, "kvnb"])
def test_a_cell_is_the_mean_of_a_kernels_speedups(gpu, kernel):
    table, speedups = front.matrix(gpu, kernel), medians(gpu, kernel, "torch.index_put")
    cell = cell_of(table, "packed", "decode", "torch.index_put")
    assert cell.speedup == f"{np.exp(np.log(speedups).mean()):.2f}"
    assert cell.spread == f"6 cases from {speedups.min():.2f} to {speedups.max():.2f}"
    low, high = map(float, cell.ends.strip("[]").split(","))
    assert low <= float(cell.speedup) <= high and (cell.verdict, cell.but, cell.colour) == ("FASTER", "", "faster")
    assert cell.text == f"{cell.speedup} {cell.ends} FASTER"


def test_what_a_kernel_loses_is_in_its_cell(gpu):
    table = front.matrix(gpu, "kvnb")
    lossy = cell_of(table, "NHD", "prefill", answers.BEST)
    assert lossy.text.endswith(" UNDECIDED, but 2 of 9 SLOWER") and lossy.colour == "mixed"
    shipped = cell_of(front.matrix(gpu, SHIPPED), "NHD", "prefill", answers.PLAIN)
    assert shipped.verdict == "SLOWER" and float(shipped.speedup) < 1 and "but" not in shipped.text  # all 9 lose


def test_what_a_losing_kernel_wins_is_in_its_cell(gpu):
    rows = gpu.speedups(SHIPPED, answers.PLAIN).query("layout == 'NHD' and regime == 'prefill'").copy()
    rows.loc[rows.index[:2], ["speedup", "low", "high", "verdict"]] = 1.1, 1.09, 1.11, "FASTER"
    cell = front._cell(rows)
    assert cell.text.endswith(f" SLOWER, but 2 of {len(rows)} FASTER") and cell.colour == "slower"


def test_kvnb_is_held_against_all_and_vllms_kernel_against_pytorchs(gpu, old):
    vllm, ours = front.matrices(gpu)
    assert (vllm.kernel, ours.kernel, ours.copies[0]) == (SHIPPED, "kvnb", SHIPPED)
    assert {"triton", "flashinfer", "vllm.scalar"} <= set(ours.copies) and "triton" not in vllm.copies
    assert [table.kernel for table in front.matrices(old)] == ["kvnb"]
    assert cell_of(ours, "packed", "decode", "flashinfer") is None


def test_the_compact_table_holds_what_the_question_is_about(gpu):
    table = front.compact(gpu)
    assert table.copies == [SHIPPED, answers.BEST, "torch.index_put", "torch.compile"]
    assert {layout for layout, *_ in table.rows} == {"packed", "NHD"}
    lines = table.markdown().splitlines()
    assert len(lines) == 2 + 6 and {line.count("|") for line in lines} == {6}
    assert lines[0].startswith(f"| kvnb's speedup over | {SHIPPED} |") and lines[2].startswith("| packed, decode | ")


def test_a_reserved_slot_costs_time_where_much_is_padded(padded):
    text, found = front.reserve(padded), null_block.replayed()
    assert text.startswith("Time where much is padded, and one block: padding written to it, not skipped, slows ")
    for copy in padded.main:
        rows = padded.cost(copy)
        dear = rows[rows["verdict"] == "FASTER"]
        assert len(dear) and f"{copy} by up to {answers.times(rows['speedup'].max())} [" in text
        usual = [row.padding <= null_block.usual_share(found.shares, row.num_tokens) for row in dear.itertuples()]
        assert not any(usual)
    cases = sum(null_block.is_usual(padded.cost(copy), usual_of(padded, found)).sum() for copy in padded.main)
    little = "with no more padding than rounding up to vLLM's captured sizes (8 and 16 apart) usually leaves."
    assert f" times, but in none of the {cases} cases {little}" in text
    most = null_block.memory_rows().sort_values("percent").iloc[-1]
    assert text.endswith(
        f"In memory it is one block, at most {most['percent']:.2f} % of a pool of 60 GiB ({most['model']}, blocks of "
        f"{most['tokens']} tokens)."
    )
    assert text.count(". ") == 1 and len(text.split()) < 80, "two sentences, read in ten seconds"


def usual_of(run, found) -> dict[int, float]:
    return {tokens: null_block.usual_share(found.shares, tokens) for tokens in run.cells()["num_tokens"].unique()}


def test_a_slot_that_costs_no_time_and_one_that_costs_what_is_usual(padded, monkeypatch):
    same = padded.samples.assign(seconds=padded.samples.groupby("num_tokens")["seconds"].transform("median"))
    free = front.reserve(null_block.PaddedRun(same.assign(copy=same["copy"].str.split(" ").str[0])))
    assert free.startswith("No time, and one block: ") and "captured sizes" not in free
    cases = len(padded.cost("kvnb"))
    assert all(f"{copy} in none of {cases} padded cases" in free for copy in padded.main)
    monkeypatch.setattr(null_block, "usual_share", lambda *asked: 1.0)
    told, dear = front.reserve(padded), [(padded.cost(copy)["verdict"] == "FASTER").sum() for copy in padded.main]
    assert told.startswith("Time, and one block: ")
    assert f" times, and in {sum(dear)} of the {2 * cases} cases with" in told


def test_what_is_not_decided_is_not_counted_as_a_cost(padded):
    again = padded.samples["copy"].eq("kvnb.again")
    loud = padded.samples.assign(seconds=padded.samples["seconds"].mask(again, padded.samples["seconds"] * 3))
    loud = null_block.PaddedRun(loud.assign(policy="skip"))
    assert (loud.cost("kvnb")["verdict"] == "UNDECIDED").mean() > 0.5
    text = front.reserved(loud)
    assert text.startswith("Not decided, and one block: ") and " times, but in none of the " in text
    assert "A noise floor of " in text


def test_a_run_of_two_copies_and_without_a_release_is_answered(padded):
    two = padded.samples[padded.samples["copy"].isin(["kvnb", "kvnb null_slot"])].assign(policy="skip")
    text = front.reserved(null_block.PaddedRun(two))
    assert "slows kvnb by up to " in text and "vllm==" not in text
    assert text.endswith("A difference below 2.0% counts as none: no noise floor was measured.")
    alone = null_block.PaddedRun(padded.samples[padded.samples["family"].eq("torch")].assign(policy="skip"))
    assert front.reserved(alone).startswith("Not measured in time: no kernel of this run both skips padding")


def test_without_a_run_of_grid_padding_only_memory_is_known():
    text = front.reserve(None)
    assert text.startswith("Not timed yet: no run of grid padding is recorded yet (make record GRID=padding).")
    assert "In memory it is one block" in text and front.reserved(None) == text


def test_a_page_says_how_its_run_is_made_again(gpu, old, padded, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    recorded, local = tmp_path / "h200" / "a.parquet", tmp_path.parent / "mine.parquet"
    commit = gpu.first["kvnb_commit"][:7]
    asked = [command for command, _ in front.commands(gpu, recorded)]
    assert asked == [
        "make render GPU=h200", f"git checkout {commit}", ".venv/bin/kvnb releases 0.33.0",
        "make record GRID=full ROUNDS=5",
    ]  # fmt: skip
    assert [command for command, _ in front.commands(old, local)] == ["make report GRID=full ROUNDS=5"]
    failed = answers.Run(gpu.samples.assign(status="error"))
    assert front.commands(failed, recorded)[-1][0] == "make record GRID=full"
    assert [command for command, _ in front.commands(padded, recorded)][-2:] == [
        ".venv/bin/kvnb releases 0.33.0", "make record GRID=padding ROUNDS=5",
    ]  # fmt: skip
    usual = answers.Run(gpu.samples.assign(round=gpu.samples["round"] * 2 + 1))  # 10 rounds, of 3 workers
    assert front.commands(usual, recorded)[-1][0] == "make record GRID=full"


def test_limits_of_the_claim_hold_what_placement_does_in_a_run_of_ones_own_too(gpu, cpu, tmp_path):
    assert front.elsewhere(gpu, tmp_path / "mine.parquet") == [answers.placed(gpu)] != [""]
    assert front.elsewhere(cpu, tmp_path / "mine.parquet") == []


def test_method_is_five_lines_with_the_runs_numbers(gpu, cpu):
    assert len(front.method(gpu)) == len(front.method(cpu)) == 5
    assert "timer graph" in front.method(gpu)[0] and "timer wall" in front.method(cpu)[0]
    assert front.method(gpu)[2].startswith("3 workers") and "5 rounds" in front.method(gpu)[2]


def test_provenance_holds_the_files_digest(gpu, tmp_path):
    path = results.save(gpu.samples, tmp_path / "run.parquet")
    assert dict(front.provenance(gpu, path))["SHA-256 of its file"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_summary_is_for_an_issue(gpu, padded):
    text = front.summary([gpu], [padded])
    assert text.startswith(f"# NVIDIA H200, torch 2.13.0, {gpu.first['utc'][:10]}")
    cost = f"{front.reserve(padded)} {null_block.certainty(padded)}"
    assert "kvnb 0123abc." in text.split("grid padding, run padding-run, ")[1]
    for part in (answers.answer(gpu), f"{answers.scope(gpu)} {answers.certainty(gpu)}", cost, answers.note([gpu])):
        assert part in text
    tables = re.findall(r"(?:^\|.+\n)+", text, re.MULTILINE)
    assert [table.rstrip("\n") for table in tables] == [table.markdown() for table in front.matrices(gpu)]
    assert "](" not in text, "a relative link leads nowhere in an issue"


def test_what_is_told_names_timer_and_state_once_a_run_and_in_order(gpu, cpu, padded):
    text = front.told([gpu], [padded])
    assert text.split("\n\n")[1:3] == [answers.answer(gpu), f"{answers.scope(gpu)} {answers.certainty(gpu)}"]
    assert all(text.count(name) == 1 for name in ("(timer graph)", "(timer eager)", "(state produced)"))
    both = front.told([cpu, gpu], [])
    assert both.count("(timer wall)") == both.count("(timer graph)") == 1 and both.count("(state produced)") == 2
    assert f"\n\n{gpu.machine}, grid full: {answers.answer(gpu)}\n\n" in both
    failed = answers.Run(gpu.samples.assign(status="error"))
    assert front.told([failed], []).split("\n\n")[1:3] == [answers.answer(failed), answers.certainty(failed)]


@pytest.mark.parametrize("commit, dirty, told", [
    ("0123abcdef", False, ("git checkout 0123abc", "the code that measured:")),
    ("0123abcdef", True, ("git checkout 0123abc", "the code that measured, but for changes of its own:")),
    ("tree-0123", False, None),
])  # fmt: skip
def test_a_record_names_the_code_that_measured_it(gpu, commit, dirty, told):
    run = answers.Run(gpu.samples.assign(kvnb_commit=commit, dirty=dirty))
    said = front.commands(run, paths.RECORDED / "h200" / "x.parquet")
    assert [pair for pair in said if pair[0].startswith("git")] == ([told] if told else [])
