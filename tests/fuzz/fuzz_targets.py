"""One hostile input after the other: what is damaged, and who reads it.

A target writes its input below `place.given` and calls what reads it; what was read is checked there, too.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz_commands import command
from fuzz_damage import damage, damage_safetensors, damaged_copy, hostile_yaml
from fuzz_folders import rearrange, surprised
from fuzz_gguf import hostile_gguf
from fuzz_mutations import flipped, mutated, to_json
from fuzz_seeds import Seeds
from safetensors.torch import load_file

from trisect.calibrate import load_moments, read_info
from trisect.compare import load_recipe
from trisect.config import CompressConfig, read_mapping
from trisect.data.read import read_file
from trisect.errors import TrisectError
from trisect.models.checkpoint import load_model, read_shape
from trisect.plan import Plan, apply_plan, read_curves, read_latency
from trisect.support.checks import read_json
from trisect.support.receipt import read_receipt

QUICK = ["--samples", "2", "--length", "8", "--align", "none", "--quiet"]
OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate", "out of memory", "unable to allocate", "bad_alloc")
"""What a refusal must not say: the memory was asked for, then."""


@dataclass(frozen=True, kw_only=True)
class Place:
    given: Path
    """The hostile input goes here."""
    out: Path
    """The only folder that may be written to."""
    whole: float = 1.0
    """How many whole commands are run: times the usual share of each target."""


Target = Callable[[Random, Seeds, Place], None]


def config_json(random: Random, seeds: Seeds, place: Place) -> None:
    """A stock model's config."""
    folder = _copied(seeds, "dense", place)
    path = folder / "config.json"
    if random.random() < 0.5:
        path.write_text(to_json(surprised(random, json.loads(path.read_text()))), errors="surrogatepass")
    else:
        damage(random, path)
    _read_model(random, seeds, place, folder)


def folder_layout(random: Random, seeds: Seeds, place: Place) -> None:
    """Links, pipes, missing and additional files."""
    name = random.choice(("dense", "sharded", "narrow"))
    folder = _copied(seeds, name, place)
    rearrange(random, folder, seeds.root / name)
    _read_model(random, seeds, place, folder)


def trisect_entry(random: Random, seeds: Seeds, place: Place) -> None:
    """A compressed model's config, mostly its own entry."""
    folder = _copied(seeds, "narrow", place)
    config = json.loads((folder / "config.json").read_text())
    if random.random() < 0.8:
        config["trisect"] = mutated(random, config["trisect"])
        (folder / "config.json").write_text(to_json(config), errors="surrogatepass")
    else:
        damage(random, folder / "config.json")
    _read_model(random, seeds, place, folder)


def weight_index(random: Random, seeds: Seeds, place: Place) -> None:
    folder = _copied(seeds, "sharded", place)
    damage(random, folder / "model.safetensors.index.json")
    _read_model(random, seeds, place, folder)


def safetensors_header(random: Random, seeds: Seeds, place: Place) -> None:
    name = random.choice(("dense", "sharded", "narrow"))
    folder = _copied(seeds, name, place)
    shard = random.choice(sorted(folder.glob("*.safetensors")))
    damage_safetensors(random, shard)
    _read_model(random, seeds, place, folder)


def tokenizer_files(random: Random, seeds: Seeds, place: Place) -> None:
    folder = _copied(seeds, "dense", place)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    damage(random, folder / random.choice(names))
    _read_model(random, seeds, place, folder)


def gguf_file(random: Random, seeds: Seeds, place: Place) -> None:
    path = place.given / "m.gguf"
    path.write_bytes(hostile_gguf(random, seeds.gguf_keys, seeds.gguf_tensors, seeds.gguf_data))
    if random.random() < 0.1 * place.whole:
        words = random.choice((("inspect",), ("eval", *_text(seeds), "--quiet")))
        command(words[0], path, *words[1:], "--json", place.out / "i.json")
    elif random.random() < 0.5:
        read_shape(str(path))
    else:
        load_model(str(path))


def moments(random: Random, seeds: Seeds, place: Place) -> None:
    path = shutil.copy(seeds.root / "moments.safetensors", place.given / "m.safetensors")
    damage_safetensors(random, path)
    if random.random() < 0.08 * place.whole:
        arguments = ["--moments", path, "--method", "a3", "--ratio", "0.3", "--eval", "none", *QUICK]
        command("compress", seeds.root / "dense", "-o", place.out / "o", *arguments)
        return
    read_info(path)
    for _, found in load_moments(path, fingerprint=seeds.fingerprint, layers=seeds.shape.layers):
        assert all(value.isfinite().all() for value in found.values())


def plan_file(random: Random, seeds: Seeds, place: Place) -> None:
    path = damaged_copy(random, seeds.root / "plan.json", place.given)
    plan = Plan.from_dict(read_json(path))
    assert Plan.from_dict(plan.to_dict()) == plan
    apply_plan(seeds.shape, plan)


def curves_file(random: Random, seeds: Seeds, place: Place) -> None:
    path = damaged_copy(random, seeds.root / "curves.json", place.given)
    if random.random() < 0.3 * place.whole:
        arguments = ["--allocate", random.choice(("search", "balanced")), "--curves", path, "--align", "none"]
        goal = random.choice((["--ratio", "0.3"], ["--max-ppl-increase", "20%"]))
        command("plan", seeds.root / "dense", *goal, "--method", "a3", *arguments)
        return
    curves = read_curves(path)
    for layer, component in curves.points:
        curves.loss_at(layer, component, max(curves.points[layer, component]))


def latency_table(random: Random, seeds: Seeds, place: Place) -> None:
    path = damaged_copy(random, seeds.root / "latency.json", place.given)
    if random.random() < 0.3 * place.whole:
        arguments = ["--budget", "latency", "--latency-table", path, "--ratio", "0.3", "--align", "none"]
        command("plan", seeds.root / "dense", "--method", "a3", *arguments)
        return
    table = read_latency(path)
    for component in ("qk", "ov", "mlp"):
        assert table.nanoseconds(seeds.shape.layers[0], component, 4) > 0


def receipt(random: Random, seeds: Seeds, place: Place) -> None:
    folder = _copied(seeds, "narrow", place)
    damage(random, folder / "receipt.json")
    if random.random() < 0.06 * place.whole:
        command("export", folder, "-o", place.out / "o")
    elif random.random() < 0.1:
        command("inspect", folder)
    else:
        assert isinstance(read_receipt(folder), dict)


def cell_receipt(random: Random, seeds: Seeds, place: Place) -> None:
    """A receipt in the results of a comparison."""
    results = _copied(seeds, "results", place)
    damage(random, random.choice(sorted((results / "cells").glob("*.json"))))
    command("compare", seeds.root / "cells.yaml", "--dry-run", "-o", results)


def run_config(random: Random, seeds: Seeds, place: Place) -> None:
    path = hostile_yaml(random, seeds.root / "run.yaml", place.given)
    if random.random() < 0.2 * place.whole:
        command("plan", seeds.root / "dense", "--config", path, "--json", place.out / "p.json")
    elif random.random() < 0.05 * place.whole:
        arguments = ["--config", path, "--calibration", seeds.root / "text.txt", "--eval", "none"]
        command("compress", seeds.root / "dense", "-o", place.out / "o", *arguments)
    else:
        config = CompressConfig.from_dict(read_mapping(path))
        assert CompressConfig.from_dict(config.to_dict()) == config


def recipe(random: Random, seeds: Seeds, place: Place) -> None:
    path = hostile_yaml(random, seeds.root / "recipe.yaml", place.given)
    if random.random() < 0.2 * place.whole:
        command("compare", path, "--dry-run", "-o", place.out / "o")
    else:
        load_recipe(path)


def token_file(random: Random, seeds: Seeds, place: Place) -> None:
    suffix = random.choice(("safetensors", "json", "jsonl", "txt", "npy"))
    path = place.given / f"data.{suffix}"
    if suffix == "safetensors":
        shutil.copy(seeds.root / "ids.safetensors", path)
        damage_safetensors(random, path)
    elif suffix == "npy":
        import numpy

        numpy.save(path, numpy.arange(40))
        path.write_bytes(flipped(random, path.read_bytes()))
    else:
        data = mutated(random, [{"text": "w1 w2 w3"}, {"text": "w4 w5"}, "w6"])
        text = to_json(data) if suffix == "json" else "\n".join(map(to_json, data)) if isinstance(data, list) else "x"
        path.write_text(text, errors="surrogatepass")
    if random.random() < 0.1 * place.whole:
        command("eval", seeds.root / "dense", "--data", path, "--length", "8", "--windows", "1", "--quiet")
    else:
        read_file(path)


TARGETS: dict[str, tuple[int, Target]] = {
    "config.json": (24, config_json),
    "folder": (5, folder_layout),
    "trisect entry": (12, trisect_entry),
    "weight index": (8, weight_index),
    "safetensors header": (12, safetensors_header),
    "tokenizer files": (4, tokenizer_files),
    "GGUF file": (12, gguf_file),
    "moments": (6, moments),
    "plan": (4, plan_file),
    "curves": (5, curves_file),
    "latency table": (3, latency_table),
    "receipt": (4, receipt),
    "cell receipt": (3, cell_receipt),
    "run config": (6, run_config),
    "recipe": (6, recipe),
    "token file": (4, token_file),
}
"""Kind -> its share of the inputs, and who damages and reads it."""


def kind_of(index: int) -> str:
    """The kind of the input with this number: shares are exact in every hundred or so."""
    kinds = [kind for kind, (share, _) in TARGETS.items() for _ in range(share)]
    return kinds[index * 37 % len(kinds)]


def attempt(index: int, seeds: Seeds, place: Place) -> str:
    """Read one hostile input: refused or accepted. Anything but a TrisectError goes through."""
    kind = kind_of(index)
    random = Random(f"{kind} {index}")
    try:
        TARGETS[kind][1](random, seeds, place)
    except TrisectError as error:
        if not str(error).strip():
            raise RuntimeError("an error that says nothing") from error
        if any(words in str(error).lower() for words in OUT_OF_MEMORY):
            raise MemoryError(str(error)) from error
        return "refused"
    return "accepted"


def _copied(seeds: Seeds, name: str, place: Place) -> Path:
    return Path(shutil.copytree(seeds.root / name, place.given / name))


def _read_model(random: Random, seeds: Seeds, place: Place, folder: Path) -> None:
    """By one of the ways that a folder is read; loaded weights are what the files hold."""
    if random.random() < 0.11 * place.whole:
        command(*random.choice(_ways(seeds, place, folder)))
    elif random.random() < 0.3:
        read_shape(str(folder))
    else:
        loaded = load_model(str(folder), stream=random.choice(("off", "off", "on")))
        stored = {}
        for shard in folder.glob("*.safetensors"):
            stored |= load_file(shard)
        for name, tensor in loaded.model.state_dict().items():
            if name in stored and not tensor.is_meta:  # a streamed layer is in its file still
                same = tensor.allclose(stored[name].to(tensor.dtype), rtol=0, atol=0, equal_nan=True)
                assert same, f"{name} is not what the file holds"


def _ways(seeds: Seeds, place: Place, folder: Path) -> list[tuple[object, ...]]:
    """Commands that read a model's folder."""
    cut = ("--ratio", "0.3", "--method", "a3", "--calibration", seeds.root / "text.txt", "--eval", "none")
    ways = [("inspect", folder, "--json", place.out / "i.json"), ("eval", folder, *_text(seeds), "--quiet")]
    if folder.name == "narrow":
        return [*ways, ("export", folder, "-o", place.out / "o")]
    cutting = ("compress", folder, "-o", place.out / "o", *cut, *QUICK)
    return [*ways, cutting, (*cutting, "--stream", "on")]


def _text(seeds: Seeds) -> tuple[object, ...]:
    return ("--data", seeds.root / "text.txt", "--length", "8", "--windows", "1")
