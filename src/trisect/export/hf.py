"""A stock Hugging Face checkpoint: plain config, plain weights, no trisect needed to load it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trisect.bundle.card import write_stock_card
from trisect.errors import TrisectError
from trisect.export.check import Exported, check_same, difference, probe
from trisect.export.rotation import listed_rope, stock_factors
from trisect.export.stock import Stock, plain_config, stock_weights
from trisect.export.vocabulary import split_digits
from trisect.models.compressed import CompressedModel
from trisect.support.files import check_disk_space, new_folder


def export_hf(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    dtype: torch.dtype,
    as_llama: bool = False,
    receipt: dict[str, Any] | None = None,
) -> Exported:
    """Write a compressed model, given in float32, as a checkpoint of its stock architecture."""
    if not isinstance(model, CompressedModel):
        raise TrisectError(
            "This model is not compressed, so it is a stock checkpoint already; give the folder that "
            "`trisect compress MODEL -o DIR` wrote."
        )
    stock = stock_weights(model)
    config = stock_config(model.config, stock, as_llama=as_llama)
    expected = probe(model)
    apart = check_same(probe(built(config, stock.tensors)), expected, "The stock model")
    # Taken out one by one, so that a second copy of the model never stands beside the first.
    rounded = {name: stock.tensors.pop(name).to(dtype) for name in list(stock.tensors)}
    tokenizer, notes = split_digits(tokenizer)
    check_disk_space(out, int(1.05 * sum(t.numel() * t.element_size() for t in rounded.values())))
    with new_folder(out) as folder:
        written = built(config, rounded)
        written.generation_config = model.generation_config
        written.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        logits = probe(built(config, {name: tensor.float() for name, tensor in rounded.items()}))
        check_same(_reloaded(folder), logits, "What was written")
        result = Exported(
            path=Path(out),
            architecture=type(written).__name__,
            head_width=stock.head_width,
            mlp_widths=stock.mlp_widths,
            dtype=str(dtype).removeprefix("torch."),
            difference=apart,
            rounding=None if dtype == torch.float32 else difference(logits, expected),
            notes=(*_notes(stock, config), *notes),
        )
        write_stock_card(folder, receipt or {}, result)
    return result


def stock_config(source: Any, stock: Stock, *, as_llama: bool = False) -> Any:
    """The source's config as its stock class has it, with the widths and the rotation of the export."""
    changes: dict[str, Any] = {"head_dim": stock.head_width, **stock.widths}
    if stock.rates is not None:
        base = float(source.rope_parameters["rope_theta"])
        rope = listed_rope(stock_factors(stock.rates, base), base, source.max_position_embeddings)
        if source.rope_parameters.get("llama_4_scaling_beta") is not None:  # Ministral 3 scales queries too
            kept = ("llama_4_scaling_beta", "original_max_position_embeddings")
            rope |= {key: source.rope_parameters.get(key) for key in kept}
        changes["rope_parameters"] = rope
    return plain_config(source, changes, as_llama=as_llama)


def built(config: Any, tensors: dict[str, Tensor]) -> Any:
    """The stock model around the tensors, none of them copied."""
    from accelerate import init_empty_weights

    model_class: Any = transformers.AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(config, dtype=torch.float32)  # buffers, too: Gemma's scale of embeddings
    expected = model.state_dict()
    # Qwen2 has no bias after attention where Llama has one.
    extra = {
        k: torch.zeros(v.shape, dtype=tensors["model.norm.weight"].dtype)
        for k, v in expected.items()
        if k.endswith("o_proj.bias") and k not in tensors
    }
    model.load_state_dict({**tensors, **extra}, assign=True)
    model.tie_weights()
    # Not among the weights: the table must be float32, whatever the config's dtype is.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _reloaded(folder: Path) -> Tensor:
    """Logits of the files, by the way that anybody loads them."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if isinstance(found, CompressedModel):
        raise TrisectError(f"{folder} still needs trisect; this is a mistake of trisect, please report it.")
    return probe(found.eval())


def _notes(stock: Stock, config: Any) -> tuple[str, ...]:
    """What a user should know before serving the export."""
    notes = []
    if stock.head_width % 8:
        notes.append(
            f"head width {stock.head_width} is no multiple of 8, which vLLM and GPU kernels ask for: "
            "compress with --align 16 to serve it there"
        )
    if config.model_type == "qwen2" and stock.head_width * config.num_attention_heads != config.hidden_size:
        notes.append(
            "transformers reads Qwen2's head width from the config, vLLM works it out from the hidden size: "
            "export with --as-llama to serve it there"
        )
    return (*notes, *padding_notes(stock))


def padding_notes(stock: Stock) -> tuple[str, ...]:
    """Which widths were made equal."""
    notes = []
    for what, mixture in (("MLP", False), ("Expert", True)):
        widths = [w for layer, w in enumerate(stock.mlp_widths) if (layer in stock.mixtures) == mixture]
        if len(set(widths)) > 1:
            notes.append(f"{what} widths from {min(widths)} to {max(widths)} were all padded with zeros to the widest")
    return tuple(notes)
