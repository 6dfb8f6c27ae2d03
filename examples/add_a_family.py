"""A new family as one entry of the table: Arcee (AFM-4.5B), described, checked and compressed.

    python examples/add_a_family.py            # a tiny random Arcee, in seconds
    python examples/add_a_family.py FOLDER     # a real checkpoint of the family

A record says where the projections are and which channels rotate together. That it says so rightly is checked
where it matters: the attention that trisect runs must give the stock model's logits, to the last bit.
"""

import sys

import torch
import transformers

import trisect
from trisect import api
from trisect.models import Family, layer_views, register_family
from trisect.records.parts import COMPONENTS

# Unlike Llama, the MLP has no gate. Biases, grouped heads and their width are read off the modules and the config.
ARCEE = register_family(Family(name="arcee", model="ArceeForCausalLM", gate=None))


def tiny_config() -> transformers.ArceeConfig:
    return transformers.ArceeConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_bias=True,
    )


def tiny_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.ArceeForCausalLM(tiny_config()).eval()
    for parameter in model.parameters():  # biases of zero would hide a mistake about them
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def check(model: transformers.PreTrainedModel, ids: torch.Tensor) -> None:
    """Parts read and written back are the same weights, and the owned attention is the stock one."""
    stock = model(ids).logits
    for view in layer_views(model):
        for component in COMPONENTS:  # writing puts trisect's attention in place of the stock one
            view.write(view.part(component))
    owned = model(ids).logits
    if not owned.equal(stock):
        raise SystemExit(f"the record is wrong: logits are off by {(owned - stock).abs().max():.3g}")


def main(arguments: list[str]) -> transformers.PreTrainedModel:
    model = api.load(arguments[0]) if arguments else tiny_model()
    ids = torch.randint(0, 97, (8, 64), generator=torch.Generator().manual_seed(1))
    check(model, ids)
    print("parts come back as they were read, and logits are the stock model's")
    config = trisect.CompressConfig(ratio=0.25, align=None)
    small = trisect.compress(model, config=config, calibration=ids)
    print(api.summary(small))
    return small


if __name__ == "__main__":
    main(sys.argv[1:])
