"""`snows.bench`: dense against sparse on this machine, each layer and the whole network."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ..caller import Stoppable, own_surroundings
from ..devices.device import as_device, best_device, placed
from ..errors import ArgumentError, shown
from ..events import Listener, Working
from ..exports.base import Saved
from ..exports.reading import read_saved
from ..graph.capture import Call
from ..listeners.progress import Listeners, listening
from ..reading import read_json
from ..results.manifest import REPORT
from .benchmark import Benchmark, LayerBenchmark, LayerTiming, NetworkTiming
from .clock import time_in_turns
from .engines import Exports, Setting, check_engines, packed, torch_settings
from .kernels import kernels_of
from .layers import LayerCase, failure, find_cases, time_layer
from .machine import describe_machine
from .modes import COMPILED, chosen_dtype, chosen_modes
from .possibilities import elsewhere, never, sparsity

BATCHES = (1, 8, 32)
LIMIT = 120.0  # seconds
_LAYERS_SHARE = 0.5  # of the limit; the rest is for the whole network
_SECONDS = 0.5  # of a layer at one batch size
_NETWORK_SECONDS = 2.0  # of the whole network in one mode at one batch size


def bench(
    directory: str | Path,
    model: nn.Module | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    engines: Iterable[str] | None = None,
    modes: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    limit: float = LIMIT,
    progress: Listeners = True,
) -> Benchmark:
    """Time a saved result on this machine: what its zeros are worth here.

    Each pruned layer is timed with ordinary and with sparse kernels of torch, in turns, warm; then the whole network
    dense, with all layers packed, and with those packed that gained. On a GPU in half precision, eager, as a CUDA graph
    and compiled; on a CPU eager and compiled, and in ONNX Runtime and OpenVINO where these are installed.

    Args:
        directory: A folder that `Result.save` or `snows prune --out` wrote.
        model: The model that was pruned, with any weights. It is not changed. Default: a new model of the name that the
            folder records, unless that is code ("file.py:factory"), which is never run.
        batches: Batch sizes.
        engines: "torch", "onnxruntime", "openvino". Default: torch, and on a CPU those that are installed.
        modes: How torch runs the whole network: "eager", "compiled", and on a GPU "graph" and "compiled graph".
            Default: all. Compiling takes longest; it comes last.
        device: Where to time. Default: a GPU if there is one.
        dtype: On a GPU "float16" or "bfloat16". Default: "float16". Elsewhere it is that of the weights.
        limit: Seconds. What cannot be measured in that time is listed as not timed; a measurement that has begun ends.
        progress: As of `snows.prune`.

    Returns:
        A `Benchmark`. Its `prune` names the layers that were faster sparse; `save` writes the file that `prune` takes
        as `layers=`.

    Raises:
        ArgumentError: An option is not understood.
        InputError: The result is damaged, or an engine is not installed.

    Example:
        >>> import tempfile, torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     saved = result.save(f"{place}/pruned")
        ...     found = snows.bench(saved, model, batches=[1], engines=[], device="cpu", limit=2, progress=False)
        >>> [(layer.name, layer.kernel, [timing.batch for timing in layer.timings]) for layer in found.layers]
        [('0', 'CSR, MKL', [1])]
    """
    sizes = _check_batches(batches)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ArgumentError(f"limit is {shown(limit)}; expected a number of seconds above 0")
    place = as_device(device) or best_device()
    chosen, ways, half = check_engines(engines, place), chosen_modes(modes, place), chosen_dtype(dtype, place)
    with (
        Stoppable(),
        listening(progress, "timing") as notify,
        own_surroundings(place, notify),
        TemporaryDirectory() as folder,
    ):
        saved = read_saved(directory, model)
        return _Bench(saved, place, half, sizes, ways, limit, notify).run(chosen, Path(folder))


def _check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(batches))
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ArgumentError(f"batches is {shown(batches)}; expected batch sizes of 1 or more")
    return sizes


@dataclass
class _Bench:
    """The measurements of one call, which stop when the time is up."""

    saved: Saved
    device: torch.device
    half: torch.dtype | None  # in which torch computes on a GPU
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    limit: float
    notify: Listener
    began: float = field(default_factory=time.perf_counter)
    not_timed: list[str] = field(default_factory=list)
    done: int = 0  # of `total` measurements
    total: int = 0

    def run(self, engines: tuple[str, ...], folder: Path) -> Benchmark:
        dtype = self.half or self._stored_dtype()
        layout = (
            torch.channels_last if self.device.type == "cuda" else torch.preserve_format
        )  # fastest for convolutions
        network = self.saved.model.to(self.device, dtype)
        for parameter in network.parameters():
            parameter.data = placed(parameter.data, self.device, dtype, layout)
        calls = {batch: placed(self.saved.inputs(batch), self.device, dtype, layout) for batch in self.batches}
        cases = find_cases(network, self.saved.masks, calls, kernels_of(self.device))
        modes = sum(len(self.modes) if engine == "torch" else 1 for engine in engines)
        first: dict[Any, LayerCase] = {}
        for case in cases.values():
            if case.kernels:
                first.setdefault(case.key, case)
        self.total = (len(first) + modes) * len(self.batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says about its sparse formats
            layers = self._layers(cases, first)
            settings = self._settings(engines, _variants(network, cases, layers), calls, folder)
            timings = [row for setting in settings for batch in self.batches for row in self._network(setting, batch)]
        return Benchmark(
            model=self.saved.name,
            machine=describe_machine(self.device),
            dtype=str(dtype).removeprefix("torch."),
            batches=self.batches,
            layers=tuple(layers),
            network=tuple(timings),
            flops=read_json(self.saved.folder / REPORT).get("flops"),
            seconds=round(time.perf_counter() - self.began, 1),
            not_timed=tuple(self.not_timed),
        )

    def _settings(
        self, engines: tuple[str, ...], variants: dict[str, nn.Module], calls: dict[int, Call], folder: Path
    ) -> list[Setting]:
        """All engines in all modes. Compiling takes longest and comes last."""
        exports = Exports(self.saved, folder)
        found = [
            setting
            for engine in engines
            for setting in (
                torch_settings(variants, calls, self.modes, self.device)
                if engine == "torch"
                else exports.settings(engine, calls)
            )
        ]
        return sorted(found, key=lambda setting: setting.mode.startswith(COMPILED))

    def _stored_dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.saved.model.parameters() if p.is_floating_point())

    def _in_time(self, what: str, share: float = 1.0) -> bool:
        """Whether there is time left; what there is none for is noted."""
        self.notify(Working(what, self.done, self.total))
        if time.perf_counter() - self.began < share * self.limit:
            return True
        self.not_timed.append(what)
        return False

    def _layers(self, cases: dict[str, LayerCase], first: dict[Any, LayerCase]) -> list[LayerBenchmark]:
        """Layers that are alike are timed once: the first of them in the network."""
        timed = {key: self._timings(case) for key, case in first.items()}
        return [self._layer(case, first, timed) for case in cases.values()]

    def _timings(self, case: LayerCase) -> tuple[list[LayerTiming], str | None]:
        found: list[LayerTiming] = []
        for batch in self.batches:
            if self._in_time(f"{case.name}, batch {batch}", _LAYERS_SHARE):
                try:
                    found += time_layer(case, batch, _SECONDS)
                except Exception as error:  # each library has its own kinds
                    return found, failure(error)
            self.done += 1
        return found, None if found else "there was no time left"

    def _layer(self, case: LayerCase, first: dict[Any, LayerCase], timed: dict[Any, Any]) -> LayerBenchmark:
        weight = self.saved.weight(case.parameter)
        own = first.get(case.key) if case.kernels else None
        timings, reason = timed[case.key] if own is not None else ((), case.reason)
        return LayerBenchmark(
            name=case.name,
            parameter=case.parameter,
            shape=tuple(weight.shape),
            sparsity=sparsity(weight),
            reason=reason,
            timed_as=None if own is None or own is case else own.name,
            timings=tuple(timings),
            elsewhere=elsewhere(case.module, case.parameter, weight, called=bool(case.shapes)),
            never=never(case.module, weight),
        )

    def _network(self, setting: Setting, batch: int) -> list[NetworkTiming]:
        where = (setting.engine, setting.mode)
        if not self._in_time(f"the whole network, {setting.engine}, {setting.mode}, batch {batch}"):
            return []
        try:
            with torch.no_grad():
                timed = time_in_turns(setting.calls(batch), self.device, _NETWORK_SECONDS)
        except Exception as error:  # each engine has its own kinds
            return [NetworkTiming(*where, "all", batch, None, failure(error))]
        finally:
            self.done += 1
        return [NetworkTiming(*where, weights, batch, timing) for weights, timing in timed.items()]


def _variants(network: nn.Module, cases: dict[str, LayerCase], layers: list[LayerBenchmark]) -> dict[str, nn.Module]:
    """The network as it is, with all sparse kernels that ran, and with those that gained at some batch size."""
    chosen = {
        layer.name: (cases[layer.parameter], kernel)
        for layer in layers
        for kernel in cases[layer.parameter].kernels
        if kernel.name == layer.kernel
    }
    gained = {layer.name for layer in layers if any(layer.pays(timing.batch) for timing in layer.timings)}
    found = {"dense": network}
    if chosen:
        found["sparse"] = packed(network, chosen)
    if 0 < len(gained) < len(chosen):
        found["sparse where it pays"] = packed(network, {name: chosen[name] for name in chosen if name in gained})
    return found
