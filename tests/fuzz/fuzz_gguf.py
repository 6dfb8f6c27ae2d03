"""GGUF files from a description, honest or not: every count and length may be something else."""

import struct
from random import Random
from typing import Any

from fuzz_mutations import flipped

KINDS = {"u8": (0, "B"), "i32": (5, "i"), "u32": (4, "I"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q")}
LIES = (0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def scalar(kind: str, value: Any) -> bytes:
    number, letter = KINDS[kind]
    return struct.pack("<I", number) + struct.pack(f"<{letter}", value)


def string(value: str) -> bytes:
    return struct.pack("<I", 8) + text(value)


def array(kind: str, values: list[Any]) -> bytes:
    number = 8 if kind == "str" else KINDS[kind][0]
    head = struct.pack("<IIQ", 9, number, len(values))
    if kind == "str":
        return head + b"".join(map(text, values))
    return head + b"".join(struct.pack(f"<{KINDS[kind][1]}", value) for value in values)


def build(
    keys: list[tuple[str, bytes]], tensors: list[dict[str, Any]], data: bytes, *, header: dict[str, int]
) -> bytes:
    """The file; `header` may lie about version and counts, a tensor about its dims, type and offset."""
    content = b"GGUF" + struct.pack("<I", header.get("version", 3))
    content += struct.pack("<QQ", header.get("tensors", len(tensors)), header.get("keys", len(keys)))
    for key, value in keys:
        content += text(key) + value
    for tensor in tensors:
        dims = tensor["dims"]
        content += text(tensor["name"]) + struct.pack("<I", tensor.get("rank", len(dims)))
        content += b"".join(struct.pack("<Q", size) for size in dims)
        content += struct.pack("<IQ", tensor["kind"], tensor["offset"])
    return content + b"\0" * (-len(content) % 32) + data


def hostile_gguf(random: Random, keys: list[tuple[str, bytes]], tensors: list[dict[str, Any]], data: bytes) -> bytes:
    """One of the file's fields tells a lie, or its bytes are damaged."""
    keys, tensors, header = list(keys), [dict(tensor) for tensor in tensors], {}
    action, lie = random.randrange(9), random.choice(LIES)
    key = random.randrange(len(keys))
    name, value = keys[key]
    tensor = random.choice(tensors)
    if action == 0:
        header[random.choice(("tensors", "keys"))] = lie
    elif action == 1:
        header["version"] = lie % 2**32
    elif action == 2:
        keys[key] = (name, struct.pack("<I", random.randrange(14)) + value[4:])
    elif action == 3:  # the first eight bytes behind the type: a length, or most numbers
        keys[key] = (name, value[:4] + struct.pack("<Q", lie) + value[12:])
    elif action == 4:
        keys[key] = (random.choice((name + "x", keys[0][0], "", "general.alignment")), value)
    elif action == 5:  # the length of an array, and its type
        keys[key] = (name, struct.pack("<IIQ", 9, random.randrange(13), lie) + value[16:])
    elif action == 6:
        at = random.randrange(len(tensor["dims"]))
        tensor["dims"] = [*tensor["dims"][:at], lie, *tensor["dims"][at + 1 :]]
    elif action == 7:
        tensor[random.choice(("kind", "offset", "rank"))] = lie % 2**32
    content = build(keys, tensors, data, header=header)
    return flipped(random, content) if action == 8 else content
