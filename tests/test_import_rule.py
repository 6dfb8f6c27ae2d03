"""The architecture is a test: which folder may import what (docs/design.md, 'The import rule')."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "trisect"

# solve <- methods <- pipeline -> models; methods and models meet only in the records of parts.py.
ALLOWED = {
    "solve": {"trisect.solve"},
    "methods": {"trisect.methods", "trisect.solve", "trisect.records.parts", "trisect.errors"},
    "models": {
        "trisect.models",
        "trisect.records.parts",
        "trisect.records.shapes",
        "trisect.errors",
        "trisect.support.checks",
        "trisect.support.files",
        "trisect.bundle",
        "trisect.kernels",
        "trisect.support.clock",
        "trisect.data.registry",
        "trisect.data.hub",
    },
    "kernels": {"trisect.kernels", "trisect.errors"},
    "plan": {
        "trisect.plan",
        "trisect.records.shapes",
        "trisect.records.parts",
        "trisect.errors",
        "trisect.support.checks",
        "trisect.config",
    },
    "data": {
        "trisect.data",
        "trisect.errors",
        "trisect.support.checks",
        "trisect.support.files",
        "trisect.data.hub",
    },
    "calibrate": {
        "trisect.calibrate",
        "trisect.models",
        "trisect.records.parts",
        "trisect.records.shapes",
        "trisect.errors",
        "trisect.support.checks",
        "trisect.support.files",
        "trisect.support.clock",
        "trisect.support.distributed",
    },
    "bundle": {
        "trisect.bundle",
        "trisect.plan",
        "trisect.records.shapes",
        "trisect.errors",
        "trisect.support.files",
    },
    "export": {
        "trisect.export",
        "trisect.bundle",
        "trisect.models",
        "trisect.records.parts",
        "trisect.records.shapes",
        "trisect.errors",
        "trisect.support.checks",
        "trisect.support.files",
    },
    "finetune": {
        "trisect.finetune",
        "trisect.data",
        "trisect.evaluate",
        "trisect.models",
        "trisect.methods",
        "trisect.quantize",
        "trisect.records.parts",
        "trisect.records.shapes",
        "trisect.support.receipt",
        "trisect.support.files",
        "trisect.support.plots",
        "trisect.support.checks",
        "trisect.errors",
    },
    "quantize": {
        "trisect.quantize",
        "trisect.models",
        "trisect.plan",
        "trisect.records.parts",
        "trisect.records.shapes",
        "trisect.errors",
    },
    "evaluate": {"trisect.evaluate", "trisect.data", "trisect.errors"},
}
OUTSIDE = {"solve": {"torch"}, "methods": {"torch"}, "plan": {"numpy"}}
STANDARD_ONLY = {
    "bisect",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "json",
    "math",
    "pathlib",
    "typing",
}


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            modules.add(node.module or "")
    return modules


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((SOURCE / folder).rglob("*.py"))
    assert files
    for path in files:
        ours = {module for module in imported_modules(path) if within(module, {"trisect"})}
        wrong = sorted(module for module in ours if not within(module, ALLOWED[folder]))
        assert not wrong, f"{path.name} imports {wrong}; see docs/design.md, 'The import rule'"


@pytest.mark.parametrize("folder", OUTSIDE)
def test_numerics_need_only_torch(folder: str) -> None:
    for path in sorted((SOURCE / folder).rglob("*.py")):
        theirs = {module for module in imported_modules(path) if not within(module, {"trisect"})}
        wrong = sorted(m for m in theirs if not within(m, OUTSIDE[folder] | STANDARD_ONLY))
        assert not wrong, f"{path.name} imports {wrong}"
