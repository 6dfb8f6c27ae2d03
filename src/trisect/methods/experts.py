"""Mixtures of experts: which experts stay, and each of them solved by whatever solves an MLP.   docs/math.md, 9

E = routed experts, I = their width, r = new width
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trisect.methods.fold import keep_neurons
from trisect.records.parts import METRIC, MLP, Experts, Moments, Shrunk
from trisect.solve import SOLVE_DTYPE, neuron_scores, top

EXPERTS = "experts"  # the step in front of a mixture's MLPs, which may drop some of them
REFITS = ("refit-up", "refit-down")  # steps behind an MLP that was narrowed: its input maps, then its output map again
ATTENTION_REFITS = ("refit-qk", "refit-v", "refit-o")  # the same behind narrowed heads
STEPS = {**dict.fromkeys((EXPERTS, *REFITS), "mlp"), **dict(zip(ATTENTION_REFITS, ("qk", "ov", "ov"), strict=True))}
"""Steps that are about a component without being one."""
EXPERT_READS = frozenset({"mlp"})
FEW = 32  # tokens below which an expert's neurons are chosen by its weights alone


def in_turn(tasks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Every expert's solution, from what solves it."""
    return {expert: task() for expert, task in tasks.items()}


def solve_experts(
    solver: Callable[..., Any],
    part: Experts,
    moments: Moments,
    width: int,
    options: Any,
    *,
    solve_each: Callable[..., dict[str, Any]] = in_turn,
) -> Shrunk:
    """Every expert on the tokens routed to it, all to one width.                               [math.md G-1]"""
    mlps = {f"expert{number}": mlp for number, mlp in zip(part.numbers, part.routed, strict=True)}
    if part.shared is not None:
        mlps["shared"] = part.shared
    seen = {name: moments_of(moments, name) for name in mlps}
    everyone = sum(tokens_of(found) for found in seen.values())
    starved, loss, total = [], 0.0, 0.0
    tasks: dict[str, Callable[[], Any]] = {}
    for name, mlp in mlps.items():
        inner = width * mlp.width // part.width
        if everyone and tokens_of(seen[name]) < FEW:  # some methods read nothing at all
            starved.append(name)
            mlps[name] = keep_neurons(mlp, top(weight_scores(mlp), inner)[0])
        else:
            tasks[name] = partial(solver, mlp, seen[name], inner, options)
    for name, solution in solve_each(tasks).items():
        mlps[name], share = solution.part, tokens_of(seen[name]) / max(1.0, everyone)
        loss, total = loss + share * solution.loss, total + share * solution.total
    shared = mlps.pop("shared", None)
    note = f"{len(starved)} of {len(mlps)} experts saw fewer than {FEW} tokens: their weights chose" if starved else ""
    return Shrunk(part=replace(part, routed=tuple(mlps.values()), shared=shared), loss=loss, total=total, note=note)


def choose_experts(part: Experts, moments: Moments, width: int, options: Any) -> Shrunk:
    """Drop whole experts as long as that costs A3's objective less than a narrower cut.          [math.md G-3]

    As many neurons stay as in all experts at `width`: with fewer experts, those that stay keep more of theirs.
    """
    seen = [moments_of(moments, f"expert{number}") for number in part.numbers]
    pairs = zip(seen, part.routed, strict=True)
    scores = torch.stack([neuron_scores(found["mlp"], mlp.W_down) * tokens_of(found) for found, mlp in pairs])  # (E, I)
    ranked = scores.sort(dim=-1, descending=True).values
    order = scores.sum(dim=-1).argsort(descending=True, stable=True)
    neurons, count = width * len(scores), len(scores)
    least = -(-neurons // part.width)
    costs = {}
    for kept in range(max(least, part.top_k), count + 1):
        stays = ranked[order[:kept], : -(-neurons // kept)].sum()
        costs[kept] = (scores.sum() - stays).item()
    best = min(costs, key=lambda kept: (costs[kept], -kept))
    return dropped(part, order[:best].sort().values, loss=costs[best], total=scores.sum().item())


def drop_experts(part: Experts, moments: Moments, width: int, options: Any) -> Shrunk:
    """REAP: the experts whose router-weighted output is largest over the tokens they see.      [math.md G-4]"""
    seen = [moments_of(moments, f"expert{number}") for number in part.numbers]
    saliency = torch.stack([found["out_norm"].reshape(()) for found in seen])
    kept, lost = top(saliency, max(part.top_k, round(len(seen) * width / part.width)))
    return dropped(part, kept, loss=lost.item(), total=saliency.sum().item())


def dropped(part: Experts, kept: Tensor, *, loss: float, total: float) -> Shrunk:
    """The mixture with some of its experts."""
    routed, numbers = (tuple(each[place] for place in kept.tolist()) for each in (part.routed, part.numbers))
    gone = len(part.routed) - len(kept)
    note = f"dropped {gone} of {len(part.routed)} experts" if gone else ""
    return Shrunk(part=replace(part, routed=routed, numbers=numbers), loss=loss, total=total, note=note)


def moments_of(moments: Moments, expert: str) -> dict[str, Tensor]:
    """What was gathered of one expert, and the metric of all their outputs."""
    prefix = f"{expert}."
    own = {name.removeprefix(prefix): value for name, value in moments.items() if name.startswith(prefix)}
    return {**own, METRIC: moments[METRIC]} if METRIC in moments else own


def tokens_of(moments: Moments) -> float:
    return moments["observed"].item() if "observed" in moments else 0.0


def weight_scores(mlp: MLP) -> Tensor:
    """Squared sizes (I,) of a neuron's weights, multiplied: for want of anything better."""
    scores = mlp.W_down.to(SOLVE_DTYPE).square().sum(dim=-1)
    for W in (mlp.W_up, mlp.W_gate):
        scores = scores if W is None else scores * W.to(SOLVE_DTYPE).square().sum(dim=0)
    return scores
