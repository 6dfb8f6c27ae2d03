"""A stock export through llm-compressor: python experiments/quantise_export.py STOCK OUT SCHEME TEXT.

Needs `pip install llmcompressor` in an environment of its own. SCHEME is FP8_DYNAMIC (no text is read), W8A8 or W4A16;
TEXT is a file like what the model is for. The output is in the compressed-tensors format, which vLLM serves.
"""

import sys
from pathlib import Path

WINDOWS, LENGTH = 64, 256


def main(stock: str, out: str, scheme: str, text: str) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
