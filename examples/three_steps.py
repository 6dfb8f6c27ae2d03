"""Calibrate once, then plan, solve and rewrite: each step by itself, with a look at what it found.

    python examples/three_steps.py                      # a tiny random model, in seconds
    python examples/three_steps.py MODEL TEXT_FILE      # a real one, calibrated on a text

Prints the share of its objective that every component loses, before anything is written into the model.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

import trisect
from trisect import api

BAR = 40


def tiny_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    return transformers.LlamaForCausalLM(config).eval()


def main(arguments: list[str], folder: Path) -> api.Compressed:
    if arguments:
        model, tokens = api.load(arguments[0]), None
        source = trisect.CalibrationConfig(source=arguments[1], samples=16, length=512)
    else:
        model, source = tiny_model(), trisect.CalibrationConfig()
        tokens = torch.randint(0, 97, (8, 64), generator=torch.Generator().manual_seed(1))
    config = trisect.CompressConfig(ratio=0.25, method="a3", align=None, calibration=source)

    moments = folder / "moments.safetensors"
    info = api.calibrate(model, config, moments, tokens=tokens)
    print(f"calibrated: {info.num_tokens} tokens, {info.num_layers} layers")

    plan = api.plan(model, config)
    print(f"planned: {plan.layers[0]} in the first layer")

    # Nothing is in the model yet: solutions can be looked at, kept or thrown away.
    steps = list(api.solve(model, config, plan, moments=moments))
    for step in steps:
        share = step.solution.loss / step.solution.total
        print(f"layer {step.layer:2d} {step.component:4s} {'#' * round(BAR * share):{BAR}s} {share:.1%} lost")

    result = api.rewrite(model, config, plan, steps)
    print(api.summary(result.model))
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1:], Path(scratch))
