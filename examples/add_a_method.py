"""A new method as one entry of the table: MLP neurons by the norm of their weights, then a refit.

    python examples/add_a_method.py                      # a tiny random model, in seconds
    python examples/add_a_method.py MODEL TEXT_FILE      # a real one, calibrated on a text

Attention is a3's. An MLP neuron is scored by its weights alone; the down projection is then fitted anew by
least squares, so that the neurons that stay stand in for those that go. a3 runs beside it.
"""

import sys
from dataclasses import replace

import torch
import transformers
from torch import Tensor

import trisect
from trisect import api
from trisect.methods import METHODS, register_method
from trisect.methods.fold import keep_neurons, like
from trisect.methods.method import Options, need
from trisect.records.parts import MLP, Moments, Shrunk
from trisect.solve import SOLVE_DTYPE, Regression, ridge, top

RIDGE = 1e-4


def norm_scores(part: MLP) -> Tensor:
    """The product of the norms of what a neuron reads and of what it writes, (I,)."""
    reads = [part.W_up, part.W_gate] if part.W_gate is not None else [part.W_up]
    sizes = [W.to(SOLVE_DTYPE).norm(dim=0) for W in reads]
    return torch.stack([*sizes, part.W_down.to(SOLVE_DTYPE).norm(dim=1)]).prod(dim=0)


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """A solver is given a part, its moments and a width; its solution knows its own loss."""
    gram, W = need(moments, "down_gram"), part.W_down.to(SOLVE_DTYPE)  # (I, I), (I, D)
    kept, _ = top(norm_scores(part), width)
    # What all neurons put out, as a target for those that stay.
    problem = Regression(gram=gram, cross=gram @ W, energy=(W * (gram @ W)).sum(), tokens=1.0).chosen(kept)
    refitted = ridge(problem, W[kept], RIDGE)
    return Shrunk(
        part=replace(keep_neurons(part, kept), W_down=like(part.W_down, refitted)),
        loss=max(0.0, problem.error(refitted).item()),
        total=problem.energy.item(),
    )


NORM_REFIT = register_method(
    replace(
        METHODS["a3"],
        name="norm-refit",
        summary="Example: neurons by weight norms, the down projection refitted; attention as in a3.",
        solvers={**METHODS["a3"].solvers, "mlp": solve_mlp},
        reads={**METHODS["a3"].reads, "mlp": frozenset({"down_gram"})},
    )
)


def tiny_model() -> transformers.PreTrainedModel:
    """A random Llama, the same on every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:  # loud enough for a cut to be heard
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def divergence(dense: Tensor, small: Tensor) -> float:
    """What the small model's predictions are off by: mean Kullback-Leibler divergence in nats."""
    return torch.nn.functional.kl_div(
        small.log_softmax(-1).flatten(0, 1), dense.log_softmax(-1).flatten(0, 1), log_target=True, reduction="batchmean"
    ).item()


@torch.no_grad()
def compare(methods: tuple[str, ...], arguments: list[str]) -> dict[str, float]:
    """Method -> divergence from the dense model, with half of every MLP removed."""
    tokens = torch.randint(0, 97, (16, 64), generator=torch.Generator().manual_seed(1))
    found = {}
    for method in methods:
        model = api.load(arguments[0]) if arguments else tiny_model()
        if arguments:
            ids = model.tokenizer(open(arguments[1]).read(), return_tensors="pt").input_ids[0]
            tokens = ids[: 16 * 256].reshape(16, 256)
        calibration, judging = tokens[:12], tokens[12:]
        dense = model(judging).logits
        config = trisect.CompressConfig(ratio=0.5, method=method, parts=("mlp",), align=None)
        small = trisect.compress(model, config=config, calibration=calibration)
        found[method] = divergence(dense, small(judging).logits)
    return found


if __name__ == "__main__":
    for name, nats in compare(("a3", NORM_REFIT.name), sys.argv[1:]).items():
        print(f"{name:12s} {nats:.4f} nats per token from the dense model, half of every MLP removed")
