"""finetune(): attach adapters, train, merge; then measure and save, the model being an ordinary one again."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trisect.config.verbs import TuneConfig
from trisect.data import Tokens, evaluation_tokens
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import check_positions, evaluating, exponential, input_device, perplexity
from trisect.finetune.adapters import attach, logits_of, merge
from trisect.finetune.examples import IGNORED, Batch, Example, Examples, collate, holds_instructions, load_examples
from trisect.methods import METHODS
from trisect.models import checkpoint, compressed, fingerprint, looking, round_as_stored, save_model
from trisect.support.checks import explained
from trisect.support.files import check_disk_space, new_file, new_folder, write_json
from trisect.support.receipt import build_receipt, package_version

WARM_UP = 0.03  # share of the steps in which the learning rate rises
LONGEST_GRADIENT = 1.0  # longer ones are shortened to it
RECORD, FORMAT = "trisect_tuning", 2

Progress = Callable[[int, int], None]


class Stopped(KeyboardInterrupt):
    """Tuning was interrupted between two steps; the same command resumes there."""

    def __init__(self, step: int, total: int, state: Path | None):
        kept = "" if state is None else f"; the run is in {state}. The same command resumes there"
        super().__init__(f"Stopped after step {step} of {total}{kept}.")
        self.step, self.total, self.state = step, total, state


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What tuning made, and what happened on the way."""

    model: Any  # the model that was given, its weights changed
    losses: list[float]
    receipt: dict[str, Any]  # what is added to the model's receipt


def finetune(
    model: Any,
    examples: Examples,
    config: TuneConfig,
    *,
    state: Path | None = None,
    save_every: int = 50,
    progress: Progress = lambda done, total: None,
) -> Tuned:
    """Tune a model in place, compressed or dense. Resumes from the file `state` where there is one.

    Torch's own random numbers are the same afterwards as before. An interruption leaves the model adapted.
    """
    check_model(model, examples, config)
    identity = identify(model, examples, config)
    started = time.perf_counter()
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        training = Training(attach(model, config), examples.items, config)
        resumed = state is not None and state.is_file()
        if state is not None and resumed:
            started -= load_state(state, training, identity)
        first = training.step

        def keep() -> None:
            if state is not None:
                save_state(state, training, identity, seconds=time.perf_counter() - started)

        progress(training.step, training.total)
        with stop_requested() as stop:
            while training.step < training.total and training.take_step(stop):
                if training.step % save_every == 0 or training.step == training.total:
                    keep()
                progress(training.step, training.total)
        if training.step < training.total:
            keep()
            raise Stopped(training.step, training.total, state)
    if config.gradient_checkpointing:
        training.adapted.gradient_checkpointing_disable()
    ids = collate([max(examples.items, key=lambda item: item.learned)], device).ids
    apart = logits_of(training.adapted, ids)
    merge(training.adapted)
    merged = logits_of(model, ids)
    round_as_stored(model, model)
    timings = {"finetune": time.perf_counter() - started}
    receipt = build_receipt(config.to_dict(), seed=config.seed, token_hash=examples.hash, timings=timings)
    receipt["versions"]["peft"] = package_version("peft")
    receipt |= {
        "data": examples.to_dict(),
        "steps": training.step,
        "seen": training.seen(),
        "adapters": sum(name.endswith("lora_A.default.weight") for name in training.parameters),
        "trained_parameters": sum(p.numel() for p in training.parameters.values()),
        "losses": training.losses,
        "resumed_at": first if resumed else None,
        "merge_difference": float((merged - apart).abs().max() / apart.abs().max()),
    }
    return Tuned(model=model, losses=training.losses, receipt=receipt)


def check_model(model: Any, examples: Examples, config: TuneConfig) -> None:
    """Refuse models and data that tuning would spoil or that would fail half-way."""
    if model.dtype == torch.float16:
        instead = "give --dtype float32 or bfloat16 (the result is saved in float16 again)"
        raise TrisectError(f"Gradients vanish in float16; {instead}.")
    method = (getattr(model.config, "trisect", None) or {}).get("method")
    if method in METHODS and METHODS[method].masks:
        zeros = f"{method} saved zeros, and merging an adapter would fill them in again"
        raise TrisectError(f"{zeros}; tune the dense model before it is masked, or compress with another method.")
    if config.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise TrisectError(f"{type(model).__name__} has no gradient checkpointing in transformers; leave it out.")
    longest = max(examples.items, key=lambda item: len(item.ids))
    looking.check_tokens(model, torch.tensor([max(max(item.ids) for item in examples.items), *longest.ids]))
    check_positions(model, length=len(longest.ids))
    looking.check_finite(model)


def identify(model: Any, examples: Examples, config: TuneConfig) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model": fingerprint(model), "dtype": dtype, "data": examples.hash, **config.to_dict()}


class Training:
    """An adapted model in training: parameters, optimiser, order of the examples, and the step it is at."""

    def __init__(self, adapted: Any, examples: Sequence[Example], config: TuneConfig):
        self.adapted, self.examples, self.config = adapted.train(), examples, config
        if config.gradient_checkpointing:
            # Not re-entrant: the re-entrant kind wants inputs that need gradients, and embeddings are frozen.
            adapted.gradient_checkpointing_enable({"use_reentrant": False})
        self.parameters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=config.lr, weight_decay=0.0)
        generator = torch.Generator().manual_seed(config.seed)
        epochs = [torch.randperm(len(examples), generator=generator) for _ in range(config.epochs)]
        self.order = torch.cat(epochs).tolist()
        steps = math.ceil(len(self.order) / (config.batch_size * config.accumulate))
        self.total = min(steps, config.max_steps or steps)
        self.device = input_device(adapted)
        self.step = 0
        self.losses: list[float] = []
        """Mean loss of a learned token, step by step."""

    def seen(self) -> dict[str, int]:
        """Examples met so far, and the tokens learned from them, again each time that they were met."""
        met = self.order[: self.step * self.config.batch_size * self.config.accumulate]
        return {"examples": len(set(met)), "tokens": sum(self.examples[index].learned for index in met)}

    def tensors(self) -> dict[str, Tensor]:
        """All that changes from step to step, by name: adapters, and what AdamW keeps for each."""
        found: dict[str, Tensor] = {f"adapter/{name}": p for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{kind}/{name}"] = value
        return found

    def begin_optimizer(self) -> None:
        """Make what AdamW keeps, as its first step does, without moving anything."""
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def take_step(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """One step: True; or, where `stop` says so between two batches, none of it: False."""
        # Each step has a seed of its own, so that dropout is the same wherever a run was resumed.
        torch.manual_seed(self.config.seed + 1 + self.step)
        size = self.config.batch_size
        start, count = self.step * size * self.config.accumulate, size * self.config.accumulate
        # Examples of like length share a batch, for little padding.
        chosen = sorted((self.examples[i] for i in self.order[start : start + count]), key=lambda e: len(e.ids))
        batches = [collate(chosen[i : i + size], self.device) for i in range(0, len(chosen), size)]
        learned = sum(int((batch.labels[:, 1:] != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            if stop():
                self.optimizer.zero_grad(set_to_none=True)
                return False
            loss = summed_loss(self.adapted, batch) / learned
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            instead = "Start again with a smaller --lr, or with --dtype float32"
            raise TrisectError(f"The loss is {total} at step {self.step + 1}; no model was written. {instead}.")
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), LONGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * rate_at(self.step, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.losses.append(total)
        return True


def rate_at(step: int, total: int) -> float:
    """Share of the learning rate at a step, counted from 0: a linear rise, then a cosine to almost 0."""
    rise = math.ceil(WARM_UP * total)
    if step < rise:
        return (step + 1) / (rise + 1)
    left = 1 - (step - rise) / max(1, total - rise)  # 1 at the first step after the rise, 1/n at the last
    return 0.5 * (1 - math.cos(math.pi * left))


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """Negative log-likelihood of all learned tokens of a batch, in nats."""
    logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    targets = batch.labels[:, 1:]
    learned = targets != IGNORED
    return F.cross_entropy(logits[:, :-1][learned].float(), targets[learned], reduction="sum")


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yield a question: did SIGINT (Ctrl-C) or SIGTERM come? The second one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python gives signals to the main thread only
        return
    came: list[int] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def handle(number: int, frame: Any) -> None:
        came.append(number)
        restore()

    for number in usual:
        signal.signal(number, handle)
    try:
        yield lambda: bool(came)
    finally:
        restore()


def state_path(out: str | Path) -> Path:
    """Where the run that makes `out` keeps its state."""
    out = Path(out)
    return out.with_name(out.name + ".tuning.safetensors")


def save_state(path: Path, training: Training, identity: dict[str, Any], *, seconds: float) -> None:
    """Replace the file by one for the step that was just finished; readers see the old or the new one."""
    record = {"format": FORMAT, "step": training.step, "losses": training.losses, "seconds": seconds}
    metadata = {RECORD: json.dumps({**record, "identity": identity})}
    with new_file(path) as partial:
        tensors = {name: x.detach().contiguous().cpu() for name, x in training.tensors().items()}
        save_file(tensors, partial, metadata=metadata)


def load_state(path: Path, training: Training, identity: dict[str, Any]) -> float:
    """Put a fresh run where the saved one was; returns the seconds that one had taken."""
    with explained(f"{path} cannot be resumed from; add --fresh to start anew"):
        with safe_open(path, framework="pt") as file:
            record = State.model_validate_json((file.metadata() or {}).get(RECORD, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    saved = record.identity
    names = [name for name in {**saved, **identity} if saved.get(name) != identity.get(name)]
    if names:
        apart = "; ".join(f"{name} was {saved.get(name)!r}, is {identity.get(name)!r}" for name in names)
        raise TrisectError(f"{path} is of another run: {apart}. Give what was given then, or --fresh to start anew.")
    if record.step:
        training.begin_optimizer()
    own = training.tensors()
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: x.shape for name, x in own.items()}:
        raise TrisectError(f"{path} cannot be resumed from, its tensors are of another run; --fresh starts anew.")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    training.step, training.losses = record.step, record.losses
    return record.seconds


class State(BaseModel, strict=True):
    """What the file of a run says besides its tensors."""

    format: Literal[FORMAT]  # type: ignore[valid-type]
    step: int
    losses: list[float]
    seconds: float
    identity: dict[str, Any]


HeldOut = Tokens | Examples


def load_held_out(
    source: str, tokenizer: Any, *, tuned_on: str, length: int, windows: int | None, loss: str
) -> HeldOut:
    """Windows of a text, or all examples of instruction data; never the tuning data itself."""
    path = Path(source).expanduser()
    if source == tuned_on or (path.exists() and path.resolve() == Path(tuned_on).expanduser().resolve()):
        raise TrisectError(f"--eval-data {source} is the tuning data, which shows nothing; give another text.")
    if path.is_file() and holds_instructions(path):
        return load_examples(source, tokenizer, length=length, loss=loss)
    return evaluation_tokens(source, tokenizer, windows=windows, length=length)


def measure(model: Any, held_out: HeldOut, *, progress: Progress | None = None) -> dict[str, Any]:
    """Perplexity of a text as `trisect eval` has it, or of the learned tokens of instructions."""
    if isinstance(held_out, Tokens):
        return asdict(perplexity(model, held_out, progress=progress))
    total, device, tokens = 0.0, input_device(model), held_out.learned
    with evaluating(model):
        for done, example in enumerate(held_out.items, start=1):
            total += summed_loss(model, collate([example], device)).item()
            if progress is not None:
                progress(done, len(held_out.items))
    found = {"perplexity": exponential(total / tokens), "nll": total / tokens, "tokens": tokens}
    return found | {"examples": len(held_out.items), "data": held_out.source, "token_hash": held_out.hash}


def extended(receipt: dict[str, Any], tuning: dict[str, Any]) -> dict[str, Any]:
    """The receipt with another entry in the list `tuning`; a model may be tuned more than once."""
    return {**receipt, "tuning": [*receipt.get("tuning", []), tuning]}


def save_tuned(tuned: Tuned, tokenizer: Any, out: str | Path, *, receipt: dict[str, Any]) -> Path:
    """A compressed model's folder, or a stock one for a dense model."""
    if isinstance(tuned.model, compressed.CompressedModel):
        save_model(tuned.model, tokenizer, out, receipt=receipt)
    else:
        with checkpoint.as_stored(tuned.model):
            check_disk_space(out, int(1.05 * sum(parameter.nbytes for parameter in tuned.model.parameters())))
            with new_folder(out) as folder:
                tuned.model.save_pretrained(folder)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                write_json(folder / "receipt.json", receipt)
    return Path(out)
