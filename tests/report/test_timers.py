"""What 06_timers says and shows of the claims about our timers."""

from __future__ import annotations

from functools import partial

import pandas as pd
import pytest

from kvnb.bench import counters, witness
from kvnb.bench.witness import row
from kvnb.problem.case import Case
from kvnb.report import answers, timers

US = 1e-6


def test_what_has_no_bound_is_not_said_to_hold():
    assert not any("holds" in text for text in timers.told(witness.table([row("write-back", 2.0, 1.0)])))


@pytest.mark.parametrize("apart, said", [
    ([(0.01, 0.02), (0.01, 0.02)], "Yes: 2 of 2 claims hold in every row that is judged; 4 of 4 rows hold."),
    ([(0.01, 0.2), (0.01, 0.02)], "No: 1 of 2 claims hold in every row that is judged; 3 of 4 rows hold."),
    ([(0.01, 0.2), (0.01, 0.02), (0.01,)], "Mostly: 2 of 3 claims hold in every row that is judged; 4 of 5 rows hold."),
    ([], "Not known: nothing that has a bound was measured."),
])  # fmt: skip
def test_the_answer_is_a_line_that_counts_claims_and_rows(apart, said):
    claims = ("noise floor", "two processes", "profiler")
    rows = [row(claim, at, sense="at most", bound=0.1, difference=at)
            for claim, differences in zip(claims, apart) for at in differences]  # fmt: skip
    assert timers.verdict(witness.table([*rows, row("write-back", 2.0, 1.0)])) == said


def test_what_the_profilers_watching_costs_is_told_with_its_claim():
    rows = [row("profiler", 20 * US, 20 * US, "within", 0.05, copy="a"), row("watching", 22 * US, 20 * US, copy="a"),
            row("watching", 9 * US, 5 * US, copy="b")]  # fmt: skip
    [text] = [text for text in timers.told(witness.table(rows)) if text.startswith("**profiler**")]
    assert text.endswith(": holds in 1 of 1; watching makes calls take up to 10.0% longer (a).")


def test_timers_that_two_processes_are_not_judged_by_are_told_with_the_claim():
    share = partial(row, "two processes", unit="share")
    rows = [share(0.97, sense="at least", bound=0.95, difference=0.97, timer="graph"),
            share(0.48, difference=0.48, timer="call", state="cold"), share(0.25, difference=0.25, timer="host"),
            share(0.31, difference=0.31, timer="call", state="resident")]  # fmt: skip
    [text] = [text for text in timers.told(witness.table(rows)) if text.startswith("**two processes**")]
    assert text.endswith(": holds in 1 of 1; not judged: `call`, `host`, in 25% to 48% of cells.")


def test_what_does_not_hold_is_told_first_and_named():
    rows = [row("noise floor", 0.02, sense="at most", bound=0.1, difference=0.02, unit="share"),
            row("profiler", 20 * US, 10 * US, "within", 0.05, timer="graph", case="c", copy="kvnb")]  # fmt: skip
    first, second, *others = timers.told(witness.table(rows))
    assert first.startswith("**profiler**") and "holds in 0 of 1; not in graph/kvnb/c" in first
    assert second.startswith("**noise floor**") and "holds in 1 of 1" in second
    assert len(others) == len(timers.CLAIMS) - 2 and all("not measured" in text for text in others)


def test_cells_are_shown_with_units_and_without_empty_columns():
    rows = witness.table([row("profiler", 20 * US, 10 * US, "within", 0.05, timer="graph")])
    assert timers.shown(rows, "profiler").to_dict("records") == [
        {"timer": "graph", "ours": "20.00 us", "witness": "10.00 us", "difference": "+100.0%", "bound": "within 5%",
         "holds": "no"}
    ]  # fmt: skip
    assert timers.shown(rows, "nvbench").empty


def test_what_watching_costs_is_told_of_calls_that_are_judged():
    costs = [("a", "graph", 22, 20), ("a", "graph", 12.1, 11), ("a", "graph", 33, 20), ("a", "graph", 9, 5),
             ("b", "call", 19, 20)]  # fmt: skip
    rows = witness.table([row("watching", ours * US, theirs * US, copy=copy, timer=timer)
                          for copy, timer, ours, theirs in costs])  # fmt: skip
    assert timers.watching(rows).to_dict("records") == [
        {"copy": "a", "call": "", "graph": "+10.0%, at most +65.0%"},
        {"copy": "b", "call": "-5.0%, at most -5.0%", "graph": ""},
    ]
    assert timers.watching(rows).columns.name is None, "to_html would give every row an empty header"
    assert timers.watching(rows[:0]).empty


def made_by(run: answers.Run, *rows: dict, columns: list[str], **elsewhere: object) -> pd.DataFrame:
    """A table of `seen` from where the run is from, but for what is `elsewhere`."""
    place = {name: run.first[name] for name in counters.PROVENANCE} | elsewhere
    return pd.DataFrame([at | place for at in rows], columns=[*columns, *counters.PROVENANCE])


def of_a_call(copy: str, *written: float) -> list[dict]:
    """Rows of ncu, a kernel each: a flushed call of 16,384 tokens."""
    case = Case(16384)
    at = {"copy": copy, "case": str(case), "timer": "call", "bytes_moved": case.bytes_moved, "dram_read": 1.0}
    return [at | {"dram_written": bytes_} for bytes_ in written]


@pytest.mark.parametrize("elsewhere, kvnb, said", [
    ({}, "", ""),
    ({"kvnb_commit": "tree-fedcba9876"}, "fedcba9", " are of kvnb fedcba9, measured earlier"),
    ({"gpu_uuid": "1", "utc": "2026-12-01T00:00:00Z"}, "0123abc",
     " are of the same kvnb, measured later on another NVIDIA H200"),
    ({"gpu_uuid": "1", "gpu": "NVIDIA B200", "kvnb_commit": "89abcdef0"}, "89abcde",
     " are of kvnb 89abcde, measured earlier on NVIDIA B200"),
])  # fmt: skip
def test_what_is_not_the_runs_is_named_in_the_answer_in_each_row_and_in_the_provenance(gpu, elsewhere, kvnb, said):
    elsewhere = {"utc": "2026-11-29T00:00:00Z"} | elsewhere
    measured = made_by(gpu, row("nvbench", 2.0, 1.0, copy="a"), columns=witness.COLUMNS)
    counted = made_by(gpu, *of_a_call("kvnb", 1.0), columns=counters.COLUMNS, **elsewhere)
    chain = [at | {"timer": "graph", "state": "cold", "calls": 1, "passes": 1} for at in of_a_call("limit.copy", 1.0)]
    rows = timers.gathered(gpu, measured, made_by(gpu, *chain, columns=counters.COLUMNS, **elsewhere))
    assert set(rows.loc[rows["claim"] == "states by DRAM bytes", "kvnb"]) == {kvnb}
    assert set(rows.loc[rows["claim"] != "states by DRAM bytes", "kvnb"]) == {""}
    tables = {claim: timers.shown(rows, claim) for claim in ("states by DRAM bytes", "nvbench", "noise floor")}
    captions = {claim: table.attrs.get("caption", "") for claim, table in tables.items()}
    assert captions == {"states by DRAM bytes": kvnb and f"kvnb {kvnb}", "nvbench": "", "noise floor": ""}
    assert not any("kvnb" in table for table in tables.values())
    mixed = rows.assign(claim="nvbench", kvnb=["0123abc", *rows["kvnb"][1:]])
    assert timers.shown(mixed, "nvbench")["kvnb"].iloc[0] == "0123abc"
    told = timers.origins(gpu, measured, counted)
    assert told == "The run is of kvnb 0123abc" + (said and f"; the counters{said}") + "."
    made = timers.provenance(measured, counted).set_index("what")
    assert [*made] == ["the profiler, waits and nvbench", "the counters"]
    assert made.loc["kvnb_commit"].tolist() == ["0123abc", elsewhere.get("kvnb_commit", "0123abc")]


def test_what_was_never_measured_has_no_origin(gpu):
    measured, counted = (made_by(gpu, columns=columns) for columns in (witness.COLUMNS, counters.COLUMNS))
    assert timers.origins(gpu, measured, counted) == "The run is of kvnb 0123abc."
    assert timers.provenance(measured, counted).empty
    assert set(timers.gathered(gpu, measured, counted)["claim"]) == {"noise floor", "two processes"}


def test_beside_the_write_back_stands_what_ncu_says_was_left_unwritten(gpu):
    """67.2 MB are to be written; of two kernels the sum of both counts. Nothing where that call was not counted."""
    cells = [row("write-back", 2.0, 1.0, copy=copy, case=str(Case(tokens)))
             for copy, tokens in (("kvnb", 16384), ("two", 16384), ("kvnb", 4096), ("limit.copy", 16384))]  # fmt: skip
    rows, none = witness.table(cells), made_by(gpu, columns=counters.COLUMNS)
    counts = [*of_a_call("kvnb", 45.1e6), *of_a_call("two", 20e6, 30e6), *of_a_call("limit.copy", float("nan"))]
    counts += [at | {"timer": "graph"} for at in of_a_call("limit.copy", 1.0)]
    counted = made_by(gpu, *counts, columns=counters.COLUMNS)
    assert timers.write_back(rows, counted)[timers.UNWRITTEN].tolist() == ["22 MB", "17 MB", "", ""]
    assert timers.write_back(rows, counted, "0df2b40")[timers.UNWRITTEN].iloc[0] == "22 MB (0df2b40)"
    assert timers.UNWRITTEN not in timers.write_back(rows, none) and len(timers.write_back(rows, none)) == 4
    assert timers.write_back(rows[:0], counted).empty


def test_a_record_is_found_again_by_its_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(witness, "CASES", ())  # nothing but the row that nvbench is not here
    monkeypatch.setattr(timers.paths, "RECORDED", tmp_path)
    monkeypatch.setattr(witness.machine, "package_version", lambda name: "")
    for gpu_name, day in (("A", 1), ("B", 2), ("A", 3)):
        monkeypatch.setattr(counters, "provenance", lambda device, gpu=gpu_name, day=day: {
            **dict.fromkeys(counters.PROVENANCE, ""), "gpu": gpu, "utc": day})  # fmt: skip
        path = witness.record(tmp_path / gpu_name.lower() / f"2026-12-0{day}_timers_0123abc.parquet", "cpu")
        assert [file.name for file in path.parent.glob("*") if day == 1] in ([], [path.name])
    newest, counted = timers.seen("cpu", "auto", "A")
    assert newest["utc"].tolist() == [3] and newest.columns.tolist() == [*witness.COLUMNS, *counters.PROVENANCE]
    assert counted.empty and timers.counts(counted).empty
    assert timers.seen("cpu", "no", "C")[0].empty
    with pytest.raises(ValueError, match="live = 'yes' needs a CUDA GPU, and device is cpu"):
        timers.seen("cpu", "yes", "A")


def test_dram_bytes_are_shown_as_shares_of_what_is_read_and_what_is_written():
    case = Case(16384)
    half = case.bytes_moved / 2
    at = {"copy": "kvnb", "case": str(case), "timer": "call", "bytes_moved": case.bytes_moved, "seconds": 33.5e-6}
    counted = at | {"dram_read": half, "dram_written": half / 4, "l2": 3 * half, "registers": 32, "in_flight": 20_480.0}
    counted |= {"threads": 2_097_152, "warps": 32}
    rows = [counted | {"timer": "graph", "seconds": 1.0}, counted, {"reason": "no ncu"}]
    shown = timers.counts(pd.DataFrame(rows, columns=counters.COLUMNS))
    assert shown["why"].tolist() == ["", "no ncu"]  # a graph's counts are about states
    first = shown.iloc[0].to_dict()
    assert (first["DRAM read, %"], first["DRAM written, %"], first["time, us"]) == ("100", "25", "33.5")
    assert float(first["L2, MB"]) == pytest.approx(3 * half / 1e6, rel=1e-3)
    assert (first["in flight, KB per SM"], first["registers"], first["threads"]) == ("20.48", "32", "2,097,152")
    loops = timers.counts(pd.DataFrame([counted | {"in_flight": 460_000.0}], columns=counters.COLUMNS))
    assert loops["in flight, KB per SM"].tolist() == ["131.1"] and "why" not in loops  # 32 warps of 32 x 32 registers
