"""finetune(): LoRA adapters on the decoder's own linear maps are attached, trained by transformers, and merged."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import Conv1D, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from trisect.config.verbs import TuneConfig
from trisect.data import Tokens, evaluation_tokens
from trisect.errors import TrisectError, check_names
from trisect.evaluate.perplexity import check_positions, evaluating, exponential, input_device, perplexity
from trisect.evaluate.tasks import seeded
from trisect.finetune.examples import IGNORED, Example, Examples, collate, holds_instructions, load_examples
from trisect.methods import METHODS
from trisect.models import compressed, fingerprint, layer_views, linear, looking, round_as_stored
from trisect.quantize import QuantizeConfig, quantized_linear
from trisect.support import distributed
from trisect.support.receipt import build_receipt, package_version

WARM_UP = 0.03  # share of the steps in which the learning rate rises
LONGEST_GRADIENT = 1.0  # longer ones are shortened to it
COMPLETE = "*/trainer_state.json"  # what a checkpoint of Trainer has once all of it is written

Progress = Callable[[int, int], None]


class QuantizedBase(nn.Linear):
    """A quantised map as the linear module, without a weight, that peft puts an adapter on."""

    def __init__(self, held: linear.QuantizedLinear):
        nn.Module.__init__(self)  # not Linear's own, which makes a weight
        self.in_features, self.out_features = held.in_features, held.out_features
        self.held = held
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    @property
    def qweight(self) -> Tensor:
        """peft puts adapters on the device of this."""
        return self.held.packed

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x)


def target_modules(model: nn.Module, targets: tuple[str, ...] | None) -> dict[str, nn.Module]:
    """Module name -> module of the chosen maps, in the model's order."""
    # A map that is fused with others brings them along; a factored one has two modules. Block-diagonal factors
    # hold no plain matrix and stay as they are.
    views = layer_views(model)
    known = tuple(dict.fromkeys(name for view in views for name in view.linears()))
    check_names("linear map", targets or (), known)
    wanted = known if targets is None else targets
    chosen = [view.module(name) for view in views for name in wanted if name in view.linears()]
    inside, kinds = (
        {id(part) for module in chosen for part in module.modules()},
        nn.Linear | Conv1D | linear.QuantizedLinear,
    )
    return {name: part for name, part in model.named_modules() if id(part) in inside and isinstance(part, kinds)}


def attach(model: Any, config: TuneConfig) -> Any:
    """The model with fresh adapters, of which alone the parameters train; drawn from torch's global seed."""
    modules = target_modules(model, config.targets)
    if not modules:
        raise TrisectError("None of the chosen maps is a plain matrix, which adapters need; choose other --targets.")
    transposed = any(isinstance(module, Conv1D) for module in modules.values())
    sizes: Any = {"r": config.rank, "lora_alpha": config.alpha}
    lora = peft.LoraConfig(**sizes, target_modules=list(modules), fan_in_fan_out=transposed)
    for path, module in modules.items():
        if isinstance(module, linear.QuantizedLinear):
            model.set_submodule(path, QuantizedBase(module))
    with warnings.catch_warnings():
        # peft takes each layer's own layout and warns that the one in its config does not fit them all.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        adapted = peft.get_peft_model(model, lora)
    lora.base_model_name_or_path = ""  # peft would look the model up on the hub at every checkpoint
    return adapted


def merge(adapted: Any) -> Any:
    """The model itself, no adapter left: each W is W + alpha / rank B A, quantised again if it was."""
    # Where it was, what the adapter adds below half a step between two levels is rounded away.
    model = adapted.get_base_model()
    based = ((path, layer) for path, layer in model.named_modules() if hasattr(layer, "base_layer"))
    quantized = [(path, layer) for path, layer in based if isinstance(layer.base_layer, QuantizedBase)]
    for path, layer in quantized:
        model.set_submodule(path, _sum(layer.base_layer.held, layer.get_delta_weight("default")))
    if quantized:
        compressed.mark_quantized(model, backend=model.config.trisect["quantization"]["backend"])
    model = adapted.merge_and_unload()
    model.requires_grad_(True)
    return model


@torch.no_grad()
def _sum(held: linear.QuantizedLinear, delta: Tensor) -> linear.QuantizedLinear:
    """A quantised map plus a change of its weight, in the same bits and groups."""
    plain = nn.Linear(held.in_features, held.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(held.dequantized() + delta.float(), requires_grad=False)
    if held.bias is not None:
        plain.bias = nn.Parameter(held.bias, requires_grad=False)
    config = QuantizeConfig(bits=held.packing.bits, backend="torchao" if held.packing.symmetric else "hqq")
    return quantized_linear(plain.train(held.training), config, held.packing.group_size)


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits in float32 on the CPU, without dropout."""
    model.eval()
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().cpu()


def finetune(
    model: Any,
    examples: Examples,
    config: TuneConfig,
    *,
    state: Path | None = None,
    save_every: int = 20,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Tune a model in place, compressed or dense; gives what is added to its receipt.

    Resumes from the folder `state` where a run was left in it. Random numbers are the same afterwards as before. An
    interruption leaves the model adapted.
    """
    check_model(model, examples, config)
    device, started = next(model.parameters()).device, time.perf_counter()
    order, dtype = in_order(examples.items, config), str(model.dtype).removeprefix("torch.")
    identity = {"model": fingerprint(model), "dtype": dtype, "data": examples.hash, **config.to_dict()}
    with seeded(config.seed, device), TemporaryDirectory() as nowhere:
        adapted = attach(model, config)
        resumed = None if state is None else last_checkpoint(state, identity)
        trainer = trainer_for(adapted, order, config, folder=state or Path(nowhere), save_every=save_every)
        train(trainer, progress, resumed=resumed)
    steps = trainer.state.global_step
    learning = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    ids = collate([max(examples.items, key=lambda item: item.learned)])["input_ids"].to(device)
    apart = logits_of(adapted, ids)
    merge(adapted)
    merged = logits_of(model, ids)
    round_as_stored(model, model)
    timings = {"finetune": time.perf_counter() - started}
    receipt = build_receipt(config.to_dict(), seed=config.seed, token_hash=examples.hash, timings=timings)
    receipt["versions"]["peft"] = package_version("peft")
    met = order[: steps * config.batch_size * config.accumulate]
    return receipt | {
        "data": examples.to_dict(),
        "steps": steps,
        "seen": {"examples": len(set(map(id, met))), "tokens": sum(item.learned for item in met)},
        "adapters": len(learning) // 2,
        "trained_parameters": sum(parameter.numel() for parameter in learning),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "resumed_at": None if resumed is None else step_of(resumed),
        "merge_difference": float((merged - apart).abs().max() / apart.abs().max()),
    }


def check_model(model: Any, examples: Examples, config: TuneConfig) -> None:
    """Refuse models and data that tuning would spoil or that would fail half-way."""
    if model.device.index not in (None, 0):
        raise TrisectError(f"Tuning runs on the first GPU: set CUDA_VISIBLE_DEVICES={model.device.index}.")
    if model.dtype == torch.float16:
        raise TrisectError("Gradients vanish in float16; give --dtype float32 (it is saved in float16 again).")
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


def in_order(examples: Sequence[Example], config: TuneConfig) -> list[Example]:
    """The examples as they are met: one epoch after the other, each in an order of its own."""
    generator = torch.Generator().manual_seed(config.seed)
    epochs = [torch.randperm(len(examples), generator=generator) for _ in range(config.epochs)]
    met, step = [examples[i] for i in torch.cat(epochs).tolist()], config.batch_size * config.accumulate
    # Examples of like length share a batch of their step, for little padding.
    steps = (sorted(met[at : at + step], key=lambda item: len(item.ids)) for at in range(0, len(met), step))
    return [example for each in steps for example in each]


def trainer_for(adapted: Any, order: list[Example], config: TuneConfig, *, folder: Path, save_every: int) -> Trainer:
    """transformers' Trainer with the run's optimiser, schedule and loss; checkpoints go into `folder`."""
    steps = math.ceil(len(order) / (config.batch_size * config.accumulate))
    total = min(steps, config.max_steps or steps)
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=config.seed,
        max_steps=total,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulate,
        max_grad_norm=LONGEST_GRADIENT,
        gradient_checkpointing=config.gradient_checkpointing,
        # Not re-entrant: the re-entrant kind wants inputs that need gradients, and embeddings are frozen.
        gradient_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="sequential",  # the order is ours
        save_steps=save_every,
        save_total_limit=1,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=input_device(adapted).type == "cpu",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one device, whatever else is there
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=config.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_at, total=total))
    given: Any = {"train_dataset": order, "data_collator": collate, "compute_loss_func": summed_loss}
    trainer = Trainer(adapted, arguments, optimizers=(optimizer, schedule), **given)
    trainer.remove_callback(PrinterCallback)  # what is printed is the caller's to say
    return trainer


class Watch(TrainerCallback):
    """Reports every step, and refuses a loss that is no number."""

    def __init__(self, progress: Progress):
        self.progress, self.began = progress, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress(state.global_step, state.max_steps)

    on_train_end = on_step_begin

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        if not math.isfinite(loss := logs.get("loss", 0.0)):
            instead = "Start again with a smaller --lr, or with --dtype float32"
            raise TrisectError(f"The loss is {loss} at step {state.global_step}; no model was written. {instead}.")


def train(trainer: Trainer, progress: Progress, *, resumed: Path | None) -> None:
    """Run a trainer to its end; the model's settings are afterwards as they were."""
    before, watch = dict(vars(trainer.model.config)), Watch(progress)
    trainer.add_callback(watch)
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    except Exception as error:
        if resumed is None or watch.began:
            raise
        raise TrisectError(f"{resumed} cannot be resumed from ({error}); add --fresh to start anew.") from error
    trainer.model.gradient_checkpointing_disable()
    trainer.model.config.__dict__ = before


def rate_at(step: int, total: int) -> float:
    """Share of the learning rate at a step, counted from 0: a linear rise, then a cosine to almost 0."""
    rise = math.ceil(WARM_UP * total)
    if step < rise:
        return (step + 1) / (rise + 1)
    left = 1 - (step - rise) / max(1, total - rise)  # 1 at the first step after the rise, 1/n at the last
    return 0.5 * (1 - math.cos(math.pi * left))


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = 1) -> Tensor:
    """Negative log-likelihood of all learned tokens of a batch in nats, over the learned tokens of its step."""
    learned = labels[:, 1:] != IGNORED
    logits = outputs.logits[:, :-1][learned].float()
    return nn.functional.cross_entropy(logits, labels[:, 1:][learned], reduction="sum") / num_items_in_batch


def last_checkpoint(state: Path, identity: dict[str, Any]) -> Path | None:
    """The newest complete checkpoint in a folder, which is made ready for one; that of another run is refused."""
    # Trainer writes its own state last, and older checkpoints go after that.
    found = max((path.parent for path in state.glob(COMPLETE)), key=step_of, default=None)
    if found is None:  # nothing to resume: whatever run this was
        (state / distributed.MANIFEST).unlink(missing_ok=True)
    distributed.manifest_of(state, identity)
    return found


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint of Trainer was written behind."""
    return int(checkpoint.name.rpartition("-")[2])


def load_held_out(
    source: str, tokenizer: Any, *, tuned_on: str, length: int, windows: int | None, loss: str
) -> Tokens | Examples:
    """Windows of a text, or all examples of instruction data; never the tuning data itself."""
    path = Path(source).expanduser()
    if source == tuned_on or (path.exists() and path.resolve() == Path(tuned_on).expanduser().resolve()):
        raise TrisectError(f"--eval-data {source} is the tuning data, which shows nothing; give another text.")
    if path.is_file() and holds_instructions(path):
        return load_examples(source, tokenizer, length=length, loss=loss)
    return evaluation_tokens(source, tokenizer, windows=windows, length=length)


def measure(model: Any, held_out: Tokens | Examples, *, progress: Progress | None = None) -> dict[str, Any]:
    """Perplexity of a text as `trisect eval` has it, or of the learned tokens of instructions."""
    if isinstance(held_out, Tokens):
        return asdict(perplexity(model, held_out, progress=progress))
    total, device, tokens = 0.0, input_device(model), held_out.learned
    with evaluating(model):
        for done, example in enumerate(held_out.items, start=1):
            batch = {name: value.to(device) for name, value in collate([example]).items()}
            labels = batch.pop("labels")
            total += summed_loss(model(**batch), labels).item()
            if progress is not None:
                progress(done, len(held_out.items))
    found = {"perplexity": exponential(total / tokens), "nll": total / tokens, "tokens": tokens}
    return found | {"examples": len(held_out.items), "data": held_out.source, "token_hash": held_out.hash}
