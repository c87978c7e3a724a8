"""The block pool: blocks conserved, none used twice, the null block left alone, all or nothing; sharing; refusals."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvnb.reserve.pool import NULL_BLOCK, OutOfBlocks, Pool

NAMES = st.integers(0, 5)
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # two ids only: prefixes meet often
TOKENS = IDS | st.integers(1, 20)


def state_of(pool: Pool) -> dict:
    """All a pool knows, order included."""
    return copy.deepcopy(vars(pool)) | {"order": list(pool._free)}


class Requests(RuleBasedStateMachine):
    """Any sequence of calls, against a model that knows each request's tokens (None: of unknown content)."""

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 5), reserve=st.booleans())
    def start(self, num_blocks, block_size, reserve):
        self.pool = Pool(num_blocks, block_size, reserve)
        self.tokens: dict[int, list[int | None]] = {}
        self.cache: dict[int, int | None] = {}  # slot -> the token that an engine would have written there

    def attempt(self, method, name, tokens):
        """The call's result; nothing may have changed where it is refused."""
        before = state_of(self.pool)
        try:
            result = getattr(self.pool, method)(name, tokens)
        except (OutOfBlocks, ValueError) as refused:
            assert state_of(self.pool) == before, "a refused call left something half done"
            short = isinstance(refused, OutOfBlocks)
            assert short or (method == "allocate") == (name in self.tokens)
            assert not short or refused.needed > refused.free
            return
        shared = result or 0
        new = [None] * tokens if isinstance(tokens, int) else tokens[shared:]
        self.tokens[name] = [*self.tokens.get(name, []), *([] if isinstance(tokens, int) else tokens[:shared]), *new]
        slots = self.pool.slot_mapping(name)
        assert len(slots) == len(new) > 0
        for slot, token in zip(slots, new):
            assert self.pool.references(slot // self.pool.block_size) == 1, "a shared block was to be written"
            self.cache[slot] = token

    @rule(name=NAMES, tokens=TOKENS)
    def allocate(self, name, tokens):
        self.attempt("allocate", name, tokens)

    @rule(name=NAMES, tokens=TOKENS)
    def append(self, name, tokens):
        self.attempt("append", name, tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.free(name)
        del self.tokens[name]
        with pytest.raises(ValueError, match=f"request {name} holds no blocks"):
            self.pool.free(name)

    @invariant()
    def blocks_are_conserved_and_counted(self):
        held = [block for name in self.tokens for block in self.pool.blocks(name)]
        assert len(set(held)) + self.pool.num_free == self.pool.usable == self.pool.num_blocks - self.pool.reserve
        assert not set(held) & set(self.pool._free)
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == held.count(block)

    @invariant()
    def the_null_block_is_left_alone(self):
        if self.pool.reserve:
            assert all(NULL_BLOCK not in self.pool.blocks(name) for name in self.tokens)
            assert NULL_BLOCK not in self.pool._free
            assert NULL_BLOCK not in self.pool._found.values()

    @invariant()
    def every_request_finds_its_own_tokens(self):
        """No slot is used twice, and what is shared holds what its sharer would have written."""
        size = self.pool.block_size
        for name, tokens in self.tokens.items():
            blocks = self.pool.blocks(name)
            assert len(blocks) == len(set(blocks)) == -(-len(tokens) // size)
            assert [self.cache[blocks[i // size] * size + i % size] for i in range(len(tokens))] == tokens


TestRequests = Requests.TestCase


@given(length=st.integers(1, 100), block_size=st.integers(1, 17), reserve=st.booleans())
def test_the_longest_request_that_construction_allows_is_served_and_one_block_less_is_refused(
    length, block_size, reserve
):
    need = -(-length // block_size)
    pool = Pool(need + reserve, block_size, reserve, max_model_len=length)
    pool.allocate("longest", length)
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="exceed max_model_len"):
        pool.append("longest", 1)
    if need > 1:
        with pytest.raises(ValueError, match=f"at most {(need - 1) * block_size}, or at least {need + reserve} blocks"):
            Pool(need + reserve - 1, block_size, reserve, max_model_len=length)


def test_thirteen_blocks_of_8192_do_not_hold_106496_tokens_beside_a_null_block():
    """What hung a server: 13 x 8,192 is 106,496 (https://github.com/RBLN-SW/vllm-rbln/issues/957)."""
    Pool(13, 8192, reserve=False, max_model_len=106_496)
    with pytest.raises(ValueError, match="13 blocks, less the null block, are 12 usable ones.* at most 98304"):
        Pool(13, 8192, max_model_len=106_496)


def test_a_shortage_names_the_request_and_both_numbers():
    pool = Pool(4, 16)
    pool.allocate("a", 20)
    with pytest.raises(OutOfBlocks, match="request 'b' needs 2 more blocks, 1 are free"):
        pool.allocate("b", 17)


def test_a_whole_prompt_found_again_still_leaves_its_last_token_to_write():
    pool = Pool(8, 4)
    assert pool.allocate("a", range(8)) == 0
    assert pool.allocate("b", range(8)) == 4
    assert pool.blocks("a")[0] == pool.blocks("b")[0]
    assert pool.slot_mapping("b") == [pool.blocks("b")[1] * 4 + i for i in range(4)]
    assert set(pool.slot_mapping("a")).isdisjoint(pool.slot_mapping("b"))


def test_equal_tokens_behind_different_ones_are_not_shared():
    pool = Pool(8, 2)
    pool.allocate("a", [1, 2, 3, 4, 5])
    assert pool.allocate("b", [9, 9, 3, 4, 5]) == 0


def test_freed_blocks_are_found_until_their_place_is_needed_those_freed_first_going_first():
    pool = Pool(6, 2, reserve=False)
    for name, first in (("old", 0), ("new", 10)):
        pool.allocate(name, range(first, first + 4))
    pool.free("old")
    pool.free("new")
    assert pool.num_free == 6
    pool.allocate("unknown", 8)  # two blank blocks, then both of old
    assert pool.allocate("again", range(10, 14)) == 2
    pool.free("again")
    assert pool.allocate("old", range(4)) == 0


def test_blank_blocks_are_taken_before_findable_ones_whenever_they_were_freed():
    pool = Pool(3, 2, reserve=False)
    pool.allocate("unknown", 4)
    pool.allocate("known", [1, 2])
    pool.free("known")
    pool.free("unknown")
    pool.allocate("unknown", 2)
    assert pool.allocate("known", [1, 2, 3]) == 2


def test_nothing_is_found_by_what_follows_tokens_of_unknown_content():
    pool = Pool(8, 2)
    pool.allocate("a", [1, 2, 3])
    pool.append("a", 1)
    pool.append("a", [4, 5, 6])
    assert pool.allocate("b", [1, 2, 3, 4, 5, 6]) == 2


def test_a_chain_loses_its_end_before_its_beginning():
    pool = Pool(3, 2, reserve=False)
    pool.allocate("a", range(6))
    pool.free("a")
    pool.allocate("b", 2)
    assert pool.allocate("c", range(6)[:4]) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.allocate("a", 1), "request 'a' holds blocks already"),
        (lambda pool: pool.append("b"), "request 'b' holds no blocks: allocate it first"),
        (lambda pool: pool.append("a", []), "request 'a': 0 tokens"),
        (lambda pool: pool.allocate("b", -3), "request 'b': -3 tokens"),
        (lambda pool: Pool(1, 16), "too small: it needs 2 blocks, one of them the null block"),
        (lambda pool: Pool(0, 16, reserve=False), "too small: it needs 1 block$"),
    ],
)
def test_misuse_is_refused(call, message):
    pool = Pool(4, 16)
    pool.allocate("a", 3)
    before = state_of(pool)
    with pytest.raises(ValueError, match=message):
        call(pool)
    with pytest.raises(TypeError):
        pool.append("a", ["a word"])
    assert state_of(pool) == before
