"""REAP, a rival: whole experts go, by what their output counts for the router.             docs/math.md, 9"""

from trisect.methods.experts import drop_experts
from trisect.methods.method import ComponentMethod, Options
from trisect.records.parts import MLP, Moments, Shrunk


def leave(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """A layer without experts, between others that have some, stays as it is."""
    return Shrunk(part=part, loss=0.0, total=0.0, note="one MLP: there is nothing to drop")


REAP = ComponentMethod(
    name="reap",
    summary="Baseline: drops experts by their router-weighted output; nothing else changes.",
    solvers={"mlp": leave},
    reads={"mlp": frozenset({"out_norm"})},
    mixture=drop_experts,
)
