"""The tables of docs/after-pruning.md: engines on a CPU, kernels and networks on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
NETWORKS = {"resnet50": "ResNet50", "vit-s": "ViT-S", "vit": "ViT-B", "resnet": "ResNet50", "wide": "MLP, 4,096 wide"}
DENSE = {"fp16": ("fp16 dense", "fp16 dense, channels first"), "int8": ("int8 dense, int32 out",)}
DENSE["fp8"] = ("fp8 dense", "fp8 dense, fast sums")


def engines() -> str:
    found = _read("engines")
    if found is None:
        return "Not measured yet: `python benchmarks/engines.py`."
    titles = ["network", "sparsity", "batch", "torch", "torch, CSR", "ONNX Runtime", "OpenVINO, off", "on", "off / on"]
    columns = [
        ("torch", "dense"),
        ("torch", "sparse"),
        ("onnxruntime", "dense"),
        ("openvino", "dense"),
        ("openvino", "sparse"),
    ]
    rows = []
    for row in sorted(found["rows"], key=lambda row: (row["network"], row["sparsity"])):
        for batch in sorted({entry["batch"] for entry in row["network_timings"]}):
            timings = {
                (entry["engine"], entry["weights"]): entry["timing"]
                for entry in row["network_timings"]
                if entry["batch"] == batch and entry["mode"] != "compiled"
            }
            cells = [_milliseconds(timings.get(column)) for column in columns]
            off, on = (timings.get(("openvino", weights)) for weights in ("dense", "sparse"))
            ratio = f"{off['median'] / on['median']:.2f}" if off and on else "–"
            rows.append([NETWORKS[row["network"]], str(row["sparsity"]), str(batch), *cells, ratio])
    machine = found["rows"][0]["machine"]
    return f"{_table(titles, rows)}\n\n{_machine(machine)} Milliseconds a batch: median (quartiles)."


def on_a_gpu() -> str:
    """Whole networks, single products and two layers in a row, or one sentence where none was timed."""
    found = _read("kernels")
    if found is None:
        command = "python benchmarks/kernels.py --out benchmarks/results/kernels.json"
        return (
            "Timings of whole networks, of single products (also in int8 and FP8) and of two layers in a row with this "
            f"version are still to come: on a GPU, `{command}` takes them and `make docs-table` shows them here."
        )
    tables = {
        "Whole networks, by `snows bench`:": (networks, {"vit", "resnet", "wide"}),
        "Single products, in the layout of networks and in the one that suits the kernel:": (kernels, {"products"}),
        "Two layers in a row:": (chains, {"chains"}),
    }
    timed = {title: make for title, (make, parts) in tables.items() if parts & found.keys()}
    return "\n\n".join(f"{title}\n\n{make(found)}" for title, make in timed.items())


def networks(found: Row) -> str:
    rows = []
    for part in ("vit", "resnet", "wide"):
        timings: dict[tuple[int, str], dict[str, Any]] = {}
        for entry in found.get(part, {}).get("network", []):
            if entry["timing"] is not None:
                timings.setdefault((entry["mode"], entry["engine"], entry["batch"]), {})[entry["weights"]] = entry[
                    "timing"
                ]
        for (mode, _, batch), by in sorted(timings.items(), key=lambda item: (item[0][2], item[0][0])):
            ways = ("dense", "sparse", "sparse where it pays")
            best = min((by[way]["median"] for way in ways[1:] if way in by), default=None)
            ratio = f"{by['dense']['median'] / best:.2f}" if best and "dense" in by else "–"
            rows.append([NETWORKS[part], str(batch), mode, *(_milliseconds(by.get(way)) for way in ways), ratio])
    titles = ["network", "batch", "mode", "dense", "all 2:4", "2:4 where it pays", "dense / best 2:4"]
    return f"{_table(titles, rows)}\n\n{_machine(found['environment'])} Milliseconds a batch: median (quartiles)."


def kernels(found: Row) -> str:
    """Single products: for each type of number the best dense and the best sparse way."""
    rows = []
    for row in found.get("products", {}).get("rows", []):
        times = _medians(row)
        cells = [f"{row['outputs']} x {row['inputs']}", f"{row['positions']:,}", _time(times.get("fp16 dense"))]
        cells += [_time(times.get("fp16 2:4, result copied")), _time(times.get("fp16 2:4"))]
        for kind in DENSE:
            cells.append(_against(times, kind))
        rows.append(cells)
    titles = ["outputs x inputs", "positions", "fp16 dense", "2:4, copied", "2:4", "best fp16", "best int8", "best fp8"]
    said = "Microseconds as a CUDA graph, medians. The last three columns: best dense way / best 2:4 way (speed-up)."
    return f"{_table(titles, rows)}\n\n{said}"


def chains(found: Row) -> str:
    rows = []
    for row in found.get("chains", {}).get("rows", []):
        times = _medians(row)
        names = ("fp16 2:4, torch's layers", "fp16 2:4, channels first")
        rows.append(
            [
                f"MLP {row['chain']}",
                f"{row['positions']:,}",
                *(_time(times.get(key)) for key in ("fp16 dense", *names)),
                _against(times, "fp16"),
            ]
        )
    titles = ["what", "positions", "dense", "torch's 2:4 layers", "channels first", "best dense / best 2:4"]
    return f"{_table(titles, rows)}\n\nMicroseconds as a CUDA graph, medians."


def _medians(row: Row) -> dict[str, float]:
    return {name: values[1] for name, values in row["microseconds"].items()}


def _against(times: dict[str, float], kind: str) -> str:
    dense = [times[name] for name in DENSE[kind] if name in times]
    sparse = [value for name, value in times.items() if name.startswith(f"{kind} 2:4")]
    if not dense or not sparse:
        return "–"
    return f"{_time(min(dense))} / {_time(min(sparse))} ({min(dense) / min(sparse):.2f})"


def _time(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(timing: Row | None) -> str:
    if timing is None:
        return "–"
    median, low, high = (_time(1e3 * timing[name]) for name in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


def _machine(machine: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    device = "" if machine["device"] == "cpu" else f"{machine['device']}; "
    amx = "" if machine["device"] != "cpu" else f", {'with' if machine['amx'] else 'without'} AMX"
    return f"Measured on: {device}{machine['cpu']}{amx}, {machine['threads']} threads; {versions}."


def _table(titles: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *rows])


def _read(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
