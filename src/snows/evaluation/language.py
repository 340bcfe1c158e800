"""How good a causal language model is: perplexity, and how close its predictions are to the dense model's.

Tokens come in windows: whole numbers, samples x length. A window of n tokens has n - 1 predictions: each token but the
first, given those before it. Every prediction has the same weight, whatever the batch size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import Call, calls
from ..errors import InputError
from .running import evaluating, scores

_SCORES_AT_ONCE = 1 << 26  # numbers. Vocabularies are large, so the scores bound the batch


def token_windows(tokens: Tensor, length: int) -> Tensor:
    """Cut the tokens of a text into windows. Tokens left over at the end are dropped.

    Args:
        tokens: The text, one row of whole numbers.
        length: Tokens in a window, at least 2.

    Returns:
        The windows: samples x length.

    Raises:
        InputError: The tokens are no row of whole numbers, or too few for one window.

    Example:
        >>> import snows, torch
        >>> snows.token_windows(torch.arange(7), 3)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """
    _check_whole_numbers(tokens)
    if tokens.ndim != 1:
        raise InputError(f"the tokens have shape {tuple(tokens.shape)}; expected one row of them")
    if length < 2:
        raise InputError(f"windows of {length} tokens predict nothing; expected a length of at least 2")
    if len(tokens) < length:
        raise InputError(f"there are {len(tokens)} tokens, too few for one window of {length}")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def perplexity(model: nn.Module, tokens: Tensor, batch: int | None = None) -> float:
    """Measure how well a causal language model predicts a text: exp of the mean cross-entropy of its next tokens.

    Args:
        model: A causal language model. Its output, or the output's `logits`, is samples x length x vocabulary.
        tokens: Windows without padding, samples x length; `token_windows` cuts a text into them.
        batch: Windows to run at once. Default: as many as give a moderate number of scores.

    Returns:
        The perplexity. 1 is perfect; guessing evenly gives the size of the vocabulary.

    Raises:
        InputError: The tokens are no windows of whole numbers, or the model does not give scores for them.

    Example:
        >>> import snows, torch
        >>> uniform = torch.nn.Embedding(6, 6)  # scores for the next token, from this token alone
        >>> _ = torch.nn.init.zeros_(uniform.weight)
        >>> round(snows.perplexity(uniform, torch.randint(6, (4, 10))), 3)
        6.0
    """
    return language_figures(model, tokens, batch=batch)["perplexity"]


def language_figures(
    model: nn.Module, tokens: Tensor, dense: nn.Module | None = None, batch: int | None = None
) -> dict[str, float]:
    """Perplexity. With the dense model also `agreement` and `kl` with its predictions, as means over tokens."""
    _check_windows(tokens)
    tokens = tokens.long()
    totals = torch.zeros(3, dtype=torch.float64)  # cross-entropy, agreement, divergence
    for part in tokens.split(batch or _batch_size(model, tokens)):
        predicted = _predictions(model, part)
        totals[0] -= predicted.gather(2, part[:, 1:, None].to(predicted.device)).double().sum().cpu()
        if dense is not None:
            expected = _predictions(dense, part).to(predicted.device)
            totals[1] += (predicted.argmax(2) == expected.argmax(2)).double().sum().cpu()
            divergences = F.kl_div(predicted, expected, log_target=True, reduction="none").sum(2)
            totals[2] += divergences.double().sum().cpu()
    loss, agreement, kl = totals / (len(tokens) * (tokens.shape[1] - 1))
    figures = {"perplexity": float(loss.exp())}
    return figures if dense is None else {**figures, "agreement": float(agreement), "kl": float(kl)}


def predicts_tokens(model: nn.Module, x: Any) -> bool:
    """Whether the samples are tokens and the model scores each one: samples x tokens x vocabulary."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.is_floating_point() or x.dtype == torch.bool or not len(x):
        return False
    with evaluating(model):
        outputs = scores(model, x[:1])
    return outputs.ndim == 3 and outputs.shape[:2] == x[:1].shape


def windows_of(model: nn.Module, data: Any, batch: int) -> Tensor | None:
    """All windows of tokens in the data, if that is what the model scores; else None."""
    if isinstance(data, Tensor):
        return data if predicts_tokens(model, data) else None
    first = next(calls(data, model, batch=batch))
    tokens = _tokens_of(first)
    if tokens is None or not predicts_tokens(model, tokens):
        return None
    parts = [_unpadded(call) for call in calls(data, model, batch=batch)]
    lengths = sorted({part.shape[1] for part in parts})
    if len(lengths) > 1:
        raise InputError(f"the windows of tokens have different lengths: {lengths}; expected one length")
    return torch.cat(parts)


def _tokens_of(call: Call) -> Any:
    return call.args[0] if call.args else call.kwargs.get("input_ids")


def _unpadded(call: Call) -> Tensor:
    mask = call.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise InputError(
            "the tokens are padded (attention_mask has zeros); expected windows without padding: "
            "snows.token_windows cuts a text into them"
        )
    return torch.as_tensor(_tokens_of(call))


def _predictions(model: nn.Module, part: Tensor) -> Tensor:
    """Log-probabilities of the next tokens: samples x (length - 1) x vocabulary."""
    with evaluating(model):
        outputs = scores(model, part)
    if outputs.ndim != 3 or outputs.shape[:2] != part.shape:
        raise InputError(
            f"the model returns a tensor of shape {tuple(outputs.shape)} for tokens of shape {tuple(part.shape)}; "
            "scores of next tokens (samples x tokens x vocabulary) are expected"
        )
    highest = int(part.max())
    if highest >= outputs.shape[2] or int(part.min()) < 0:
        raise InputError(f"tokens go from {int(part.min())} to {highest}; the vocabulary has {outputs.shape[2]}")
    return outputs[:, :-1].float().log_softmax(2)


def _batch_size(model: nn.Module, tokens: Tensor) -> int:
    with evaluating(model):
        scores_of_one = scores(model, tokens[:1]).numel()
    return max(1, _SCORES_AT_ONCE // max(1, scores_of_one))


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
