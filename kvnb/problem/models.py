"""Two models, for what a difference is worth: sizes that decide a decode step's copies and its least time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder without its vocabulary tables tied.

    num_kv_heads, head_size  a row of the cache, per layer
    weight_bytes             what a decode step has to read: all weights but the input embedding
    source                   where the sizes come from
    """

    name: str
    layers: int
    num_kv_heads: int
    head_size: int
    weight_bytes: int
    source: str


def _weight_bytes(layers: int, hidden: int, kv_width: int, feed_forward: int, vocabulary: int) -> int:
    """Bytes of a Llama in bfloat16: attention (q, o; k, v), gated feed-forward, norms, and the output head."""
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * feed_forward + 2 * hidden
    return 2 * (layers * layer + hidden + vocabulary * hidden)


MODELS = (
    Model(
        name="Llama-3.1-8B bf16",
        layers=32,
        num_kv_heads=8,
        head_size=128,
        weight_bytes=_weight_bytes(32, 4096, 8 * 128, 14336, 128256),
        source="https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json",
    ),
    Model(
        name="Llama-3.1-70B bf16",
        layers=80,
        num_kv_heads=8,
        head_size=128,
        weight_bytes=_weight_bytes(80, 8192, 8 * 128, 28672, 128256),
        source="https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json",
    ),
)
