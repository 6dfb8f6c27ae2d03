"""Plans: the widths every layer is to have, aligned to the hardware, and what they cost."""

from trisect.plan.allocate import plan_for, planner_for
from trisect.plan.budget import Budget, Change, LatencyTable, budget_of, compare, read_latency
from trisect.plan.curves import TRIES, Curves, read_curves, smallest_within
from trisect.plan.problem import CURVED, MINIMUM_HEAD, UNITS, Outlook, chosen_layers, outlook, problem_for
from trisect.records.plan import Plan, apply_plan
