"""Kept ranks under the name that all tests use."""

import pytest

from tests.verify.kept import KeptPool


@pytest.fixture
def pool(kept: KeptPool) -> KeptPool:
    """Gives the kept ranks to checks, each of which builds its models anew."""
    return kept
