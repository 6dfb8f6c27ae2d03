"""Says what is planned against what was asked for, before the work."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trisect.config import CompressConfig
    from trisect.plan import Plan
    from trisect.records.shapes import ModelShape


def say_outlook(shape: "ModelShape", config: "CompressConfig") -> "Callable[[Plan], None] | None":
    """At once, where the plan follows from sizes; else gives what is to be called with it once it is known.

    Neither under a bound on perplexity: what stays within it is found by trying.
    """
    from trisect.commands._screen import stdout
    from trisect.commands.plan import make_plan
    from trisect.methods import get_method
    from trisect.pipeline.run import checked
    from trisect.plan import outlook
    from trisect.support import distributed

    config = checked(config, get_method(config.method))

    def say(plan: "Plan") -> None:
        if distributed.is_rank_zero():
            stdout().print(str(outlook(shape, config, plan)), soft_wrap=True)

    if config.max_ppl_increase is not None:
        return None
    if config.allocate != "uniform":
        return say
    say(make_plan(shape, config, None))
    return None
