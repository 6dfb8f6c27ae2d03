"""Stock exports in other engines, each in an environment of its own: `make test-exports` builds them and runs this.

Reference: the compressed model here, by logits and by the tokens that a text is cut into.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import compressed, pieces
from safetensors.torch import load_file, save_file
from test_hf import CASES

from tiny_models import CONFIGS, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.export import export_hf
from trisect.models import load_model
from trisect.pipeline.run import compress

INSIDE = 7
"""Tokens that every window of the tiny models holds: not all engines know windows."""
TEXT = "Once upon a time, 3 little pigs\n  went home."
TRANSFORMERS = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
transformers.logging.set_verbosity_error()
ids, found, failed = load_file(sys.argv[1]), {}, {}
for name, prompt in ids.items():
    folder = f"{sys.argv[2]}/{name}"
    # Scores of Gemma 2 are bounded in eager attention alone, there.
    kernel = {"attn_implementation": "eager"} if name.startswith("gemma2") else {}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, **kernel)
        with torch.no_grad():
            found[name] = model.eval()(prompt).logits.contiguous()
        text = transformers.AutoTokenizer.from_pretrained(folder)(sys.argv[3], return_tensors="pt")
        found[name + ".text"] = text.input_ids[0]
        found[name + ".greedy"] = model.generate(**text, max_new_tokens=8, do_sample=False)[0]
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"[:200]
save_file(found, sys.argv[4])
print(json.dumps(failed))
"""
MLX = """
import json, sys, mlx.core as mx
from pathlib import Path
from mlx_lm.utils import load
ids, found, failed = mx.load(sys.argv[1]), {}, {}
for name, prompt in ids.items():
    try:
        model, tokenizer = load(f"{sys.argv[2]}/{name}")
        model.set_dtype(mx.float32)
        found[name] = model(prompt).astype(mx.float32)
        text = tokenizer.encode(sys.argv[3])
        found[name + ".text"] = mx.array(text)
        for _ in range(8):
            token = model(mx.array([text]))[0, -1].argmax().item()
            text.append(token)
            if token in tokenizer.eos_token_ids:
                break
        found[name + ".greedy"] = mx.array(text)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"[:200]
mx.save_safetensors(sys.argv[4], found)
print(json.dumps(failed))
"""
ENGINES = {"transformers 4": ("TRISECT_TRANSFORMERS4", TRANSFORMERS), "mlx": ("TRISECT_MLX", MLX)}
"""Name -> the variable that has its Python, and what is run there."""
CANNOT: dict[str, dict[str, str]] = {
    "transformers 4": {
        "granitemoe": "size mismatch",
        "ministral3": "does not recognize this architecture",
        "qwen2_moe": "hidden_size must be divisible by num_heads",
    },
    "mlx": {
        "exaone4": "object of type 'int' has no len()",  # of the pattern of windows, a word in all real ones
        "gemma3": "list index out of range",  # every sixth layer is taken for the full one, and the model has three
        "gpt_oss": "not in model",
        "gpt_oss-unbiased": "NoneType",
        "granite": "broadcast_shapes",
        "granitemoe": "broadcast_shapes",
        "mixtral": "Expected shape",
        "qwen2-window": "broadcast_shapes",
        "qwen2_moe": "rope_scaling must contain",
    },
}
"""Tiny models that an engine refuses, and with what words."""
DEAF = {("mlx", "gemma--model-rates"), ("mlx", "gemma2--model-rates")}
"""Where an engine loads a model and computes something else: the export says so in a note."""
ROUNDED = {("mlx", "gemma3_six"): 1e-3}
"""Where an engine computes in fewer bits: MLX-LM rounds the scale of Gemma 3's embeddings to bfloat16."""
pytestmark = pytest.mark.skipif(
    not any(variable in os.environ for variable, _ in ENGINES.values()), reason="`make test-exports` runs these"
)


def six_layers() -> Any:
    """Gemma 3 with one full layer in six, as all real ones have it."""
    torch.manual_seed(0)
    config = CONFIGS["gemma3"]()
    config.num_hidden_layers, config.layer_types = 6, ["sliding_attention"] * 5 + ["full_attention"]
    model = transformers.Gemma3ForCausalLM(config).eval()
    settings = CompressConfig(ratio=0.3, align=None, parts=("mlp",), method="a3")
    return compress(model, settings, tokens=tokens_from_tensor(tokens(2, 20))).model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder of exports, the native models, and tokenizers."""
    home = tmp_path_factory.mktemp("stock")
    natives = {f"{name}--{setting}": compressed(name, setting) for name, setting in CASES}
    natives["gemma3_six--mlp"] = six_layers()
    tokenizers = dict.fromkeys(natives, pieces())
    if folder := os.environ.get("TRISECT_NATIVE"):  # a real model, compressed with --portable
        loaded = load_model(folder, dtype="float32")
        natives["real--portable"], tokenizers["real--portable"] = loaded.model, loaded.tokenizer
    for name, native in natives.items():
        export_hf(native, tokenizers[name], home / name, dtype=torch.float32)
    return home, natives, tokenizers


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_computes_the_same(engine: str, exported: tuple[Path, Any, Any], tmp_path: Path) -> None:
    variable, script = ENGINES[engine]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python; `make test-exports` sets it")
    home, natives, tokenizers = exported
    prompt = tokens(2, 60, seed=9)
    save_file({name: prompt.clone() for name in natives}, tmp_path / "ids.safetensors")
    out = tmp_path / "found.safetensors"
    command = [os.environ[variable], "-c", script, str(tmp_path / "ids.safetensors"), str(home), TEXT, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    failed, found = json.loads(done.stdout.splitlines()[-1]), load_file(out)
    for name, native in natives.items():
        family = name.partition("--")[0]
        if family in CANNOT[engine]:
            assert CANNOT[engine][family] in failed[name]
            continue
        assert name not in failed, failed[name]
        with torch.no_grad():
            expected = native(prompt).logits
        seen = INSIDE if engine == "mlx" and getattr(native.config, "sliding_window", None) else None
        apart = (found[name] - expected)[:, :seen].abs().max() / expected.abs().max()
        print(f"{engine}: {name} {apart:.1e}")
        if (engine, name) in DEAF:
            assert apart > 0.01, f"{engine} has learnt to turn {name}: take its note out"
            continue
        assert apart < ROUNDED.get((engine, family), 1e-5), name
        text = tokenizers[name](TEXT, return_tensors="pt", return_token_type_ids=False)
        assert torch.equal(found[f"{name}.text"], text.input_ids[0]), name
        if seen is None:
            greedy = native.generate(**text, max_new_tokens=8, do_sample=False)[0]
            assert torch.equal(found[f"{name}.greedy"], greedy), name
