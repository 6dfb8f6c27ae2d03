"""Untrusted JSON and YAML: read within limits, plain data out, or a clear error."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from trisect.errors import TrisectError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

AnyModel = TypeVar("AnyModel", bound="BaseModel")

LARGEST_JSON = 32 << 20  # bytes. The index of a model of a thousand shards has a few million.
LARGEST_YAML = 64 << 10  # bytes. Files that people write have a few thousand, and the YAML reader is slow.
DEEPEST = 64
MOST_NODES = 20_000  # of a YAML file with all its aliases written out
LONGEST_NUMBER = 64  # digits: Python's time to read more grows with their square

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """A value for an error message, shortened where it is long."""
    return _short.repr(value)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever a library raises for a damaged file into one TrisectError line."""
    try:
        yield
    except TrisectError:
        raise
    except BaseException as error:
        # A panic of the tokenizers library is no Exception, but it means a damaged file too.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = str(error).strip().partition("\n\n")[0]  # behind it is advice for those who wrote the call
        raise TrisectError(f"{what}: {' '.join(said.split())[:400] or type(error).__name__}") from error


def check_device(device: str) -> None:
    """Refuse a device that torch does not find here."""
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        what = "There is no" if re.fullmatch(r"cuda(:\d+)?", device) else "Unknown device"
        found = torch.cuda.device_count()
        there = f"{found}, from cuda:0 on" if found else "no CUDA device here"
        raise TrisectError(f"{what} {device}: torch finds {there}; leave --device out for the CPU.") from error
    if device.startswith("meta"):
        raise TrisectError(f"The device {device} holds no numbers; leave --device out for the CPU.")


def is_number(value: object) -> bool:
    """Whether a value is an integer or a float; to Python, true and false are integers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_text(path: str | Path, *, largest: int | None = None) -> str:
    """A UTF-8 file, of at most so many bytes where it should be one that we or a person wrote."""
    path = Path(path)
    try:
        if not path.is_file():
            raise TrisectError(f"Cannot read {path}: there is no such file.")
        with path.open("rb") as file:
            content = file.read(-1 if largest is None else largest + 1)
        if largest is not None and len(content) > largest:
            raise TrisectError(f"Cannot read {path}: it has more than {largest:,} bytes, so it is not ours.")
        return content.decode("utf-8")
    except OSError as error:
        raise TrisectError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TrisectError(f"{path} is not UTF-8 text (byte {error.start}).") from error


def read_json(path: str | Path, *, largest: int = LARGEST_JSON) -> Any:
    """The content of a JSON file."""
    return parse_json(read_text(path, largest=largest), where=str(path))


def parse_json(text: str, *, where: str) -> Any:
    """The data in a JSON text; repeated keys, NaN, very long numbers and very deep nesting are refused."""
    real, whole = partial(_number, kind=float), partial(_number, kind=int)
    kinds: Any = {"parse_int": whole, "parse_float": real, "parse_constant": real}
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, **kinds)
    except json.JSONDecodeError as error:
        why = f"{error.msg}, line {error.lineno}, column {error.colno}"
        raise TrisectError(f"{where} is not JSON ({why}).") from error
    except ValueError as error:
        raise TrisectError(f"{where} is not JSON that can be used: {error}.") from error
    except RecursionError as error:
        raise _too_deep(where) from error
    check_plain(data, where=where)
    return data


def read_settings(path: str | Path) -> Any:
    """The content of a file of settings: JSON by its suffix, YAML otherwise."""
    if Path(path).suffix == ".json":
        return read_json(path)
    return parse_yaml(read_text(path, largest=LARGEST_YAML), where=str(path))


def read_record(path: str | Path, *, what: str, instead: str) -> dict[str, Any]:
    """A mapping that trisect wrote as JSON; where the file holds no such thing, `instead` says what to do."""
    try:
        data = read_json(path)
    except TrisectError as error:
        raise TrisectError(f"{error} {instead[0].upper()}{instead[1:]}.") from error
    if not isinstance(data, dict):
        raise TrisectError(f"{path} is no {what}; {instead}.")
    return data


def validated(model: type[AnyModel], data: Any, *, where: str = "", hint: str = "") -> AnyModel:
    """`data` as a pydantic model, or one line that names the place, what came and what is needed."""
    from pydantic import ValidationError

    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise TrisectError((f"{where}: " if where else "") + first_problem(error, hint)) from error


def table_rows(row: type[AnyModel], table: Mapping[Any, Mapping[Any, float]]) -> list[dict[str, Any]]:
    """Curves by key, (a, b) -> x -> y, as rows for JSON: one per point, by the names of a row's fields."""
    points = [(*key, *point) for key, curve in table.items() for point in curve.items()]
    return [dict(zip(row.model_fields, point, strict=True)) for point in points]


def read_table(path: str | Path, row: type[AnyModel], name: str, what: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    """A JSON file, and the curves in its list `name` as `table_rows` writes them."""
    data = read_json(path)
    rows = data.get(name) if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise TrisectError(f"Cannot read {what} from {path}: there is no list of {name} in it.")
    table: dict[Any, Any] = {}
    for number, entry in enumerate(rows):
        *key, x, y = vars(validated(row, entry, where=f"{path}, {name}[{number}]")).values()
        table.setdefault(tuple(key), {})[x] = y
    return data, table


def first_problem(error: "ValidationError", hint: str = "") -> str:
    """The first of the problems that pydantic found, with its place written as models[0].source."""
    problem = error.errors()[0]
    steps = [step for step in problem["loc"] if not str(step).startswith("(")]  # tags of unions are in brackets
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    if problem["type"] == "value_error":
        return (f"{place}: " if place else "") + str(problem["ctx"]["error"]).removesuffix(".") + "."
    if problem["type"] == "missing":
        return f"{place} is missing" + (f"; {hint}." if hint else ".")
    if problem["type"] == "too_short":
        return f"{place} must be a list with at least one entry, not {shown(problem['input'])}."
    needed = problem["msg"].replace("Input should be", "must be").replace("String should", "must")
    needed = re.sub(r"dictionary or instance of \w+", "mapping", needed)
    return f"{place or 'it'} {needed}, not {shown(problem['input'])}."


def parse_yaml(text: str, *, where: str) -> Any:
    """The data in a YAML text of mappings, lists, text and numbers; aliases that write out to much are refused."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _written_out(node, {}, set()) > MOST_NODES:
            raise TrisectError(f"{where} has aliases that write out to over {MOST_NODES:,} entries.")
        data = loader.construct_document(node)
    except TrisectError:
        raise
    except RecursionError as error:
        raise _too_deep(where) from error
    # The constructors behind tags such as !!timestamp and !!bool raise whatever their parsing runs into.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise TrisectError(f"{where} is not valid YAML: {reason}.") from error
    check_plain(data, where=where)
    return data


def check_plain(data: Any, *, where: str) -> None:
    """Refuse all but mappings with text keys, lists, text, 64-bit integers, numbers, true, false and null."""
    todo: list[tuple[Any, int]] = [(data, 0)]
    while todo:
        value, depth = todo.pop()
        if depth > DEEPEST:
            raise _too_deep(where)
        if isinstance(value, dict | list):
            todo += [(entry, depth + 1) for entry in (value if isinstance(value, list) else value.values())]
            for key in value if isinstance(value, dict) else ():
                if not isinstance(key, str):
                    raise TrisectError(f"{where}: the key {shown(key)} must be text; put it in quotes.")
                todo.append((key, depth + 1))
        elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise TrisectError(f"{where}: {shown(value)} holds half a letter (a lone surrogate).")
        elif isinstance(value, float) and math.isnan(value):
            raise TrisectError(f"{where} holds NaN, which is no number.")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TrisectError(f"{where} holds an integer of more than 64 bits.")
        elif value is not None and not isinstance(value, str | float | int):
            kind = type(value).__name__
            raise TrisectError(f"{where}: {shown(value)} was read as a {kind}; put it in quotes to make it text.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    if len(set(names)) != len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise ValueError(f"the key {shown(name)} comes twice")
    return dict(pairs)


def _number(text: str, kind: Callable[[str], float]) -> float:
    """An integer or a finite float, of not too many digits."""
    if len(text) > LONGEST_NUMBER or not math.isfinite(value := kind(text)):
        raise ValueError(f"{text[:20]} is too large or no number, or has {len(text)} digits")
    return value


def _written_out(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """How many nodes are below this one, aliases counted again; cycles, repeated keys, long numbers are refused."""
    if id(node) in sizes:
        return sizes[id(node)]
    if id(node) in above:
        raise yaml.YAMLError("an alias that holds itself")
    above.add(id(node))
    children = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        _unique_keys([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        children = [child for pair in node.value for child in pair]
    elif node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
        raise yaml.YAMLError(f"a number of {len(node.value)} digits")
    total = 1 + sum(_written_out(child, sizes, above) for child in children)
    above.discard(id(node))
    sizes[id(node)] = total
    return total


def _too_deep(where: str) -> TrisectError:
    return TrisectError(f"{where} is nested more than {DEEPEST} levels deep; no file of ours is.")
