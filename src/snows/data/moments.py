"""Second moments of the inputs of layers: Gram matrices, and cross moments with the outputs a layer should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..devices.distributed.ranks import ALONE, Ranks
from ..graph import Layer
from ..linalg.gram import damped
from ..linalg.large import cholesky, cholesky_solve, product, self_product
from .streams import Stream

Zeros = Callable[[], Sequence[Tensor]]

_PATCH_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}  # formed at once: caches like few, a GPU large products


NO_OUTPUTS = torch.zeros(())


@dataclass(frozen=True)
class Moments:
    """Second moments of a layer's inputs X, and of X with its target outputs Y, averaged over positions."""

    gram: Tensor  # groups x columns x columns
    cross: Tensor = NO_OUTPUTS  # groups x columns x outputs of a group
    energy: float = 0.0  # mean square of the target outputs, summed over groups and outputs
    positions: int = 1  # that were averaged

    @classmethod
    def collect(
        cls, pairs: Iterable[tuple[Tensor, Tensor]], ranks: Ranks = ALONE, zeros: Zeros | None = None
    ) -> Moments:
        """Sum over pairs (X, Y), each groups x positions x …, in double precision.

        Of several `ranks`, each has pairs of its own, or none: then its sums are `zeros`, see `no_moments`.
        """

        def summed() -> Sequence[Tensor]:
            gram = cross = torch.zeros((), dtype=torch.float64)
            energy, count = 0.0, 0
            for x, y in pairs:
                gram, cross = _add(gram, second_moment(x)), _add(cross, product(x.transpose(1, 2), y))
                energy += float(torch.linalg.vector_norm(y, dtype=torch.promote_types(y.dtype, torch.float32))) ** 2
                count += x.shape[1]
            return [gram.new_tensor([energy, count]), gram, cross] if count or zeros is None else zeros()

        (energy, count), gram, cross = ranks.sums(summed, zeros or list)
        return cls(gram.div_(count), cross.div_(count), float(energy / count), int(count))

    def refit(self, weight: Tensor, relative_damping: float) -> Tensor:
        """The unpruned least-squares weights (rows x columns), damped towards `weight`."""
        start = weight.to(self.gram.device, self.gram.dtype).unflatten(0, (len(self.gram), -1)).mT
        factor, _ = cholesky(damped(self.gram, relative_damping))
        change = cholesky_solve(self.cross - product(self.gram, start), factor)
        refitted: Tensor = (start + change).mT.flatten(0, 1).to(weight.device, weight.dtype)
        return refitted


def _add(total: Tensor, part: Tensor) -> Tensor:
    """The sum, in double precision and in place. `total` is a scalar zero at first."""
    return total.add_(part) if total.ndim else part.double()


def second_moment(x: Tensor) -> Tensor:
    """x^T x, for x groups x positions x columns."""
    return product(x.mT, x) if len(x) > 1 else self_product(x[0].mT)[None]


def gram_of_inputs(layer: Layer, stream: Stream, inputs: Iterable[Tensor] | None = None) -> Tensor:
    """The second moment of a layer's inputs, averaged over positions: groups x columns x columns.

    `inputs` are those of this rank's micro-batches. Default: what the stream, which has arrived at the layer, holds.
    """
    if inputs is None:
        inputs = (stream.read(index, [layer.input])[layer.input] for index in stream.own_of(stream.fitted))
    parts = (layer.patches(part) for x in inputs for part in x.split(samples_at_once(layer, x)))
    pairs = ((patches, patches[..., :0]) for patches in parts)
    return in_weight_order(layer, Moments.collect(pairs, stream.ranks, no_moments(layer, 0, stream.device))).gram


def no_moments(layer: Layer, outputs: int, device: torch.device) -> Zeros:
    """What a rank without samples adds to the sums of `Moments.collect`. `outputs` are those of a group."""
    shape = (layer.groups, layer.columns)
    sizes = [(2,), (*shape, layer.columns), (*shape, outputs)]
    return lambda: [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes]


def in_weight_order(layer: Layer, moments: Moments) -> Moments:
    """The same moments, with columns in the order of the layer's weight."""
    gram, cross = layer.in_weight_order(moments.gram, 1, 2), layer.in_weight_order(moments.cross, 1)
    return replace(moments, gram=gram, cross=cross)


def samples_at_once(layer: Layer, x: Tensor) -> int:
    """How many samples of `x` have their patches formed together."""
    if not layer.is_convolution:  # the first axis of a linear layer's input may not be samples alone
        return max(len(x), 1)
    kernel = layer.columns * layer.groups / x.shape[1]
    at_least = _PATCH_BYTES.get(x.device.type, _PATCH_BYTES["cpu"])
    patches = max(at_least, layer.columns**2 * x.element_size())  # adding up Gram matrices takes time, too
    return max(1, int(patches / (x[0].numel() * x.element_size() * kernel)))
