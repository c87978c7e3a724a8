"""TODO 1's sentences and tables: recomputed here from raw samples, and from how the fixture was made."""

from __future__ import annotations

import io
import itertools
import re

import fixture_runs
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from kvnb import machine, paths
from kvnb.bench import run as bench_run
from kvnb.problem import models
from kvnb.problem.case import CASE_FIELDS, PADDING_SHARES, grid
from kvnb.report import answers, null_block, parameters, plots
from kvnb.report.null_block import HEAVY, PaddedRun

SHARES = pd.DataFrame(  # of 100 steps that round up to 8 rows, 5 leave more than 12.5 %; nothing else occurs
    {"captured": "8 and 16 apart", "batch": [7] * 96 + [5] * 4, "rows": 8, "share": [0.125] * 96 + [0.375] * 4}
)
POWERS = pd.DataFrame({"captured": "powers of two", "batch": 300, "rows": 512, "share": [212 / 512] * 9})
BOTH = pd.concat([SHARES, POWERS])
CAPACITY = pd.DataFrame(
    {"usable blocks": [100, 99, 92], "most held": 5, "held in the mean": [4.25, 4.125, 4], "preempted": 7, "steps": 9}
)
FOUND = null_block.Replayed("a trace", pd.DataFrame(), SHARES, CAPACITY)


def ratios(run: PaddedRun, name: str, over: str) -> pd.DataFrame:
    """Per padded case, the median over rounds of the time of `over` / that of `name`, from raw samples."""
    rows = run.samples.query("timer == 'graph' and part == 'write' and padding > 0 and status == 'ok'")
    wide = rows.pivot(index=[*CASE_FIELDS, "worker", "round"], columns="copy", values="seconds")
    return (wide[over] / wide[name]).groupby(list(CASE_FIELDS)).median().dropna().rename("speedup").reset_index()


def test_each_policy_is_a_copy_of_its_own_and_skip_keeps_the_name(padded):
    names = set(padded.samples["copy"])
    assert {"kvnb", "kvnb null_slot", "torch.index_put last_slot", "vllm==0.33.0", "limit.copy"} <= names
    assert "torch.index_put" not in names and "kvnb skip" not in names
    assert padded.main == ["vllm==0.33.0", "kvnb"] and padded.hand == "vllm==0.33.0"
    assert padded.drawn == ["vllm==0.33.0", "kvnb", "torch.index_put", "torch.index_copy_wide"]


@pytest.mark.parametrize("policy", null_block.NULL)
def test_a_cost_is_how_many_times_longer_a_policy_takes(padded, policy):
    cost = padded.cost("kvnb", policy).set_index(["layout", "padded", "num_tokens", "padding"])["speedup"]
    cases = [case for case in grid("padding") if case.padding]
    assert len(cost) == len(cases)
    for case in cases:
        known = [fixture_runs.padded_seconds("kvnb", case, name) for name in (policy, "skip")]
        here = cost[case.layout, case.padded, case.num_tokens, case.padding]
        assert here == pytest.approx(known[0] / known[1], rel=0.01)


def test_the_first_line_says_what_one_slot_costs_and_from_where(padded):
    (question, told), *_ = null_block.decision(padded, FOUND)
    assert question == "When it is not free"
    for copy in ("vllm==0.33.0", "kvnb"):
        rows = ratios(padded, copy, f"{copy} null_slot")
        dear = rows[rows["speedup"] > 1.021]
        worst, fewest = dear["speedup"].max(), (dear["num_tokens"] * dear["padding"]).round().min()
        clause = next(clause for clause in re.split("not skipped, |; ", told) if clause.startswith(copy))
        assert clause.startswith(f"{copy} takes longer in {len(dear)} of {len(rows)} padded cells, from {fewest:.0f} ")
        assert f"up to {worst:.1f} [" in clause and "(94% padded, 8,192 tokens of 8x128 NHD)" in clause
        heavy = rows.loc[rows["padding"] == HEAVY, "speedup"].max()
        assert f"and to {heavy:.2f} at 75%" in clause


def test_the_second_line_counts_only_the_padding_that_occurs(padded):
    told = null_block.decision(padded, FOUND)[1][1]
    reached = [case for case in grid("padding") if case.num_tokens == 8 and 0 < case.padding <= 0.125]
    assert f"vllm==0.33.0 takes longer in 0 of {len(reached)} cells and as long in {len(reached)}; kvnb" in told
    sizes = "vLLM's captured sizes (1, 2, 4, multiples of 8 up to 256, of 16 up to 512)"
    assert f"Rounding a batch up to {sizes} usually leaves at most 12% of 8 rows padded. With no more, vllm==" in told
    assert null_block.memory() in told and "powers of two" not in told, "which left nothing"


def test_capacity_is_of_a_pool_made_scarce_and_apart_from_memory():
    pool = "(100 blocks of 16 tokens, a trace, load 2)"
    told = "in the mean: 4.25 with all of them, 4.12 with 1 less, 4.00 with 8 less."
    assert null_block.held(FOUND) == f"Requests that a pool made scarce {pool} holds {told}"
    assert f"of a pool of 60 GiB. {null_block.held(FOUND)}" in null_block.decision(None, FOUND)[1][1]


def test_powers_of_two_leave_more_and_what_that_costs_stands_beside(padded):
    told = null_block.decision(padded, null_block.Replayed("a trace", pd.DataFrame(), BOTH, CAPACITY))[1][1]
    ours, theirs = told.split("Rounding a batch up to ")[1:]
    assert ours.startswith("vLLM's captured sizes (") and " up to " not in ours.split("With no more")[1]
    assert theirs.startswith("powers of two usually leaves at most 41% of 512 rows padded. With no more, ")
    rows = ratios(padded, "kvnb", "kvnb null_slot").query("num_tokens == 512")
    within, above = rows[rows["padding"] <= 0.41], rows[rows["padding"] == 0.5]
    dear = (within["speedup"] > 1.021).sum()
    assert 0 < dear < len(within)
    clause = theirs.split("kvnb takes ")[1]
    assert clause.startswith(f"longer in {dear} of {len(within)} cells")
    assert f", up to {within['speedup'].max():.2f} [" in clause and "(25% padded, 512 tokens" in clause
    assert f"at the next larger share measured up to {above['speedup'].max():.2f} [" in clause


def test_where_a_small_share_costs_the_second_line_says_so(padded):
    slow = padded.samples["copy"].eq("kvnb null_slot") & padded.samples["num_tokens"].eq(8)
    samples = padded.samples.assign(seconds=padded.samples["seconds"] * np.where(slow, 2, 1), policy="skip")
    told = null_block.decision(PaddedRun(samples), FOUND)[1][1]
    assert re.search(r"kvnb takes longer in (\d) of \1 cells and as long in 0, up to [12]\.\d\d \[", told)


def test_the_third_line_names_the_policy_with_the_least_worst_cost(padded):
    told = null_block.decision(padded, FOUND)[2][1]
    assert "Let the kernel skip (times of skipping, in the worst cell of vllm==0.33.0 and kvnb: " in told
    most = 8 * null_block.memory_rows()["percent"].max()
    to = f"send it to null_blocks (8 blocks, at most {most:.2f} % of a pool of 60 GiB); speedup over one null slot"
    assert f"Where an index copy must write padding, {to}, 75% padded and more: torch.index_put" in told
    for policy in null_block.NULL:
        worst = []
        for copy in padded.main:
            dear = ratios(padded, copy, f"{copy} null_slot")["speedup"] > 1.021
            worst.append(ratios(padded, copy, f"{copy} {policy}")["speedup"][dear].max())
        assert f"{answers.times(max(worst))} with {policy}" in told
        if policy != "null_slot":
            for copy in ("torch.index_put", "torch.index_copy_wide"):
                rows = ratios(padded, f"{copy} {policy}", f"{copy} null_slot")
                gain = np.exp(np.log(rows[rows["padding"] >= HEAVY]["speedup"]).mean())
                assert re.search(rf"{re.escape(answers.label(copy))} {gain:.2f} \[[\d., ]+\] with {policy}[,.]", told)
    assert null_block.POISON in told


def test_index_copies_are_advised_by_their_own_times(padded):
    slow = padded.samples["copy"].isin([f"{copy} null_blocks" for copy in ("torch.index_put", "torch.index_copy_wide")])
    seconds = padded.samples["seconds"]
    told = {}
    for name, worse in (("null_block", slow), ("none", slow | padded.samples["copy"].str.endswith(" null_block"))):
        samples = padded.samples.assign(seconds=seconds * np.where(worse, 9, 1), policy="skip")
        told[name] = null_block.decision(PaddedRun(samples), FOUND)[2][1]
    assert "send it to null_block (1 block, at most " in told["null_block"]
    assert "padding, spreading it does not help; speedup" in told["none"]
    kernels = padded.samples[~padded.samples["family"].eq("torch")].assign(policy="skip")
    text = null_block.decision(PaddedRun(kernels), FOUND)[2][1]
    assert "No index copy of this run says how to spread padding." in text and "nan" not in text


def test_certainty_is_the_runs_own(padded):
    rows = padded.samples
    assert null_block.certainty(padded) == (
        "In brackets: 95 % intervals, from 3 workers of up to 5 rounds. A difference below 2.0% counts as none."
    )
    few = PaddedRun(rows[rows["worker"].le(0) & rows["round"].lt(2)].assign(policy="skip"))
    assert "from 1 worker (not 3: they are too short) of up to 2 rounds." in null_block.certainty(few)
    again = rows["copy"].eq("kvnb.again")
    for by, low, told in ((1.05, 0.045, "A difference below {:.1%} counts"), (2, 0.9, "A noise floor of {:.0%} hides")):
        loud = PaddedRun(rows.assign(seconds=rows["seconds"] * np.where(again, by, 1), policy="skip"))
        margin = loud.cost("kvnb")["margin"].max()
        assert low < margin < 1.2 * by and told.format(margin) in null_block.certainty(loud)
    silent = PaddedRun(rows[rows["family"].eq("torch")].assign(policy="skip"))
    assert null_block.certainty(silent).endswith("rounds."), "no kernel, no margin"


def test_where_nothing_costs_nothing_is_advised(padded):
    cheap = padded.samples[padded.samples["num_tokens"] == 8].assign(policy="skip")
    first, _, third = (told for _, told in null_block.decision(PaddedRun(cheap), FOUND))
    assert "kvnb takes longer in 0 of" in first and "up to" not in first.split("kvnb")[1].split(",")[0]
    assert third == f"No kernel of this run pays for one null slot. {null_block.POISON}"


def test_without_a_run_what_the_cpu_knows_is_said_and_nothing_of_time():
    first, second, third = (told for _, told in null_block.decision(None, FOUND))
    assert "not measured" in first and "make record GRID=padding" in first
    assert null_block.memory() in second and "(100 blocks" in second and "not measured" in second
    assert third.startswith(null_block.POISON)
    assert not re.search("FASTER|SLOWER|SAME|UNDECIDED|free", " ".join((first, second, third)))


def test_pytorch_is_held_against_the_kernel_that_skips(padded):
    texts = null_block.sentences(padded)
    assert [text.split(" with ")[0] for text in texts] == ["torch.index_put (the issue's)", "torch.index_copy_wide"]
    rows = ratios(padded, "torch.index_copy_wide null_blocks", "vllm==0.33.0")["speedup"]
    slower, faster = (rows < 1 / 1.021).sum(), (rows > 1.021).sum()
    assert f"null_blocks against vllm==0.33.0 skipping: slower in {slower} of {len(rows)} padded cells" in texts[1]
    assert f"faster in {faster}, by up to {rows.max():.2f} [" in texts[1]


def test_the_policy_table_is_over_one_null_slot_in_the_same_cells(padded):
    table = null_block.policy_table(padded, HEAVY).set_index(["copy", "padding"])
    rows = ratios(padded, "kvnb null_block", "kvnb null_slot")
    rows = rows[(rows["padding"] >= HEAVY) & (rows["layout"] == "NHD") & (rows["padded"] == "scattered")]["speedup"]
    cell = table.loc[("kvnb", "NHD, scattered"), "null_block"]
    assert cell.startswith(f"{np.exp(np.log(rows).mean()):.2f} [") and f"({len(rows)} cells from" in cell
    assert table.loc[("torch.index_put (the issue's)", "NHD, tail"), "last_slot"].split()[3] == "SAME"
    assert table.loc[("kvnb", "packed, scattered"), "remap"] == "", "kernels do not remap"


def test_remap_and_filter_pay_once_per_step(padded):
    table = null_block.step_table(padded).set_index(["timer", "copy, policy", "layout"])
    assert list(table) == ["8", "32", "128", "512", "2,048", "8,192"]
    assert table.loc[("eager", "torch.index_put, filter", "NHD"), "8,192"].startswith("140 us + ")
    case = next(case for case in grid("padding") if (case.num_tokens, case.padding) == (512, HEAVY))
    written = 1e6 * fixture_runs.padded_seconds("torch.index_put", case, "remap")
    step, write = table.loc[("graph", "torch.index_put, remap", "NHD"), "512"].split(" us + ")
    assert (step, float(write.removesuffix(" us"))) == ("2.50", pytest.approx(written, rel=0.01))
    assert "graph" not in table.xs("torch.index_put, filter", level=1).index.get_level_values("timer")


def test_shares_are_what_the_steps_say():
    row = null_block.shares_table(SHARES).iloc[0]
    assert (row["batches"], row["steps"], row["median"]) == ("1 to 8", "100.0%", "12.5%, 1 row")
    assert (row["95% of steps at most"], row["at most"]) == ("12.5%, 1 row", "37.5%, 3 rows")
    assert [null_block.usual_share(SHARES, tokens) for tokens in (8, 16)] == [0.125, 0.0]
    assert [null_block.usual_share(BOTH, 512, name) for name in null_block.SIZES] == [0, 212 / 512]


def test_memory_is_of_every_model_and_block_size():
    rows = null_block.memory_rows()
    assert len(rows) == len(models.CACHES) * len(null_block.BLOCK_SIZES)
    llama = rows[(rows["model"] == "Llama-3.1-8B") & (rows["block_size"] == 16)].iloc[0]
    assert (llama["MiB"], llama["percent"]) == (2.0, pytest.approx(100 / 30_720))
    table = null_block.memory_table()
    assert list(table["model"]) == [model.title for model in models.CACHES]
    largest = rows[rows["model"] == "Llama-3.1-405B, TP 16"].set_index("block_size")["MiB"]
    assert largest[256] == 126 * 256 * 2 * 128 * 2 / 2**20, "one of its 8 KV heads on each GPU"
    assert null_block.bill() == f"at most {rows['percent'].max():.2f} % of a pool of 60 GiB"
    assert list(table["source"]) == [model.source for model in models.CACHES]


def test_models_stand_on_as_many_gpus_as_hold_them_and_no_more():
    degrees = {model.name.split(" ")[0]: model.tp for model in models.CACHES}
    known = {"Llama-3.1-8B": 1, "Qwen3-32B": 1, "Llama-3.1-70B": 2, "Llama-3.1-405B": 16, "Qwen3-235B-A22B": 8}
    assert degrees.items() >= known.items()
    for model in models.CACHES:
        left = [141e9 - model.gigabytes * 1e9 / tp - 60 * 2**30 for tp in (model.tp, model.tp / 2)]
        assert left[0] >= 0 and (left[1] < 0 or model.tp == 1)
        assert model.title == (f"{model.name}, TP {model.tp}" if model.tp > 1 else model.name)


@pytest.mark.parametrize("copy", ["kvnb", "torch.index_put"])
def test_the_figure_of_a_copy_has_a_panel_per_size_and_a_line_per_policy(padded, copy):
    fig = plots.padding(padded, copy, SHARES)
    assert [ax.get_title(loc="left") for ax in fig.axes] == [f"{n:,} tokens" for n in (8, 32, 128, 512, 2048, 8192)]
    policies = set(fixture_runs.POLICIES[copy]) & set(null_block.DRAWN) | {"limit.copy"}
    ranks = {f"CP {ranks}" for ranks in null_block.RANKS}
    assert all({text.get_text() for text in ax.texts} == policies | ranks for ax in fig.axes)
    spans = [[patch.get_x() + patch.get_width() for patch in ax.patches] for ax in fig.axes]
    assert spans == [[0.125], [], [], [], [], []], "shares that occur, where they do"
    line = next(line for line in fig.axes[-1].lines if line.get_label() == "null_slot")
    case = next(case for case in grid("padding") if (case.num_tokens, case.padding) == (8192, 0.94))
    known = 1e6 * fixture_runs.padded_seconds(copy, case, "null_slot")
    assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (0.94, pytest.approx(known, rel=0.01))
    words = " ".join(text.get_text() for text in fig.texts)
    assert f"{padded.machine}, torch 2.13.0" in words and copy in words
    ticks = [list(ax.get_xticks()) for ax in fig.axes]
    assert ticks[-1] == list(PADDING_SHARES) and ticks[0] == [0, 0.12, 0.25, 0.5, 0.75], "measured shares only"


@pytest.mark.parametrize("longest", [8192, 8])
def test_every_panel_spans_the_same_ratio_of_times(padded, longest):
    fewer = PaddedRun(padded.samples[padded.samples["num_tokens"] <= longest].assign(policy="skip"))
    fig = plots.padding(fewer, "kvnb", SHARES)
    ratios = [high / low for low, high in (ax.get_ylim() for ax in fig.axes)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios)) and ratios[0] >= 4, "small differences look small"
    for ax in fig.axes:
        low, high = ax.get_ylim()
        assert all(low < y < high for line in ax.lines for y in line.get_ydata() if line.get_label() in null_block.NULL)


def test_names_of_policies_do_not_overlap(padded):
    batches = pd.DataFrame({"batch": [5, 40, 200, 400], "rows": 512, "share": [0.3, 0.31, 0.3, 0.29]})
    shares = pd.concat(batches.assign(captured=name) for name in ("8 and 16 apart", "powers of two"))
    for fig in (plots.padding(padded, "torch.index_put", SHARES), plots.padded_shares(shares, "x")):
        renderer = FigureCanvasAgg(fig).get_renderer()
        fig.draw(renderer)
        boxes = [Text.get_window_extent(text, renderer) for ax in fig.axes for text in ax.texts]
        assert not any(a.shrunk(1, 0.8).overlaps(b.shrunk(1, 0.8)) for a, b in itertools.combinations(boxes, 2))
        assert all(box.x1 <= fig.bbox.x1 for box in boxes)


def test_lines_of_padded_shares_are_quantiles():
    ax = plots.padded_shares(SHARES, "x").axes[0]
    x, y = ax.lines[0].get_data()
    assert y[x.searchsorted(0.96 - 1e-9)] == 0.125 and y[x.searchsorted(0.97 - 1e-9)] == 0.375


def test_figures_are_small_and_the_same_every_time(padded):
    for make in (lambda: plots.padding(padded, "kvnb", SHARES), lambda: plots.padded_shares(SHARES, "x"), plots.memory):
        first, second = plots.png_of(make()), plots.png_of(make())
        assert first == second and len(first) <= 60_000 and Image.open(io.BytesIO(first)).mode == "P"


def test_alt_texts_describe_what_is_drawn(padded):
    text = null_block.padding_alt(padded, "kvnb")
    line = null_block.padding_rows(padded, "kvnb").query("num_tokens == 8192 and policy == 'null_slot'")
    ends = line[line["padded"] == "scattered"]["seconds"].iloc[[0, -1]]
    last = text.split("8,192 tokens, 0% to 94% padded: ")[1]
    assert f"null_slot {ends.iloc[0] * 1e6:.1f} us to {ends.iloc[1] * 1e6:.1f} us" in last
    assert ". 8 tokens, 0% to 75% padded: " in text, "no more was measured there"
    assert "8 and 16 apart: median 12.5%, 95% of steps at most 12.5%" in null_block.shares_alt(SHARES)


@pytest.mark.parametrize(
    ("live", "device", "uuid", "measures"),
    [("auto", "cuda", "another", True), ("auto", "cuda", "0", False), ("auto", "cpu", "", False),
     ("yes", "cpu", "", True), ("no", "cuda", "another", False)],
)  # fmt: skip
def test_what_is_measured_now(live, device, uuid, measures, padding_file, monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "resolve_device", lambda name: type("Device", (), {"type": device}))
    monkeypatch.setattr(machine, "gpu_uuid", lambda place: uuid)
    monkeypatch.setattr(bench_run, "measure", lambda *args, **more: asked.append((*args, more)) or more["path"])
    made = null_block.measured("auto", live, [padding_file])
    assert bool(made) == bool(asked) == measures
    if measures:
        *_, more = asked[0]
        assert asked[0][1] == "padding" and {"kvnb", "kvnb.again", "torch.index_put"} <= set(asked[0][2])
        assert made[0].parent == paths.LOCAL / "padding" and more["workers"] == 1


def test_a_trace_of_ones_own_is_replayed(tmp_path):
    path = tmp_path / "mine.csv"
    lines = [f"2023-11-16 18:17:{i:02d}.0,{100 + i},{20 + i}" for i in range(40)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    parameters.check("04_null_block", {"trace": str(path)})
    found = null_block.replayed(str(path))
    assert found.name == "trace mine.csv of 40 requests"
    assert {*found.shares["captured"]} == {"8 and 16 apart", "powers of two"} and len(found.capacity) == 3
    short = (f"2023-11-16 18:17:{i:02d}.0,3,9" for i in range(40))
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *short]))
    null_block.replayed.cache_clear()
    few = null_block.replayed(str(path)).capacity["usable blocks"]
    assert list(few) == [9, 8, 1], "requests of one block, and 8 reserved, still leave one"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", lines[0]]))
    null_block.replayed.cache_clear()
    with pytest.raises(ValueError, match="of 1 requests: while requests arrive, no step only decodes"):
        null_block.replayed(str(path))
    with pytest.raises(ValueError, match=r"gone\.csv does not exist"):
        parameters.check("04_null_block", {"trace": str(tmp_path / "gone.csv")})
