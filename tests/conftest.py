"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on gloo, kept for the session."""
    ranks = Pool()
    yield ranks
    ranks.close()
