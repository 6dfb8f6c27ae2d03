"""Plans: the widths every layer is to have, aligned to the hardware, and what they cost."""

from trisect.plan.balanced import balanced_plan
from trisect.plan.budget import Budget, Change, budget_of, compare, flops_of
from trisect.plan.choose import check_plannable, plan_for
from trisect.plan.curves import Curves, read_curves
from trisect.plan.latency import LatencyTable, read_latency
from trisect.plan.outlook import Outlook, outlook
from trisect.plan.plan import Plan, apply_plan
from trisect.plan.uniform import uniform_plan

__all__ = [
    "Budget",
    "Change",
    "Curves",
    "LatencyTable",
    "Outlook",
    "Plan",
    "apply_plan",
    "balanced_plan",
    "budget_of",
    "check_plannable",
    "compare",
    "flops_of",
    "outlook",
    "plan_for",
    "read_curves",
    "read_latency",
    "uniform_plan",
]
