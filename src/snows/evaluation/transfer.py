"""Whether a network's features still serve other tasks: a linear classifier on the input of the last layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..caller import own_surroundings
from ..data.preparation import Prepared, prepare
from ..data.samples import check_count
from ..data.tensors import kind_of, unusable
from ..data.usable import require_module
from ..devices.device import device_of, placed
from ..errors import ArgumentError, InputError, a_type
from ..graph import Graph, Layer

_BATCH = 100
_EXAMPLES = 8  # to capture the model with
_RIDGES = tuple(10.0**power for power in range(-6, 3))  # relative to the features' mean second moment
_HELD_OUT = 5  # every fifth training sample helps to choose the ridge


def linear_probe(
    model: nn.Module, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, batch: int = _BATCH
) -> float:
    """Measure how well a linear classifier on the model's features solves a task, any task.

    Features are the input of the model's last layer. The classifier is a ridge regression of the classes on them, in
    closed form. A fifth of the training samples chooses the strength of the ridge; then all of them are fitted.

    Args:
        model: The network whose features are judged. Its own classes do not matter.
        train: Samples to fit the classifier to.
        train_labels: Their classes, one whole number each.
        test: Samples to judge the classifier on.
        test_labels: Their classes.
        batch: Samples to run at once.

    Returns:
        The share of test samples that the classifier gets right.

    Raises:
        InputError: Samples are missing, labels do not fit them, or the model has no layer.
        CaptureError: torch.export cannot capture the model.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()
        >>> x = torch.randn(80, 4)
        >>> task = (x.sum(1) > 0).long()
        >>> snows.linear_probe(model, x[:60], task[:60], x[60:], task[60:]) > 0.5
        True
    """
    require_module(model, "model")
    check_count("batch", batch)
    _check(train, train_labels, "train")
    _check(test, test_labels, "test")
    if train.shape[1:] != test.shape[1:] or kind_of(train) != kind_of(test):
        raise InputError(
            f"training samples are {train.dtype} of shape {tuple(train.shape)} and test samples {test.dtype} of shape "
            f"{tuple(test.shape)}; expected the same kind and shape"
        )
    batch = min(batch, max(len(train), len(test)))
    examples = max(train, test, key=len)[: max(batch, _EXAMPLES)]
    with own_surroundings(device_of(model)):
        prepared = prepare(model, examples, None, seed=0)
        prepared.compare_at_sizes(min(batch, len(examples)))
        layer = _last_layer(prepared.graph, type(model).__name__)
        known, new = (_features(prepared, layer, part, batch) for part in (train, test))
        classes, targets = train_labels.cpu().unique(return_inverse=True)
        predicted = classes[_ridge_regression(known, targets, len(classes), new)]
        return float((predicted == test_labels.cpu()).double().mean())


def _last_layer(graph: Graph, name: str) -> Layer:
    """The layer that is executed last, whether or not its weight could be pruned."""
    layers = [layer for layer in graph.layers if layer.in_graph]
    if not layers:
        raise InputError(f"{name} has no layer whose input could serve as features")
    return max(layers, key=lambda layer: layer.position)


def _features(prepared: Prepared, layer: Layer, x: Tensor, batch: int) -> Tensor:
    """Samples x features, in float64. Features of several positions are averaged."""
    graph = prepared.graph
    dtype = next(value.dtype for value in graph.parameters.values() if value.is_floating_point())
    program = graph.giving([a for a in layer.node.all_input_nodes if a.name == layer.input])
    (name,) = [node.name for node in graph.inputs]
    rows = []
    with torch.no_grad():
        for part in x.split(batch):
            inputs = placed({name: part}, prepared.device, dtype)
            features = {**inputs, **program(inputs, graph.parameters)}[layer.input]
            if layer.is_convolution:
                features = features.flatten(2).mT
            rows.append(features.reshape(len(part), -1, features.shape[-1]).double().mean(1).cpu())
    return torch.cat(rows)


def _ridge_regression(known: Tensor, targets: Tensor, classes: int, new: Tensor) -> Tensor:
    """The predicted class of each new row."""
    held_out = torch.arange(len(known)) % _HELD_OUT == _HELD_OUT - 1
    best = _RIDGES[len(_RIDGES) // 2]
    if held_out.any():
        answers = _predict(known[~held_out], targets[~held_out], classes, known[held_out], _RIDGES)
        right = torch.stack([(answer == targets[held_out]).double().mean() for answer in answers])
        best = _RIDGES[int(right.argmax())]
    return _predict(known, targets, classes, new, (best,))[0]


def _predict(known: Tensor, targets: Tensor, classes: int, new: Tensor, ridges: tuple[float, ...]) -> list[Tensor]:
    """For each ridge: least squares of one column per class on standardized features; the highest column wins."""
    center, spread = known.mean(0), known.std(0, correction=0).clamp(min=1e-12)
    known, new = (known - center) / spread, (new - center) / spread
    columns = torch.nn.functional.one_hot(targets, classes).double()
    shares = columns.mean(0)
    values, vectors = torch.linalg.eigh(known.T @ known / len(known))
    projected = vectors.T @ (known.T @ (columns - shares) / len(known))
    return [
        (new @ (vectors @ (projected / (values.clamp(min=0) + ridge)[:, None])) + shares).argmax(1) for ridge in ridges
    ]


def _check(x: Tensor, y: Tensor, what: str) -> None:
    for value in (x, y):
        if not isinstance(value, Tensor) or unusable(value) is not None or not value.ndim:
            kind = unusable(value) if isinstance(value, Tensor) else a_type(value)
            raise ArgumentError(f"{what} is {kind or 'a single number'}; expected tensors of samples and of labels")
    if not len(x):
        raise InputError(f"there are no {what} samples")
    if y.ndim != 1 or y.is_floating_point() or len(y) != len(x):
        raise InputError(
            f"the {what} labels are {y.dtype} of shape {tuple(y.shape)} for {len(x)} samples; expected one whole "
            "number for each"
        )
