"""Whether a network's features still serve other tasks: a linear probe on what its classifier reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..data.preparation import Prepared, prepare
from ..errors import InputError
from ..graph import Graph, Layer

_BATCH = 100
_EXAMPLES = 8  # to capture the model with
_RIDGES = tuple(10.0**power for power in range(-6, 3))  # of the features' mean second moment
_JUDGED = 5  # every fifth sample chooses the ridge


def linear_probe(
    model: nn.Module, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, batch: int = _BATCH
) -> float:
    """The share of test samples that a linear classifier on the model's features gets right.

    Features are what the model's last layer reads. The classifier is a ridge regression of the classes on them, in
    closed form; how strong it is, a fifth of the training samples says, before it is fitted to all of them. Labels may
    be of any task; the model's own classes play no part.
    """
    _check(train, train_labels, "train")
    _check(test, test_labels, "test")
    world = prepare(model, train[:_EXAMPLES], None, seed=0)
    layer = _classifier(world.graph, type(model).__name__)
    known, new = (_features(world, layer, part, batch) for part in (train, test))
    classes, targets = train_labels.cpu().unique(return_inverse=True)
    predicted = classes[_ridge_regression(known, targets, len(classes), new)]
    return float((predicted == test_labels.cpu()).double().mean())


def _classifier(graph: Graph, name: str) -> Layer:
    """The layer that is executed last, whether or not its weight could be pruned."""
    layers = [layer for layer in graph.layers if layer.in_graph]
    if not layers:
        raise InputError(f"{name} has no layer whose input could serve as features")
    return max(layers, key=lambda layer: layer.position)


def _features(world: Prepared, layer: Layer, x: Tensor, batch: int) -> Tensor:
    """One row a sample, in float64; features of several positions are averaged."""
    graph = world.graph
    dtype = next(value.dtype for value in graph.parameters.values() if value.is_floating_point())
    program = graph.giving([a for a in layer.node.all_input_nodes if a.name == layer.input])
    (name,) = [node.name for node in graph.inputs]
    rows = []
    with torch.no_grad():
        for part in x.split(batch):
            inputs = {name: part.to(world.device, dtype if part.is_floating_point() else part.dtype)}
            found = {**inputs, **program(inputs, graph.parameters)}[layer.input]
            found = found.flatten(2).mT if layer.is_convolution else found.reshape(len(part), -1, found.shape[-1])
            rows.append(found.double().mean(1).cpu())
    return torch.cat(rows)


def _ridge_regression(known: Tensor, targets: Tensor, classes: int, new: Tensor) -> Tensor:
    """The class that each new row is given."""
    judged = torch.arange(len(known)) % _JUDGED == _JUDGED - 1
    fitted = [targets[~judged], targets[judged]]
    best = _RIDGES[len(_RIDGES) // 2]
    if len(fitted[1]):
        answers = _predict(known[~judged], fitted[0], classes, known[judged], _RIDGES)
        right = torch.stack([(answer == fitted[1]).double().mean() for answer in answers])
        best = _RIDGES[int(right.argmax())]
    return _predict(known, targets, classes, new, (best,))[0]


def _predict(known: Tensor, targets: Tensor, classes: int, new: Tensor, ridges: tuple[float, ...]) -> list[Tensor]:
    """For each ridge: standardized features, least squares on one column a class, the highest of them."""
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
    if not len(x):
        raise InputError(f"there are no {what} samples")
    if y.ndim != 1 or y.is_floating_point() or len(y) != len(x):
        raise InputError(
            f"the {what} labels are {y.dtype} of shape {tuple(y.shape)} for {len(x)} samples; expected one whole "
            "number for each"
        )
