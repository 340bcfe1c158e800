"""How good a causal language model is: perplexity, and how close its predictions are to the dense model's.

Tokens come in windows: whole numbers, samples x length. Every token but the first of a window is predicted from those
before it, so a window of n tokens has n - 1 predictions. All of them count alike, whatever the batch size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .running import evaluating, scores

_SCORES_AT_ONCE = 1 << 26  # numbers; vocabularies are large, so a batch is bounded by what it makes the model give


def token_windows(tokens: Tensor, length: int) -> Tensor:
    """A text's tokens, one after another, cut into windows: samples x length. What is left at the end is dropped."""
    _check_whole_numbers(tokens)
    if tokens.ndim != 1:
        raise InputError(f"the tokens have shape {tuple(tokens.shape)}; expected one row of them")
    if length < 2:
        raise InputError(f"windows of {length} tokens predict nothing; expected a length of at least 2")
    if len(tokens) < length:
        raise InputError(f"there are {len(tokens)} tokens, too few for one window of {length}")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def perplexity(model: nn.Module, tokens: Tensor, batch: int | None = None) -> float:
    """exp of the mean cross-entropy of every token given those before it in its window.

    tokens   windows, samples x length (`token_windows` cuts a text into them); without padding
    batch    windows at a time; default: as many as give a moderate number of scores
    """
    return language_figures(model, tokens, batch=batch)["perplexity"]


def language_figures(
    model: nn.Module, tokens: Tensor, dense: nn.Module | None = None, batch: int | None = None
) -> dict[str, float]:
    """Perplexity; with the dense model also, per token, agreement (same first choice) and kl from its predictions."""
    _check_windows(tokens)
    tokens = tokens.long()
    totals = torch.zeros(3, dtype=torch.float64)  # cross-entropy, agreement, divergence
    for part in tokens.split(batch or _batch_size(model, tokens)):
        predicted = _predictions(model, part)
        totals[0] -= predicted.gather(2, part[:, 1:, None].to(predicted.device)).double().sum().cpu()
        if dense is not None:
            reference = _predictions(dense, part).to(predicted.device)
            totals[1] += (predicted.argmax(2) == reference.argmax(2)).double().sum().cpu()
            each = F.kl_div(predicted, reference, log_target=True, reduction="none").sum(2)
            totals[2] += each.double().sum().cpu()
    loss, agreement, kl = totals / (len(tokens) * (tokens.shape[1] - 1))
    figures = {"perplexity": float(loss.exp())}
    return figures if dense is None else {**figures, "agreement": float(agreement), "kl": float(kl)}


def predicts_tokens(model: nn.Module, x: Tensor) -> bool:
    """Whether these samples are tokens and the model gives scores for each: samples x tokens x vocabulary."""
    if x.ndim != 2 or x.is_floating_point() or x.dtype == torch.bool or not len(x):
        return False
    with evaluating(model):
        found = scores(model, x[:1])
    return found.ndim == 3 and found.shape[:2] == x[:1].shape


def _predictions(model: nn.Module, part: Tensor) -> Tensor:
    """The logarithms of the next tokens' probabilities: samples x (length - 1) x vocabulary."""
    with evaluating(model):
        found = scores(model, part)
    if found.ndim != 3 or found.shape[:2] != part.shape:
        raise InputError(
            f"the model returns a tensor of shape {tuple(found.shape)} for tokens of shape {tuple(part.shape)}; "
            "scores of next tokens (samples x tokens x vocabulary) are expected"
        )
    highest = int(part.max())
    if highest >= found.shape[2] or int(part.min()) < 0:
        raise InputError(f"tokens go from {int(part.min())} to {highest}; the vocabulary has {found.shape[2]}")
    return found[:, :-1].float().log_softmax(2)


def _batch_size(model: nn.Module, tokens: Tensor) -> int:
    with evaluating(model):
        of_one = scores(model, tokens[:1]).numel()
    return max(1, _SCORES_AT_ONCE // max(1, of_one))


def _check_windows(tokens: Tensor) -> None:
    _check_whole_numbers(tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise InputError(
            f"the tokens have shape {tuple(tokens.shape)}; expected windows of at least 2: samples x length"
        )
    if not len(tokens):
        raise InputError("there are no tokens to evaluate on")


def _check_whole_numbers(tokens: Tensor) -> None:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InputError(f"the tokens are {tokens.dtype}; expected whole numbers")
