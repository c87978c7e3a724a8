"""One problem: a Case says what is written, into what cache, from where."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

LAYOUTS = ("NHD", "HND", "packed")
SOURCES = ("contiguous", "qkv", "transposed")
SLOT_PATTERNS = ("decode", "prefill", "mixed", "random")
PADDED = ("scattered", "tail")  # where in slot_mapping padding lies
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
DECODE_TOKENS = 256  # the largest decode batch that vLLM's default capture list holds below its second step
PREFILL_TOKENS = 2048
NULL_BLOCKS = 8  # as many as policy `null_blocks` takes where the cache can spare them
GIB = 1 << 30
MIB = 1 << 20


def regime_of(num_tokens: int) -> str:
    """decode, mixed or prefill."""
    if num_tokens <= DECODE_TOKENS:
        return "decode"
    return "mixed" if num_tokens < PREFILL_TOKENS else "prefill"


def usual_cache_bytes(num_tokens: int, token_bytes: int, at_least: int = GIB) -> int:
    """What grids give a GPU case: 1 GiB (many times any L2; fits a small GPU twice), and at least twice its tokens."""
    return max(at_least, 2 * num_tokens * token_bytes)


@dataclass(frozen=True)
class Case:
    """A copy problem. Sizes count elements, `cache_bytes` counts bytes of the K and V caches together.

    Logical cache shape is `[num_blocks, block_size, num_kv_heads, head_size]` whatever the layout. Block 0 is the null
    block. `value_head_size` 0 means "as head_size". `padding` is the share of `slot_mapping` that is padding, 0 to 1;
    `padded` says where in it: scattered, as context parallelism leaves it, or at the tail, as a rounded-up batch does.

    Raises ValueError for a value outside its range, naming the field, its value and what is allowed.
    """

    num_tokens: int
    num_kv_heads: int = 8
    head_size: int = 128
    value_head_size: int = 0
    block_size: int = 16
    cache_bytes: int = GIB
    dtype: str = "bfloat16"
    layout: str = "NHD"
    source: str = "contiguous"
    slots: str = "random"
    padding: float = 0.0
    padded: str = "scattered"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_head_size", self.value_head_size or self.head_size)
        for name, low in (
            ("num_tokens", 0),
            ("num_kv_heads", 1),
            ("head_size", 1),
            ("value_head_size", 1),
            ("block_size", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {low}")
        allowed = {"layout": LAYOUTS, "source": SOURCES, "slots": SLOT_PATTERNS, "dtype": tuple(ITEMSIZE)}
        allowed["padded"] = PADDED
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(values)}")
        if not 0.0 <= self.padding <= 1.0:
            raise ValueError(f"padding = {self.padding} must lie between 0 and 1")
        if self.num_tokens > self.usable_slots:
            need = (self.num_blocks_for(self.num_tokens) + 3) * self.block_bytes
            raise ValueError(
                f"cache_bytes = {self.cache_bytes} holds {self.usable_slots} usable slots, "
                f"{self.num_tokens} tokens need cache_bytes of at least {need}"
            )

    def num_blocks_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_size)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V rows together, in one layer."""
        return self.num_kv_heads * (self.head_size + self.value_head_size) * self.itemsize

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token's K, and of its V, that lie together in the cache: all heads in NHD, else one head."""
        together = self.itemsize * (self.num_kv_heads if self.layout == "NHD" else 1)
        return self.head_size * together, self.value_head_size * together

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def num_blocks(self) -> int:
        return self.cache_bytes // self.block_bytes

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def usable_slots(self) -> int:
        """Slots that real tokens may count on: not the null block's, not the last block's (policy `last_slot`
        needs its last slot), and not those of one spare block, so that runs and single slots need not share one."""
        return max(0, self.num_blocks - 3) * self.block_size

    @property
    def null_blocks(self) -> int:
        """Blocks from block 0 on that policy `null_blocks` spreads padding over; no real token gets one of them."""
        return min(NULL_BLOCKS, max(1, self.num_blocks - 2 - self.num_blocks_for(self.num_tokens)))

    @property
    def padded_tokens(self) -> int:
        return round(self.num_tokens * self.padding)

    @property
    def written_tokens(self) -> int:
        return self.num_tokens - self.padded_tokens

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes a call moves: each written row read once and written once, and the int64 index read once."""
        return 2 * self.written_tokens * self.token_bytes + 8 * self.num_tokens

    @property
    def large_cache(self) -> str:
        """The cache's size in words where it is more than grids give a case of these tokens, else empty."""
        large = self.cache_bytes > usual_cache_bytes(self.num_tokens, self.token_bytes)
        return f"{self.cache_bytes / GIB:.3g} GiB cache" * large

    @property
    def regime(self) -> str:
        return regime_of(self.num_tokens)

    def fields(self) -> dict:
        """The case as a flat dict, in field order: the case columns of a run file."""
        return asdict(self)

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads}x{self.head_size}"
        if self.value_head_size != self.head_size:
            heads += f"/{self.value_head_size}"
        extras = [self.source] * (self.source != "contiguous") + [f"{self.slots} slots"] * (self.slots != "random")
        at_tail = " at the tail" * (self.padded == "tail")
        extras += [f"{self.padding:.0%} padded{at_tail}"] * (self.padding > 0)
        extras += [f"blocks of {self.block_size}"] * (self.block_size != 16)
        extras += [self.large_cache] * bool(self.large_cache)
        return " ".join([f"{self.num_tokens} tokens", heads, self.dtype, self.layout, *extras])


CASE_FIELDS = tuple(field.name for field in fields(Case))


# ------------------------------------------------------------------------------------------------------------- grids

GRIDS = ("quick", "full", "releases", "padding")
HEADLINE = ("graph", "produced")  # timer and state of the first answer on a GPU
CPU_HEADLINE = ("wall", "produced")
EVERY_TIMING = (
    *(("graph", state) for state in ("produced", "cold", "resident")),
    *(("call", state) for state in ("produced", "cold", "resident")),
    ("host", "produced"),
    ("eager", "produced"),
)  # fmt: skip
FIRST_LOOK = (1, 32, 256, 1024, 4096, 16384, 65536)
EVERY_TIMING_AT = (1, 32, 256, 1024, 16384)  # tokens
AROUND = (32, 256, 2048, 16384)  # tokens at which one factor is varied
PADDING_TOKENS = (8, 32, 128, 512, 2048, 8192)
PADDING_SHARES = (0.0, 0.03, 0.12, 0.25, 0.5, 0.75, 0.94)
FEW_SHARES = (0.12, 0.75)  # a rounded-up decode batch's; a rank's of 4 in context parallelism
FINE = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)


def _gpu_case(num_tokens: int, cache_bytes: int = GIB, **fields) -> Case:
    """A case with the usual cache, or one of `cache_bytes` where that is more."""
    token_bytes = Case(0, cache_bytes=GIB, **fields).token_bytes
    return Case(num_tokens, cache_bytes=usual_cache_bytes(num_tokens, token_bytes, cache_bytes), **fields)


def _full() -> list[Case]:
    """Tokens x heads at head size 128 in NHD and packed, then one factor at a time around 8 x 128 bf16 NHD."""
    cases = [_gpu_case(n, layout=layout) for layout in ("NHD", "packed") for n in FINE]
    for layout in ("NHD", "packed"):
        for heads in (1, 2, 4, 16, 32, 128):
            tokens = FIRST_LOOK if heads < 128 else FIRST_LOOK[:-1]  # the last would move 8.6 GB a call
            cases += [_gpu_case(n, num_kv_heads=heads, layout=layout) for n in tokens]
    for factor in ({"layout": "HND"}, {"source": "qkv"}, {"layout": "packed", "source": "qkv"}):
        cases += [_gpu_case(n, **factor) for n in FIRST_LOOK]
    factors = [{"head_size": size} for size in (64, 80, 96, 192, 256)]
    factors += [{"dtype": "float16"}, {"dtype": "float32"}]
    factors += [{"block_size": size} for size in (32, 64, 128, 256, 1600)]
    factors += [{"cache_bytes": size * GIB} for size in (4, 64)]
    cases += [_gpu_case(n, **factor) for factor in factors for n in AROUND]
    cases += [_gpu_case(n, slots=regime_of(n)) for n in FIRST_LOOK[1:]]
    # rows in slot order, as in one long block: what their being scattered costs
    return cases + [_gpu_case(n, slots="prefill", block_size=n) for n in FIRST_LOOK[-2:]]


def _releases() -> list[Case]:
    """What vLLM's releases are compared on: one NHD problem, the sources and layouts of their default backends, and
    transposed heads, which a kernel that never looks at their stride gets wrong."""
    kinds = (("NHD", "contiguous"), ("NHD", "qkv"), ("packed", "qkv"))
    cases = [_gpu_case(n, layout=layout, source=source) for layout, source in kinds for n in FIRST_LOOK]
    return [*cases, _gpu_case(256, source="transposed")]


def _padding() -> list[Case]:
    """8 x 128 bf16 by tokens and padded share, scattered in NHD; at the tail, and in packed, at fewer of them."""
    tails = [(n, share, "tail", "NHD") for n in PADDING_TOKENS for share in FEW_SHARES]
    packed = [(n, share, "scattered", "packed") for n in PADDING_TOKENS[1::2] for share in (0.0, *FEW_SHARES)]
    scattered = [(n, share, "scattered", "NHD") for n in PADDING_TOKENS for share in PADDING_SHARES]
    cases = [
        _gpu_case(n, padding=share, padded=at, layout=layout) for n, share, at, layout in scattered + tails + packed
    ]
    return [case for case in cases if not case.padding or 0 < case.padded_tokens < case.num_tokens]


def _cpu(tokens: tuple[int, ...], heads: tuple[int, ...]) -> list[Case]:
    sizes = [(h, n) for h in heads for n in tokens]
    return [Case(n, h, cache_bytes=128 * MIB, layout=layout) for layout in ("NHD", "packed") for h, n in sizes]


def grid(name: str, device: str = "cuda") -> list[Case]:
    """The cases of a named grid on a device type ("cuda" or "cpu": smaller). Raises ValueError naming the grids."""
    if name not in GRIDS:
        raise ValueError(f"grid {name!r} is not one of {', '.join(GRIDS)}")
    if name in ("releases", "padding") and device == "cpu":
        raise ValueError(f"grid {name!r} is about CUDA kernels and needs a GPU; a CPU has quick and full")
    if device == "cpu":
        return _cpu((1, 32, 256, 2048), (8,)) if name == "quick" else _cpu((1, 8, 64, 256, 1024, 4096), (1, 8, 32))
    if name != "quick":
        return {"full": _full, "releases": _releases, "padding": _padding}[name]()
    return [_gpu_case(n, layout=layout) for layout in ("NHD", "packed") for n in FIRST_LOOK[:-1]]


def timings(name: str, case: Case, device: str = "cuda") -> tuple[tuple[str, str], ...]:
    """(timer, state) pairs that a grid gives a case: all at 8 x 128 bf16 NHD and packed, else the headline."""
    if device == "cpu":
        return (CPU_HEADLINE,)
    if name == "quick":
        return (HEADLINE, ("eager", "produced"))
    if name == "releases":  # a release that is an op can be called from Python, and the question came from there
        called = (case.layout, case.source) == ("NHD", "contiguous") and case.num_tokens in EVERY_TIMING_AT
        return (HEADLINE, ("graph", "cold"), *((timer, "produced") for timer in ("host", "eager") if called))
    if name == "padding":  # policy filter waits for the GPU, so that only an eager call can be timed
        eager = (case.padding, case.layout, case.padded) == (FEW_SHARES[-1], "NHD", "scattered")
        return (HEADLINE, ("eager", "produced")) if eager else (HEADLINE,)
    plain = _gpu_case(case.num_tokens, layout=case.layout)
    in_full = case == plain and case.layout != "HND" and case.num_tokens in EVERY_TIMING_AT
    return EVERY_TIMING if in_full else (HEADLINE,)
