"""Preparation: the user's model is only copied, and a shared capture changes nothing that a run notices."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from snows import InputError, SnowsWarning
from snows.data import preparation
from snows.data.preparation import capturing_once, prepare, with_weights
from tests.networks import example, make

X = example("mlp", 12)
PIXELS = torch.arange(2 * 2 * 4 * 4.0).view(2, 2, 4, 4)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every capture."""
    done: list[int] = []
    capture = preparation.capture
    monkeypatch.setattr(preparation, "capture", lambda *given: done.append(1) or capture(*given))
    return done


def said(action: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SnowsWarning)
        action()  # type: ignore[operator]
    return [str(warning.message) for warning in caught if warning.category is SnowsWarning]


def test_the_model_is_left_as_it_is() -> None:
    model = make("conv-bn").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(SnowsWarning, match="the model is in train mode"):
        prepared = prepare(model, example("conv-bn", 6), "cpu", seed=0)
    prepared.graph.parameters["3.weight"].zero_()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.training
    assert next(model.parameters()).is_contiguous()


def test_a_capture_is_shared_inside_only(captures: list[int]) -> None:
    model, other = make("mlp"), make("mlp")
    with capturing_once(model):
        for _ in range(3):
            prepare(model, X, None, seed=0)
        assert len(captures) == 1
        prepare(model, X, None, seed=1)  # other samples
        prepare(other, X, None, seed=0)  # another model, every time
        prepare(other, X, None, seed=0)
        assert len(captures) == 4
    prepare(model, X, None, seed=0)
    assert len(captures) == 5


def test_each_run_has_its_own_parameters() -> None:
    model = make("mlp")
    with capturing_once(model):
        first = prepare(model, X, None, seed=0)
        first.graph.parameters["2.weight"] = torch.zeros_like(first.graph.parameters["2.weight"])
        second = prepare(model, X, None, seed=0)
    assert torch.equal(second.graph.parameters["2.weight"], model[2].weight)
    assert first.samples is second.samples


def test_every_run_is_warned(captures: list[int]) -> None:
    """Also where the capture is shared: the report of each run holds the warnings of its preparation."""
    model = make("conv-bn").train()
    with capturing_once(model):
        told = [said(lambda: prepare(model, PIXELS, None, seed=0)) for _ in range(3)]
    assert len(captures) == 1
    assert told[0] == told[1] == told[2]
    assert [words[:24] for words in told[0]] == ["the model is in train mo", "the calibration images l"]


def test_other_threads_share_nothing(captures: list[int]) -> None:
    model = make("mlp")
    with capturing_once(model):
        prepare(model, X, None, seed=0)
        thread = threading.Thread(target=lambda: preparation._MEMORY.get() or captures.append(0))
        thread.start()
        thread.join()
    assert captures == [1, 0]


def test_a_copy_has_the_new_weights() -> None:
    model = make("mlp").half().train()
    new = with_weights(model, {"2.weight": torch.full((8, 8), 3.0)})
    assert new is not model
    assert new.training
    assert new[2].weight.dtype == torch.float16
    assert bool((new[2].weight == 3).all())
    assert not bool((model[2].weight == 3).all())
    assert torch.equal(new[0].weight, model[0].weight)


def test_weights_that_are_handed_over_are_not_copied() -> None:
    model = make("mlp").train()
    own = {name: p.detach().clone() + 1 for name, p in model.named_parameters() if name.endswith("weight")}
    new = with_weights(model, own, handed_over=True)
    assert {name: p.data_ptr() for name, p in new.named_parameters() if name in own} == {
        name: tensor.data_ptr() for name, tensor in own.items()
    }
    assert [p.requires_grad for p in new.parameters()] == [p.requires_grad for p in model.parameters()]
    assert new.training
    assert new[0].bias.data_ptr() != model[0].bias.data_ptr()
    assert torch.equal(new[0].bias, model[0].bias)
    copied = with_weights(model.half(), own, handed_over=True)  # of another dtype they are
    assert torch.equal(copied[0].weight, own["0.weight"].half())
    assert not torch.equal(copied[0].weight, model[0].weight)


def test_what_cannot_be_prepared_is_refused() -> None:
    with pytest.raises(InputError, match="ReLU has no parameters"):
        prepare(nn.ReLU().eval(), X, None, seed=0)
    model = make("mlp")
    model[2].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"the model's weights contain NaN or infinity \(in 2\.weight\)"):
        prepare(model, X, None, seed=0)
    model = make("mlp")
    model.register_buffer("seen", torch.tensor([torch.nan]))
    with pytest.raises(InputError, match=r"the model's weights contain NaN or infinity \(in seen\)"):
        prepare(model, X, None, seed=0)
