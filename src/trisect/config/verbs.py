"""How models are loaded, and the settings of sample, quantize and finetune; compress has its own (`settings.py`)."""

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator

from trisect.config.settings import RUNNING, Names, Parts, option, record
from trisect.errors import TrisectError
from trisect.records.shapes import COMPONENTS

BITS = (8, 4, 3, 2)
setting = partial(option, panel=None)
running = partial(option, panel=RUNNING)
listed = partial(setting, metavar="LIST", typed=str)


def _group_size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value != "auto" and not (value.isascii() and value.isdigit()):
        raise TrisectError(f"A group size is a number such as 64, or auto; got {value!r}.")
    return None if value == "auto" else int(value)


@record
class LoadOptions:
    """How a verb's model is loaded."""

    dtype: str | None = running(None, "float32, bfloat16, float16; else the checkpoint's.", metavar="DTYPE")
    device: str = running("cpu", "Or cuda, cuda:1, ...", metavar="DEVICE")
    trust_remote_code: bool = running(False, "Run code that the checkpoint brings along.")


@record
class SampleConfig:
    """How much synthetic text to write, and how freely."""

    samples: int = setting(128, "Texts.", ge=1)
    length: int | None = setting(None, "Tokens per text. (default: 2048, or the model's context)", ge=2)
    temperature: float = setting(1.0, "Less than 1: what it finds likelier.", gt=0, allow_inf_nan=False)
    seed: int = setting(0, "Other seeds give other texts.", ge=0)
    batch_size: int = setting(32, "Texts at once; decides about the texts, too.", ge=1)


@record
class QuantizeConfig:
    """Which weights are held in how many bits, and by whose rule."""

    bits: int = setting(4, "Bits per weight, before scales.", metavar="8|4|3|2")
    group_size: Annotated[int | None, BeforeValidator(_group_size)] = setting(
        None, "Inputs with one scale. (default: auto, at most 128 that fit)", metavar="N|auto", typed=str
    )
    backend: str = setting("hqq", "torchao: int8 with one scale per output.", choices=("hqq", "torchao"))
    parts: Parts = listed(COMPONENTS, "What to quantise. (default: qk,ov,mlp)")
    lm_head: bool = setting(False, "Also the head; one that shares the embedding becomes a matrix of its own.")

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise TrisectError(f"Cannot quantise to {self.bits} bits; use one of {', '.join(map(str, BITS))}.")
        if self.backend == "torchao" and (self.bits != 8 or self.group_size is not None):
            raise TrisectError("torchao quantises to 8 bits: type --bits 8 without --group-size, or --backend hqq.")
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise TrisectError(f"A group size must be a multiple of 8, got {self.group_size}; try 64, or auto.")


@record
class TuneConfig:
    """Everything but data and model that decides what the tuned weights will be."""

    rank: int = setting(8, "Rank of the adapters.", ge=1)
    alpha: int = setting(16, "Adapters count alpha / rank times.", ge=1)
    targets: Names | None = listed(None, "E.g. q,v of q,k,v,o,gate,up,down. (default: all)")
    epochs: int = setting(2, "Times that every example is seen.", ge=1)
    max_steps: int | None = setting(None, "Stop after so many steps; the learning rate comes down over them.", ge=1)
    lr: float = setting(2e-4, "Highest learning rate.", gt=0, allow_inf_nan=False)
    batch_size: int = setting(4, "Examples per forward pass.", ge=1)
    accumulate: int = setting(4, "Forward passes per step.", ge=1)
    length: int = setting(512, "Tokens of an example, or of a window of text.", ge=2)
    loss: str = setting("response", "What is learned of instructions.", choices=("response", "all"))
    seed: int = setting(0, "Seed of adapters and order.", ge=0)
    gradient_checkpointing: bool = setting(False, "Less memory, a third more time.")

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return {**asdict(self), "targets": None if self.targets is None else list(self.targets)}
