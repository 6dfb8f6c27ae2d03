"""Fixtures of the tests with hostile input."""

import pytest
from fuzz_seeds import Seeds, build_seeds


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    """Good files of every kind, to be spoilt."""
    return build_seeds(tmp_path_factory.mktemp("seeds"))
