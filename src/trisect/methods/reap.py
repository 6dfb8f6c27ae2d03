"""REAP, a rival: whole experts go, by what their output counts for the router.             docs/math.md, 9"""

from trisect.errors import TrisectError
from trisect.methods.experts import drop_experts
from trisect.methods.method import ComponentMethod, Options
from trisect.records.parts import MLP, Moments, Shrunk


def refuse_single(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """There is nothing to drop in a model without experts."""
    raise TrisectError("reap drops experts, and a layer of this model has one MLP; use --method a3+.")


REAP = ComponentMethod(
    name="reap",
    summary="Baseline: drops experts by their router-weighted output; nothing else changes.",
    solvers={"mlp": refuse_single},
    reads={"mlp": frozenset({"out_norm"})},
    mixture=drop_experts,
)
