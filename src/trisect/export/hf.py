"""A stock Hugging Face checkpoint, which needs no trisect, and its comparison with the native model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trisect.bundle import write_card
from trisect.errors import TrisectError
from trisect.export import llama_cpp, vocabulary
from trisect.export.stock import Stock, listed_rope, plain_config, stock_factors, stock_weights
from trisect.models import compressed, original_shape, shape_of
from trisect.support.files import check_disk_space, new_folder, write_json


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how near it is to the native model."""

    path: Path
    architecture: str
    head_width: int
    mlp_widths: tuple[int, ...]
    dtype: str  # of the weights: torch's name in a folder, llama.cpp's in a GGUF file
    difference: float  # of float32 logits, relative to the largest one
    rounding: float | None = None  # the same after rounding to `dtype`; None for float32 and GGUF files
    llama_cpp: float | None = None  # nats between the native model's next token and llama.cpp's; None if not run
    transformers_4: bool = False
    vllm: bool = False
    mlx: bool = False  # whether these engines are known to load it
    notes: tuple[str, ...] = ()


TOLERANCE = 1e-4  # largest difference of logits, relative to the largest logit, that float32 arithmetic may make

LENGTH = 320
REACH = 2048  # positions are checked up to here, so that slow rotations show too
DIVERGENCE = {"f32": 1e-3, "f16": 1e-2, "q8_0": 0.1}  # nats between next tokens that a kind of weights explains
PROMPT = 64
MIXTURE_PROMPTS = 5
"""Rounding may send a token to another expert, and what follows it elsewhere: of so many prompts the median counts."""


@torch.no_grad()
def probe(model: Any, *, seed: int = 0) -> Tensor:
    """Logits (2, t, vocabulary) on random tokens: one text in a row, one spread over many positions."""
    config = model.config
    longest = int(config.max_position_embeddings)
    length = min(LENGTH, longest)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.arange(length), torch.linspace(0, min(longest, REACH) - 1, length).long()])
    device = next(model.parameters()).device
    # A mask, because transformers takes a jump in the positions for the start of another text.
    out = model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=torch.ones_like(ids).to(device),
        use_cache=False,
    )
    logits: Tensor = out.logits.float().cpu()
    return logits


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest logit of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def check_same(found: Tensor, expected: Tensor, what: str) -> float:
    """The difference, or a refusal to write files that compute something else."""
    apart = difference(found, expected)
    if not apart <= TOLERANCE:  # NaN is refused too
        off = f"{what} differs from the compressed model by {apart:.2g} of the largest logit"
        raise mistake(f"{off}, where rounding explains {TOLERANCE:g}")
    return apart


def mistake(what: str) -> TrisectError:
    """The refusal of a file that is wrong."""
    return TrisectError(f"{what}: nothing was written. This is a mistake of trisect; please report it.")


@torch.no_grad()
def check_in_llama_cpp(path: Path, model: Any, kind: str, *, longest: int, mixture: bool = False) -> float | None:
    """Nats between the next token's probabilities; None without llama.cpp. A wrong file is refused."""
    if not llama_cpp.is_installed():
        return None
    size = int(model.config.vocab_size)
    prompts = MIXTURE_PROMPTS if mixture else 1
    ids = torch.randint(size, (prompts, min(PROMPT, longest - 1)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    device = next(model.parameters()).device
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    expected = logits[:, -1].double().cpu().log_softmax(-1)
    try:
        found = torch.tensor(llama_cpp.run_apart(path, ids.tolist(), size)).double().log_softmax(-1)
    except RuntimeError as error:
        raise mistake(f"llama.cpp cannot run the file ({error})") from error
    apart = float((expected.exp() * (expected - found)).sum(dim=-1).median())
    if not apart <= DIVERGENCE[kind]:  # NaN is refused too
        off = f"llama.cpp's probabilities of a next token are {apart:.2g} nats from the compressed model's"
        raise mistake(f"{off}, where {kind} explains {DIVERGENCE[kind]:g}")
    return apart


def export_hf(
    model: Any, tokenizer: Any, out: str | Path, *, dtype: torch.dtype, receipt: dict[str, Any] | None = None
) -> Exported:
    """Write a compressed model, given in float32, as a checkpoint of its stock architecture."""
    if not isinstance(model, compressed.CompressedModel):
        dense = "This model is not compressed, so it is a stock checkpoint already"
        raise TrisectError(f"{dense}; give the folder that `trisect compress MODEL -o DIR` wrote.")
    stock = stock_weights(model)
    config = stock_config(model.config, stock)
    expected = probe(model)
    apart = check_stock(config, stock, expected)
    # Taken out one by one, so that a second copy of the model never stands beside the first.
    rounded = {name: stock.tensors.pop(name).to(dtype) for name in list(stock.tensors)}
    tokenizer, notes = vocabulary.split_digits(tokenizer)
    check_disk_space(out, int(1.05 * sum(t.numel() * t.element_size() for t in rounded.values())))
    with new_folder(out) as folder:
        written = built(config, rounded)
        written.generation_config = model.generation_config
        written.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        speak_to_transformers_4(folder, config)
        logits = probe(built(config, {name: tensor.float() for name, tensor in rounded.items()}))
        again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # as anybody loads it
        if isinstance(again, compressed.CompressedModel):
            raise mistake(f"{folder} still needs trisect")
        check_same(probe(again.eval()), logits, "What was written")
        result = Exported(
            path=Path(out),
            architecture=type(written).__name__,
            head_width=stock.head_width,
            mlp_widths=stock.mlp_widths,
            dtype=str(dtype).removeprefix("torch."),
            difference=apart,
            rounding=None if dtype == torch.float32 else difference(logits, expected),
            notes=(*_notes(stock, config), *notes),
            **_engines(stock, config),
        )
        new = shape_of(written)
        shapes = replace(original_shape(model), bytes_per_element=new.bytes_per_element), new
        write_card(folder, model, receipt or {}, shapes=shapes, stock=result)
    return result


def speak_to_transformers_4(folder: Path, config: Any) -> None:
    """Say in the files of transformers 5 what transformers 4 and engines of its time read under other names."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    rope = values["rope_parameters"]
    whole = rope.get("full_attention", rope)
    scaling = {key: value for key, value in whole.items() if key != "rope_theta"}
    older: dict[str, Any] = {"rope_theta": whole["rope_theta"], "torch_dtype": values["dtype"]}
    older["rope_scaling"] = None if whole["rope_type"] == "default" else scaling
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    older |= {old: values[new] for old, new in config.attribute_map.items() if new in values}
    write_json(path, values | older)
    path = folder / "tokenizer_config.json"
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("tokenizer_class") == "TokenizersBackend":
            # There, the inputs of BERT are what a tokenizer gives unless it says otherwise.
            inputs = ["input_ids", "attention_mask"]
            write_json(path, values | {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs})


def stock_config(source: Any, stock: Stock) -> Any:
    """The source's config as its stock class has it, with the widths and the rotation of the export."""
    changes: dict[str, Any] = {"head_dim": stock.head_width, **stock.widths}
    if stock.rates is not None:
        base = float(source.rope_parameters["rope_theta"])
        rope = listed_rope(stock_factors(stock.rates, base), base, source.max_position_embeddings)
        if source.rope_parameters.get("llama_4_scaling_beta") is not None:  # Ministral 3 scales queries too
            kept = ("llama_4_scaling_beta", "original_max_position_embeddings")
            rope |= {key: source.rope_parameters.get(key) for key in kept}
        changes["rope_parameters"] = rope
    return plain_config(source, changes)


def built(config: Any, tensors: dict[str, Tensor]) -> Any:
    """The stock model around the tensors, none of them copied."""
    from accelerate import init_empty_weights

    model_class: Any = transformers.AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(config, dtype=torch.float32)  # buffers, too: Gemma's scale of embeddings
    # Qwen2 has no bias after attention where Llama has one.
    missing = {k: v for k, v in model.state_dict().items() if k.endswith("o_proj.bias") and k not in tensors}
    extra = {k: torch.zeros(v.shape, dtype=tensors["model.norm.weight"].dtype) for k, v in missing.items()}
    model.load_state_dict({**tensors, **extra}, assign=True)
    model.tie_weights()
    # Not among the weights: the table must be float32, whatever the config's dtype is.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def check_stock(config: Any, stock: Stock, expected: Tensor) -> float:
    """The difference of the stock model's logits, or a refusal."""
    model = built(config, stock.tensors)
    if stock.rates is not None:
        model.model.rotary_emb = _Exact(model.model.rotary_emb)
    return check_same(probe(model), expected, "The stock model")


class _Exact(nn.Module):
    """A stock table whose angles are float64, as the compressed model's are."""

    # Float32 rounds an angle of 2000 radians by 1e-4: so do stock models, and it says nothing about the weights.

    def __init__(self, table: Any):
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.table(x, position_ids)
        angles = position_ids[..., None].double() * self.table.inv_freq.double()
        angles = angles.repeat(1, 1, cos.shape[-1] // angles.shape[-1])
        factor = self.table.attention_scaling
        return (angles.cos() * factor).to(cos.dtype), (angles.sin() * factor).to(sin.dtype)


KERNELS = {
    "FlashAttention (multiples of 8)": range(8, 257, 8),
    "FlashInfer (64, 128, 256)": (64, 128, 256),
    "vLLM on a CPU (multiples of 16 from 32 to 128, 160, 192, 224, 256)": (*range(32, 129, 16), 160, 192, 224, 256),
}
"""The head widths that common engines have kernels for."""
COMPUTED = {"qwen2": "vLLM works", **dict.fromkeys(("qwen2_moe", "granitemoe"), "vLLM and transformers 4 work")}
"""Architectures whose head width not everybody reads from the config."""
MLX = ("llama", "mistral", "ministral3", "seed_oss")
MLX_WHOLE = "qwen3 qwen3_moe smollm3 gemma2 gemma3_text olmo2 olmo3 hunyuan_v1_dense".split()
"""Architectures that MLX-LM runs with frequencies of their own, or with the source's; test_elsewhere.py ran them."""
DEAF = ("gemma", "gemma2")  # those that it loads but turns at other rates than are listed


def _computed(stock: Stock, config: Any) -> bool:
    """Whether some engine takes the head width to be another one."""
    return config.model_type in COMPUTED and stock.head_width * config.num_attention_heads != config.hidden_size


def _engines(stock: Stock, config: Any) -> dict[str, bool]:
    """Which engines load the export, by the fields of `Exported`."""
    computed, kind = _computed(stock, config), config.model_type
    # Gemma 2's scores are bounded in transformers 4 only where eager attention is asked for.
    four = kind not in ("ministral3", "gemma2") and not (computed and "transformers 4" in COMPUTED[kind])
    mlx = kind in MLX or (kind in MLX_WHOLE and stock.rates is None)
    only_yarn = kind == "gpt_oss" and stock.rates is not None  # vLLM's gpt-oss takes every rotation for yarn
    return {"transformers_4": four, "vllm": not computed and not only_yarn, "mlx": mlx}


def _notes(stock: Stock, config: Any) -> tuple[str, ...]:
    """What a user should know before serving the export."""
    width, notes = stock.head_width, []
    if missing := [name for name, widths in KERNELS.items() if width not in widths]:
        engines = " and ".join(missing)
        notes.append(f"head width {width} has no kernel in {engines}: serve it with another, or not there")
    if _computed(stock, config):
        notes.append(
            f"{COMPUTED[config.model_type]} the head width of {config.model_type} out from the hidden size and "
            "cannot load this one: transformers 5 can, or compress with --parts ov,mlp"
        )
    if config.model_type in DEAF and stock.rates is not None:
        notes.append("MLX-LM would load it and compute something else: it ignores the listed frequencies of Gemma")
    return (*notes, *padding_notes(stock))


def padding_notes(stock: Stock) -> tuple[str, ...]:
    """Which widths were made equal."""
    notes = []
    for what, mixture in (("MLP", False), ("Expert", True)):
        widths = [w for layer, w in enumerate(stock.mlp_widths) if (layer in stock.mixtures) == mixture]
        if len(set(widths)) > 1:
            notes.append(f"{what} widths from {min(widths)} to {max(widths)} were all padded with zeros to the widest")
    return tuple(notes)
