"""What every test may use: the ops, a device, and a skip that says why for tests that need a GPU."""

from __future__ import annotations

import hypothesis
import pytest

# No deadline and no health check on speed: a slow machine is not a failure.
hypothesis.settings.register_profile(
    "kvnb", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvnb")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU; torch {torch.__version__} sees none here"))


@pytest.fixture(scope="session")
def ops():
    """torch.ops.kvnb, built once."""
    from kvnb import build

    return build.load()


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param
