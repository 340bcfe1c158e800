"""Wanda against its ranking, row by row."""

from __future__ import annotations

from snows.masks.wanda import Wanda
from snows.patterns import NM, Pattern
from tests.masks import each_layer, groups_of, layer


@each_layer
def test_wanda_ranks_weight_times_input_norm_within_rows(name: str, pattern: Pattern) -> None:
    weight, gram = layer(name, seed=7)
    choice = Wanda().choose_layer("w", weight, gram, pattern)
    assert not choice.weights
    mask = choice.masks["w"].flatten(1)
    group = groups_of(tuple(weight.shape), pattern)
    per_group = weight.shape[0] // len(gram)
    removed = round(pattern.sparsity * weight.numel())
    for r, row in enumerate(weight.flatten(1).tolist()):
        norms = gram[r // per_group].diagonal().sqrt().tolist()
        scores = [abs(w) * norm for w, norm in zip(row, norms, strict=True)]
        for g in set(group):
            members = [p for p in range(len(row)) if group[p] == g]
            gone = {p for p in members if not mask[r, p]}
            if isinstance(pattern, NM):
                assert len(gone) == pattern.m - pattern.n
            else:  # the same number in every row, the first rows one more
                assert len(gone) == removed // len(weight) + (r < removed % len(weight))
            assert gone == set(sorted(members, key=lambda p: scores[p])[: len(gone)])
