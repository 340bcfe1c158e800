"""A model as a flat graph of operations, cut into segments. Knows nothing of masks or solvers."""

from .capture import capture
from .graph import Graph
from .layers import Layer
from .segment import Program, Segment

__all__ = ["Graph", "Layer", "Program", "Segment", "capture"]
