from .base import NM, Pattern, PatternRules, Unstructured, keep_best, parse_pattern

__all__ = ["NM", "Pattern", "PatternRules", "Unstructured", "keep_best", "parse_pattern"]
