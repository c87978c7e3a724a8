"""How a run's disturbances read: in the facts about it, and in every mean whose cells they touch."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvnb.bench import stats
from kvnb.report import answers, words
from kvnb.report.compare import CELL

CAP, OTHER = "software power cap", "other process on the GPU"


def told(run: answers.Run, **columns) -> answers.Run:
    return answers.Run(run.samples.assign(**columns))


def test_a_run_that_nothing_disturbed_says_so(gpu):
    assert words.disturbances(gpu.samples) == "0.0% of rounds"


def test_every_reason_has_its_share_of_rounds(gpu):
    worker = gpu.samples["worker"]
    reasons = np.select([worker == 0, worker == 1], [CAP, f"{CAP}, {OTHER}"], "")
    third, both = f"{OTHER} 33.3%", f"66.7% of rounds ({CAP} 66.7%"
    assert words.disturbances(told(gpu, throttled=reasons).samples) == f"{both}, {third})"


def test_a_clock_that_drifted_has_its_share_too(gpu):
    mhz = gpu.samples["sm_clock_mhz"].mask(gpu.samples["worker"] == 2, 1700.0)
    assert words.disturbances(told(gpu, sm_clock_mhz=mhz).samples) == "33.3% of rounds (clock drift 33.3%)"


def test_what_nvml_did_not_say_is_said(gpu):
    silent = gpu.samples["throttled"].mask(gpu.samples["worker"] == 0, None)
    assert words.disturbances(told(gpu, throttled=silent).samples) == (
        "0.0% of rounds; NVML said nothing in 33.3% of samples"
    )
    assert words.disturbances(gpu.samples.assign(throttled=None, sm_clock_mhz=np.nan)) == "not known"


def test_where_every_cell_failed_after_it_was_timed_nothing_is_known(gpu):
    failed = gpu.samples.drop_duplicates(CELL).assign(status="error")
    assert words.disturbances(pd.concat([gpu.samples, failed])) == "not known"


def test_a_margin_without_a_sound_noise_floor_says_so(gpu):
    kernels = gpu.samples["copy"].isin(stats.NOISE)
    unknown = answers.Run(gpu.samples[gpu.samples["copy"] != stats.NOISE[0]])
    assert f"A difference below 2.0% counts as none: {stats.NO_FLOOR}." in answers.certainty(unknown)
    loud = told(gpu, throttled=np.where(kernels, CAP, ""))
    assert f" counts as none: {stats.DISTURBED_FLOOR}." in answers.certainty(loud)
    assert "% (graph, produced, of disturbed rounds)" in answers.noise_floors(loud)
    assert answers.certainty(gpu).endswith(" counts as none.") and "disturbed" not in answers.noise_floors(gpu)


@pytest.mark.parametrize("reason", [CAP, OTHER])
def test_means_of_disturbed_cells_are_undecided_and_count_them(gpu, reason):
    fewest = gpu.samples["num_tokens"] == gpu.samples["num_tokens"].min()
    for touched in (fewest, fewest | True):
        run = told(gpu, throttled=np.where(touched, reason, ""))
        rows = run.against("torch.index_put")
        disturbed = rows["num_tokens"].isin(run.samples.loc[touched, "num_tokens"])
        assert disturbed.any() and rows["disturbed"].tolist() == disturbed.tolist()
        assert set(rows.loc[disturbed, "verdict"]) == {"UNDECIDED"}
        assert rows.loc[disturbed, "reason"].str.startswith(f"{reason} in 15 of 15 rounds: ").all()
        assert f", {disturbed.sum()} disturbed)" in words.speedup(rows)
    assert " UNDECIDED (" in words.speedup(rows)
    assert "disturbed" not in words.speedup(gpu.against("torch.index_put"))
    assert answers.verdict_table(run).map(lambda cell: "FASTER (" in cell or "SLOWER (" in cell).to_numpy().sum() == 0
