"""Copies that csrc/ builds: our kernel, launched plainly and dependently, and vLLM's 2024 design, rewritten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnb import paths
from kvnb.copies.base import NULL, Copy
from kvnb.problem.case import Case

if TYPE_CHECKING:
    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

SOURCES = tuple(paths.CSRC / name for name in ("kv_index.h", "launch.h", "bindings.cpp"))


def _bind_op(inputs: Inputs, name: str) -> Step:
    """`torch.ops.kvnb.<name>` with nothing done per step: the op takes slot_mapping as the engine has it."""
    from kvnb import build

    op = getattr(build.load_for(inputs.device.type), name).default
    key_cache, value_cache = inputs.key_cache, inputs.value_cache

    def step(slot_mapping):
        def write(key, value):
            op(key, value, key_cache, value_cache, slot_mapping)

        return write

    return step


def bind_kvnb(inputs: Inputs) -> Step:
    """Our kernel: one launch, 16-byte vectors, slot and data loaded together (csrc/kvnb_copy.cu; CPU: cpu_copy.cpp)"""
    return _bind_op(inputs, "copy")


def bind_dependent(inputs: Inputs) -> Step:
    """Our kernel, launched dependently: it starts while the one before ends, if that one allows it (sm_90 and later)"""
    return _bind_op(inputs, "copy_dependent")


def bind_vllm_scalar(inputs: Inputs) -> Step:
    """vLLM's 2024 design, rewritten: a block per token, one element per thread and turn (csrc/vllm_scalar.cu)"""
    return _bind_op(inputs, "vllm_scalar")


def built_for(device: str):
    """A `supports` that gives the build's own reason where the ops of `device` cannot be had."""

    def supports(case: Case, policy: str, timer: str) -> str | None:
        from kvnb import build

        return build.problem("cpu" if timer == "wall" else device)

    return supports


def _dependent(case: Case, policy: str, timer: str) -> str | None:
    import torch

    reason = built_for("cuda")(case, policy, timer)
    if reason is None and torch.cuda.get_device_capability() < (9, 0):
        return "programmatic dependent launch needs sm_90 or later"
    return reason


POLICIES = ("skip", *NULL)
OUR_SOURCES = (*SOURCES, *(paths.CSRC / name for name in ("capacity.h", "kvnb_copy.cu", "cpu_copy.cpp")))
COPIES = (
    Copy("kvnb", "kernel", POLICIES, bind_kvnb, ("cuda", "cpu"), supports=built_for("cuda"), sources=OUR_SOURCES),
    Copy("kvnb.dependent", "kernel", POLICIES, bind_dependent, supports=_dependent, sources=OUR_SOURCES),
    Copy("kvnb.again", "kernel", POLICIES, bind_kvnb, ("cuda", "cpu"), supports=built_for("cuda"), sources=OUR_SOURCES),
    Copy(
        "vllm.scalar", "kernel", POLICIES, bind_vllm_scalar, supports=built_for("cuda"),
        sources=(*SOURCES, paths.CSRC / "vllm_scalar.cu"),
    ),
)  # fmt: skip
