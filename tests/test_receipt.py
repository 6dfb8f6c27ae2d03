"""A receipt says how to run it again."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trisect.config import CompressConfig
from trisect.support import receipt
from trisect.support.files import write_json


def test_a_receipt_names_recipe_versions_hardware_and_tokens(tmp_path: Path):
    recipe = CompressConfig(ratio=0.25).to_dict()
    made = receipt.build_receipt(recipe, seed=3, token_hash="abc", timings={"solve": 1.23456})
    write_json(tmp_path / "receipt.json", made)
    read = json.loads((tmp_path / "receipt.json").read_text())
    assert CompressConfig.from_dict(read["recipe"]) == CompressConfig(ratio=0.25)
    assert read["seed"] == 3
    assert read["token_hash"] == "abc"
    assert read["timings"] == {"solve": 1.235}
    assert read["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert read["hardware"]["cores"] >= 1
    assert read["date"].endswith("+00:00")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """git is asked once in a process, and here again."""
    receipt._checkout.cache_clear()
    yield
    receipt._checkout.cache_clear()


def test_in_a_checkout_the_commit_is_gits_own(asked_anew, monkeypatch):
    monkeypatch.delenv("TRISECT_COMMIT", raising=False)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not head:
        pytest.skip("not in a checkout, or without git")
    assert receipt.package_commit() in (head, f"{head}-dirty")


def test_outside_a_checkout_there_is_no_commit(asked_anew, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(receipt, "__file__", str(tmp_path / "receipt.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert receipt.package_commit() is None


def test_without_git_there_is_no_commit(asked_anew, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert receipt.package_commit() is None


def test_a_package_that_is_not_installed_has_no_version():
    assert receipt.package_version("no-such-package-here") is None


def test_a_receipt_says_where_products_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert receipt.hardware()["gpu"] == "a GPU"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert receipt.hardware()["gpu"] == "a GPU with TF32 products"
    finally:
        torch.set_float32_matmul_precision(before)
