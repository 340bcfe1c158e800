"""What `snows.bench` found, as plain values and as a file that `prune` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..data.layer_lists import KIND
from ..errors import one_line
from ..results.files import write_or_rescue
from ..words import counted
from .clock import Timing


@dataclass(frozen=True)
class LayerTiming:
    """One layer at one batch size, dense and with a sparse kernel, timed in turns.

    Attributes:
        batch: Samples.
        kernel: The sparse kernel of torch.
        mode: How torch ran both: "eager", or "graph" (a CUDA graph).
        dense: Of the layer with ordinary weights.
        sparse: Of the same layer with packed weights.
    """

    batch: int
    kernel: str
    mode: str
    dense: Timing
    sparse: Timing


@dataclass(frozen=True)
class LayerBenchmark:
    """One pruned layer.

    Attributes:
        name: The layer's module.
        parameter: The name of its weight.
        shape: Of the weight.
        sparsity: The fraction that is removed.
        reason: Why the layer was not timed; None if it was.
        timed_as: A layer of the same shape, input and sparsity, whose times these are; None if they are its own.
        timings: By batch size and mode.
        elsewhere: By engine, why its sparse kernels cannot take the layer; None if they can. None of them was timed.
        never: What nothing gains from this layer's zeros, one sentence each.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    sparsity: float
    reason: str | None
    timed_as: str | None = None
    timings: tuple[LayerTiming, ...] = ()
    elsewhere: dict[str, str | None] = field(default_factory=dict)
    never: tuple[str, ...] = ()

    def fastest(self, batch: int) -> tuple[Timing, Timing] | None:
        """The best dense and the best sparse timing at a batch size, each in its own best mode."""
        here = [timing for timing in self.timings if timing.batch == batch]
        if not here:
            return None
        dense, sparse = ([getattr(timing, kind) for timing in here] for kind in ("dense", "sparse"))
        return min(dense, key=lambda t: t.median), min(sparse, key=lambda t: t.median)

    @property
    def kernel(self) -> str | None:
        """The sparse kernel that was fastest at the largest batch size; None if none was timed."""
        largest = max((timing.batch for timing in self.timings), default=0)
        here = [timing for timing in self.timings if timing.batch == largest]
        return min(here, key=lambda t: t.sparse.median).kernel if here else None

    def pays(self, batch: int) -> bool:
        """Whether the best sparse way is faster than the best dense one, beyond the spread of both."""
        best = self.fastest(batch)
        return best is not None and best[1].below(best[0])


@dataclass(frozen=True)
class NetworkTiming:
    """The whole network at one batch size.

    Attributes:
        engine: "torch", "onnxruntime" or "openvino".
        mode: How torch ran it, or the engine's settings.
        weights: "dense", "sparse" (all layers that the kernel takes) or "sparse where it pays".
        batch: Samples.
        timing: Seconds; None if it did not run.
        reason: Why it did not run; None if it did.
    """

    engine: str
    mode: str
    weights: str
    batch: int
    timing: Timing | None
    reason: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """What sparse weights are worth on this machine, as `snows.bench` returns it.

    Attributes:
        model: The model's class.
        machine: Device, processor, threads, and versions of what was timed.
        dtype: In which torch computed.
        batches: The batch sizes.
        layers: Every pruned layer, in the order of the result.
        network: The whole network.
        flops: The operations of the dense and the sparse network, as the result's report has them.
        seconds: What the measurements took.
        not_timed: What the time limit left out.

    Example:
        >>> import snows
        >>> snows.Benchmark("Net", {}, "float32", (1,), (), ()).prune
        ()
    """

    model: str
    machine: dict[str, Any]
    dtype: str
    batches: tuple[int, ...]
    layers: tuple[LayerBenchmark, ...]
    network: tuple[NetworkTiming, ...]
    flops: dict[str, float] | None = None
    seconds: float = 0.0
    not_timed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        faster = f"{len(self.prune)} of {counted(len(self.layers), 'layer')} faster sparse"
        return f"<Benchmark: {one_line(self.model)} in {self.dtype}, {faster}>"

    @property
    def sparse_network(self) -> bool:
        """Whether the whole network was timed with sparse weights, in any engine."""
        return any(row.timing is not None and row.weights != "dense" for row in self.network)

    @property
    def prune(self) -> tuple[str, ...]:
        """The layers to prune if speed is the goal: sparse was faster at one of the batch sizes at least."""
        return tuple(layer.name for layer in self.layers if any(map(layer.pays, self.batches)))

    def fastest(self, batch: int) -> NetworkTiming | None:
        """The whole network's best time at a batch size, in any engine and mode."""
        ran = [(row.timing.median, row) for row in self.network if row.batch == batch and row.timing is not None]
        return min(ran, key=lambda pair: pair[0])[1] if ran else None

    def gains(self, batch: int) -> tuple[tuple[NetworkTiming, float], ...]:
        """Ways in which the whole network was faster sparse than dense in the same engine and mode, and how many times.

        Faster is beyond the spread of both.
        """
        rows = [row for row in self.network if row.batch == batch]
        dense = {(row.engine, row.mode): row.timing for row in rows if row.weights == "dense"}
        pairs = [(row, row.timing, dense.get((row.engine, row.mode))) for row in rows if row.weights != "dense"]
        return tuple((row, old.median / new.median) for row, new, old in pairs if new and old and new.below(old))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, with the list that `prune` reads."""
        paying = {str(batch): [x.name for x in self.layers if x.pays(batch)] for batch in self.batches}
        kernels = {layer.name: layer.kernel for layer in self.layers}
        return {"kind": KIND, **asdict(self), "kernels": kernels, "prune": list(self.prune), "pays_at": paying}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the file that `snows.prune(..., layers=file)` and `--layers FILE` read."""
        write_or_rescue(Path(path), f"{self.to_json()}\n".encode())
