"""How numbers and names read in every sentence, table and figure."""

from __future__ import annotations

import re

import pandas as pd

from kvnb.bench import stats

OURS, DEPENDENT, ISSUE = "kvnb", "kvnb.dependent", "torch.index_put"  # ISSUE: the spelling of vLLM issue #4698
VLLM = "vLLM's 2024 design, rewritten"
LABELS = {"vllm.scalar": f"vllm.scalar ({VLLM})", ISSUE: f"{ISSUE} (the issue's)"}
USUAL = {"dtype": "bfloat16", "source": "contiguous", "slots": "random", "block_size": 16, "cache": ""}


def label(copy: str) -> str:
    return LABELS.get(copy, copy)


def release(copy: str) -> str:
    """The version in `vllm==X`; empty for other copies and for `vllm==X.cubin`, which stands beside its op."""
    found = re.fullmatch(r"vllm==(\d[\w.]*)", copy)
    return found[1] if found and not copy.endswith(".cubin") else ""


def times(ratio: float) -> str:
    """Three digits; `z` keeps a rounded -0.00 from showing its sign."""
    return f"{ratio:z.{2 if abs(ratio) < 10 else 1 if abs(ratio) < 100 else 0}f}"


def duration(seconds: float) -> str:
    """Three digits, in us, ms or s."""
    scale, unit = next(((s, u) for s, u in ((1e6, "us"), (1e3, "ms")) if abs(seconds) * s < 1000), (1, "s"))
    return f"{times(seconds * scale)} {unit}"


def line_name(row: dict | pd.Series, layout: bool = False) -> str:
    """`8x128`, then what is not as in USUAL, then its layout."""
    value = f"/{row['value_head_size']}" if row["value_head_size"] != row["head_size"] else ""
    words = {"slots": "{} slots", "block_size": "blocks of {}"}
    odd = [words.get(name, "{}").format(row[name]) for name, usual in USUAL.items() if row[name] != usual]
    return " ".join([f"{row['num_kv_heads']}x{row['head_size']}{value}", *odd, *[row["layout"]] * layout])


def cell_name(row: dict | pd.Series) -> str:
    return f"{count(row['num_tokens'], 'token')} of {line_name(row, layout=True)}"


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def hardware(first: dict | pd.Series) -> str:
    """GPU, or CPU with its threads, of a run's row."""
    return first["gpu"] or f"{first['cpu']}, {count(first['threads'], 'thread')}"


def interval(row: dict | pd.Series) -> str:
    return f"{times(row['speedup'])} [{times(row['low'])}, {times(row['high'])}]"


def neither(row: dict | pd.Series) -> str:
    """A verdict that leaves open which is faster, in brackets."""
    return f" ({row['verdict']})" if row["verdict"] in ("SAME", "UNDECIDED") else ""


def mean(rows: pd.DataFrame, noun: str = "cell") -> pd.Series:
    """stats.summarise of all `rows`, and `spread`, what it is a mean of: `9 cells from 0.60 to 3.10, 1 disturbed`."""
    mean = stats.summarise(rows.assign(all=""), ["all"]).iloc[0]
    ends = f" from {times(mean['smallest'])} to {times(mean['largest'])}" if len(rows) > 1 else ""
    counts = rows.reindex(columns=stats.WITHHELD, fill_value=False).sum()
    withheld = "".join(f", {n} {why}" for why, n in counts.items() if n)
    return pd.concat([mean, pd.Series({"spread": count(len(rows), noun) + ends + withheld})])


def speedup(rows: pd.DataFrame, cells: bool = True) -> str:
    """A mean in words: `2.10 [2.05, 2.15] FASTER (9 cells from 0.60 to 3.10, 2 SLOWER)`."""
    told, lost = mean(rows), (rows["verdict"] == "SLOWER").sum()
    of = f" ({told['spread']}{f', {lost} SLOWER' if lost else ''})" if cells else ""
    return f"{interval(told)} {told['verdict']}{of}"


def disturbances(samples: pd.DataFrame) -> str:
    """Of a run's samples: `2.1% of rounds (software power cap 1.5%, clock drift 0.6%)`, and what nobody watched."""
    done, rounds = samples[samples["status"] == "ok"], stats.by_round(samples)
    if rounds.empty or (done["throttled"].isna().all() and done["sm_clock_mhz"].isna().all()):
        return "not known"
    said = rounds.loc[~rounds["disturbed"].isin(["", stats.UNWATCHED]), "disturbed"].str.split(", ")
    each = said.explode().value_counts() / len(rounds)
    told = ", ".join(f"{reason} {share:.1%}" for reason, share in each.items())
    silent = done["throttled"].isna().mean()
    return (
        f"{len(said) / len(rounds):.1%} of rounds{f' ({told})' if told else ''}"
        f"{f'; NVML said nothing in {silent:.1%} of samples' if silent else ''}"
    )
