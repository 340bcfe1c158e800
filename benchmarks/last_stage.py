"""What the last stage brings, and what of it: from one cascade, several ways to train all layers together.

    python benchmarks/last_stage.py --shared ../shared --network mobilenet --pattern 0.7 --seconds 200

One cascade is run once; every way starts from its weights. Ways are compared by the KL to the dense network on
calibration images that nothing was fitted to; accuracy on validation images is measured as well and decides nothing.
One row a way under benchmarks/results/last-stage-NETWORK.json. No way is begun when the time is up.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accuracy import DATA, environment
from networks import load_network, normalization
from torch import Tensor, nn
from torch.fx import Node

import snows
from snows.data.preparation import prepare, with_weights
from snows.data.sources import read_npz
from snows.devices.memory import memory_limits
from snows.graph import Graph
from snows.recipe import DEFAULT
from snows.solve.distill import Distillation
from snows.solve.settings import resolve

HERE = Path(__file__).parent
KEPT_ASIDE = 300  # calibration images to choose by
FIRST_SECONDS = 5  # of a way that was not timed yet


@dataclass(frozen=True)
class Way:
    """How the last stage is done."""

    steps: int = 1000
    precision: str = "half"  # of passes: "half" is pure bfloat16, "mixed" is autocast
    matched: str = "operations"  # whose outputs are matched, beside the network's own
    rate: float | None = None
    batch: int | None = None
    share: float | None = None  # of the network's outputs in the loss


WAYS = {
    "half, all operations": Way(),
    "mixed, all operations": Way(precision="mixed"),
    "mixed, norms": Way(precision="mixed", matched="norms"),
    "half, norms": Way(matched="norms"),
    "mixed, norms, 3000 steps": Way(3000, precision="mixed", matched="norms"),
    "half, norms, 3000 steps": Way(3000, matched="norms"),
    "half, all operations, 3000 steps": Way(3000),
    "mixed, norms, 3000 steps, 1e-3": Way(3000, precision="mixed", matched="norms", rate=1e-3),
    "mixed, norms, 3000 steps, batches of 128": Way(3000, precision="mixed", matched="norms", batch=128),
    "mixed, no layer before its norm": Way(precision="mixed", matched="not before a norm"),
    "mixed, norms, outputs by half": Way(precision="mixed", matched="norms", share=0.5),
    "mixed, norms, 1e-3": Way(precision="mixed", matched="norms", rate=1e-3),
}


def norms(graph: Graph) -> list[Node]:
    """Batch norms are scales and shifts in the captured graph."""
    return [node for node in graph.operations if "addcmul" in str(node.target)]


def not_before_a_norm(graph: Graph) -> list[Node]:
    read = {node for norm in norms(graph) for node in norm.all_input_nodes}
    return [node for node in graph.operations if node not in read]


MATCHED: dict[str, Callable[[Graph], Sequence[Node]]] = {
    "operations": lambda graph: graph.operations,
    "norms": norms,
    "not before a norm": not_before_a_norm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and checkpoints/")
    parser.add_argument("--network", default="mobilenet", choices=["mobilenet", "resnet50"])
    parser.add_argument("--pattern", default="0.7")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--more", action="store_true", help="also the images of imagenet_more.npz")
    parser.add_argument("--test-samples", type=int, default=2500)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, help="instead of each way's own")
    parser.add_argument("--horizon", type=int, default=4, help="of the cascade")
    parser.add_argument("--sweeps", type=int, default=1, help="of the cascade")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no way is begun that would take longer")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore", snows.SnowsWarning)
    Trial(options).run()


class Trial:
    def __init__(self, options: argparse.Namespace) -> None:
        self.began, self.options = time.perf_counter(), options
        x = read(options, DATA[options.network][0])
        if options.more:
            x = torch.cat([x, read(options, "imagenet_more.npz")])
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
        self.aside, self.fitted = x[:KEPT_ASIDE], x[KEPT_ASIDE:][: options.samples]
        self.model = load_network(options.network, options.shared).to(options.device)
        self.path = options.out / f"last-stage-{options.network}.json"
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        recipe = DEFAULT.replace(horizon=self.options.horizon, sweeps=self.options.sweeps, finish_steps=0)
        result = snows.prune(
            self.model, self.fitted, self.options.pattern, exclude="*downsample*", recipe=recipe, progress=False
        )
        self.note("the cascade alone", result.model)
        for name in self.options.ways:
            longest = max((row["train_seconds"] for row in self.rows[1:]), default=FIRST_SECONDS)
            steps = self.options.steps or WAYS[name].steps
            if time.perf_counter() - self.began + 1.3 * longest * max(1, steps / 1000) > self.options.seconds:
                continue
            try:
                self.try_way(name, WAYS[name], steps, result)
            except Exception as error:  # the others are still worth their time
                print(name, repr(error)[:500], flush=True)

    def try_way(self, name: str, way: Way, steps: int, result: snows.Result) -> None:
        prepared = prepare(self.model, self.fitted, torch.device(self.options.device), 0)
        graph = prepared.graph
        given = {"finish_rate": way.rate, "finish_batch": way.batch}
        recipe = DEFAULT.replace(finish_steps=steps, **{k: v for k, v in given.items() if v is not None})
        settings = resolve(recipe, graph, self.options.device.split(":")[0]).distill
        held_out = DEFAULT.held_out_samples(prepared.samples.count)
        fitted, judged = prepared.samples.split(prepared.samples.count - held_out)
        state = {key: value.to(self.options.device) for key, value in result.model.state_dict().items()}
        start = {key: state.get(key, value) for key, value in graph.parameters.items()}
        memory = memory_limits(torch.device(self.options.device), None)
        masks = {key: mask.to(self.options.device) for key, mask in result.masks.items()}
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(Distillation, "_precision", return_value=way.precision))
            patches.enter_context(mock.patch("snows.solve.distill.matched", MATCHED[way.matched]))
            if way.share is not None:
                patches.enter_context(mock.patch("snows.solve.distill._OUTPUT_SHARE", way.share))
            began = time.perf_counter()
            stage = Distillation(graph, masks, fitted, judged, settings, memory, 0)
            changed, ended = stage.run(start)
            seconds = time.perf_counter() - began
        self.note(name, with_weights(self.model, changed), steps, seconds, (ended.loss_before, ended.loss))

    def note(
        self, name: str, model: nn.Module, steps: int = 0, seconds: float = 0.0, losses: Sequence[float] = ()
    ) -> None:
        aside = snows.evaluate(model, self.aside, dense=self.model)
        x, y = self.test
        found = snows.evaluate(model, x, y, dense=self.model)
        self.rows.append(
            {
                "way": name, "steps": steps, "train_seconds": round(seconds, 1), "held_out_losses": list(losses),
                "kl_aside": round(aside["kl"], 4), "agreement_aside": round(aside["agreement"], 4),
                "top1": round(100 * found["top1"], 2), "kl": round(found["kl"], 4),
                "seconds_so_far": round(time.perf_counter() - self.began, 1),
            }
        )  # fmt: skip
        print(json.dumps(self.rows[-1]), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        facts = {key: str(value) for key, value in vars(self.options).items() if key not in ("shared", "out")}
        self.path.write_text(
            json.dumps({"options": facts, "rows": self.rows, "environment": environment(self.options.device)}, indent=2)
        )

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_test"):
            parts = [
                read_npz(self.options.shared / "data" / file, *normalization(self.options.network))
                for file in DATA[self.options.network][1]
            ]
            labels = torch.cat([y for _, y in parts if y is not None])
            keep = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: self.options.test_samples]
            self._test = torch.cat([x for x, _ in parts])[keep], labels[keep]
        return self._test


def read(options: argparse.Namespace, file: str) -> Tensor:
    return read_npz(options.shared / "data" / file, *normalization(options.network))[0]


if __name__ == "__main__":
    main()
