"""Perplexity and the figures of next tokens against a loop over them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows import InputError, evaluate, perplexity, token_windows
from tests.transformers import VOCABULARY, Language, build, token_samples


def log_probabilities(model: nn.Module, window: Tensor) -> list[list[float]]:
    """For each position, of every token that could come next."""
    with torch.no_grad():
        return model.double()(window[None])[0].log_softmax(1).tolist()


def by_hand(model: nn.Module, tokens: Tensor) -> float:
    found = [
        log_probabilities(model, window)[place][int(window[place + 1])]
        for window in tokens
        for place in range(len(window) - 1)
    ]
    return math.exp(-sum(found) / len(found))


def test_perplexity_is_that_of_every_next_token() -> None:
    model, tokens = build(Language), token_samples(5)
    assert perplexity(model, tokens) == pytest.approx(by_hand(build(Language), tokens), rel=1e-5)
    assert perplexity(model, tokens.to(torch.uint8)) == perplexity(model, tokens)


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_the_batch_size_does_not_matter(batch: int) -> None:
    model, tokens = build(Language), token_samples(5)
    assert perplexity(model, tokens, batch=batch) == pytest.approx(perplexity(model, tokens), rel=1e-6)


def test_uniform_predictions_have_the_perplexity_of_the_vocabulary() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: Tensor) -> Any:
            return SimpleNamespace(logits=torch.zeros(*tokens.shape, VOCABULARY))

    assert perplexity(Uniform(), token_samples(3)) == pytest.approx(VOCABULARY)


def test_the_mode_is_put_back_and_there_is_no_dropout() -> None:
    model = build(Language).train()
    model.norm.eval()
    assert perplexity(model, token_samples(3)) == perplexity(build(Language), token_samples(3))
    assert model.training
    assert model.dropout.training
    assert not model.norm.training


def test_figures_against_the_dense_model() -> None:
    dense, other, tokens = build(Language), build(Language), token_samples(4)
    with torch.no_grad():
        other.blocks[0].mlp[0].weight.mul_(-3)
    figures = evaluate(other, tokens, dense=dense)
    assert list(figures) == ["perplexity", "agreement", "kl"]
    pairs = [
        (p, q)
        for window in tokens
        for p, q in zip(log_probabilities(build(Language), window), log_probabilities(other, window), strict=True)
    ]
    length = tokens.shape[1]
    pairs = [pair for place, pair in enumerate(pairs) if place % length != length - 1]  # nothing follows the last token
    assert figures["perplexity"] == pytest.approx(by_hand(other, tokens), rel=1e-5)
    assert figures["agreement"] == sum(p.index(max(p)) == q.index(max(q)) for p, q in pairs) / len(pairs)
    divergences = [sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)) for p, q in pairs]
    assert figures["kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)
    assert 0 < figures["agreement"] < 1


def test_a_language_model_alone_has_its_perplexity_only() -> None:
    assert set(evaluate(build(Language), token_samples(2))) == {"perplexity"}


class Named(nn.Module):
    """Takes tokens by keyword, as language models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build(Language)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.model(input_ids))


def test_batches_of_tokens_by_name() -> None:
    """Labels within the batches are not used: the tokens are their own."""
    tokens = token_samples(5)
    ones = torch.ones_like(tokens)
    batches = [
        {"input_ids": tokens[:2], "attention_mask": ones[:2], "labels": tokens[:2]},
        {"input_ids": tokens[2:], "attention_mask": ones[2:], "labels": tokens[2:]},
    ]
    expected = evaluate(build(Language), tokens, dense=build(Language))
    assert evaluate(Named(), batches, dense=Named()) == pytest.approx(expected)
    assert evaluate(build(Language), [tokens[:1], tokens[1:]]) == {"perplexity": expected["perplexity"]}
    with pytest.raises(InputError, match=r"the tokens are padded \(attention_mask has zeros\)"):
        evaluate(Named(), {"input_ids": tokens, "attention_mask": ones.tril()})
    with pytest.raises(InputError, match=r"the windows of tokens have different lengths: \[4, 8\]"):
        evaluate(build(Language), [token_samples(2, 8), token_samples(2, 4)])


def test_windows() -> None:
    assert token_windows(torch.arange(11), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert token_windows(torch.arange(4), 4).shape == (1, 4)


def class_scores() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 2), nn.Flatten())


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("the tokens are torch.float32; expected whole numbers", lambda: token_windows(torch.ones(8), 4)),
        ("the tokens have shape (2, 3); expected one row", lambda: token_windows(token_samples(2, 3), 2)),
        ("windows of 1 tokens predict nothing", lambda: token_windows(torch.arange(8), 1)),
        ("there are 3 tokens, too few for one window of 4", lambda: token_windows(torch.arange(3), 4)),
        ("the tokens are torch.bool; expected whole", lambda: perplexity(build(Language), torch.ones(2, 3) > 0)),
        ("the tokens have shape (2, 1); expected windows", lambda: perplexity(build(Language), token_samples(2, 1))),
        ("there are no tokens to evaluate on", lambda: perplexity(build(Language), token_samples(0))),
        ("the model returns a tensor of shape (1, 24)", lambda: perplexity(class_scores(), token_samples(1))),
        (
            "tokens go from 0 to 25; the vocabulary has 24",
            lambda: perplexity(nn.Embedding(30, VOCABULARY), torch.tensor([[0, 25]])),
        ),
        (
            "labels are given for a language model; leave them out",
            lambda: evaluate(build(Language), token_samples(2), torch.zeros(2, dtype=torch.long)),
        ),
    ],
)
def test_wrong_input_gets_one_sentence(words: str, call: Any) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
