"""Plans: the widths every layer is to have, aligned to the hardware, and what they cost."""

from trisect.plan.allocate import CURVED, check_plannable, plan_for, planner_for
from trisect.plan.budget import Budget, Change, LatencyTable, budget_of, compare, read_latency
from trisect.plan.curves import Curves, read_curves
from trisect.plan.problem import MINIMUM_HEAD, UNITS, Outlook, chosen_layers, outlook, problem_for
from trisect.records.plan import Plan, apply_plan
