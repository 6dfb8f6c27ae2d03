"""Fixtures of the kernels' tests."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from interpreted import interpreted


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[str, ModuleType]]:
    """The kernels' modules by name, run by Triton's interpreter."""
    with interpreted() as modules:
        yield modules
