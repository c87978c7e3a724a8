"""Two models, for what a difference is worth: sizes that decide a decode step's copies and its least time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A Llama in bfloat16 with an output head of its own: the sizes of its config.json."""

    name: str
    layers: int
    hidden: int
    num_kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int

    @property
    def weight_bytes(self) -> int:
        """What a decode step has to read: all weights but the input embedding."""
        attention = 2 * self.hidden * (self.hidden + self.num_kv_heads * self.head_size)  # q, o; k, v
        layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden  # gated feed-forward; two norms
        return 2 * (self.layers * layer + self.hidden + self.vocabulary * self.hidden)


MODELS = (  # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, and 70B's
    Model("Llama-3.1-8B bf16", 32, 4096, 8, 128, 14336, 128256),
    Model("Llama-3.1-70B bf16", 80, 8192, 8, 128, 28672, 128256),
)
