"""Plans: the widths every layer is to have, aligned to the hardware, and what they cost."""

from trisect.plan.budget import Budget, Change, budget_of, compare, flops_of
from trisect.plan.plan import Plan, apply_plan
from trisect.plan.uniform import uniform_plan

__all__ = [
    "Budget",
    "Change",
    "Plan",
    "apply_plan",
    "budget_of",
    "compare",
    "flops_of",
    "uniform_plan",
]
