"""The whole flow on one screen: calibrate -> plan -> solve -> rewrite."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect.calibrate import Progress, read_info
from trisect.calibrate.texts import with_tokens
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods import get_method, solve
from trisect.methods.a3plus import check_pieces
from trisect.methods.method import Method, Options, check_parts, options_of
from trisect.models import LayerView, layer_views, mark_compressed, original_widths, shape_of
from trisect.models.fingerprint import check_finite
from trisect.pipeline.loss_curves import curves_for
from trisect.pipeline.rank_search import linear_plan
from trisect.pipeline.resume import Ledger, open_ledger
from trisect.pipeline.rounds import rounds
from trisect.pipeline.stored_moments import calibrated_as, refuse_stored_moments
from trisect.plan import Plan, check_plannable, plan_for
from trisect.records.parts import COMPONENTS, Solution
from trisect.records.shapes import LayerWidths, widths_of
from trisect.support import distributed
from trisect.support.clock import stage, timing
from trisect.support.receipt import build_receipt


@dataclass(kw_only=True)
class Step:
    """What one component, or linear map, of one layer becomes: solved, and not yet in the model."""

    view: LayerView
    component: str
    width: int
    solution: Solution
    token_hash: str
    """Of the tokens that it was solved on."""
    calibration: CalibrationConfig
    """Where those come from."""
    applied: bool = False

    @property
    def layer(self) -> int:
        return self.view.index

    def apply(self) -> None:
        """Write the solution into the layer."""
        self.view.apply(self.solution)
        self.applied = True

    def entry(self) -> dict[str, Any]:
        """The step as it stands in a receipt."""
        outcome = {name: getattr(self.solution, name) for name in ("loss", "total", "clipped", "note")}
        carried = self.solution.spectrum
        seen = {} if carried is None else {"spectrum": carried.to_dict()}
        return {"layer": self.layer, "component": self.component, "width": self.width, **outcome, **seen}


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A compressed model, and what became of it on the way."""

    model: Any
    plan: Plan
    losses: list[dict[str, Any]]
    """One entry per layer and component: width, predicted loss, its share of the whole, notes."""
    receipt: dict[str, Any]


def compress(
    model: Any,
    config: CompressConfig,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    moments: str | Path | None = None,
    curves: str | Path | None = None,
    plan: Plan | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
) -> Compressed:
    """Compress a model in place and say what it cost.

    Statistics come from `moments` if given, else from `tokens`, else from `config.calibration`. Loss curves,
    or ASVD's sensitivities, are read from the file `curves` where the plan needs them, or measured and
    written there. A `plan` given is carried out as it is. With a folder `work`, every finished layer is kept
    there, and a run that finds some goes on after them. `planned` is told the plan before anything is solved.
    """
    with timing(next(model.parameters()).device) as clock:
        method = get_method(config.method)
        config = checked(config, method)
        check_model(model, config)
        if moments is None:
            config, tokens = with_tokens(model, config, tokens, tokenizer=tokenizer, progress=progress)
        else:
            refuse_stored_moments(method)
            config = calibrated_as(config, read_info(str(moments)))
        token_hash = hash_of(tokens, moments)

        original, options = original_widths(model), options_of(config)
        ledger, known = open_ledger(model, config, token_hash, work)
        plan = plan or known
        if plan is None:
            with stage("plan"):
                plan = distributed.broadcast(
                    make_plan(
                        model, method, config, tokens, options=options, curves=curves, progress=progress
                    )
                )
            ledger.settle(plan)
        if planned is not None:
            planned(plan)

        solved = steps(model, config, plan, tokens=tokens, moments=moments, ledger=ledger, progress=progress)
        for step in solved:
            step.apply()
            ledger.note(step.layer, step.entry())
        plan = marked(model, config, plan, original)
    losses = [entry for _, entries in sorted(ledger.losses.items()) for entry in entries]
    found = received(model, config, plan, losses, token_hash=token_hash, seconds=clock.seconds())
    if ledger.last_norm_scale is not None:
        found.receipt["last_norm_scale"] = ledger.last_norm_scale
    return found


def steps(
    model: Any,
    config: CompressConfig,
    plan: Plan,
    *,
    tokens: Tokens | None,
    moments: str | Path | None,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> Iterator[Step]:
    """One solution after the other; whoever takes them applies them."""
    method, options, token_hash = get_method(config.method), options_of(config), hash_of(tokens, moments)
    gathered = rounds(
        model,
        method,
        plan,
        config,
        tokens=tokens,
        moments=moments,
        options=options,
        ledger=ledger,
        progress=progress,
    )
    for view, components, statistics in gathered:
        for number, component in enumerate(components):
            width = plan.width(view.index, component)
            owner = (view.index * len(COMPONENTS) + number) % distributed.world_size()
            with stage(component):
                solution = solved_by(owner, method, view, component, statistics, width, options)
            step = Step(
                view=view,
                component=component,
                width=width,
                solution=solution,
                token_hash=token_hash,
                calibration=config.calibration,
            )
            yield step
            if not step.applied and (method.repairs or method.sequential):
                raise TrisectError(
                    f"{method.name} solves each part behind those solved before it: apply every step before "
                    "you take the next, as api.rewrite does; --method a3 can solve without rewriting."
                )


def marked(model: Any, config: CompressConfig, plan: Plan, original: list[LayerWidths]) -> Plan:
    """Make a rewritten model one of the compressed classes; gives the plan with the widths it really has."""
    mark_compressed(model, original=original, method=config.method, ratio=plan.ratio)
    return replace(plan, layers=tuple(widths_of(view.shape()) for view in layer_views(model)))


def received(
    model: Any,
    config: CompressConfig,
    plan: Plan,
    losses: list[dict[str, Any]],
    *,
    token_hash: str | None,
    seconds: dict[str, float],
) -> Compressed:
    """The model with its receipt."""
    timings = {"compress": sum(seconds.values()), **seconds}
    receipt = build_receipt(config.to_dict(), seed=config.seed, token_hash=token_hash, timings=timings)
    model.receipt = {**receipt, "plan": plan.to_dict(), "losses": losses}
    return Compressed(model=model, plan=plan, losses=losses, receipt=model.receipt)


def hash_of(tokens: Tokens | None, moments: str | Path | None) -> str:
    """Of the calibration tokens, whether they are here or only their moments are."""
    return tokens.hash if tokens is not None else read_info(str(moments)).token_hash


def checked(config: CompressConfig, method: Method) -> CompressConfig:
    """The config with the method's own allocation where the user named none; what it cannot do is refused."""
    check_pieces(config.without)
    if method.slots is None and (config.without or config.rope_scope != "head"):
        raise TrisectError(f"--without and --rope-scope are for a3+, not for {method.name}; leave them out.")
    return replace(config, allocate=config.allocate or method.allocate)


def check_model(model: Any, config: CompressConfig) -> None:
    """Refuse weights that are not finite, and a model that cannot become portable."""
    check_finite(model)
    if config.portable:
        from trisect.export.stock import check_portable

        check_portable(model, config.parts)


def solved_by(
    owner: int,
    method: Method,
    view: LayerView,
    component: str,
    statistics: dict[str, Tensor],
    width: int,
    options: Options,
) -> Solution:
    """One process solves, and all have its solution."""
    part, solution = view.part(component), None
    if distributed.rank() == owner:
        solution = solve(method, component, part, statistics, width=width, options=options)
    found: Solution = distributed.broadcast_record(
        solution, owner=owner, device=next(view.layer.parameters()).device
    )
    return found


def make_plan(
    model: Any,
    method: Method,
    config: CompressConfig,
    tokens: Tokens | None,
    *,
    options: Options,
    curves: str | Path | None,
    progress: Progress | None,
) -> Plan:
    """Widths for the components, or ranks for the linear maps, whichever the method works on."""
    check_plannable(config)
    if method.linear:
        return linear_plan(model, method, config, tokens, options=options, progress=progress, kept=curves)
    check_parts(method, config.parts)
    found = curves_for(model, config, tokens, options=options, path=curves, progress=progress)
    return plan_for(shape_of(model), config, found)
