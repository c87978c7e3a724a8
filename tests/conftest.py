"""What every test may use: the ops, a device, and a skip that says why for tests that need a GPU.

Tests that count what they try (record_property "trust") stand for README's section on trust: `make trust` writes their
counts to trust.txt. A count that differs from it fails the run, one that it lacks is told.
"""

from __future__ import annotations

import signal
from pathlib import Path

import hypothesis
import pytest

# No deadline and no health check on speed: a slow machine is not a failure.
hypothesis.settings.register_profile(
    "kvnb", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvnb")


TRUST = Path(__file__).with_name("trust.txt")  # a line per test: its id, a tab, what it counted
_counted: dict[str, str] = {}
_ran: set[str] = set()  # files whose tests this session ran
_skipped: set[str] = set()


def pytest_configure():
    """Begun in a shell's background or under nohup, children would ignore the signals that tests send them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser):
    parser.addoption("--trust", metavar="FILE", help="write what tests counted there, beside what it holds")


def pytest_runtest_logreport(report):
    _ran.add(report.nodeid.partition("::")[0])
    if report.skipped:
        _skipped.add(report.nodeid)
    if report.when == "call" and report.passed:
        for name, told in report.user_properties:
            if name == "trust":
                _counted[report.nodeid] = told


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):  # the process that gathers the reports sees all of them
        return
    asked = session.config.getoption("trust")
    file = Path(asked) if asked else TRUST
    known = dict(line.split("\t") for line in file.read_text().splitlines()) if file.is_file() else {}
    if asked:
        kept = {test: told for test, told in known.items() if test in _skipped or test.partition("::")[0] not in _ran}
        file.write_text("".join(f"{test}\t{told}\n" for test, told in sorted({**kept, **_counted}.items())))
    elif stale := [test for test, told in _counted.items() if known.get(test) != told]:
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(f"\n{TRUST.name} is older than {', '.join(stale)}: make trust, make readme", red=True)
        if not known.keys().isdisjoint(stale):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
