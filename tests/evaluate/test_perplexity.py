"""Perplexity against transformers' own loss and against cases that can be worked out by hand."""

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trisect.data.tokens import Tokens, tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import fitting_batch_size, perplexity, window_losses

VOCAB = 97


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        attention_dropout=0.3,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def tokens() -> Tokens:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (5, 24), generator=generator)
    return tokens_from_tensor(ids, "random ids", text_bytes=480)


def test_nll_is_transformers_own_loss(llama, tokens):
    llama.eval()
    with torch.inference_mode():
        # Windows are equally long, so the mean over windows is the mean over tokens.
        losses = [llama(input_ids=row[None], labels=row[None]).loss for row in tokens.ids]
    expected = torch.stack(losses).double().mean().item()
    result = perplexity(llama, tokens)
    assert result.nll == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert (result.windows, result.length, result.tokens) == (5, 24, 5 * 23)
    assert (result.data, result.token_hash) == ("random ids", tokens.hash)


def test_bits_per_byte_are_bits_per_token_over_bytes_per_token(llama, tokens):
    result = perplexity(llama, tokens)
    bytes_per_token = 480 / (5 * 24)
    assert result.bits_per_byte == pytest.approx(math.log2(result.perplexity) / bytes_per_token)
    assert perplexity(llama, tokens_from_tensor(tokens.ids)).bits_per_byte is None


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_the_batch_size_does_not_change_the_result(llama, tokens, batch_size: int):
    steps: list[tuple[int, int]] = []
    result = perplexity(llama, tokens, batch_size=batch_size, progress=lambda done, total: steps.append((done, total)))
    assert result.nll == pytest.approx(perplexity(llama, tokens).nll, rel=1e-6)
    assert steps == [(min(at + batch_size, 5), 5) for at in range(0, 5, batch_size)]


def test_uniform_logits_give_the_size_of_the_vocabulary(llama, tokens):
    torch.nn.init.zeros_(llama.lm_head.weight)
    assert perplexity(llama, tokens).perplexity == pytest.approx(VOCAB, rel=1e-6)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(2, 9), st.integers(2, 11), st.integers(1, 40))
def test_window_losses_are_the_formula_whatever_the_chunk(b: int, t: int, vocab: int, chunk: int):
    generator = torch.Generator().manual_seed(b + 10 * t + 100 * vocab)
    logits = 5 * torch.randn(b, t, vocab, generator=generator)
    ids = torch.randint(0, vocab, (b, t), generator=generator)
    losses = window_losses(logits, ids, chunk_elements=chunk)
    for row in range(b):
        expected = sum(
            math.log(sum(math.exp(x) for x in logits[row, at].tolist())) - float(logits[row, at, ids[row, at + 1]])
            for at in range(t - 1)
        )
        assert losses[row].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_logits_name_the_window(llama, tokens, poison: float):
    ids = tokens.ids.clone()
    ids[ids == 7] = 8
    ids[3, 10] = 7  # only window 3 reads the poisoned row
    llama.model.embed_tokens.weight.data[7] = poison
    for batch_size in (1, 2, 5):
        with pytest.raises(TrisectError, match="not finite in window 3 of 5"):
            perplexity(llama, tokens_from_tensor(ids), batch_size=batch_size)


def test_the_training_flags_come_back_as_they_were(llama, tokens):
    llama.train()
    llama.model.layers[0].eval()
    before = [module.training for module in llama.modules()]
    first = perplexity(llama, tokens)
    assert [module.training for module in llama.modules()] == before
    assert first == perplexity(llama, tokens)  # dropout was off


def test_half_precision_logits_are_summed_in_full(llama, tokens):
    exact = perplexity(llama, tokens).nll
    assert perplexity(llama.bfloat16(), tokens).nll == pytest.approx(exact, rel=0.05)


def test_an_id_outside_the_vocabulary_is_named(llama):
    ids = torch.tensor([[1, VOCAB, 2]])
    with pytest.raises(TrisectError, match=rf"Token id {VOCAB} .*vocabulary of {VOCAB}"):
        perplexity(llama, tokens_from_tensor(ids))


def test_windows_that_predict_nothing_are_refused(llama):
    with pytest.raises(TrisectError, match="--length 2"):
        perplexity(llama, tokens_from_tensor(torch.tensor([[1]])))


def test_a_batch_size_below_one_is_refused(llama, tokens):
    with pytest.raises(TrisectError, match="batch size is 0"):
        perplexity(llama, tokens, batch_size=0)


def test_learned_positions_limit_the_length():
    config = GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    fits = tokens_from_tensor(torch.ones(1, 8, dtype=torch.int64))
    assert perplexity(model, fits).tokens == 7
    with pytest.raises(TrisectError, match=r"learned 8 positions.*--length 8"):
        perplexity(model, tokens_from_tensor(torch.ones(1, 9, dtype=torch.int64)))


def test_rotary_models_past_their_context_only_warn(llama, caplog):
    ids = tokens_from_tensor(torch.ones(1, 65, dtype=torch.int64))
    with caplog.at_level(logging.WARNING, logger="trisect"):
        assert math.isfinite(perplexity(llama, ids).perplexity)
    assert "context of 64" in caplog.text


def test_the_chosen_batch_keeps_the_logits_within_a_gibibyte(llama):
    assert fitting_batch_size(llama, length=24) == 16
    length = (1 << 30) // (VOCAB * 4) // 3
    assert fitting_batch_size(llama, length=length) == 3
    assert fitting_batch_size(llama, length=10 * length) == 1
