"""WoodFisher against its definition, with every inverse computed."""

from __future__ import annotations

import torch

from snows.masks.fisher import slices
from snows.masks.woodfisher import WoodFisher
from snows.patterns import Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork, fisher_of


def test_woodfisher_by_its_definition() -> None:
    network = FakeNetwork(TWO_LAYERS, Unstructured(0.4, "uniform"))
    method = WoodFisher(damping=1e-2, block=5)
    choice = method.choose(network)
    for name, weight in network.weights.items():
        w = weight.flatten()
        saliency, changes = torch.empty_like(w), []
        for part in slices(len(w), 5):
            inverse = torch.linalg.inv(fisher_of(network.rows[name][:, part], 1e-2))
            saliency[part] = w[part] ** 2 / inverse.diagonal()
            changes.append((part, inverse))
        removed = round(0.4 * len(w))
        gone = saliency.argsort()[:removed].tolist()
        assert (~choice.masks[name].flatten()).nonzero().flatten().tolist() == sorted(gone)
        expected = w.clone()
        for part, inverse in changes:
            for q in (p for p in gone if part.start <= p < part.stop):
                own = inverse[:, q - part.start]
                expected[part] -= own * w[q] / own[q - part.start]
        expected[gone] = 0
        torch.testing.assert_close(choice.weights[name].flatten(), expected, rtol=1e-7, atol=1e-9)
