"""The flow of a run: gather statistics, plan, solve, apply; resume it, or search under a bound."""
