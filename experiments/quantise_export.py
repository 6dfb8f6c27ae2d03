"""A stock export through llm-compressor, and what that costs in vLLM.

    python experiments/quantise_export.py quantise STOCK OUT SCHEME TEXT   # where llmcompressor is installed
    python experiments/quantise_export.py measure TEXT FOLDER...           # where vLLM and trisect are

SCHEME is FP8_DYNAMIC (no text is read), W8A8 or W4A16; TEXT is a file like what the model is for. The output is in the
compressed-tensors format, which vLLM serves. Measured rows go to experiments/results/quantise-export.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

WINDOWS, LENGTH = 64, 256


def quantise(stock: str, out: str, scheme: str, text: str) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stock, dtype=torch.bfloat16 if scheme == "FP8_DYNAMIC" else "auto")
    tokenizer = AutoTokenizer.from_pretrained(stock)
    where = {"targets": ["Linear"], "ignore": ["lm_head"]}
    if scheme == "FP8_DYNAMIC":
        oneshot(model=model, recipe=QuantizationModifier(scheme=scheme, **where))
    else:
        # Narrow widths are multiples of 16 or 32, and the preset's groups have 128.
        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
        groups = {"group_0": QuantizationScheme(targets=where["targets"], weights=weights)}
        four = {"config_groups": groups, "ignore": where["ignore"]}
        recipe = GPTQModifier(**four) if scheme == "W4A16" else GPTQModifier(scheme=scheme, **where)
        ids = tokenizer(Path(text).read_text(encoding="utf-8")[: 40 * WINDOWS * LENGTH]).input_ids
        windows = [ids[i : i + LENGTH] for i in range(0, WINDOWS * LENGTH, LENGTH)]
        data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * LENGTH] * WINDOWS})
        oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=LENGTH, num_calibration_samples=WINDOWS)
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def measure(text: str, *folders: str) -> None:
    """Perplexity of each folder by vLLM, all in bfloat16, which each scheme runs in on a CPU."""
    from tables import keep_row

    for folder in folders:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            how = ["--data", text, "--length", "256", "--windows", "64", "--dtype", "bfloat16", "--backend", "vllm"]
            subprocess.run([sys.executable, "-m", "trisect", "eval", folder, *how, "--json", file.name], check=True)
            found = json.loads(Path(file.name).read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        keep_row("quantise-export.json", {"name": Path(folder).name, "bytes": size, **found})


if __name__ == "__main__":
    {"quantise": quantise, "measure": measure}[sys.argv[1]](*sys.argv[2:])
