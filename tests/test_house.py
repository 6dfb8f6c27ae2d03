"""Rules that no other tool keeps: short files, and public names that say what they take and give."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from numerics import KINDS, NUMERICS, STRUCTURE
from tiny_models import CONFIGS

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src" / "trisect"
LONGEST = 500
"""Lines of a file; one that needs more says why in docs/design.md."""
SHORT = 4
"""Lines of a body that is read as fast as any words about it."""

Definition = ast.FunctionDef | ast.ClassDef


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def public(path: Path) -> Iterator[tuple[str, ast.ClassDef | None, Definition]]:
    """Functions, classes and methods without a leading underscore: full name, class around it, and node.

    What is inside a function or a private class is nobody else's; kernels that Triton compiles have no types
    of Python.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, Definition) or node.name.startswith("_") or is_kernel(node):
            continue
        yield node.name, None, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", node, inner


def is_kernel(node: Definition) -> bool:
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def untyped(node: ast.FunctionDef, *, method: bool) -> list[str]:
    """The arguments without a type, and "return"."""
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    arguments = [*node.args.posonlyargs, *node.args.args][1 if method and not static else 0 :]
    arguments += [*node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
    missing = [argument.arg for argument in arguments if argument.annotation is None]
    return missing if node.returns is not None else [*missing, "return"]


def has_words(node: Definition, owner: ast.ClassDef | None) -> bool:
    """Whether a definition says what it is for, or need not."""
    if ast.get_docstring(node) or isinstance(node, ast.ClassDef):
        return ast.get_docstring(node) is not None
    overrides = owner is not None and bool(owner.bases)  # the base class has the words
    last = node.body[-1].end_lineno
    assert last is not None
    return overrides or last - node.body[0].lineno < SHORT


@pytest.mark.parametrize("folder", [SOURCE, REPOSITORY / "tests"], ids=["src", "tests"])
def test_no_file_is_longer_than_a_few_screens(folder: Path) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files(folder)}
    reasons = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    names = {str(path.relative_to(REPOSITORY)): length for path, length in lengths.items()}
    assert not {name: n for name, n in names.items() if n > LONGEST and f"`{name}`" not in reasons}


def test_public_functions_say_what_they_take_and_give() -> None:
    """Every argument and every result of a public function or method has a type."""
    found = {
        f"{path.relative_to(SOURCE)}:{node.lineno} {name}": missing
        for path in files(SOURCE)
        for name, owner, node in public(path)
        if isinstance(node, ast.FunctionDef) and (missing := untyped(node, method=owner is not None))
    }
    assert not found


def test_public_names_have_a_line_about_them() -> None:
    """Classes always: fields and methods do not add up to what a thing is for.

    Functions and methods of more than a few lines; below that, name, types and body are seen at one glance,
    and a line that repeats the name adds nothing. Methods of a class with a base may be overrides: the base
    has the words.
    """
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {name}"
        for path in files(SOURCE)
        for name, owner, node in public(path)
        if not has_words(node, owner)
    ]
    assert not found


def test_what_is_run_again_as_on_another_cpu_is_there() -> None:
    """A test or a tiny model that was renamed would else be left out, or run twice, without a word."""
    tests = REPOSITORY / "tests"
    defined = {line.split("(")[0] for path in files(tests) for line in path.read_text().splitlines()}
    listed = {*NUMERICS, *STRUCTURE}
    assert not {name for name in listed if not (tests / name).exists() and f"def {name}" not in defined}
    assert not set(KINDS) - set(CONFIGS)
