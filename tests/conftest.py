"""Fixtures for all tests."""

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Ranks on gloo."""
    return Pool()
