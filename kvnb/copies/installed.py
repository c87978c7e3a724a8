"""The copies that other packages bring: FlashInfer's, SGLang's and vLLM's own ops, as installed beside kvnb.

Nothing is imported before `bind`. Each op keeps its own rules; `supports` says what it cannot do, where a call would
fail late or take the device along.

              padding      layouts           what `step` makes of slot_mapping
  flashinfer  no -1        NHD, HND, packed  request and position of each token, int32, for its page table
  sglang      -1 is fatal  NHD               nothing
  vllm        -1 skipped   NHD, HND, packed  nothing
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvnb.copies.base import NULL, Copy
from kvnb.copies.torch_index import flat_rows, nhd_only, tokens_of
from kvnb.problem.case import Case

if TYPE_CHECKING:
    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

FLASHINFER_HEADS, FLASHINFER_DTYPES = (64, 128, 256, 512), ("bfloat16", "float16", "float8_e4m3fn")
VLLM_DTYPES = ("bfloat16", "float16", "float32")  # under kv_cache_dtype "auto"
SGLANG_HOMES = ("sglang.kernels.ops.kvcache.kvcache", "sglang.jit_kernel.kvcache")  # from 2026-07 on; before
WARP, MOST_THREADS, VECTOR_BYTES = 32, 1024, 16


@dataclass(frozen=True)
class Installed(Copy):
    """A Copy whose code other packages hold: what is installed of them is part of its title and of its version, as in
    "23715aa3ec, flashinfer-python 0.7.4"."""

    distributions: tuple[str, ...] = ()  # as pip knows them

    @property
    def title(self) -> str:
        return self.title_in(self.version)

    def title_in(self, version: str) -> str:
        """`title`, of what was installed where a run file has this `version`, its copy_version."""
        return f"{super().title} ({version.partition(', ')[2] or 'of a version that the run does not say'})"

    @property
    def version(self) -> str:
        return f"{super().version}, {_releases(self.distributions)}"


@cache
def _releases(distributions: tuple[str, ...]) -> str:
    """As in "flashinfer-python 0.7.4"."""
    found = (next(iter(metadata.distributions(name=name)), None) for name in distributions)
    return ", ".join(f"{package.name} {package.version}" for package in found if package) or "not installed"


def _absent(package: str) -> str | None:
    return None if find_spec(package) else f"{package} is not installed"


def bind_flashinfer(inputs: Inputs) -> Step:
    """FlashInfer's append_paged_kv_cache: a block for a token at a time, addresses through a page table

    One request owns every page in order, so that a token's position in it is its slot. That table stays as it is, like
    an engine's; `step` makes the two arrays that FlashInfer wants per token.
    """
    import torch
    from flashinfer import append_paged_kv_cache

    case, caches, layout = inputs.case, (inputs.key_cache, inputs.value_cache), "NHD"
    if case.layout != "NHD":
        caches, layout = (caches[0].transpose(1, 2), caches[1].transpose(1, 2)), "HND"
    ints = {"dtype": torch.int32, "device": inputs.device}
    pages, last = torch.arange(case.num_blocks, **ints), torch.tensor([case.block_size], **ints)
    table = pages, torch.tensor([0, case.num_blocks], **ints), last  # which, whose, how full the last

    def step(slot_mapping):
        positions, count = slot_mapping.int(), len(slot_mapping)
        requests = torch.zeros_like(positions)

        def write(key, value):
            rows = tokens_of(key, count, None), tokens_of(value, count, None)
            append_paged_kv_cache(*rows, requests, positions, caches, *table, layout)

        return write

    return step


def _flashinfer(case: Case, policy: str, timer: str) -> str | None:
    """From its page.cuh and page.cu (0.7.4): strides are free, as long as K's are V's and rows are whole."""
    if reason := _absent("flashinfer"):
        return reason
    if case.dtype not in FLASHINFER_DTYPES or not case.head_size == case.value_head_size in FLASHINFER_HEADS:
        return f"takes {', '.join(FLASHINFER_DTYPES)}, K and V heads of one size of {FLASHINFER_HEADS} only"
    threads = case.num_kv_heads * case.head_size // max(VECTOR_BYTES // case.itemsize, case.head_size // WARP)
    if threads > MOST_THREADS:
        return f"gives a token to one block: {threads} threads here, {MOST_THREADS} at most"
    return None if case.num_tokens else "cannot launch its grid for no tokens"


def bind_sglang(inputs: Inputs) -> Step:
    """SGLang's store_cache: warps share a row, launched dependently; told to write slot 0, which it skips as shipped"""
    store = _sglang_store()
    key_rows, value_rows = flat_rows(inputs.key_cache), flat_rows(inputs.value_cache)

    def step(slot_mapping):
        count = len(slot_mapping)

        def write(key, value):
            rows = flat_rows(tokens_of(key, count, None)), flat_rows(tokens_of(value, count, None))
            store(*rows, key_rows, value_rows, slot_mapping)

        return write

    return step


def _sglang_store():
    """`store(keys, values, key_rows, value_rows, slots)`: sglang's kernel, or sgl_kernel's where sglang has none."""
    for home in SGLANG_HOMES if find_spec("sglang") else ():
        try:
            store = import_module(home).store_cache
        except ModuleNotFoundError as missing:
            if not f"{home}.".startswith(f"{missing.name}."):  # something that it needs
                raise
            continue
        skips = "reserved_skip_index" in inspect.signature(store).parameters
        return partial(store, reserved_skip_index=-1) if skips else store
    import torch

    if find_spec("sgl_kernel"):
        import_module("sgl_kernel")  # for the op itself: its Python wrapper hides a failure behind an index_put
    if not hasattr(torch.ops.sgl_kernel, "store_kv_cache"):
        raise ImportError(f"neither {' nor '.join(SGLANG_HOMES)} nor sgl_kernel stores: install another sglang")
    warnings.warn("sglang: store_cache is not installed, sgl_kernel's store_kv_cache stands for it", stacklevel=2)
    return lambda keys, values, *caches_and_slots: torch.ops.sgl_kernel.store_kv_cache(*caches_and_slots, keys, values)


def _sglang(case: Case, policy: str, timer: str) -> str | None:
    return (_absent("sgl_kernel") and _absent("sglang")) or nhd_only(case, policy, timer)


def bind_vllm(inputs: Inputs) -> Step:
    """vLLM's reshape_and_cache_flash, as the installed vllm calls it for a cache that is not quantised"""
    import torch
    from vllm import _custom_ops

    op, caches = _custom_ops.reshape_and_cache_flash, (inputs.key_cache, inputs.value_cache)
    scale = torch.ones(1, dtype=torch.float32, device=inputs.device)  # of K and of V; "auto" reads neither
    return lambda slot_mapping: lambda key, value: op(key, value, *caches, slot_mapping, "auto", scale, scale)


def _vllm(case: Case, policy: str, timer: str) -> str | None:
    """From its cache_kernels.cu and vectorization_utils.cuh: V's strides are taken to be K's, stores to be aligned."""
    if reason := _absent("vllm"):
        return reason
    if case.dtype not in VLLM_DTYPES or case.head_size != case.value_head_size:
        return f"takes K and V heads of one size in {', '.join(VLLM_DTYPES)} only"
    row, _ = case.row_bytes
    return f"stores {VECTOR_BYTES}-byte vectors: rows of {row} bytes are not aligned" if row % VECTOR_BYTES else None


COPIES = (
    Installed("flashinfer", "peer", NULL, bind_flashinfer, supports=_flashinfer, steps=lambda case, policy: True,
              distributions=("flashinfer-python",)),
    Installed("sglang", "peer", NULL, bind_sglang, supports=_sglang, distributions=("sglang", "sgl-kernel")),
    Installed("vllm", "peer", ("skip", *NULL), bind_vllm, supports=_vllm, distributions=("vllm",)),
)  # fmt: skip
