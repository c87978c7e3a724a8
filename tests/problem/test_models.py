"""Block bytes of the models, against figures that others published."""

from __future__ import annotations

import pytest

from kvnb.problem.models import CACHES, GIB

MIB = 1 << 20
BY_NAME = {model.name.split(" ")[0]: model for model in CACHES}


@pytest.mark.parametrize(
    ("name", "per_token"),
    [("Llama-3.1-8B", 131_072), ("Llama-3.1-70B", 327_680), ("Llama-3.1-405B", 516_096), ("DeepSeek-V3", 70_272)],
)
def test_bytes_of_a_token_over_all_layers(name, per_token):
    model = BY_NAME[name]
    assert model.token_bytes() * model.layers == per_token
    assert model.block_bytes(64) == 64 * per_token


def test_a_reserved_block_of_an_8b_model_is_two_mib_and_a_thirty_thousandth_of_its_pool():
    model = BY_NAME["Llama-3.1-8B"]
    assert model.block_bytes() == 2 * MIB
    assert model.share(60 * GIB) == 1 / 30_720


def test_fewer_heads_than_gpus_are_replicated_and_so_is_a_latent_row():
    llama, deepseek = BY_NAME["Llama-3.1-405B"], BY_NAME["DeepSeek-V3"]
    assert [llama.token_bytes(tp) for tp in (1, 2, 8, 16)] == [4096, 2048, 512, 512]
    assert deepseek.token_bytes(1) == deepseek.token_bytes(8) == 1152


@pytest.mark.parametrize(
    ("name", "align", "tp", "itemsize", "tokens"),
    [
        ("Nemotron-3-Nano-30B-A3B", 32, 1, 1, 4192),  # vllm#41037
        ("Nemotron-3-Nano-30B-A3B", 32, 2, 1, 4192),
        ("Nemotron-3-Nano-30B-A3B", 32, 4, 1, 2112),
        ("Nemotron-3-Nano-30B-A3B", 16, 4, 2, 540_672 // 512),  # vllm#37467: the page, at 512 bytes a token
        ("Qwen3-Next-80B-A3B", 16, 1, 2, 544),
        ("Llama-3.1-8B", 128, 1, 2, 128),
    ],
)
def test_managers_blocks_are_as_long_as_vllm_reports(name, align, tp, itemsize, tokens):
    assert BY_NAME[name].tokens_per_block(align, tp, itemsize) == tokens


def test_a_block_spans_whole_models_or_one_group_of_their_layers():
    for model in CACHES:
        assert 0 < model.block_layers <= model.layers
        assert model.source.startswith("https://")
        assert model.block_bytes() == model.tokens_per_block() * model.token_bytes() * model.block_layers


def test_misuse_is_refused():
    model = BY_NAME["Llama-3.1-8B"]
    with pytest.raises(ValueError, match="tp = 0 must be at least 1"):
        model.block_bytes(tp=0)
    with pytest.raises(ValueError, match="block_size = 0 must be at least 1"):
        model.block_bytes(0)
    with pytest.raises(ValueError, match="holds no block; one takes 2097152 bytes"):
        model.share(MIB)
