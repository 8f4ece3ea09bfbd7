"""Faults that the installed megatron-core no longer has, or not yet: the tests that show them have to fail."""

from collections.abc import Generator

import pytest

import mtrain.core.ranks  # noqa: F401  # before tests import megatron-core: it may need what stands in for triton
from tests.known_issues.rows import TABLE
from tests.known_issues.rows.row import installed


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Reverses the verdict of such a test: if it passes, the fault is there all the same."""
    gone = {name for row in TABLE if not row.bites(installed()) for name in row.tests}
    gone -= {
        name for row in TABLE if row.bites(installed()) for name in row.tests
    }  # shows our absence of what is there
    name = pyfuncitem.nodeid.split("[")[0]
    if name not in gone or not name.startswith("tests/known_issues/"):
        return (yield)
    try:
        yield
    except Exception:  # whatever the fault's absence leads to on a rank or in an assertion
        return True
    pytest.fail(f"{name} passes: megatron-core {installed()} has the fault; see since and gone_in of its row")
