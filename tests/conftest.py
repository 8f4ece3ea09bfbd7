"""Fixtures for all tests."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.fault_table import Notice, measured
from tests.pool import Pool

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests everywhere: ranks are CPU processes on gloo
settings.register_profile("mtrain", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("mtrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption(
        "--max-examples", type=int, help="search so many random runs for parity faults, from new seeds (at night)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A search that was asked for takes the time it takes."""
    if config.getoption("--max-examples") is not None:
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Ranks on gloo."""
    return Pool()


@pytest.fixture
def notice(request: pytest.FixtureRequest) -> Iterator[Notice]:
    """Measures how long the fault of this test takes to be noticed."""
    yield from measured(request)


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as it is in a terminal, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
