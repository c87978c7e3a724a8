"""torch.compile on the index copy: with the caches as flat arguments, and with the view inside, a trap."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING

from kvnb.copies.base import NULL, Copy
from kvnb.copies.torch_index import POLICIES, flat_rows, indexed, rows_as_they_lie
from kvnb.problem.case import GIB, MIB, Case

if TYPE_CHECKING:
    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

# Inductor writes two tilings of such a kernel, 8 and 2 elements a thread, and keeps the one that is faster in its own
# timing of the first call, which can go either way (pointwise, torch/_inductor/runtime/triton_heuristics.py, v2.11.0).
# Nothing is kept on disk: what one process chose would be every worker's, and no interval would show that it is one of
# two; and a graph with dynamic sizes is found whatever size it was made for, so one regime would be served another's.
ANEW = {"fx_graph_cache": False, "autotune_local_cache": False}
TILINGS = {"timed": ANEW, "first": {**ANEW, "triton.autotune_pointwise": False}}
# For that timing it clones the caches, which are changed, before every call; where memory has no room for clones,
# it puts them back from the host (copy_args_to_cpu_if_needed, same file): minutes for a graph.
LARGEST_CLONED = 16 * GIB
TRAP = Case(256, cache_bytes=256 * MIB)  # compile_view is shown in this problem only, whatever the cache's size


def _assign_rows(key_rows, value_rows, slots, key, value):
    key_rows[slots] = key
    value_rows[slots] = value


def _assign_by_block(key_cache, value_cache, block, offset, key, value):
    key_cache[block, offset] = key
    value_cache[block, offset] = value


def _assign_packed(cache, block, offset, key, value):
    import torch

    cache[block, offset] = torch.cat((key, value), dim=-1)


def _assign_to_view(key_cache, value_cache, slots, key, value):
    key_cache.view(-1, key.shape[1])[slots] = key
    value_cache.view(-1, value.shape[1])[slots] = value


_called: set = set()  # what of `compiled` is compiled


@cache
def compiled(function, shapes: tuple, source: str, dtype: str, tokens: str, device: str, tiling: str = "timed"):
    """One fullgraph object per shapes (of the caches, of a token), source, dtype, `tokens` (a regime or "one") and key
    of TILINGS.

    One token compiles apart because torch specialises sizes 0 and 1; regimes, because Inductor tiles for the size that
    it saw first, and a graph made for 32 tokens would be judged at 65,536; the others, because what differs between two
    calls dynamo makes dynamic in the second graph.

    Each is compiled from a twin with a name of its own: dynamo keeps its guards, and what it made dynamic, by code.
    """
    import torch

    torch._dynamo.config.fail_on_recompile_limit_hit = True  # never eager
    named = ("x".join(map(str, shape)) for shape in shapes)
    name = "_".join((function.__name__, *named, source, dtype, tokens, device, tiling))
    twin = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    return torch.compile(twin, fullgraph=True, options=TILINGS[tiling])


def graphs_made() -> int:
    """Graphs that dynamo has compiled in this process so far: the `graphs` column of a run file."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _compiled_for(inputs: Inputs, function, *caches, tiling: str = "timed"):
    case = inputs.case
    tokens = "one" if case.num_tokens == 1 else case.regime
    shapes = *(tuple(cache.shape) for cache in caches), (case.num_kv_heads, case.head_size, case.value_head_size)
    return compiled(function, shapes, case.source, case.dtype, tokens, inputs.device.type, tiling)


def _first_call(function, *tensors, tokens: int) -> None:
    """Compile `function` by calling it, the last `tokens` tensors marked: their dimension 0 varies, so that one graph
    serves every number of tokens of a regime."""
    import torch

    for tensor in tensors[-tokens:]:
        if tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    function(*tensors)
    _called.add(function)


def _packed_cache(inputs: Inputs):
    """The packed buffer as one cache, `[num_blocks, block_size, num_kv_heads, head_size + value_head_size]`."""
    case = inputs.case
    row = case.head_size + case.value_head_size
    return inputs.storage[0].view(case.num_blocks, case.num_kv_heads, case.block_size, row).transpose(1, 2)


def bind_compile(inputs: Inputs) -> Step:
    """torch.compile of the index copy, caches as arguments (fullgraph, tokens dynamic; packed: K and V joined)

    Two views of one packed buffer as two arguments would be cloned whole at every call: AOTAutograd makes one base of
    inputs that alias, and Inductor copies it.
    """
    return _bind_tiled(inputs, "timed")


def bind_compile_first(inputs: Inputs) -> Step:
    """torch.compile of the index copy, with Inductor's first tiling (8 elements a thread), not the faster of two"""
    return _bind_tiled(inputs, "first")


def _bind_tiled(inputs: Inputs, tiling: str) -> Step:
    layout = inputs.case.layout
    assign = {"NHD": _assign_rows, "HND": _assign_by_block, "packed": _assign_packed}[layout]
    view = flat_rows if layout == "NHD" else lambda t: t
    caches = (_packed_cache(inputs),) if layout == "packed" else (view(inputs.key_cache), view(inputs.value_cache))
    function = _compiled_for(inputs, assign, *caches, tiling=tiling)

    def write_rows(index, key, value):
        if function not in _called:
            return _first_call(function, *caches, *index, view(key), view(value), tokens=len(index) + 2)
        return function(*caches, *index, view(key), view(value))

    return indexed(inputs, layout != "NHD", write_rows)


def bind_compile_view(inputs: Inputs) -> Step:
    """torch.compile with the cache viewed inside the function: the whole cache is cloned at every call"""
    function = _compiled_for(inputs, _assign_to_view, inputs.key_cache, inputs.value_cache)

    def write_rows(index, key, value):
        function(inputs.key_cache, inputs.value_cache, *index, flat_rows(key), flat_rows(value))

    return indexed(inputs, False, write_rows)


def _trap_only(case: Case, policy: str, timer: str) -> str | None:
    shown = (TRAP.num_tokens, TRAP.num_kv_heads, TRAP.head_size, TRAP.dtype, TRAP.layout, TRAP.source)
    if (case.num_tokens, case.num_kv_heads, case.head_size, case.dtype, case.layout, case.source) != shown:
        return f"shown once, in: {TRAP}"
    return _compiles(case, policy, timer)


def _compiles(case: Case, policy: str, timer: str) -> str | None:
    from kvnb import build

    if timer == "wall":
        return build.no_compiler() or rows_as_they_lie(case, policy, timer)
    if case.cache_bytes > LARGEST_CLONED:
        return "Inductor times its tilings on clones of the caches: shown up to 16 GiB, beyond with the first tiling"
    return rows_as_they_lie(case, policy, timer)


def _first_where_shown(case: Case, policy: str, timer: str) -> str | None:
    """The tiling is a question of its own, asked at one shape: a compilation takes as long as timing a whole case."""
    shape = case.num_kv_heads, case.head_size, case.value_head_size, case.dtype, case.padding
    if shape != (8, 128, 128, "bfloat16", 0):
        return "shown at 8x128 bfloat16 without padding only"
    return rows_as_they_lie(case, policy, timer)


def _needs_block_indices(case: Case, policy: str) -> bool:
    return case.layout != "NHD" or policy == "remap"


COPIES = (
    Copy(
        "torch.compile", "compile", POLICIES[:-1], bind_compile, ("cuda", "cpu"), supports=_compiles,
        steps=_needs_block_indices,
    ),
    Copy(
        "torch.compile_first", "compile", POLICIES[:-1], bind_compile_first, supports=_first_where_shown,
        steps=_needs_block_indices,
    ),
    Copy(
        "torch.compile_view", "compile", NULL, bind_compile_view, ("cuda", "cpu"), ("eager", "wall"),
        supports=_trap_only,
    ),
)  # fmt: skip
