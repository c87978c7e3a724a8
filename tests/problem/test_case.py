"""Case: its derived sizes, one error per value that is out of range, and the grids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvnb.problem.case import CASE_FIELDS, EVERY_TIMING, GIB, MIB, Case, grid, timings


def test_derived_sizes_of_the_issues_problem():
    case = Case(4096, num_kv_heads=8, head_size=128, block_size=16, cache_bytes=4 * GIB)
    assert case.value_head_size == 128
    assert case.token_bytes == 8 * 2 * 128 * 2
    assert case.block_bytes == 16 * 4096
    assert case.num_blocks == 65536
    assert case.num_slots == 65536 * 16


def test_bytes_moved_counts_written_rows_twice_and_the_index_once():
    case = Case(100, num_kv_heads=2, head_size=8, value_head_size=4, dtype="float32", padding=0.25, cache_bytes=MIB)
    assert (case.padded_tokens, case.written_tokens) == (25, 75)
    assert case.bytes_moved == 2 * 75 * 2 * (8 + 4) * 4 + 8 * 100


@pytest.mark.parametrize(
    ("tokens", "regime"),
    [(1, "decode"), (256, "decode"), (257, "mixed"), (2047, "mixed"), (2048, "prefill"), (65536, "prefill")],
)
def test_regimes_end_where_the_design_says(tokens, regime):
    assert Case(tokens).regime == regime


def test_fields_are_the_case_columns_in_order():
    case = Case(7, layout="HND", padding=0.5)
    assert tuple(case.fields()) == CASE_FIELDS
    assert Case(**case.fields()) == case


WRONG = [
    ({"num_tokens": -1}, "num_tokens = -1 must be at least 0"),
    ({"num_kv_heads": 0}, "num_kv_heads = 0 must be at least 1"),
    ({"head_size": 0}, "head_size = 0 must be at least 1"),
    ({"value_head_size": -4}, "value_head_size = -4 must be at least 1"),
    ({"block_size": 0}, "block_size = 0 must be at least 1"),
    ({"layout": "NDH"}, "layout = 'NDH' must be one of NHD, HND, packed"),
    ({"source": "fused"}, "source = 'fused' must be one of contiguous, qkv"),
    ({"slots": "sorted"}, "slots = 'sorted' must be one of decode, prefill, mixed, random"),
    ({"dtype": "bf16"}, "dtype = 'bf16' must be one of bfloat16, float16,"),
    ({"padding": 1.5}, "padding = 1.5 must lie between 0 and 1"),
    ({"padding": -0.1}, "padding = -0.1 must lie between 0 and 1"),
]


@pytest.mark.parametrize(("field", "message"), WRONG, ids=[next(iter(field)) for field, _ in WRONG])
def test_a_value_out_of_range_is_named_with_what_is_allowed(field, message):
    with pytest.raises(ValueError) as caught:
        Case(**{"num_tokens": 4, **field})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("tokens", [1, 16, 17, 1000])
def test_a_cache_that_is_too_small_says_how_large_it_must_be(tokens):
    with pytest.raises(ValueError, match=f"{tokens} tokens need cache_bytes of at least") as caught:
        Case(tokens, cache_bytes=0)
    enough = int(str(caught.value).rsplit(" ", 1)[1])
    assert Case(tokens, cache_bytes=enough).usable_slots >= tokens
    with pytest.raises(ValueError, match="cache_bytes"):
        Case(tokens, cache_bytes=enough - 1)


def test_a_case_reads_as_one_line():
    case = Case(
        13, 3, 20, value_head_size=8, cache_bytes=MIB, layout="packed", source="qkv", slots="decode", padding=0.25
    )
    assert str(case) == "13 tokens 3x20/8 bfloat16 packed qkv decode slots 25% padded"


@pytest.mark.parametrize(("layout", "rows"), [("NHD", (120, 48)), ("HND", (40, 16)), ("packed", (40, 16))])
def test_the_bytes_of_a_token_that_lie_together(layout, rows):
    assert Case(13, 3, 20, value_head_size=8, cache_bytes=MIB, layout=layout).row_bytes == rows


# --------------------------------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["quick", "full"])
def test_a_grid_names_each_case_once(name, device):
    cases = grid(name, device)
    assert len(cases) == len(set(cases))
    assert {case.layout for case in cases} >= {"NHD", "packed"}
    assert {case.regime for case in cases} == {"decode", "mixed", "prefill"} or (name, device) == ("quick", "cpu")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_full_varies_the_heads_that_quick_holds(device):
    assert {case.num_kv_heads for case in grid("quick", device)} == {8}
    assert {case.num_kv_heads for case in grid("full", device)} > {1, 8}


def test_full_varies_one_factor_at_a_time():
    plain = Case(256).fields()
    skipped = {"num_tokens", "slots"}
    for case in grid("full"):
        differing = {name for name, value in case.fields().items() if value != plain[name]} - skipped
        if case.cache_bytes == max(GIB, 2 * case.num_tokens * case.token_bytes):  # what every case gets
            differing -= {"cache_bytes"}
        allowed = [
            {"layout"},
            {"num_kv_heads"},
            {"num_kv_heads", "layout"},
            {"block_size"},
            {"cache_bytes"},
            {"head_size", "value_head_size"},
            {"dtype"},
            {"source"},
            {"layout", "source"},
        ]
        assert not differing or differing in allowed, case


def test_every_timer_and_state_is_measured_at_8_x_128_only():
    assert timings("quick", Case(256), "cpu") == timings("full", Case(256), "cpu") == (("wall", "produced"),)
    for case in (Case(256), Case(256, layout="packed")):
        assert set(timings("full", case)) == set(EVERY_TIMING)
    for case in (Case(256, layout="HND"), Case(256, 4), Case(256, dtype="float16"), Case(256, source="qkv")):
        assert timings("full", case) == (("graph", "produced"),)


def test_an_unknown_grid_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="grid 'fast' is not one of quick, full, releases, padding"):
        grid("fast")


def test_full_holds_what_the_goals_and_the_reader_ask_for():
    cases = grid("full")
    for layout in ("NHD", "packed"):
        assert {case.num_kv_heads for case in cases if case.layout == layout} == {1, 2, 4, 8, 16, 32, 128}
    assert {case.head_size for case in cases} == {64, 80, 96, 128, 192, 256}
    assert {case.block_size for case in cases} == {16, 32, 64, 128, 256, 1600, 16384, 65536}
    in_order = [case.num_tokens for case in cases if (case.slots, case.block_size) == ("prefill", case.num_tokens)]
    assert in_order == [16384, 65536]
    assert {4 * GIB, 64 * GIB} <= {case.cache_bytes for case in cases}
    assert {case.dtype for case in cases} == {"bfloat16", "float16", "float32"}
    assert {case.slots for case in cases} == {"random", "decode", "mixed", "prefill"}
    assert len({str(case) for case in cases}) == len(cases)


def test_padding_varies_share_and_place():
    cases = grid("padding")
    assert len({str(case) for case in cases}) == len(cases)
    assert {case.padding for case in cases} == {0.0, 0.03, 0.12, 0.25, 0.5, 0.75, 0.94}
    assert {(case.layout, case.padded) for case in cases} >= {
        ("NHD", "scattered"),
        ("NHD", "tail"),
        ("packed", "scattered"),
    }
    for case in cases:
        assert not case.padding or 0 < case.padded_tokens < case.num_tokens, case
    assert {case.num_tokens for case in cases} == {8, 32, 128, 512, 2048, 8192}
    assert timings("padding", Case(32, padding=0.25)) == (("graph", "produced"),)
    assert ("eager", "produced") in timings("padding", Case(32, padding=0.75))
    assert timings("padding", Case(32, padding=0.75, padded="tail")) == (("graph", "produced"),)


def test_releases_are_compared_on_one_problem_and_on_their_backends_own():
    cases = grid("releases")
    *compared, transposed = cases
    assert {(case.layout, case.source) for case in compared} == {
        ("NHD", "contiguous"),
        ("NHD", "qkv"),
        ("packed", "qkv"),
    }
    assert (transposed.layout, transposed.source) == ("NHD", "transposed")
    assert {(case.num_kv_heads, case.head_size, case.dtype) for case in cases} == {(8, 128, "bfloat16")}
    graphs = ("graph", "produced"), ("graph", "cold")
    assert timings("releases", transposed) == timings("releases", replace(cases[0], layout="packed")) == graphs
    assert timings("releases", cases[0]) == (*graphs, ("host", "produced"), ("eager", "produced"))


@pytest.mark.parametrize("name", ["releases", "padding"])
def test_what_is_about_cuda_kernels_needs_a_gpu(name):
    with pytest.raises(
        ValueError, match=f"grid '{name}' is about CUDA kernels and needs a GPU; a CPU has quick and full"
    ):
        grid(name, "cpu")
