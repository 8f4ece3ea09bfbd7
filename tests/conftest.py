"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import Pool

settings.register_profile("mtrain", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("mtrain")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on gloo, kept for the session."""
    ranks = Pool()
    yield ranks
    ranks.close()
