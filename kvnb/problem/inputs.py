"""The tensors of a case: caches in their layout, source sets, slot sets. One factory for checks, timers, tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvnb.problem import slots as slot_sets
from kvnb.problem.case import Case

QUERY_GROUP = 4  # query heads per KV head in the fused projection that source = "qkv" slices (Llama 3, Qwen 3)
POISON = 0x5851F42D4C957F2D  # odd, Knuth's MMIX multiplier: word i of the poison is i * POISON
POISON_WORDS = 1_000_003  # words until the poison repeats: a prime, so that it never keeps step with rows


@dataclass(frozen=True)
class Inputs:
    """What a copy gets. Shapes:

    storage      one flat tensor (packed) or two (K, V) that hold every byte of the caches
    key_cache    `[num_blocks, block_size, num_kv_heads, head_size]`, a view in the case's layout; value_cache likewise
    keys         source sets, each `[num_tokens, num_kv_heads, head_size]`; values likewise
    slots        `[sets, num_tokens]` int64, as the engine hands it over under `policy`
    """

    case: Case
    policy: str
    storage: tuple[torch.Tensor, ...]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    slots: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.key_cache.device

    def under(self, policy: str, unplaced: torch.Tensor) -> Inputs:
        """The same tensors under another policy; `unplaced` are slot sets with -1 for padding."""
        return replace(self, policy=policy, slots=slot_sets.place_padding(unplaced, self.case, policy))


def make(
    case: Case, device: str | torch.device, *, policy: str = "skip", source_sets: int = 1, slot_count: int = 1
) -> Inputs:
    """Fresh inputs of `case` on `device`, reproducible from `case.seed`; caches are poisoned.

    Raises torch.OutOfMemoryError where the case does not fit.
    """
    storage, key_cache, value_cache = make_caches(case, device)
    poison(storage)
    generator = torch.Generator(device=device).manual_seed(case.seed + 1)
    sources = [_source(case, device, generator) for _ in range(source_sets)]
    placed = slot_sets.place_padding(slot_sets.sets(case, slot_count, device), case, policy)
    keys, values = zip(*sources)
    return Inputs(case, policy, storage, key_cache, value_cache, keys, values, placed)


def make_caches(case: Case, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Uninitialised caches of a case: (flat storage, key_cache, value_cache), the caches as views of it."""
    dtype = getattr(torch, case.dtype)
    blocks, size, heads, k, v = (
        case.num_blocks,
        case.block_size,
        case.num_kv_heads,
        case.head_size,
        case.value_head_size,
    )
    if case.layout == "packed":
        flat = torch.empty(blocks * heads * size * (k + v), dtype=dtype, device=device)
        key_cache, value_cache = flat.view(blocks, heads, size, k + v).transpose(1, 2).split([k, v], dim=-1)
        return (flat,), key_cache, value_cache
    flats = tuple(torch.empty(blocks * size * heads * d, dtype=dtype, device=device) for d in (k, v))
    if case.layout == "NHD":
        views = [flat.view(blocks, size, heads, -1) for flat in flats]
    else:
        views = [flat.view(blocks, heads, size, -1).transpose(1, 2) for flat in flats]
    return flats, *views


def _source(case: Case, device: str | torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One source set: K and V on their own, tokens first or heads first (transposed), or as slices of a fused
    projection `[num_tokens, (queries + 2) heads]`."""
    n, heads, k, v = case.num_tokens, case.num_kv_heads, case.head_size, case.value_head_size
    if case.source == "contiguous":
        key = _random((n, heads, k), case.dtype, device, generator)
        return key, _random((n, heads, v), case.dtype, device, generator)
    if case.source == "transposed":
        key = _random((heads, n, k), case.dtype, device, generator)
        return key.transpose(0, 1), _random((heads, n, v), case.dtype, device, generator).transpose(0, 1)
    queries = QUERY_GROUP * heads * k
    fused = _random((n, queries + heads * (k + v)), case.dtype, device, generator)
    _, key, value = fused.split([queries, heads * k, heads * v], dim=1)
    return key.unflatten(1, (heads, k)), value.unflatten(1, (heads, v))


def _random(shape: tuple[int, ...], dtype: str, device: str | torch.device, generator: torch.Generator) -> torch.Tensor:
    """Random values: an array of zeros would draw less power and hide unwritten rows."""
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.randint(-100 if kind.is_signed else 1, 100, shape, dtype=kind, device=device, generator=generator)
    if kind.itemsize == 1:
        return torch.randn(shape, device=device, generator=generator).to(kind)
    return torch.randn(shape, dtype=kind, device=device, generator=generator)


def poison(storage: tuple[torch.Tensor, ...]) -> None:
    """Fill the caches with a pattern, in place: neighbouring rows, and K and V, hold different bits."""
    device = storage[0].device
    pattern = torch.arange(1, 1 + POISON_WORDS, device=device) * POISON
    for number, flat in enumerate(storage):
        words = as_words(flat)
        whole = len(words) // POISON_WORDS * POISON_WORDS
        shifted = pattern + number
        words[:whole].view(-1, POISON_WORDS).copy_(shifted)
        words[whole:] = shifted[: len(words) - whole]
        tail = flat[len(words) * 8 // flat.element_size() :]
        tail.view(torch.uint8).fill_(number + 1)


def as_words(flat: torch.Tensor) -> torch.Tensor:
    """A flat storage tensor's bytes as int64, without a tail that fills no word."""
    per_word = 8 // flat.element_size()
    return flat[: flat.numel() // per_word * per_word].view(torch.int64)
