"""The whole flow on one screen: plan, then layer by layer gather -> solve -> apply -> keep."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trisect.calibrate import Progress, read_info, replay, texts
from trisect.config import CompressConfig, Increase
from trisect.data import Tokens, tokens_from_tensor
from trisect.errors import TrisectError, check_names
from trisect.evaluate.perplexity import perplexity
from trisect.methods import ComponentMethod, Method, Options, a3plus, experts, get_method, options_of, solve
from trisect.models import LayerView, compressed, layer_views, left_whole, looking, shape_of, streamed
from trisect.pipeline import loss_curves, rank_search, resume, statistics
from trisect.plan import TRIES, Curves, Plan, plan_for, planner_for, problem, smallest_within
from trisect.records.parts import COMPONENTS, Experts, Solution
from trisect.records.shapes import ModelShape, widths_of
from trisect.support import clock, distributed, receipt
from trisect.support.products import fast_products

log = logging.getLogger(__name__)

REFIT_TOKENS = 5  # calibration tokens for each neuron below which W_up and W_gate are left as they are


@dataclass(kw_only=True)
class Run:
    """One run: what was chosen, what it works on, and how far it is."""

    model: Any
    config: CompressConfig  # with nothing left open
    tokens: Tokens | None  # to calibrate on; may be None where `moments` names a file of statistics
    moments: str | Path | None = None
    plan: Plan | None = None
    ledger: resume.Ledger = field(default_factory=resume.Ledger)
    progress: Progress | None = None

    @property
    def method(self) -> Method:
        return get_method(self.config.method)

    @cached_property
    def options(self) -> Options:
        """What solvers may read; too few tokens to refit millions of weights count as asking not to."""
        options = options_of(self.config)
        # Neurons that share the tokens of a layer: all of an MLP, or of one expert for its share of them.
        neurons = [x.mlp * x.experts / max(1, x.top_k) if x.experts else x.mlp for x in self.shape.layers]
        few = self.tokens is None or self.tokens.ids.numel() < REFIT_TOKENS * max(neurons)
        return replace(options, refine=False, without=(*options.without, experts.REFITS[0])) if few else options

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes before anything was cut."""
        return shape_of(self.model)

    @cached_property
    def token_hash(self) -> str:
        """Of the calibration tokens, whether they are here or only their moments are."""
        return self.tokens.hash if self.tokens is not None else read_info(str(self.moments)).token_hash

    @property
    def how_to_run(self) -> dict[str, Any]:
        """Batch size and place of hidden states; no result depends on them."""
        assert self.tokens is not None
        how = self.config.calibration.how_to_run
        return how | {"batch_size": how["batch_size"] or replay.windows_at_once(self.model, self.tokens.ids)}

    def components(self, layer: int) -> tuple[str, ...]:
        """The components or linear maps of a layer that are to be solved, in order."""
        assert self.plan is not None
        if self.plan.linears:
            return tuple(linear.name for linear in self.plan.linears[layer])
        widths, now = self.plan.layers[layer], self.shape.layers[layer]
        cut = tuple(c for c in self.config.parts if widths.of(c) != now.width(c))
        drops = (experts.EXPERTS,) if self.config.drop_experts and now.experts and "mlp" in cut else ()
        if self.method.streams == "narrow":  # widths that stay are refitted, too
            chosen = self.config.layers is None or layer in self.config.layers
            cut = tuple(c for c in now.components if chosen and c in self.config.parts)
        heads = tuple(c for c in cut if c != "mlp")
        behind = experts.ATTENTION_REFITS if len(heads) == 2 and self.options.refine else ()
        first = experts.REFITS[0]
        refits = experts.REFITS if first in self.method.solvers and first not in self.options.without else ()
        return (*heads, *behind, *drops, *(("mlp", *refits) if "mlp" in cut else ()))

    def width(self, view: LayerView, component: str) -> int:
        """The width that a component is to have; experts that are left share what dropped ones leave."""
        assert self.plan is not None
        part, before = experts.STEPS.get(component, component), self.shape.layers[view.index]
        width = self.plan.width(view.index, part)
        if part != "mlp" or component == experts.EXPERTS or view.experts is None or not view.experts.dropped:
            return width
        grid = problem.grid_of(before, "mlp", align=self.plan.align)
        return grid.up(-(-width * before.experts // view.experts.count))


@dataclass(kw_only=True)
class Step:
    """What one component, or linear map, of one layer becomes: solved, and not yet in the model."""

    run: Run
    view: LayerView
    component: str
    width: int
    solution: Solution
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
        refit = self.component != experts.EXPERTS  # which stands by itself
        component = experts.STEPS.get(self.component, self.component) if refit else self.component
        entry = {"layer": self.layer, "component": component, "width": self.width}
        entry |= {name: getattr(self.solution, name) for name in ("loss", "total", "clipped", "note")}
        spectrum = self.solution.spectrum
        return entry if spectrum is None else {**entry, "spectrum": spectrum.to_dict()}


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
    curves: str | Path | None = None,
    work: Path | None = None,
    planned: Callable[[Plan], None] | None = None,
    **given: Any,
) -> Compressed:
    """Compress a model in place and say what it cost.

    `given` is as for `open_run`; a plan among it is carried out as it is. Loss curves are read from the file
    `curves` where the plan needs them, or measured and written there. Finished layers are kept in the folder
    `work`, and a run that finds some resumes after them. `planned` is called with the plan.
    """
    device = next(model.parameters()).device
    with clock.timing(device) as times, fast_products(device):
        run = open_run(model, config, **given)
        run.ledger, known = resume.open_ledger(model, run.config, run.token_hash, work)
        run.plan = run.plan or known
        if run.plan is None:
            with clock.stage("plan"):
                run.plan = distributed.broadcast(make_plan(run, curves=curves))
            run.ledger.settle(run.plan)
        if planned is not None:
            planned(run.plan)
        original = compressed.original_widths(model)
        whole = left_whole(layer_views(model), run.config.parts)
        if whole:
            log.warning("left whole: %s", "; ".join(whole))
        for step in () if config.removes_nothing else solve_layers(run):
            step.apply()
            run.ledger.note(step.entry())
        found = finish(run, original)
    losses = [entry for _, entries in sorted(run.ledger.losses.items()) for entry in entries]
    more: dict[str, Any] = {"last_norm_scale": run.ledger.last_norm_scale, "left_whole": whole or None}
    more["dropped_layers"] = compressed.dropped_layers(model) or None
    return with_receipt(model, run.config, found, losses, run.token_hash, times.seconds(), **more)


def solve_layers(run: Run) -> Iterator[Step]:
    """The one loop. Gives one solution after the other; whoever takes a step applies it before the next."""
    source = statistics.statistics_for(run)
    for view in source.layers():
        if view.index in run.ledger.finished:
            run.ledger.restore(view)
        else:
            for number, component in enumerate(run.components(view.index)):
                owner = (view.index * len(COMPONENTS) + number) % distributed.world_size()
                step = solve_step(run, view, component, source.moments(view, component), owner)
                yield step
                looking.round_as_stored(run.model, view.layer)
                if not step.applied and run.method.in_order:
                    behind = f"{run.method.name} solves each part behind those before it: apply every step before "
                    raise TrisectError(f"{behind}you take the next, as api.rewrite does, or use --method a3.")
            run.ledger.keep(view)
        source.finish(view)
    run.ledger.last_norm_scale = source.close()


def solve_step(run: Run, view: LayerView, component: str, moments: dict[str, Any], owner: int) -> Step:
    """Solve one component of a layer in the process `owner`, experts in theirs, and broadcast the solutions."""
    width = run.width(view, component)
    part, options = view.part(experts.STEPS.get(component, component)), run.options
    if experts.ATTENTION_REFITS[0] not in run.components(view.index):
        options = replace(options, refine=False)  # nothing comes behind W_o, so all tokens are for it
    with clock.stage(component):
        device = next(view.layer.parameters()).device
        solved = partial(solve, run.method, component, part, moments, width=width, options=options)
        if isinstance(part, Experts):  # which of them stay is soon told, by every process
            solution = solved(solve_each=partial(distributed.by_owners, device=device))
        else:
            mine = solved() if distributed.rank() == owner else None
            solution = distributed.broadcast_record(mine, owner=owner, device=device)
    return Step(run=run, view=view, component=component, width=width, solution=solution)


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
    """A run with its tokens read and everything checked that can be refused before the work.

    Statistics come from `moments` if given, else from `tokens`, else from `config.calibration`.
    """
    config = with_method_defaults(config)
    check_model(model, config)
    check_dropped(model, config)
    if moments is None:
        config, tokens = texts.with_tokens(model, config, tokens, tokenizer=tokenizer, progress=progress)
    else:
        statistics.refuse_stored_moments(get_method(config.method))
        config = replace(config, calibration=replace(config.calibration, source=read_info(str(moments)).source))
    return Run(model=model, config=config, tokens=tokens, moments=moments, plan=plan, progress=progress)


def make_plan(run: Run, *, curves: str | Path | None) -> Plan:
    """Widths for the components, or ranks for the linear maps, whichever the method works on."""
    config = run.config
    given: dict[str, Any] = {"tokens": run.tokens, "progress": run.progress}
    if isinstance(config.goal, Increase):
        use = "use `trisect compress` or compress_within (`trisect plan --curves FILE` predicts what they will find)"
        raise TrisectError(f"A bound on perplexity is kept by measuring, not by planning alone: {use}.")
    check_dropped(run.model, config)
    if config.removes_nothing:
        return plan_from_shape(run.shape, config)
    if run.method.linear:
        return rank_search.linear_plan(run.model, config, **given)
    return plan_from_shape(run.shape, config, loss_curves.curves_for(run.model, config, path=curves, **given))


def plan_from_shape(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The plan; under a bound on perplexity, the one that the curves predict to be the smallest."""
    method = get_method(config.method)
    if config.removes_nothing:
        return Plan(layers=tuple(map(widths_of, shape.layers)), method="none", ratio=0.0, align=None)
    if method.linear:
        return rank_search.linear_plan(shape, config)
    if "qk" in config.parts and "x_energy" in method.reads["qk"] and any(layer.kv_in for layer in shape.layers):
        why = f"{method.name} weighs queries and keys by the hidden states, and here they are made of latents"
        raise TrisectError(f"{why}; use --method a3, or --parts mlp.")
    return plan_for(shape, config, curves)


def finish(run: Run, original: list[Any]) -> Plan:
    """Make a rewritten model one of the compressed classes; gives the plan with the widths it really has."""
    assert run.plan is not None
    looking.round_as_stored(run.model, run.model)
    compressed.mark_compressed(run.model, original=original, method=run.plan.method, ratio=run.plan.ratio)
    return replace(run.plan, layers=tuple(widths_of(view.shape()) for view in layer_views(run.model)))


def with_receipt(
    model: Any,
    config: CompressConfig,
    plan: Plan,
    losses: list[dict[str, Any]],
    token_hash: str | None,
    seconds: dict[str, float],
    **more: Any,
) -> Compressed:
    """The model with its receipt, and in it what is known of anything more."""
    timings = {"compress": sum(seconds.values()), **seconds}
    made = receipt.build_receipt(config.to_dict(), seed=config.seed, token_hash=token_hash, timings=timings)
    known = {name: value for name, value in more.items() if value is not None}
    model.receipt = {**made, "plan": plan.to_dict(), "losses": losses, **known}
    return Compressed(model=model, plan=plan, losses=losses, receipt=model.receipt)


def with_method_defaults(config: CompressConfig) -> CompressConfig:
    """The config with the method's allocation where the user named none; what it cannot do is refused."""
    method = get_method(config.method)
    method.check_parts(config.parts)
    if config.refine and experts.ATTENTION_REFITS[0] not in method.solvers:
        raise TrisectError(f"--refine goes on where a3+ ends, and the method is {config.method}; use --method a3+.")
    check_names("piece of a3+", config.without, a3plus.PIECES, "Use e.g. --without fold,values.")
    slots = isinstance(method, ComponentMethod) and method.slots is not None
    if not slots and (config.without or config.rope_scope != "head"):
        raise TrisectError(f"--without and --rope-scope are for a3+, not for {method.name}; leave them out.")
    return replace(config, allocate=config.allocate or method.allocate)


def check_model(model: Any, config: CompressConfig) -> None:
    """Refuse weights that are not finite, experts that cannot go, and a model that cannot become portable."""
    looking.check_finite(model)
    if config.drop_layers:
        streamed.refuse_streamed(model, "--drop-layers")
    method = get_method(config.method)
    if config.portable:
        from trisect.export.stock import check_exportable

        check_exportable(model, config.parts)
    if not config.drop_experts and not (isinstance(method, ComponentMethod) and method.mixture is not None):
        return
    what = ("--drop-experts" if config.drop_experts else f"--method {config.method}") + " drops experts"
    mixtures = [view.experts for view in layer_views(model) if view.experts is not None]
    if not mixtures:
        raise TrisectError(f"{what}, and this model has none; use --method a3+ without --drop-experts.")
    if "mlp" not in config.parts:
        raise TrisectError(f"{what}, which are no part of {','.join(config.parts)}; add mlp to --parts.")
    for mixture in mixtures:
        mixture.check_droppable()


def check_dropped(model: Any, config: CompressConfig) -> None:
    """Refuse a model that still has the layers to be dropped: only a whole job drops any (pipeline/job.py)."""
    if config.drop_layers > len(compressed.dropped_layers(model)):
        raise TrisectError("Only `trisect compress` and trisect.compress drop layers; leave drop_layers out here.")


def compress_within(
    model: Any, config: CompressConfig, *, curves: str | Path | None = None, tries: int = TRIES, **given: Any
) -> Compressed:
    """The smallest of a few compressed copies inside the bound of `config.goal`; `model` stays as it is.

    The bound is kept on calibration windows set aside, never on the text that a result is reported on: one
    window in four (the last ones, which loss curves are measured on, too) takes no part in solving.
    Memory holds the model, the best copy and the one being tried. The receipt lists all trials.
    """
    goal, method = config.goal, get_method(config.method)
    if not isinstance(goal, Increase):
        raise TrisectError("No bound on perplexity was given; set max_ppl_increase, e.g. to '5%'.")
    if method.linear:
        raise TrisectError(f"{method.name} has ranks and no widths to search over; use --ratio, or --method a3+.")
    streamed.refuse_streamed(model, "A bound on perplexity is kept by trying copies, which")
    run = open_run(model, config, **given)
    config, shape = run.config, run.shape
    assert run.tokens is not None
    if len(run.tokens.ids) < 2:
        raise TrisectError("A bound on perplexity is measured on windows set aside; give --samples 8 or more.")
    names = f"{run.tokens.source} (solving)", f"{run.tokens.source} (held out)"
    solving, testing = map(tokens_from_tensor, loss_curves.held_out(run.tokens.ids), names)
    known = loss_curves.curves_for(model, config, run.tokens, path=curves, progress=run.progress)
    posed = problem.problem_for(shape, config)
    dense = perplexity(model, testing)
    bound = goal.nats(dense.nll)
    inside: list[Compressed] = []

    def measure(plan: Plan) -> float:
        trial = compress(copy.deepcopy(model), config, tokens=solving, plan=plan, progress=run.progress)
        rise = perplexity(trial.model, testing).nll - dense.nll
        if rise <= bound:
            inside[:] = [trial]  # later trials inside the bound are smaller ones
        return rise

    planner = planner_for(posed, config.allocate, known)
    predict = None if known is None else partial(known.rise, shape)
    _, trials = smallest_within(planner, measure, bound=bound, most=posed.full, predict=predict, tries=tries)
    inside[0].receipt["target"] = {
        "max_ppl_increase": str(goal),
        "held_out": {"windows": len(testing.ids), "hash": testing.hash, "perplexity": dense.perplexity},
        "trials": [{"budget": x.budget, "ratio": x.plan.ratio, "rise": x.rise, "inside": x.inside} for x in trials],
    }
    return inside[0]
