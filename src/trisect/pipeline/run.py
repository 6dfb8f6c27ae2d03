"""The whole flow on one screen: plan, then layer by layer gather -> solve -> apply -> keep."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trisect.calibrate import Progress, read_info
from trisect.calibrate.texts import with_tokens
from trisect.config import CalibrationConfig, CompressConfig, Increase
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods import get_method, solve
from trisect.methods.a3plus import check_pieces
from trisect.methods.method import ComponentMethod, Method, Options, check_parts, options_of
from trisect.models import LayerView, layer_views, mark_compressed, original_widths, shape_of
from trisect.models.fingerprint import check_finite
from trisect.pipeline.loss_curves import curves_for
from trisect.pipeline.rank_search import linear_plan
from trisect.pipeline.resume import Ledger, open_ledger
from trisect.pipeline.statistics import refuse_stored_moments, statistics_for
from trisect.pipeline.stored_moments import calibrated_as
from trisect.plan import Curves, Plan, check_plannable, plan_for
from trisect.plan.allocate import planner_for
from trisect.plan.problem import problem_for
from trisect.plan.smallest import predicted_within
from trisect.records.parts import COMPONENTS, Solution
from trisect.records.shapes import ModelShape, widths_of
from trisect.support import distributed
from trisect.support.clock import stage, timing
from trisect.support.receipt import build_receipt

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """One run: what was chosen, what it works on, and how far it is."""

    model: Any
    config: CompressConfig
    """With nothing left open."""
    tokens: Tokens | None
    """To calibrate on; may be None where `moments` names a file of statistics."""
    moments: str | Path | None = None
    plan: Plan | None = None
    ledger: Ledger = field(default_factory=Ledger)
    progress: Progress | None = None

    @property
    def method(self) -> Method:
        return get_method(self.config.method)

    @property
    def options(self) -> Options:
        return options_of(self.config)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes before anything was cut."""
        return shape_of(self.model)

    @property
    def depth(self) -> int:
        return len(self.shape.layers)

    @cached_property
    def token_hash(self) -> str:
        """Of the calibration tokens, whether they are here or only their moments are."""
        return self.tokens.hash if self.tokens is not None else read_info(str(self.moments)).token_hash

    @property
    def how_to_run(self) -> dict[str, Any]:
        """Batch size and place of hidden states; no result depends on them."""
        return self.config.calibration.how_to_run

    def components(self, layer: int) -> tuple[str, ...]:
        """The components or linear maps of a layer that are to be solved, in order."""
        assert self.plan is not None
        if self.plan.linears:
            return tuple(linear.name for linear in self.plan.linears[layer])
        if self.method.streams == "narrow":  # widths that stay are refitted, too
            chosen = self.config.layers is None or layer in self.config.layers
            return tuple(c for c in COMPONENTS if chosen and c in self.config.parts)
        widths, now = self.plan.layers[layer], self.shape.layers[layer]
        return tuple(c for c in self.config.parts if widths.of(c) != now.width(c))


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
        spectrum = self.solution.spectrum
        seen = {} if spectrum is None else {"spectrum": spectrum.to_dict()}
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
    there, and a run that finds some goes on after them. `planned` is called with the plan before any solving.
    """
    with timing(next(model.parameters()).device) as clock:
        run = open_run(model, config, tokenizer=tokenizer, tokens=tokens, moments=moments, progress=progress)
        run.ledger, known = open_ledger(model, run.config, run.token_hash, work)
        run.plan = plan or known
        if run.plan is None:
            with stage("plan"):
                run.plan = distributed.broadcast(make_plan(run, curves=curves))
            run.ledger.settle(run.plan)
        if planned is not None:
            planned(run.plan)
        original = original_widths(model)
        for step in solve_layers(run):
            step.apply()
            run.ledger.note(step.layer, step.entry())
        found = finish(run, original)
    losses = [entry for _, entries in sorted(run.ledger.losses.items()) for entry in entries]
    return with_receipt(
        run.model,
        run.config,
        found,
        losses,
        token_hash=run.token_hash,
        seconds=clock.seconds(),
        last_norm_scale=run.ledger.last_norm_scale,
    )


def solve_layers(run: Run) -> Iterator[Step]:
    """The one loop. Gives one solution after the other; whoever takes a step applies it before the next."""
    statistics = statistics_for(run)
    for view in statistics.layers():
        if run.ledger.has(view.index):
            run.ledger.restore(view)
        else:
            for number, component in enumerate(run.components(view.index)):
                step = solve_step(run, view, component, statistics.moments(view, component), number)
                yield step
                if not step.applied and run.method.in_order:
                    raise TrisectError(
                        f"{run.method.name} solves each part behind those solved before it: apply every step "
                        "before you take the next, as api.rewrite does; --method a3 can solve without "
                        "rewriting."
                    )
            run.ledger.keep(view)
        statistics.finish(view)
    run.ledger.last_norm_scale = statistics.close()


def solve_step(run: Run, view: LayerView, component: str, moments: dict[str, Any], number: int) -> Step:
    """Solve one component of a layer in one process, and broadcast its solution to the others."""
    assert run.plan is not None
    width, part, solution = run.plan.width(view.index, component), view.part(component), None
    owner = (view.index * len(COMPONENTS) + number) % distributed.world_size()
    with stage(component):
        if distributed.rank() == owner:
            solution = solve(run.method, component, part, moments, width=width, options=run.options)
        device = next(view.layer.parameters()).device
        solution = distributed.broadcast_record(solution, owner=owner, device=device)
    return Step(
        view=view,
        component=component,
        width=width,
        solution=solution,
        token_hash=run.token_hash,
        calibration=run.config.calibration,
    )


def open_run(
    model: Any,
    config: CompressConfig,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    moments: str | Path | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Run:
    """A run with its tokens read and everything checked that can be refused before the work."""
    config = with_method_defaults(config)
    check_model(model, config)
    if moments is None:
        config, tokens = with_tokens(model, config, tokens, tokenizer=tokenizer, progress=progress)
    else:
        refuse_stored_moments(get_method(config.method))
        config = calibrated_as(config, read_info(str(moments)))
    return Run(model=model, config=config, tokens=tokens, moments=moments, plan=plan, progress=progress)


def make_plan(run: Run, *, curves: str | Path | None) -> Plan:
    """Widths for the components, or ranks for the linear maps, whichever the method works on."""
    check_plannable(run.config)
    if run.method.linear:
        return linear_plan(
            run.model, run.method, run.config, run.tokens, options=run.options, progress=run.progress, kept=curves
        )
    check_parts(run.method, run.config.parts)
    found = curves_for(run.model, run.config, run.tokens, options=run.options, path=curves, progress=run.progress)
    return plan_for(shape_of(run.model), run.config, found)


def plan_from_shape(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The plan; under a bound on perplexity, the one that the curves predict to be the smallest."""
    method = get_method(config.method)
    if method.linear:
        return linear_plan(shape, method, config, None, options=options_of(config), progress=None)
    check_parts(method, config.parts)
    if not isinstance(config.goal, Increase):
        return plan_for(shape, config, curves)
    if curves is None:
        raise TrisectError(
            "Only loss curves can predict perplexity: name their file with --curves FILE, and --allocate "
            "balanced or search to have one measured."
        )
    problem = problem_for(shape, config)
    return predicted_within(problem, planner_for(problem, config.allocate, curves), curves)


def finish(run: Run, original: list[Any]) -> Plan:
    """Make a rewritten model one of the compressed classes; gives the plan with the widths it really has."""
    assert run.plan is not None
    mark_compressed(run.model, original=original, method=run.config.method, ratio=run.plan.ratio)
    return replace(run.plan, layers=tuple(widths_of(view.shape()) for view in layer_views(run.model)))


def with_receipt(
    model: Any,
    config: CompressConfig,
    plan: Plan,
    losses: list[dict[str, Any]],
    *,
    token_hash: str | None,
    seconds: dict[str, float],
    last_norm_scale: float | None = None,
) -> Compressed:
    """The model with its receipt."""
    timings = {"compress": sum(seconds.values()), **seconds}
    receipt = build_receipt(config.to_dict(), seed=config.seed, token_hash=token_hash, timings=timings)
    model.receipt = {**receipt, "plan": plan.to_dict(), "losses": losses}
    if last_norm_scale is not None:
        model.receipt["last_norm_scale"] = last_norm_scale
    return Compressed(model=model, plan=plan, losses=losses, receipt=model.receipt)


def with_method_defaults(config: CompressConfig) -> CompressConfig:
    """The config with the method's allocation where the user named none; what it cannot do is refused."""
    method = get_method(config.method)
    check_pieces(config.without)
    slots = isinstance(method, ComponentMethod) and method.slots is not None
    if not slots and (config.without or config.rope_scope != "head"):
        raise TrisectError(f"--without and --rope-scope are for a3+, not for {method.name}; leave them out.")
    return replace(config, allocate=config.allocate or method.allocate)


def check_model(model: Any, config: CompressConfig) -> None:
    """Refuse weights that are not finite, and a model that cannot become portable; say what keeps its width."""
    check_finite(model)
    say_what_stays(model, config.parts)
    if config.portable:
        from trisect.export.stock import check_portable

        check_portable(model, config.parts)


def say_what_stays(model: Any, parts: tuple[str, ...]) -> None:
    """One line for each reason that a component has to keep its width, with the layers it holds for."""
    found: dict[tuple[str, str], list[int]] = {}
    for view in layer_views(model):
        for component, reason in view.fixed.items():
            if component in parts:
                found.setdefault((component, reason), []).append(view.index)
    for (component, reason), layers in found.items():
        where = "all layers" if len(layers) == len(layer_views(model)) else f"layers {', '.join(map(str, layers))}"
        log.warning("%s of %s keeps its width: %s", component.upper(), where, reason)
