"""A paged block pool as serving engines have it, with or without a null block that no request ever gets.

A block is `block_size` slots of the KV cache in every layer. Requests hold blocks and share full ones whose tokens, and
all tokens before them, are equal. A freed full block stays findable until its place is needed. Everything here is
bookkeeping on block numbers, O(1) per block; the cache itself is elsewhere.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

NULL_BLOCK = 0
ROOT = b""  # what stands before a request's first block


class OutOfBlocks(RuntimeError):
    """The pool cannot serve a request now; nothing was changed. `request`, `needed` and `free` blocks."""

    def __init__(self, request: Hashable, needed: int, free: int) -> None:
        super().__init__(
            f"request {request!r} needs {needed} more blocks, {free} are free: free or preempt a request first"
        )
        self.request, self.needed, self.free = request, needed, free


@dataclass
class _Held:
    """What a request holds. `tail` are the tokens of its last, unfilled block, and `content` names the full blocks
    before it; both are None once tokens of unknown content came: what follows cannot be found by content."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0  # tokens that have a slot
    new_from: int = 0  # the first token that the last call gave a slot of its own
    tail: array | None = field(default_factory=lambda: array("q"))
    content: bytes | None = ROOT


class Pool:
    """`num_blocks` blocks of `block_size` slots. With `reserve`, block 0 is the null block: never handed out, never
    freed, counted neither as free nor as findable, so that `num_blocks - 1` are usable.

    `max_model_len`: the most tokens a request may have. Raises ValueError for sizes that leave no usable block, and for
    a max_model_len that the usable blocks cannot hold: a request that long would wait for ever (vllm#35541, #47272).
    """

    def __init__(
        self, num_blocks: int, block_size: int, reserve: bool = True, max_model_len: int | None = None
    ) -> None:
        if block_size < 1 or num_blocks < 1 + reserve:
            least = "2 blocks, one of them the null block" if reserve else "1 block"
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} slots is too small: it needs {least}")
        self.num_blocks, self.block_size, self.reserve = num_blocks, block_size, reserve
        self.max_model_len = max_model_len
        self.usable = num_blocks - reserve
        if max_model_len is not None and self._blocks_for(max_model_len) > self.usable:
            need, without = self._blocks_for(max_model_len), ", less the null block," * reserve
            raise ValueError(
                f"max_model_len = {max_model_len} needs {need} blocks of {block_size} slots and {num_blocks} blocks"
                f"{without} are {self.usable} usable ones: give max_model_len of at most {self.usable * block_size}, "
                f"or at least {need + reserve} blocks"
            )
        self._requests: dict[Hashable, _Held] = {}
        self._references = [0] * num_blocks
        self._content: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}  # content -> the block that is found by it
        # in the order in which blocks are taken: blank ones, then findable ones, those freed first in front
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK + reserve, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can take now, findable ones included."""
        return len(self._free)

    def blocks(self, request: Hashable) -> tuple[int, ...]:
        """The request's block table. Raises ValueError for a request that holds nothing."""
        return tuple(self._held(request).blocks)

    def references(self, block: int) -> int:
        """How many requests hold a block; always 0 for the null block."""
        return self._references[block]

    def allocate(self, request: Hashable, tokens: Sequence[int] | int) -> int:
        """Admit a request with its first tokens: their ids, or their number where content is unknown (never shared).

        Returns how many leading tokens lie in blocks that are shared: they are written already. The last token is never
        among them, since a model has to see it to go on. Raises OutOfBlocks, ValueError (a request that holds blocks,
        no tokens, more than max_model_len) or TypeError (ids that are no integers); nothing has changed then.
        """
        if request in self._requests:
            raise ValueError(f"request {request!r} holds blocks already: append to it, or free it first")
        tokens, count = self._checked(request, tokens, 0)
        shared = [] if isinstance(tokens, int) else self._look_up(tokens, (count - 1) // self.block_size)
        revived = sum(not self._references[block] for block in shared)
        needed = self._blocks_for(count) - len(shared)
        if needed > self.num_free - revived:
            raise OutOfBlocks(request, needed, self.num_free - revived)
        held = self._requests[request] = _Held()
        for block in shared:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        written = len(shared) * self.block_size
        if shared:
            held.blocks, held.length, held.content = shared, written, self._content[shared[-1]]
        self._extend(held, tokens if isinstance(tokens, int) else tokens[written:], count - written)
        return written

    def append(self, request: Hashable, tokens: Sequence[int] | int = 1) -> None:
        """Give further tokens of a request their slots. Raises as allocate does."""
        held = self._held(request)
        tokens, count = self._checked(request, tokens, held.length)
        needed = self._blocks_for(held.length + count) - len(held.blocks)
        if needed > len(self._free):
            raise OutOfBlocks(request, needed, len(self._free))
        self._extend(held, tokens, count)

    def free(self, request: Hashable) -> None:
        """Give back what a request holds. Raises ValueError for a request that holds nothing."""
        held = self._held(request)
        del self._requests[request]
        for block in reversed(held.blocks):  # a block is of no use without those before it: let it go first
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._content[block] is None:
                    self._free.move_to_end(block, last=False)

    def slot_mapping(self, request: Hashable) -> list[int]:
        """Slots of the tokens that the last allocate or append of this request added, without those that are shared."""
        held, size = self._held(request), self.block_size
        return [held.blocks[i // size] * size + i % size for i in range(held.new_from, held.length)]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _held(self, request: Hashable) -> _Held:
        if request not in self._requests:
            raise ValueError(f"request {request!r} holds no blocks: allocate it first")
        return self._requests[request]

    def _checked(self, request: Hashable, tokens: Sequence[int] | int, before: int) -> tuple[array | int, int]:
        ids = tokens if isinstance(tokens, int) else array("q", tokens)
        count = ids if isinstance(ids, int) else len(ids)
        if count < 1:
            raise ValueError(f"request {request!r}: {count} tokens; at least 1 is allocated or appended")
        if self.max_model_len is not None and before + count > self.max_model_len:
            raise ValueError(f"request {request!r}: {before + count} tokens exceed max_model_len {self.max_model_len}")
        return ids, count

    def _look_up(self, tokens: array, most: int) -> list[int]:
        """Blocks that hold the first tokens, at most `most` of them."""
        blocks, content = [], ROOT
        for start in range(0, most * self.block_size, self.block_size):
            content = _content_of(content, tokens[start : start + self.block_size])
            if content not in self._found:
                break
            blocks.append(self._found[content])
        return blocks

    def _extend(self, held: _Held, tokens: array | int, count: int) -> None:
        """Add `count` tokens for which there are enough free blocks."""
        first = held.length // self.block_size  # the block that the next token falls into
        held.new_from = held.length
        held.length += count
        for _ in range(self._blocks_for(held.length) - len(held.blocks)):
            block, _ = self._free.popitem(last=False)
            if self._content[block] is not None:
                del self._found[self._content[block]]
                self._content[block] = None
            self._references[block] = 1
            held.blocks.append(block)
        if held.tail is None or isinstance(tokens, int):
            held.tail = held.content = None
            return
        tail, size = held.tail + tokens, self.block_size
        for number, block in enumerate(held.blocks[first : held.length // size]):
            held.content = _content_of(held.content, tail[number * size : (number + 1) * size])
            if held.content not in self._found:  # equal content written twice: the first stays the one to find
                self._found[held.content], self._content[block] = block, held.content
        held.tail = tail[len(tail) - held.length % size :]


def _content_of(before: bytes, tokens: array) -> bytes:
    """A name for a block's tokens and all those before them."""
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()
