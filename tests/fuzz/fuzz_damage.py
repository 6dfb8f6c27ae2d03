"""Good files made hostile: by their structure or by their bytes."""

import json
import shutil
from pathlib import Path
from random import Random

import yaml
from fuzz_mutations import Raw, flipped, hostile, mutated, to_json

BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]" for n in range(12))
YAMLS = (
    *(BOMB, "&a [*a]", "x: &a {y: *a}", "ratio: 2001-99-99", "ratio: !!timestamp x", "ratio: !!bool x", "? [1]\n: 2"),
    *("!!python/object/apply:os.system ['true']", "ratio: !!int ''", "ratio: 1" + ":1" * 500, "ratio: 0x" + "f" * 9000),
    *("[" * 400, "- " * 3000, "{a: " * 3000, "ratio: 0.3\nratio: 0.4", "%YAML 9.9\n---\nx", "ratio: .nan", "\x07"),
    *("<<: {ratio: 0.3}", "<<: [1, 2]", "<<: 3", "!!set {a, b}", "!!binary '%%'", "ratio: !!float x", "a: 'b"),
)


def damage(random: Random, path: Path) -> None:
    """A JSON file, by its structure or by its bytes."""
    if random.random() < 0.85:
        data = mutated(random, json.loads(path.read_text()))
        path.write_text(to_json(data), errors="surrogatepass")
    else:
        path.write_bytes(flipped(random, path.read_bytes()))


def damaged_copy(random: Random, path: Path, given: Path) -> Path:
    copy = Path(shutil.copy(path, given / path.name))
    damage(random, copy)
    return copy


def damage_safetensors(random: Random, path: Path) -> None:
    content = path.read_bytes()
    if random.random() < 0.35:
        path.write_bytes(flipped(random, content))
        return
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if "__metadata__" in header and random.random() < 0.3:
        info = header["__metadata__"]
        key = random.choice(list(info))
        text = info[key] if not info[key].startswith("{") else to_json(mutated(random, json.loads(info[key])))
        info[key] = text if random.random() < 0.8 else hostile(random, text)
    else:
        header = mutated(random, header)
    text = to_json(header).encode("utf-8", errors="surrogatepass")
    size = random.choice((len(text),) * 9 + (len(text) + 1, 0, 2**40))
    path.write_bytes(size.to_bytes(8, "little") + text + content[8 + length :])


def hostile_yaml(random: Random, path: Path, given: Path) -> Path:
    copy = given / random.choice((path.name, f"{path.stem}.json"))
    data = yaml.safe_load(path.read_text())
    choice = random.randrange(10)
    if choice == 0:
        text = random.choice(YAMLS)
    elif choice == 1:
        text = flipped(random, path.read_bytes()).decode("utf-8", errors="surrogateescape")
    elif choice == 2:
        key = random.choice(list(data))
        body = random.choice(YAMLS).replace("\n", " ")
        text = to_json({**data, key: Raw(body)})
    else:
        text = to_json(mutated(random, data))  # JSON is YAML
    copy.write_text(text, errors="surrogateescape" if choice == 1 else "surrogatepass")
    return copy
