"""Fixtures for all tests."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mtrain.base import signals
from mtrain.base.imports import stand_in_for_triton
from mtrain.base.log import show_lines
from tests import warm
from tests.browser import Browser, browser
from tests.fault_table import Notice, measured
from tests.messages import Messages
from tests.needs import NOT_RUN, leave_out, report_not_run
from tests.pool import Pool
from tests.tools import wheels
from tests.tools.cores import Cores
from tests.tools.nightly import Nightly

gc.disable()  # for collection, whose objects stay to the end: looking for garbage among them takes a third longer
_CACHES = tempfile.TemporaryDirectory(prefix="mtrain-caches-")
"""Caches of this session: neither the user's token cache, nor that of a session on other code."""
# building its list of fonts anew takes seconds
os.environ.setdefault("MPLCONFIGDIR", str(wheels.CACHE_OF_USER / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = _CACHES.name
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests everywhere: ranks are CPU processes on gloo
stand_in_for_triton()  # tests import megatron-core first
show_lines()  # tests call parts of the program, whose lines they read
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it leaves in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# a busy machine is no failure; always the same examples, since more would show nothing new
settings.register_profile("mtrain", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("mtrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this suite."""
    parser.addoption(
        "--max-examples", type=int, help="search so many random runs for parity faults, from new seeds (at night)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers plugins, since this file's hooks run after `-m` has chosen."""
    config.pluginmanager.register(Nightly(), "nightly")
    config.pluginmanager.register(Messages(), "messages")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Cores(config.workerinput["testrunuid"]), "cores")


@pytest.hookimpl(trylast=True)  # tests that -k and -m deselect are not missing
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what this machine cannot run; a requested search has no time limit."""
    leave_out(config, items)
    # first: at the end the other workers would wait for them, since a started test cannot be handed over
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("slow", "waits"))))
    if config.getoption("--max-examples") is not None:
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """Exempts thousands of tests and what they import, which stay to the end, from garbage collection.

    The rest is collected less often than Python does by itself, which is a twentieth of a test without torch.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Passes on, from a worker of pytest-xdist, which tests it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash[NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over what a worker left out; all workers left out the same."""
    node.config.stash.setdefault(NOT_RUN, {}).update(getattr(node, "workeroutput", {}).get("not_run", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Reports the tests that were not run at the end of the suite."""
    report_not_run(terminalreporter, config.stash.get(NOT_RUN, {}))


POOL = Pool()  # here, so that the fork server's preloads are settled before the first test starts it
# `mtrain tokenize`, called by a test before any rank starts, would settle others: each rank would import everything
vars(forkserver)["set_forkserver_preload"] = lambda modules: None
warm.start_server_at_root()


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Returns ranks on gloo."""
    return POOL


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Starts a real browser, for one file of tests."""
    with browser(tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


@pytest.fixture(scope="session")
def transformer_engine_wheel() -> Path:
    """Returns the unpacked Python of TransformerEngine, without its compiled part."""
    folder = wheels.unpacked(wheels.TRANSFORMER_ENGINE)
    assert folder is not None, f"pip cannot bring the wheel of {wheels.TRANSFORMER_ENGINE}; give it a package index"
    return folder


@pytest.fixture(scope="session")
def flash_linear_attention_wheel() -> Path:
    """Returns the unpacked Python of flash-linear-attention's kernels."""
    folder = wheels.unpacked(wheels.FLASH_LINEAR_ATTENTION)
    assert folder is not None, f"pip cannot bring the wheel of {wheels.FLASH_LINEAR_ATTENTION}; give it a package index"
    return folder


@pytest.fixture(scope="session")
def other_python() -> Path:
    """Returns an interpreter that imports the other proven version of megatron-core."""
    python = wheels.other_python()
    assert python is not None, f"pip cannot bring {wheels.OTHER_MEGATRON}; give it a package index"
    return python


@pytest.fixture(scope="session")
def transformers_4() -> list[Path]:
    """Returns folders from which another process imports transformers 4, before all others."""
    folders = wheels.transformers_4()
    assert folders is not None, f"pip cannot bring {', '.join(wheels.TRANSFORMERS_4)}; give it a package index"
    return folders


@pytest.fixture
def notice(request: pytest.FixtureRequest) -> Iterator[Notice]:
    """Measures how long the fault of this test takes to be noticed."""
    yield from measured(request)


@pytest.fixture(autouse=True)
def interrupts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets a Ctrl-C that a test sent to this process: the command line, called here later, would end the worker."""
    monkeypatch.setattr(signals, "_interrupts", [])
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def hangup() -> Iterator[None]:
    """Restores SIGHUP as in a terminal, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
