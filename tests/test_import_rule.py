"""The architecture is a test: which folder may import what (docs/design.md, 'The import rule')."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "trisect"

# Each may import those before it, and itself.
ORDER = (
    "errors support records config solve methods kernels data plan bundle models decode evaluate calibrate "
    "export quantize finetune pipeline bench report compare serve api commands cli __init__ __main__"
).split()

# Fewer than the order allows: methods and models meet only in records, numerics know nothing else.
ONLY = {
    "solve": {"solve"},
    "methods": {"methods", "solve", "records", "errors"},
    "kernels": {"kernels", "errors"},
    "models": {"models", "kernels", "bundle", "data", "records", "support", "errors"},
    "plan": {"plan", "config", "records", "support", "errors"},
    "data": {"data", "support", "errors"},
}
OUTSIDE = {"solve": {"torch"}, "methods": {"torch"}, "plan": {"numpy", "pydantic"}}
"""Packages that the numerics may use; besides them only Python's own that compute nothing."""
PLAIN = set("bisect collections dataclasses functools itertools json math pathlib typing".split())


def imported_modules(path: Path) -> set[str]:
    """Everything that a file imports, wherever the statement stands."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            whole = node.module == "trisect"
            modules |= {f"trisect.{alias.name}" for alias in node.names} if whole else {str(node.module)}
    return modules


def rooms() -> list[str]:
    """Folders of the package, and its files at the top."""
    return sorted(path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def files(room: str) -> list[Path]:
    folder = SOURCE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def test_the_order_names_every_room() -> None:
    assert rooms() == sorted(ORDER)


def test_the_picture_names_every_room() -> None:
    page = (SOURCE.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    picture = page.partition("## Folders and import direction")[2].split("```")[1]
    named = {word for line in picture.splitlines() for word in line[:45].split() if word != "|"}
    assert named == set(ORDER) - {"cli", "__init__", "__main__"}


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_one_way(room: str) -> None:
    allowed = ONLY.get(room, set(ORDER[: ORDER.index(room) + 1]))
    for path in files(room):
        ours = {module.split(".")[1] for module in imported_modules(path) if module.startswith("trisect.")}
        wrong = sorted(name for name in ours & set(ORDER) if name not in allowed)
        assert not wrong, f"{path.name} imports {wrong}; see docs/design.md, 'The import rule'"


@pytest.mark.parametrize("room", OUTSIDE)
def test_numerics_need_only_torch(room: str) -> None:
    for path in files(room):
        theirs = {module.split(".")[0] for module in imported_modules(path)} - {"trisect"}
        assert theirs <= OUTSIDE[room] | PLAIN, path.name
