"""A stock export through llm-compressor, and what that costs in vLLM.

    python experiments/quantise_export.py quantise STOCK OUT SCHEME TEXT   # where llmcompressor is installed
    python experiments/quantise_export.py measure TEXT FOLDER              # where vLLM and trisect are

SCHEME is FP8_DYNAMIC (no text is read), W8A8 or W4A16; TEXT is a file like what the model is for. The output is in the
compressed-tensors format, which vLLM serves. Measured rows go to experiments/results/quantise-export.json.
"""

import sys
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


def measure(text: str, folder: str) -> None:
    """Perplexity of a folder in vLLM, in bfloat16, which every scheme runs in on a CPU."""
    import torch
    from tables import keep_row
    from transformers import AutoTokenizer

    from trisect.serve import Engine
    from trisect.support.receipt import build_receipt

    ids = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8")).input_ids
    windows = torch.tensor(ids[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)
    losses = Engine(folder, length=LENGTH, dtype="bfloat16", tasks=False).losses(windows)
    row = {
        "name": Path(folder).name,
        "data": text,
        "bytes": sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")),
        "perplexity": float((losses.sum() / (WINDOWS * (LENGTH - 1))).exp()),
        "receipt": build_receipt({}, seed=0, token_hash=None, timings={}),
    }
    keep_row("quantise-export.json", row)


if __name__ == "__main__":
    {"quantise": quantise, "measure": measure}[sys.argv[1]](*sys.argv[2:])
