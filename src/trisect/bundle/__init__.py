"""What a saved folder brings along for people without trisect: a model card, and a modelling file.

The file is what transformers loads with trust_remote_code=True: the modules that build compressed models, one after
another, without their imports of this package. tests/export/test_bundle.py checks that no two of them give a name
different meanings.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from trisect.errors import TrisectError
from trisect.plan import budget_of, compare
from trisect.records.shapes import ModelShape
from trisect.support import checks, files
from trisect.support.receipt import Record

PACKAGE = "trisect"
KERNELS = "trisect.kernels.triton_"  # the beginning of modules that stay with trisect: not everybody has Triton


@dataclass(frozen=True)
class ModuleText:
    """One module of this package as text and tree."""

    name: str
    text: str
    tree: ast.Module

    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Wherever they stand."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    def needs(self, *, top: bool) -> list[str]:
        """Modules of this package that are imported from, at the top level or anywhere, but kernels."""
        ours = [str(node.module) for node in self.imports() if is_ours(node) and (not top or node in self.tree.body)]
        return [name for name in ours if not name.startswith(KERNELS)]


def is_ours(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    """Whether a statement imports something of this package, which is always written `from MODULE import NAME`."""
    return isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == PACKAGE


def read_source(name: str) -> ModuleText:
    """A module of this package; a package is its __init__.py."""
    path = Path(__file__).resolve().parents[1].joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return ModuleText(name, text, ast.parse(text))


def sources_for(name: str) -> list[ModuleText]:
    """A module and everything of this package that it imports but kernels, each after what its top level needs."""
    ordered: dict[str, ModuleText] = {}
    waiting = [name]
    while waiting:
        for source in _needed(waiting.pop(0), set(ordered)):
            ordered[source.name] = source
            # What functions import may stand anywhere in the file: it is looked up when they run.
            waiting += source.needs(top=False)
    return list(ordered.values())


def _needed(name: str, known: set[str]) -> Iterator[ModuleText]:
    """Modules that are not known yet, dependencies first."""
    if name in known:
        return
    known.add(name)
    source = read_source(name)
    for module in source.needs(top=True):
        yield from _needed(module, known)
    yield source


def merged(sources: Sequence[ModuleText]) -> str:
    """The bodies of all modules; what wants a kernel finds it missing."""
    return "\n".join(_body(source) for source in sources)


def _body(source: ModuleText) -> str:
    """The module's text without its imports of this package, and without `__all__`."""
    lines: list[str | None] = list(source.text.splitlines())
    for node in ast.walk(source.tree):
        exported = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if not exported and not is_ours(node):
            continue
        assert isinstance(node, ast.stmt)
        assert node.end_lineno is not None
        missing = str(getattr(node, "module", None)).startswith(KERNELS)
        # Inside a function a statement has to stay, because it may be the only one of a block.
        inner = 'raise ImportError("this needs trisect itself")' if missing else "pass"
        place = [" " * node.col_offset + inner] if node.col_offset else [None]
        lines[node.lineno - 1 : node.end_lineno] = place + [None] * (node.end_lineno - node.lineno)
    text = "\n".join(line for line in lines if line is not None).strip()
    return f"\n# {source.name}\n\n{text}\n"


MODULE = "modeling_trisect"
HEADLESS = "TrisectModel"  # the class without a head, which vLLM's and SGLang's transformers backends build
ROOT = "trisect.models.compressed"


@cache
def _modules() -> str:
    return merged(sources_for(ROOT))


def bundle_text(family: str, model_class: str, config_class: str, record: str | None = None) -> str:
    """The whole file: the modules that build compressed models, and the three classes of one family."""
    # A family from outside the package comes with its `record`, as Python writes it.
    names = {"family": family, "model_class": model_class, "config_class": config_class, "headless": HEADLESS}
    return _filled("modeling.py.jinja", modules=_modules(), record=record, **names)


def _filled(template: str, **facts: Any) -> str:
    """A template of this folder with its facts."""
    from jinja2 import Template

    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).render(**facts)


def write_bundle(folder: Path, model: Any, *, family: str, record: str | None) -> None:
    """Put the modelling file into a saved folder, and say in its config.json what is in it."""
    model_class, config_class = type(model).__name__, type(model.config).__name__
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("architectures") != [model_class]:
        raise TrisectError(f"{path} is of {config.get('architectures')}, not of {model_class}.")
    classes = {"AutoConfig": config_class, "AutoModel": HEADLESS, "AutoModelForCausalLM": model_class}
    config["auto_map"] = {auto: f"{MODULE}.{name}" for auto, name in classes.items()}
    files.atomic_write_text(folder / f"{MODULE}.py", bundle_text(family, model_class, config_class, record))
    files.write_json(path, config)


SETTINGS = ("method", "ratio", "kv_ratio", "rope_scope", "portable", "align", "allocate", "seed")
REPRODUCE = ("date", "trisect", "commit")

_HYBRIDS = "falcon_h1 granitemoehybrid lfm2 nemotron_h qwen3_next qwen3_5_text qwen3_5_moe_text".split()
NOT_IN_VLLM = {
    **dict.fromkeys(_HYBRIDS, "its layers without attention need a cache of their own"),
    "llama4_text": "vLLM's transformers backend would replace its router by a plain linear map",
    "mpt": "transformers' code for it takes no positions",
}
"""Families that our vLLM plugin does not serve, and why; wrappers around a text model are not served either."""


def write_card(
    folder: Path,
    model: Any,
    receipt: Mapping[str, Any],
    *,
    shapes: tuple[ModelShape, ModelShape],
    family: str | None = None,
    stock: Any = None,
) -> None:
    """README.md of a folder whose weights are there already.

    `shapes` are those before and after, `family` is that of a native folder whose text model is all of it; of an
    export, `stock` is the `Exported` record.
    """
    entry = model.config.trisect
    old, new = (budget_of(shape) for shape in shapes)
    counted = ("parameters", "linear_parameters", "kv_bytes_per_token")
    titles = ("parameters", "linear weights of the decoder", "KV cache, bytes per token")
    sizes = [(title, f"{getattr(old, c):,}", f"{getattr(new, c):,}") for title, c in zip(titles, counted, strict=True)]
    facts = {
        "removed": compare(old, new).ratio,
        "sizes": [*sizes, *_perplexity_rows(receipt)],
        "weights": weights_size(folder),
        "backend": (entry.get("quantization") or {}).get("backend"),
        "times_tuned": len(receipt.get("tuning") or ()),
        "served": family is not None and family not in NOT_IN_VLLM and not entry.get("quantization"),
        "portable": (receipt.get("recipe") or {}).get("portable"),
        "stock": stock,
    }
    made = _recipe_rows(receipt) or [("method", entry.get("method"))]
    files.atomic_write_text(folder / "README.md", _card(source_of(receipt) or model.name_or_path, made, facts))


def weights_size(folder: Path) -> int:
    """Bytes of the weights alone."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _card(source: str | None, made: list[tuple[str, Any]], facts: dict[str, Any]) -> str:
    """The filled template. The title is the last part of a path, not the whole of it."""
    title = (shown_source(source).rpartition("/")[2] if source else "") or "A model"
    base_model = source if source is not None and is_hub_id(source) else None
    return _filled("card.md.jinja", title=title, base_model=base_model, made=made, **facts)


def is_hub_id(source: str) -> bool:
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


def shown_source(source: str) -> str:
    """A model's name as others may read it: without the folders of this machine."""
    return source if is_hub_id(source) else Path(source).name.removesuffix(".gguf")


def source_of(receipt: Mapping[str, Any]) -> str | None:
    """The model that was compressed, if the receipt says so."""
    recipe = receipt.get("recipe") or {}
    source = receipt.get("source") or receipt.get("model") or recipe.get("model")
    return str(source) if source else None


def _recipe_rows(receipt: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings that decide what a compressed model is."""
    recipe = receipt.get("recipe") or {}
    rows = [(key, recipe[key]) for key in SETTINGS if recipe.get(key)]
    if text := recipe.get("calibration"):
        name = Path(str(text.get("source"))).name
        rows.append(("calibration", f"{text.get('samples')} windows of {text.get('length')} tokens of {name}"))
    return rows + [(key, receipt[key]) for key in REPRODUCE if receipt.get(key)]


def _perplexity_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured while compressing."""
    texts = checks.validated(Record, files.plain(receipt)).texts
    pairs = [(row.before, row.after) for row in texts if row.before and row.after]
    return [(f"perplexity ({now.name}, {now.size})", f"{was.value:.3f}", f"{now.value:.3f}") for was, now in pairs]
