"""Sparsity patterns: which masks are allowed, and the best allowed mask for given scores."""

from .base import SPREADS, Budget, Group, Pattern, Spread
from .nm import NM
from .parse import PatternRules, parse_pattern
from .unstructured import Unstructured, keep_best, ranks_within, without_lowest

__all__ = [
    "NM",
    "SPREADS",
    "Budget",
    "Group",
    "Pattern",
    "PatternRules",
    "Spread",
    "Unstructured",
    "keep_best",
    "parse_pattern",
    "ranks_within",
    "without_lowest",
]
