"""Fixtures of the method tests."""

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("a3_oracles", "a3_problems")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small only lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
