"""Checks that tests that compute share no core, that those that wait keep none, and that ranks start from imports."""

import multiprocessing
from multiprocessing import forkserver

import pytest

from tests.paths import ROOT
from tests.pool import FUNCTIONS

pytest_plugins = ["pytester"]
ONE_CORE = """
import os
from tests.tools.cores import Cores

def pytest_configure(config):
    config.addinivalue_line("markers", "waits: needs no core")
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Cores(config.workerinput["testrunuid"]))
"""
SUITE = """
import time
from pathlib import Path
import pytest

HERE = Path(__file__).parent

def wait_for(pattern):
    deadline = time.monotonic() + 60
    while not list(HERE.glob(pattern)):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)

@pytest.mark.waits
def test_that_waits():
    (HERE / "waits").touch()
    wait_for("computed-*")

@pytest.mark.parametrize("number", range(6))
def test_that_computes(number):
    (HERE / "alone").touch(exist_ok=False)
    wait_for("waits")
    time.sleep(0.1)
    (HERE / "alone").unlink()
    (HERE / f"computed-{number}").touch()
"""


def test_a_test_that_waits_leaves_the_core_to_the_others(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis and others, which three processes would load
    pytester.makeconftest(ONE_CORE)
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("-p", "xdist", "-n", "2", "--dist", "worksteal").assert_outcomes(passed=7)


def test_no_program_changes_what_the_fork_server_has_imported() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["sentencepiece"])
    assert {*FUNCTIONS} < {*vars(vars(forkserver)["_forkserver"])["_preload_modules"]}
