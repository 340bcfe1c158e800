"""What sparse weights are worth on a GPU: `snows.bench` on whole networks, and what kernels can do at best.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json --limit 145
    python benchmarks/kernels.py --device cpu --tiny --out /tmp/kernels.json      # a trial without a GPU

Parts run one after the other in processes of their own, each with its share of the time, and write what they have after
every row: an error or the end of the time costs the rest of one part. Weights are random: kernels do not look at them.

    products  single products: dense and 2:4, in half precision, int8 and fp8, operands in either layout
    chains    two layers of an MLP, in the layouts of the network and of the kernel
    vit       `snows.bench` on a network of ViT-B's shape, at 2:4
    resnet    `snows.bench` on ResNet50, at 2:4
    wide      `snows.bench` on an MLP of four layers, 4,096 wide, at 2:4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from networks import ResNet50, ViT
from torch import Tensor, nn

import snows
from snows.timing.clock import time_in_turns
from snows.timing.layers import failure
from snows.timing.machine import describe_machine
from snows.timing.modes import modes_of

SHARES = {"products": 0.22, "chains": 0.1, "vit": 0.28, "resnet": 0.22, "wide": 0.18}
HALF, INT8, FP8 = torch.float16, torch.int8, torch.float8_e4m3fn
SHAPES = [(3072, 768), (768, 3072), (4096, 4096), (768, 768), (8192, 8192), (16384, 4096)]  # outputs, inputs
POSITIONS = [6304, 1024, 16384]  # 6,304: 32 images of 197 tokens
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=145.0, help="seconds, for all parts together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--modes", default="eager,graph", help="of whole networks; compiling takes minutes")
    parser.add_argument("--only", default=",".join(SHARES), help="parts, with commas")
    parser.add_argument("--part", choices=[*SHARES])
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.part is None:
        run_all(options)
        return
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    PARTS[options.part](options)


def run_all(options: argparse.Namespace) -> None:
    began, found = time.perf_counter(), {}
    left = {part: SHARES[part] for part in options.only.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        for part, share in dict(left).items():
            remaining = options.limit - (time.perf_counter() - began)
            seconds = remaining * share / sum(left.values())  # what earlier parts did not use goes to the others
            del left[part]
            file = Path(folder) / f"{part}.json"
            words = [
                "--part",
                part,
                "--modes",
                options.modes,
                "--out",
                str(file),
                "--device",
                options.device,
                "--limit",
                str(0.9 * seconds),
            ]
            command = [sys.executable, __file__, *words, *(["--tiny"] if options.tiny else [])]
            error = None
            try:
                done = subprocess.run(command, timeout=seconds, capture_output=True, text=True)
                error = done.stderr[-1000:] if done.returncode else None
            except subprocess.TimeoutExpired:
                error = f"stopped after {seconds:.0f} s"
            found[part] = json.loads(file.read_text()) if file.exists() else {}
            found[part]["error"] = error
            text = {"environment": describe_machine(torch.device(options.device)), **found}
            options.out.write_text(json.dumps(text, indent=1) + "\n")
            print(part, "rows:", len(found[part].get("rows", found[part].get("network", []))), error or "", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


# Single products, and two in a row


def timed(options: argparse.Namespace, calls: dict[str, Callable[[], Any]], seconds: float) -> Row:
    """Microseconds of each call as a CUDA graph (on a CPU as it is); a call that fails has its error instead."""
    modes = modes_of(torch.device(options.device))
    mode = modes.get("graph", modes["eager"])
    ready: dict[str, Callable[[], Any]] = {}
    errors: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
            ready[name] = mode(call)
        except Exception as error:
            errors[name] = failure(error)
    found = time_in_turns(ready, torch.device(options.device), seconds) if ready else {}
    times = {name: [round(1e6 * value, 2) for value in (t.low, t.median, t.high)] for name, t in found.items()}
    return {"microseconds": times, "errors": errors}


def collect(options: argparse.Namespace, rows: Iterator[Row]) -> None:
    """Write the rows one by one until the time is up."""
    end, found = time.perf_counter() + options.limit, []
    for row in rows:
        found.append(row)
        options.out.write_text(json.dumps({"rows": found}))
        if time.perf_counter() > end:
            break


def products(options: argparse.Namespace) -> None:
    shapes, positions = ([(64, 64)], [32]) if options.tiny else (SHAPES, POSITIONS)
    collect(options, (product(options, *shape, count) for count in positions for shape in shapes))


def product(options: argparse.Namespace, outputs: int, inputs: int, count: int) -> Row:
    weight = two_of_four(torch.randn(outputs, inputs, device=options.device)) / inputs**0.5
    x = torch.randn(count, inputs, device=options.device)
    calls: dict[str, Callable[[], Any]] = {}
    calls |= in_half(weight.to(HALF), x.to(HALF))
    calls |= in_int8((20 * weight).round().clamp(-127, 127).to(INT8), (20 * x).round().clamp(-127, 127).to(INT8))
    calls |= in_fp8(weight, x)
    return {"outputs": outputs, "inputs": inputs, "positions": count, **timed(options, calls, 0.25)}


def in_half(w: Tensor, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Positions first, as networks have it, and channels first, as the sparse kernel likes it."""
    columns = x.t().contiguous()
    calls: dict[str, Callable[[], Any]] = {
        "fp16 dense": lambda: nn.functional.linear(x, w),
        "fp16 dense, channels first": lambda: w @ columns,
    }
    return calls | sparse_products("fp16", w, x, columns, None)


def in_int8(w: Tensor, x: Tensor) -> dict[str, Callable[[], Any]]:
    columns = w.t()
    dense: dict[str, Callable[[], Any]] = {"int8 dense, int32 out": lambda: torch._int_mm(x, columns)}
    return dense | sparse_products("int8", w, x, x.t().contiguous(), HALF)


def in_fp8(weight: Tensor, values: Tensor) -> dict[str, Callable[[], Any]]:
    w, x = weight.to(FP8), values.to(FP8)
    one = torch.ones((), device=w.device)

    def dense() -> Tensor:
        return torch._scaled_mm(x, w.t(), one, one, out_dtype=HALF)

    def dense_fast() -> Tensor:
        return torch._scaled_mm(x, w.t(), one, one, out_dtype=HALF, use_fast_accum=True)

    calls: dict[str, Callable[[], Any]] = {"fp8 dense": dense, "fp8 dense, fast sums": dense_fast}
    return calls | sparse_products("fp8", w, x, x.t().contiguous(), HALF)


def sparse_products(
    kind: str, w: Tensor, x: Tensor, columns: Tensor, out: torch.dtype | None
) -> dict[str, Callable[[], Any]]:
    """cuSPARSELt with its default algorithm, operand and result in either layout."""
    compressed: list[Tensor] = []

    def call(operand: Tensor, transposed: bool) -> Tensor:
        if not compressed:
            compressed.append(torch._cslt_compress(w))
        return torch._cslt_sparse_mm(compressed[0], operand, out_dtype=out, transpose_result=transposed)

    found: dict[str, Callable[[], Any]] = {f"{kind} 2:4": lambda: call(x.t(), True)}
    if kind == "fp16":
        found[f"{kind} 2:4, result copied"] = lambda: call(x.t(), False).t().contiguous()
        found[f"{kind} 2:4, channels first"] = lambda: call(columns, False)
    return found


def chains(options: argparse.Namespace) -> None:
    cases = [(768, 3072, 6304), (4096, 4096, 1024), (4096, 4096, 8192), (4096, 16384, 4096), (1024, 4096, 6304)]
    collect(options, (chain(options, *case) for case in ([(64, 128, 32)] if options.tiny else cases)))


def chain(options: argparse.Namespace, width: int, hidden: int, count: int) -> Row:
    """Linear, ReLU, linear. The kernel's layout is kept between the two."""
    device = options.device
    dense = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)).to(device, HALF)
    with torch.no_grad():
        for layer in (dense[0], dense[2]):
            layer.weight.copy_(two_of_four(layer.weight))
    x = torch.randn(count, width, device=device, dtype=HALF)
    columns = x.t().contiguous()
    w1, w2 = (dense[index].weight.detach() for index in (0, 2))
    b1, b2 = (dense[index].bias.detach()[:, None] for index in (0, 2))
    parts: dict[str, Any] = {}

    def of_torch() -> Tensor:
        if "torch" not in parts:
            from snows.exports.semi_structured import pack

            copied = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)).to(device, HALF)
            copied.load_state_dict(dense.state_dict())
            parts["torch"] = pack(copied, ["0.weight", "2.weight"])
        return parts["torch"](x)

    def channels_first() -> Tensor:
        """Activations are channels x positions throughout."""
        if "packed" not in parts:
            parts["packed"] = [torch._cslt_compress(w) for w in (w1, w2)]
        p1, p2 = parts["packed"]
        y = torch._cslt_sparse_mm(p1, columns, b1[:, 0]).relu_()
        return torch._cslt_sparse_mm(p2, y, b2[:, 0])

    with torch.no_grad():
        found = timed(
            options,
            {
                "fp16 dense": lambda: dense(x),
                "fp16 dense, channels first": lambda: torch.addmm(b2, w2, torch.addmm(b1, w1, columns).relu_()),
                "fp16 2:4, torch's layers": of_torch,
                "fp16 2:4, channels first": channels_first,
            },
            0.4,
        )
    return {"chain": f"{width}-{hidden}-{width}", "positions": count, **found}


def two_of_four(weight: Tensor) -> Tensor:
    """The two largest of every four inputs."""
    with torch.no_grad():
        groups = weight.detach().unflatten(1, (-1, 4))
        kept = torch.zeros_like(groups).scatter_(2, groups.abs().topk(2, 2).indices, 1.0)
        return (groups * kept).flatten(1)


# Whole networks


def whole(make: Callable[[bool], tuple[nn.Module, Tensor]], batches: tuple[int, ...]) -> Callable[..., None]:
    def run(options: argparse.Namespace) -> None:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model, samples = make(options.tiny)
            if options.device == "cuda":
                model, samples = model.cuda(), samples.cuda()
            result = snows.prune(model.eval(), samples, "2:4", solver=None, progress=False)
            saved = result.save(Path(folder) / "pruned")
            prepared = time.perf_counter() - began
            sizes, left = (1, 2) if options.tiny else batches, options.limit - prepared - 3
            modes = [mode for mode in options.modes.split(",") if mode in modes_of(torch.device(options.device))]
            found = snows.bench(
                saved, model.cpu(), batches=sizes, engines=["torch"], modes=modes, device=options.device, limit=left,
                progress=False,
            )  # fmt: skip
        brief = found.to_dict()
        for layer in brief["layers"]:
            layer.pop("elsewhere")
        options.out.write_text(json.dumps({**brief, "prepared_seconds": round(prepared, 1)}))

    return run


def vit(tiny: bool) -> tuple[nn.Module, Tensor]:
    return ViT(64, 2, 2) if tiny else ViT(768, 12, 12), torch.randn(4, 3, 224, 224)


def resnet(tiny: bool) -> tuple[nn.Module, Tensor]:
    return ResNet50(), torch.randn(4, 3, 32 if tiny else 224, 32 if tiny else 224)


def wide(tiny: bool) -> tuple[nn.Module, Tensor]:
    width = 64 if tiny else 4096
    layers = [module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, 16)), torch.randn(64, 64)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "products": products,
    "chains": chains,
    "vit": whole(vit, (1, 32)),
    "resnet": whole(resnet, (1, 32)),
    "wide": whole(wide, (64, 1024, 8192)),
}


if __name__ == "__main__":
    main()
