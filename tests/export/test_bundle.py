"""The modelling file of a native folder. Reference: the package's own classes, in another process."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import compressed, quantized, sliced

from tiny_models import CONFIGS, tokens
from tolerances import assert_same_but_for_rounding, assert_same_text, steps_of
from trisect.bundle import ROOT, ModuleText, is_ours, merged, sources_for
from trisect.models import load_model, save_model

PROMPT = tokens(2, 20, seed=9)
SETTINGS = ("model-rates", "per-head", "factored")

LOADER = """
import json, sys
sys.modules["trisect"] = None
import torch, transformers
folders, prompt, out = json.loads(sys.argv[1]), torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
auto = transformers.AutoModelForCausalLM
try:
    auto.from_pretrained(folders["llama-gqa"], trust_remote_code=False)
except ValueError as error:
    found = {"refused": str(error)}
for name, folder in folders.items():
    # The file is the same in every folder but for its last lines, and running it takes a second.
    if name in ("llama-gqa", "gpt2", "mistral3-wrapper", "factored"):
        model = auto.from_pretrained(folder, trust_remote_code=True)
        built = sys.modules[type(model).__module__].compressed_class
    else:
        with open(folder + "/config.json") as file:
            model = built(json.load(file)["model_type"].removeprefix("trisect_")).from_pretrained(folder)
    with torch.no_grad():
        text = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        found[name] = {"logits": model(prompt).logits, "text": text}
torch.save(found, out)
"""


def natives() -> dict[str, Any]:
    """A cut model of every family, and what else a folder may hold: folded rates, factored maps, few bits."""
    families = {name: sliced(name) for name in CONFIGS}
    kinds = {setting: compressed("llama-gqa", setting) for setting in SETTINGS if setting != "fewer-experts"}
    kinds["fewer-experts"] = compressed("mixtral", "fewer-experts")
    return families | kinds | {"quantized": quantized()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("native")
    return {name: save_model(model, None, home / name, receipt={}) for name, model in natives().items()}


@pytest.mark.slow
def test_every_family_loads_where_trisect_cannot_be_imported(folders: dict[str, Path], tmp_path: Path) -> None:
    named = json.dumps({name: str(folder) for name, folder in folders.items()})
    command = [sys.executable, "-c", LOADER, named, json.dumps(PROMPT.tolist()), str(tmp_path / "found.pt")]
    # A cache of its own, so that no code of an earlier run is found there.
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, env=environment)
    found = torch.load(tmp_path / "found.pt")
    assert "trust_remote_code=True" in found["refused"]
    for name, native in natives().items():
        with torch.no_grad():
            here = native(PROMPT).logits
        assert_same_but_for_rounding(found[name]["logits"], here, steps=steps_of(native))
        text = native.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert_same_text(native, found[name]["text"], text)


@pytest.mark.parametrize("trust", [None, False, True])
def test_trisect_runs_none_of_the_code_that_a_folder_brings(
    trust: bool | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Neither through transformers nor through `load_model`, whatever is said about trust."""
    folder = folders["llama-gqa"]
    bait = tmp_path / "bait"
    bait.mkdir()
    for file in folder.iterdir():
        (bait / file.name).write_bytes(file.read_bytes())
    (bait / "modeling_trisect.py").write_text("raise RuntimeError('this code was run')")
    said = {} if trust is None else {"trust_remote_code": trust}
    through_auto = transformers.AutoModelForCausalLM.from_pretrained(bait, **said)
    assert type(through_auto).__module__ == "trisect.models.compressed"
    assert type(load_model(str(bait), **said).model) is type(through_auto)


def test_the_config_names_what_is_in_the_file(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        config = json.loads((folder / "config.json").read_text())
        text = (folder / "modeling_trisect.py").read_text()
        assert text.isascii()
        assert text.startswith("# Copyright the trisect authors. Licensed under the Apache License")
        (architecture,) = config["architectures"]
        assert config["auto_map"]["AutoModelForCausalLM"] == f"modeling_trisect.{architecture}"
        module, _, config_class = config["auto_map"]["AutoConfig"].partition(".")
        assert module == "modeling_trisect"
        for defined in (architecture, config_class):
            assert f"\n{defined} = " in text, name


def test_saving_again_keeps_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_model(str(folders["qwen2"]))
    again = save_model(loaded.model, None, tmp_path / "again", receipt={})
    first = folders["qwen2"]
    assert (again / "modeling_trisect.py").read_text() == (first / "modeling_trisect.py").read_text()
    assert json.loads((again / "config.json").read_text()) == json.loads((first / "config.json").read_text())


def source(name: str, text: str) -> ModuleText:
    return ModuleText(name, text, ast.parse(text))


def run(*modules: ModuleText) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(merged(modules), found)
    return found


FIRST = source(
    "trisect.first",
    "import math\n\n__all__ = ['area']\n\n\ndef _part(r: float) -> float:\n    return r * r\n\n\n"
    "def area(r: float) -> float:\n    return math.pi * _part(r)\n",
)


def test_names_of_all_modules_meet_in_one_file() -> None:
    package = source("trisect.package", "from trisect.first import area\n")
    user = source(
        "trisect.user",
        "import math\nfrom trisect.package import (\n    area,\n)\n\n\n"
        "class Disc:\n    def _part(self) -> float:\n        return area(1.0) / math.pi\n",
    )
    found = run(FIRST, package, user)
    assert found["Disc"]()._part() == 1.0
    assert "__all__" not in found


def test_what_is_left_out_is_missing_only_when_asked_for() -> None:
    lazy = source(
        "trisect.lazy",
        "def fast() -> int:\n    from trisect.kernels.triton_fast import launch\n\n    return launch()\n\n\n"
        "def area_of_two() -> float:\n    from trisect.first import area\n\n    return area(2.0)\n",
    )
    found = run(FIRST, lazy)
    assert found["area_of_two"]() == found["area"](2.0)
    with pytest.raises(ImportError, match="needs trisect"):
        found["fast"]()


def meanings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every name that a file binds at its top level, with what it means: a statement, or an import."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                n.id
                for target in targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            yield from ((name, ast.unparse(node)) for name in names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = getattr(node, "module", "")
            yield from ((alias.asname or alias.name, f"import {origin}.{alias.name}") for alias in node.names)


def test_one_name_has_one_meaning_in_the_whole_file() -> None:
    tree = ast.parse(merged(sources_for(ROOT)))
    found: dict[str, str] = {}
    clashes = {name for name, meaning in meanings(tree) if found.setdefault(name, meaning) != meaning}
    assert not clashes, "rename these in one of their modules"


THEIRS = {"huggingface_hub", "numpy", "packaging", "regex", "safetensors", "tokenizers", "tqdm", "yaml"}
"""Packages that transformers itself cannot do without."""
PRESENT = {"trisect", "torch", "transformers", *THEIRS, *sys.stdlib_module_names}
"""What may be imported outside of `try`: transformers refuses a modelling file that asks for more."""


def packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
    return {module.split(".")[0] for module in modules}


def demands(part: ModuleText) -> set[str]:
    """Packages that may be missing where only transformers is installed."""
    tries = [node for node in ast.walk(part.tree) if isinstance(node, ast.Try)]
    tried = {id(inner) for node in tries for inner in ast.walk(node)}
    return {name for node in part.imports() if id(node) not in tried for name in packages(node)} - PRESENT


def test_the_file_imports_only_what_comes_with_transformers() -> None:
    for part in sources_for(ROOT):
        assert not demands(part), part.name
        ours = [node for node in part.imports() if "trisect" in packages(node)]
        assert all(
            is_ours(node) and all(alias.asname in (None, alias.name) for alias in node.names) for node in ours
        ), part.name
    assert demands(source("trisect.odd", "def f():\n    import hqq\n")) == {"hqq"}


def test_an_optional_package_may_be_tried() -> None:
    text = "try:\n    import no_such_package\nexcept ImportError:\n    no_such_package = None\n"
    assert run(source("trisect.odd", text))["no_such_package"] is None
