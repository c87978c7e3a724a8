"""slot_mapping: where each token's rows go, and where padding goes under each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnb.problem.case import Case

if TYPE_CHECKING:
    import torch

POLICIES = ("skip", "null_slot", "null_block", "null_blocks", "last_slot", "remap", "filter")
NULL_POLICIES = ("null_slot", "null_block", "null_blocks")
KEEPS_NEGATIVE = ("skip", "last_slot", "remap", "filter")  # policies under which slot_mapping itself says -1


def sets(case: Case, count: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """`count` slot sets of a case, `[count, num_tokens]` int64, padding still -1; slots are unique within each set.

    Sets follow one another through whole permutations of the usable slots, so a slot comes back only when all the
    others have been used. `random`: any free slot. `decode`: one slot in each of `num_tokens` random blocks.
    `prefill`: runs that fill random blocks. `mixed`: half the tokens as prefill, half as decode.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(case.seed)
    drawn = _draw(case, count, generator, device)
    if case.padded_tokens and case.padded == "tail":
        drawn[:, -case.padded_tokens :] = -1
    elif case.padded_tokens:
        order = torch.rand(drawn.shape, generator=generator, device=device).argsort(dim=1)
        drawn.scatter_(1, order[:, : case.padded_tokens], -1)
    return drawn


def _draw(case: Case, count: int, generator: torch.Generator, device: str | torch.device) -> torch.Tensor:
    """Unpadded slot sets `[count, num_tokens]`; the null blocks and the last block stay free."""
    import torch

    first = case.null_blocks
    blocks = case.num_blocks - 1 - first

    def randperm(n: int) -> torch.Tensor:
        return torch.randperm(n, generator=generator, device=device)

    def by_block(order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return (order[:, None] + first) * case.block_size + offsets

    offsets = torch.arange(case.block_size, device=device)
    runs = {"prefill": case.num_tokens, "mixed": case.num_tokens // 2}.get(case.slots, 0)
    sets_per_pass = max(1, _sets_per_pass(case, blocks, runs))
    passes = []
    for start in range(0, count, sets_per_pass):
        here = min(sets_per_pass, count - start)
        if case.slots == "random":
            flat = randperm(blocks * case.block_size)[: here * case.num_tokens] + first * case.block_size
            passes.append(flat.view(here, case.num_tokens))
            continue
        order = randperm(blocks)
        run_blocks = case.num_blocks_for(runs)
        full = by_block(order[: here * run_blocks], offsets).view(here, -1)[:, :runs]
        singles = case.num_tokens - runs
        rest = order[here * run_blocks :]
        # more single tokens than blocks: walk the blocks again at the next offset
        turn = torch.arange(here * singles, device=device)
        single = (rest[turn % len(rest)] + first) * case.block_size + (turn // len(rest)) if singles else turn
        passes.append(torch.cat([full, single.view(here, singles)], dim=1))
    return torch.cat(passes)[:count].contiguous()


def _sets_per_pass(case: Case, blocks: int, runs: int) -> int:
    """How many sets one permutation of the blocks (or slots) serves without using a slot twice."""
    if case.slots == "random":
        return blocks * case.block_size // max(1, case.num_tokens)
    run_blocks = case.num_blocks_for(runs)
    singles = case.num_tokens - runs
    # every set takes run_blocks whole blocks, and its singles share what is left at block_size slots each
    return blocks * case.block_size // max(1, run_blocks * case.block_size + singles)


def null_slots(case: Case, policy: str) -> int:
    """How many slots from slot 0 on a policy sends padding to: 0 where it sends none to the null block."""
    spread = {
        "null_slot": 1,
        "remap": 1,
        "null_block": case.block_size,
        "null_blocks": case.null_blocks * case.block_size,
    }
    return spread.get(policy, 0)


def place_padding(slots: torch.Tensor, case: Case, policy: str) -> torch.Tensor:
    """slot_mapping as the engine hands it over under `policy`; `slots` `[..., num_tokens]` with -1 for padding.

    null_slot: slot 0. null_block: spread over block 0's slots. null_blocks: over those of
    the first `case.null_blocks` blocks.
    The others keep -1: `skip` and `last_slot` give it to the copy, `remap` and `filter` handle it in `step`.
    """
    import torch

    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    if policy in KEEPS_NEGATIVE:
        return slots
    spread = null_slots(case, policy)
    padded = slots < 0
    turn = padded.long().cumsum(-1) - 1
    return torch.where(padded, turn % spread, slots)


def validate(slot_mapping: torch.Tensor, num_slots: int, num_tokens: int) -> None:
    """Refuse a slot_mapping that a kernel could not honour.

    `slot_mapping` `[n]` or sets of them, `[..., n]`, int64 or int32, n at most `num_tokens`; every entry below
    `num_slots`. Negative entries are padding. Raises ValueError naming the position, the value and the limit.
    """
    import torch

    if slot_mapping.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}, must be torch.int64 or torch.int32")
    if slot_mapping.dim() == 0 or slot_mapping.shape[-1] > num_tokens:
        shape = list(slot_mapping.shape)
        raise ValueError(f"slot_mapping has shape {shape}, must be [n] with n at most {num_tokens} tokens")
    beyond = (slot_mapping >= num_slots).nonzero()
    if len(beyond):
        position = tuple(beyond[0].tolist())
        raise ValueError(
            f"slot_mapping[{', '.join(map(str, position))}] = {int(slot_mapping[position])} lies past the last slot: "
            f"the cache has {num_slots} slots, 0 to {num_slots - 1}"
        )
    ordered = slot_mapping.sort(dim=-1).values
    twice = ordered[..., 1:][(ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)]
    if len(twice):
        raise ValueError(
            f"slot_mapping names slot {int(twice[0])} more than once: which row it keeps would be undefined"
        )
