"""Models: two with their weights, for what a difference is worth; more with their KV caches, for what a block costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30
POOL_BYTES = 60 * GIB  # of a GPU: what 80 GB have left beside a small model, and 141 GB beside 76 GB of weights
GPU_BYTES = 141e9  # an H200


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


@dataclass(frozen=True)
class CacheModel:
    """A model's KV cache on one of `tp` GPUs (tensor parallel degree): what one block of the pool is worth.

    gigabytes        (1e9 bytes) of the weights, as they are published
    layers           layers with a KV cache, of one kind or of several (full attention, sliding window)
    block_layers     of these, how many one block spans. All of them where they are of one kind; else a block belongs to
                     a group of layers of one kind, as long as the rarest kind (vLLM's v1/core/kv_cache_utils.py)
    num_kv_heads     of the whole model; a GPU holds num_kv_heads / tp of them, at least one: fewer are replicated
    value_head_size  0 for MLA: one latent row serves as K and V, and every GPU holds all of it
    state_bytes      hybrid models: state that one recurrent layer keeps per request, split over tp. A block must hold
                     it, so the manager takes blocks of as many tokens as that needs, often thousands
    source           where the sizes stand
    """

    name: str
    gigabytes: float
    layers: int
    block_layers: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    source: str
    state_bytes: int = 0

    @property
    def tp(self) -> int:
        """The smallest power of two GPUs of GPU_BYTES that hold the weights, and a pool of POOL_BYTES each."""
        return 1 << math.ceil(math.log2(max(1, self.gigabytes * 1e9 / (GPU_BYTES - POOL_BYTES))))

    @property
    def title(self) -> str:
        return self.name + f", TP {self.tp}" * (self.tp > 1)

    def token_bytes(self, tp: int = 1, itemsize: int = 2) -> int:
        """Bytes of one token in one layer on one GPU. Raises ValueError for a tp below 1."""
        if tp < 1:
            raise ValueError(f"{self.name}: tp = {tp} must be at least 1")
        return max(1, self.num_kv_heads // tp) * (self.head_size + self.value_head_size) * itemsize

    def tokens_per_block(self, block_size: int = 16, tp: int = 1, itemsize: int = 2) -> int:
        """Tokens in one of the manager's blocks: `block_size`, or the multiple of it that holds a recurrent state."""
        if block_size < 1:
            raise ValueError(f"{self.name}: block_size = {block_size} must be at least 1")
        page = block_size * self.token_bytes(tp, itemsize)
        return block_size * max(1, math.ceil(self.state_bytes / tp / page))

    def block_bytes(self, block_size: int = 16, tp: int = 1, itemsize: int = 2) -> int:
        """Bytes of one block, and so of a reserved null block, on one GPU."""
        return self.tokens_per_block(block_size, tp, itemsize) * self.token_bytes(tp, itemsize) * self.block_layers

    def share(self, pool_bytes: int = POOL_BYTES, block_size: int = 16, tp: int = 1, itemsize: int = 2) -> float:
        """One block of the blocks that `pool_bytes` hold on one GPU, 0 to 1. Raises ValueError where they hold none."""
        one = self.block_bytes(block_size, tp, itemsize)
        if pool_bytes < one:
            raise ValueError(f"{self.name}: a pool of {pool_bytes} bytes holds no block; one takes {one} bytes")
        return 1 / (pool_bytes // one)


def _hub(name: str) -> str:
    return f"https://huggingface.co/{name}/blob/main/config.json"


# a recurrent layer keeps a state and the last 3 inputs of its convolution
MAMBA_STATE = 64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2  # Nemotron: float32 state, 2,134,016 (vllm#41037)
DELTA_STATE = 32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2  # Qwen3-Next: all bfloat16
CACHES = (
    CacheModel("Llama-3.1-8B", 16, 32, 32, 8, 128, 128, _hub("meta-llama/Llama-3.1-8B")),
    CacheModel("Llama-3.1-70B", 141, 80, 80, 8, 128, 128, _hub("meta-llama/Llama-3.1-70B")),
    CacheModel("Llama-3.1-405B", 812, 126, 126, 8, 128, 128, _hub("meta-llama/Llama-3.1-405B")),
    CacheModel("Qwen3-8B", 16, 36, 36, 8, 128, 128, _hub("Qwen/Qwen3-8B")),
    CacheModel("Qwen3-32B", 66, 64, 64, 8, 128, 128, _hub("Qwen/Qwen3-32B")),
    CacheModel("Qwen3-235B-A22B", 470, 94, 94, 4, 128, 128, _hub("Qwen/Qwen3-235B-A22B")),
    CacheModel("gemma-3-27b", 55, 62, 10, 16, 128, 128, _hub("google/gemma-3-27b-it")),  # 52 sliding, 10 full
    CacheModel("gpt-oss-120b", 65, 36, 18, 8, 64, 64, _hub("openai/gpt-oss-120b")),  # every other one sliding
    CacheModel("DeepSeek-V3 (MLA)", 689, 61, 61, 1, 512 + 64, 0, _hub("deepseek-ai/DeepSeek-V3")),
    CacheModel(
        "Qwen3-Next-80B-A3B (hybrid)", 163, 12, 12, 2, 256, 256, _hub("Qwen/Qwen3-Next-80B-A3B-Instruct"), DELTA_STATE,
    ),
    CacheModel(
        "Nemotron-3-Nano-30B-A3B (hybrid)", 63, 6, 6, 2, 128, 128,
        "https://github.com/vllm-project/vllm/issues/41037", MAMBA_STATE,
    ),
)  # fmt: skip
