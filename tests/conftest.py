"""Fixtures for all tests."""

import pytest
from hypothesis import settings

from tests.pool import Pool

settings.register_profile("mtrain", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("mtrain")


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Ranks on gloo."""
    return Pool()
