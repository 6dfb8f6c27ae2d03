"""Hostile files from good ones: the same seed gives the same file on every machine."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Text that stands in JSON or YAML as it is, whether it belongs there or not."""

    text: str


@dataclass(frozen=True)
class Twice:
    """A value whose key is written two times."""

    first: Any
    second: Any


NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 5, 7, 16, 17, 64, 97, 1000, 4096, 10**5, 10**6, 10**9, 10**12, 2**31, 2**63 - 1),
    *(2**63, 2**64, 10**40, -(10**9), -(2**63), 0.5, -0.5, 1.0, 1.5, 1e-300, 1e9, 1e30, 1e308, -1e308),
)
TEXTS = (
    *("", " ", "x", "all", "none", "auto", "true", "10", "1e9", "-1", "0-99999999999", "9" * 5000, "a" * 9999),
    *("../../escaped", "../escaped.safetensors", "~/escaped", "a\x00b", "\ud800", "\x1b[31mred", "[/bold]"),
    *("a\nb", "{}", "[]", "\u2028", "load", "os.system", "evil/kernel", "model", "qk", "mlp", "float32", "int8"),
)
RAW = tuple(
    map(
        Raw,
        (
            *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "0." + "1" * 9000, "01", "+1"),
            *("[" * 50 + "]" * 50, "[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000),
            *("[" + "0," * 5000 + "0]", "'x'", "", "null", "true", "\\", '"\\ud800"', '"\\u0000"'),
        ),
    )
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [1] * 1000, {"a": {"b": []}})


def hostile(random: Random, old: Any) -> Any:
    """A value to put in the place of `old`."""
    kind = random.randrange(8)
    if kind <= 1:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice(TEXTS)
    if kind == 3:
        return random.choice(RAW)
    if kind == 4:
        return random.choice(OTHERS)
    if kind == 5:
        return random.choice(([old], {"x": old}, [old, old], str(old), Twice(old, random.choice(NUMBERS))))
    if isinstance(old, bool) or not isinstance(old, int | float):
        return random.choice((*NUMBERS, *TEXTS))
    return random.choice((old + 1, old - 1, old * 2, old // 2, -old, old + 0.5, old * 1000, float(old)))


def mutated(random: Random, data: Any, *, changes: int | None = None) -> Any:
    """A copy of plain data with a few entries replaced, removed, added, moved or doubled."""
    data = json.loads(json.dumps(data))
    for _ in range(changes or random.choice((1, 1, 1, 2, 3))):
        places = list(_places(data))
        if not places:
            return hostile(random, data)
        container, key = random.choice(places)
        action = random.randrange(10)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[str(random.choice(TEXTS))] = container[key]
        elif action == 1:
            container.insert(key, container[key])
        elif action == 2:
            other, name = random.choice(places)
            container[key] = json.loads(_dump(other[name])) if not _holds_raw(other[name]) else None
        else:
            container[key] = hostile(random, container[key])
    return data


def to_json(data: Any) -> str:
    """JSON, with raw text and doubled keys where they were put."""
    return _dump(data)


def flipped(random: Random, content: bytes) -> bytes:
    """Bytes changed, cut, inserted or repeated somewhere; the start is where most of the meaning is."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        if not data:
            break
        top = random.choice((len(data), min(len(data), 16), min(len(data), 400)))
        at, action = random.randrange(top), random.randrange(6)
        if action == 0:
            data = data[:at]
        elif action == 1:
            data[at] ^= 1 << random.randrange(8)
        elif action == 2:
            data[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, ord("{"), ord('"'), ord("\n")))
        elif action == 3:
            data[at:at] = random.randbytes(random.choice((1, 4, 8, 100)))
        elif action == 4:
            del data[at : at + random.choice((1, 4, 8, 100))]
        else:
            data[at : at + 8] = random.choice((0, 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
    return bytes(data)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested data."""
    found, todo = [], [data]
    while todo:
        value = todo.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            found.append((value, key))
            todo.append(value[key])
    return found


def _holds_raw(value: Any) -> bool:
    if isinstance(value, Raw | Twice):
        return True
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_holds_raw, children))


def _dump(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Twice):
        return _dump(value.first)
    if isinstance(value, dict):
        pairs = []
        for key, entry in value.items():
            pairs += [f"{json.dumps(str(key))}: {_dump(entry)}"]
            if isinstance(entry, Twice):
                pairs += [f"{json.dumps(str(key))}: {_dump(entry.second)}"]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dump, value)) + "]"
    return json.dumps(value)
