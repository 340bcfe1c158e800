"""Writes the tables of the documents from benchmarks/results. With --check: fails if they are not up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression, mean, median, stdev
from typing import Any

import bench_tables
import ranks_tables

Row = dict[str, Any]
HERE = Path(__file__).parent
RESULTS = HERE / "results"
README, APPENDIX = HERE.parent / "README.md", HERE.parent / "docs" / "appendix"
MASKS, TRANSFORMERS, SPEED = (APPENDIX / f"{name}.md" for name in ("masks", "transformers", "speed"))
ROLES = {"qkv": "query, key, value", "mlp": "MLP", "qkv,out,mlp": "all 48 matrices"}
TITLES = {
    "resnet20": "ResNet20, CIFAR-10",
    "resnet50": "ResNet50, ImageNet",
    "mobilenet": "MobileNetV1, ImageNet",
}
STAGES = {"no": "no", "paper": "the paper's", "cascade": "without the last stage", "yes": "yes"}
PUBLISHED = {  # unstructured, without retraining; from the papers
    "magnitude": (88.44, 85.24, 78.79, 54.01, 11.79),
    "woodfisher": (90.23, 87.96, 81.05, 62.63, 11.49),
    "cbs": (90.58, 88.88, 81.84, 51.28, 13.68),
    "chita": (90.60, 89.22, 84.12, 57.90, 15.60),
    "falcon": (90.87, 89.67, 84.42, 65.17, 19.14),
}


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(titles: list[str], rows: list[list[str]], device: str | None = None) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *rows]]
    return "\n".join([*lines, *(["", f"Measured on: {device}."] if device else [])])


def memory(size: float | None) -> str:
    return f"{size:.1f} GiB" if size else "–"


def gibibytes(size: float | None) -> str:
    return f"{size / 2**20:.0f} MiB" if size and size < 2**30 else memory(size / 2**30 if size else None)


def listing(name: str, *columns: tuple[str, Callable[[Row], str]], order: Callable[[Row], Any] | None = None) -> str:
    """One line for each row of a result: titles, and what stands below each."""
    result = read(name)
    rows = result["rows"] if order is None else sorted(result["rows"], key=order)
    titles, cells = zip(*columns, strict=True)
    return table(list(titles), [[cell(row) for cell in cells] for row in rows], result["environment"]["device"])


def network(row: Row) -> str:
    return TITLES[row["network"]]


def peak(row: Row) -> str:
    return gibibytes(row["peak_memory_bytes"])


def seconds(row: Row) -> str:
    return f"{row['seconds']:.0f} s"


def field(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def allowed(row: Row) -> str:
    return row["memory"] or "what is free"


def accuracy() -> str:
    titles = ["network", "pattern", "recipe", "images", "orders", "dense", "mask only", "K=0", "SNOWS", "drop, 95 %"]
    titles += ["time", "memory", "version"]
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("accuracy-*.json"))]
    order = list(TITLES)
    results.sort(key=lambda r: (order.index(r["case"]["network"]), r["case"]["pattern"] != "2:4", r["case"]["recipe"]))
    devices = sorted({result["environment"]["device"] for result in results})
    return table(titles, [_accuracy_row(result) for result in results], ", ".join(devices))


def _accuracy_row(result: Row) -> list[str]:
    case, summary = result["case"], result["summary"]
    return [
        TITLES[case["network"]],
        case["pattern"],
        case["recipe"],
        str(case["samples"]),
        str(len(case["seeds"])),
        f"{summary['dense']:.2f}",
        f"{summary['mask_only']:.2f}",
        f"{summary['layerwise']:.2f}",
        f"**{summary['snows']:.2f}**",
        f"{summary['drop']:.2f} ± {summary['drop_interval']:.2f}",
        f"{summary['seconds']:.0f} s",
        memory(summary["peak_memory_gib"]),
        result["environment"]["snows"],
    ]


def published() -> str:
    result = read("masks-published")
    sparsities = list(next(iter(result["rows"].values())))
    rows = []
    for method, cells in result["rows"].items():
        rows.append(
            [method, *(f"{mean(cells[s]):.2f} ({min(cells[s]):.2f} to {max(cells[s]):.2f})" for s in sparsities)]
        )
        if method in PUBLISHED:
            rows.append([f"{method}, published", *(f"{value:.2f}" for value in PUBLISHED[method])])
    return table(["method", *sparsities], rows, result["environment"]["device"])


def unstructured() -> str:
    result = read("masks-unstructured")
    sparsities = list(dict.fromkeys(row["pattern"] for row in result["rows"]))
    rows = []
    for samples in sorted({row["samples"] for row in result["rows"]}):
        found = {row["pattern"]: row for row in result["rows"] if row["samples"] == samples}
        cells = [f"{found[s]['accuracy']:.2f}" if s in found else "–" for s in sparsities]
        rows.append([f"{samples} images, from {result['dense']:.2f}", *cells])
    rows.append(["the paper, 1,000 images, from 92.56", "92.28", "91.90", "90.87", "87.82", "64.80"])
    return table(["", *sparsities], rows, result["environment"]["device"])


def nm_masks() -> str:
    result = read("compare-resnet20")
    paper = {  # drop after SNOWS, from 92.58
        ("magnitude", "1:4"): 4.76, ("magnitude", "2:4"): 0.70, ("sparsegpt", "1:4"): 6.48, ("sparsegpt", "2:4"): 0.64,
        ("obc", "1:4"): 3.49, ("obc", "2:4"): 0.72,
    }  # fmt: skip
    cells = {(row["mask"], row["pattern"], row["snows"]): row for row in result["rows"]}
    rows = []
    for mask, pattern in {(mask, pattern) for mask, pattern, adjusted in cells if adjusted}:
        without, with_snows = cells[mask, pattern, False], cells[mask, pattern, True]
        drop = paper.get((mask, pattern))
        rows.append([
            pattern, mask, f"{100 * without['top1']:.2f}", f"**{100 * with_snows['top1']:.2f}**",
            f"{100 * with_snows['drop']:.2f}", f"{drop:.2f}" if drop else "", f"{with_snows['seconds']:.0f} s",
        ])  # fmt: skip
    rows.sort()
    titles = ["pattern", "mask", "without SNOWS", "with SNOWS", "drop", "the paper's drop", "time"]
    return table(titles, rows, result["settings"]["device"])


def resnet50() -> str:
    result = read("masks-resnet50")
    titles = ["pattern", "mask", "SNOWS", "orders", "top-1", "drop, 95 %", "above magnitude, 95 %"]
    titles += ["KL", "time", "memory"]
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        kinds.setdefault(tuple(row[key] for key in ("pattern", "mask", "permuted", "snows")), []).append(row)
    rows = []
    for (pattern, mask, permuted, snows), orders in kinds.items():
        drop, interval = mean(row["drop"] for row in orders), max(row["drop_interval"] for row in orders)
        plain = kinds.get((pattern, "magnitude", False, snows))
        rows.append([
            pattern, mask + (", permuted" if permuted else ""), STAGES[snows], str(len(orders)),
            f"{mean(row['accuracy'] for row in orders):.2f}", f"{drop:.2f} ± {interval:.2f}",
            _above(orders, plain) if plain and orders is not plain else "",
            f"{mean(row['kl'] for row in orders):.3f}", *_cost(orders),
        ])  # fmt: skip
    return table(titles, rows, result["environment"]["device"])


def _cost(orders: list[Row]) -> tuple[str, str]:
    """Time and memory, of runs that were not split in two."""
    whole = [row for row in orders if row["seconds"] is not None]
    if not whole:
        return "–", "–"
    return f"{median(row['seconds'] for row in whole):.0f} s", gibibytes(max(row["peak_memory_bytes"] for row in whole))


def _above(orders: list[Row], others: list[Row]) -> str:
    """By how many points, on the same images: each image's share of orders in which it is right."""
    shares = (
        [mean(map(int, image)) for image in zip(*(row["right"] for row in side), strict=True)]
        for side in (orders, others)
    )
    gains = [100 * (a - b) for a, b in zip(*shares, strict=True)]
    return f"{mean(gains):+.2f} ± {1.96 * stdev(gains) / len(gains) ** 0.5:.2f}"


def vit() -> str:
    result = read("vit-accuracy")
    titles = ["pruned", "pattern", "mask", "mask only, top-1", "top-5", "SNOWS, top-1", "top-5", "time", "memory"]
    cells = {(row["layers"], row["pattern"], row.get("mask"), row.get("snows")): row for row in result["rows"]}
    rows = []
    for (layers, pattern, mask, snows), row in cells.items():
        if snows:
            alone = cells[layers, pattern, mask, False]
            rows.append([
                ROLES[layers], pattern, mask, f"{alone['top1']:.2f}", f"{alone['top5']:.2f}", f"**{row['top1']:.2f}**",
                f"{row['top5']:.2f}", f"{row['seconds']:.0f} s", memory(row["peak_memory_bytes"] / 2**30),
            ])  # fmt: skip
    dense = cells["none", "dense", None, None]
    rows.insert(0, ["nothing", "dense", "", "", "", f"{dense['top1']:.2f}", f"{dense['top5']:.2f}", "", ""])
    return table(titles, rows, result["environment"]["device"])


def vit_ablation() -> str:
    return listing(
        "vit-ablation",
        ("pruned", lambda row: ROLES[row["layers"]]),
        ("recipe", field("recipe")),
        ("KL to dense", lambda row: f"{row['kl']:.3f}"),
        ("agreement, %", lambda row: f"{100 * row['agreement']:.1f}"),
        ("time", seconds),
        ("memory", peak),
        order=lambda row: (row["layers"], -row["kl"]),
    )


def vit_sizes() -> str:
    return listing(
        "vit-sizes",
        ("network", lambda row: {"vit-b": "ViT-B/16", "vit-l": "ViT-L/16"}[row["network"]]),
        ("K", field("horizon")),
        ("images", field("samples")),
        ("blocks timed", field("blocks")),
        ("time", seconds),
        ("all blocks, projected", lambda row: f"{row['projected_seconds'] / 60:.1f} min"),
        ("peak memory", peak),
        ("allowed", allowed),
    )


def language() -> str:
    result = read("language")
    cells = {(row.get("pattern"), row["mask"], row.get("snows")): row for row in result["rows"]}
    rows = [["", "dense", "", f"{cells[None, None, None]['perplexity']:.1f}", "", ""]]
    for (pattern, mask, snows), row in cells.items():
        if snows:
            alone = cells[pattern, mask, False]
            rows.append([
                pattern, mask, f"{alone['perplexity']:.1f}", f"**{row['perplexity']:.1f}**", f"{alone['kl']:.2f}",
                f"{row['kl']:.2f}",
            ])  # fmt: skip
    titles = ["pattern", "mask", "perplexity, mask method alone", "with SNOWS", "KL to dense, alone", "with SNOWS"]
    return table(titles, rows, result["environment"]["device"])


def speed_runs() -> str:
    def median(row: Row) -> str:
        return f"**{row['seconds']:.1f} s**" + (" (median of three)" if len(row["all_seconds"]) == 3 else "")

    return listing(
        "speed-runs",
        ("network", network),
        ("pattern", field("pattern")),
        ("K", field("horizon")),
        ("samples", field("samples")),
        ("time", median),
        ("peak memory", peak),
        ("estimated", lambda row: gibibytes(row["expected_memory_bytes"])),
        ("allowed", allowed),
        ("accuracy", lambda row: f"{row['accuracy']:.2f}"),
    )


def speed_paper() -> str:
    return listing(
        "speed-paper",
        ("network", network),
        ("layer", field("layer")),
        ("K", field("horizon")),
        ("samples", field("samples")),
        ('loss, `recipe="paper"`', lambda row: f"{row['loss_paper']:.3f}"),
        ("time", lambda row: f"{row['seconds_paper']:.2f} s"),
        ("loss, ours", lambda row: f"{row['loss']:.3f}"),
        ("time", lambda row: f"{row['seconds']:.3f} s"),
        ("ratio", lambda row: f"**{row['ratio']:.0f}**" if row["reached"] else "not reached"),
    )


def speed_profile() -> str:
    result = read("speed-profile")
    titles = ["part", *(f"{network(row)}, K={row['horizon']}, {row['samples']} images" for row in result["rows"])]
    rows = [
        [part, *(f"{row['parts'][part]:.2f} s ({row['parts'][part] / row['seconds']:.0%})" for row in result["rows"])]
        for part in result["rows"][0]["parts"]
    ]
    rows.append(["all", *(f"{row['seconds']:.1f} s" for row in result["rows"])])
    return table(titles, rows, result["environment"]["device"])


def speed_memory() -> str:
    return listing(
        "speed-memory",
        ("network", network),
        ("allowed", allowed),
        ("samples", field("samples")),
        ("peak memory", peak),
        ("estimated", lambda row: gibibytes(row["expected_memory_bytes"])),
        ("of the host's", lambda row: gibibytes(row["host_bytes"])),
    )


def speed_product() -> str:
    return listing(
        "speed-product",
        ("network", network),
        ("layer", field("layer")),
        ("K", field("horizon")),
        ("samples", field("samples")),
        ("one product", lambda row: f"{1e3 * row['seconds']:.2f} ms"),
        ("two plain passes", lambda row: f"{2e3 * row['forward_seconds']:.2f} ms"),
        ("ratio", lambda row: f"**{row['ratio_to_floor']:.2f}**"),
    )


def growth_table(rows: list[Row], device: str | None = None) -> str:
    """For each layer seconds = constant + slope x (samples x operations inside the horizon), by least squares."""
    titles = ["network", "layer", "constant", "for each 10^12 operations", "seconds, and what the line says"]
    lines = []
    for network, layer in dict.fromkeys((row["network"], row["layer"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["layer"]) == (network, layer)]
        work = [row["flops"] / 1e12 for row in mine]
        slope, constant = linear_regression(work, [row["seconds"] for row in mine])
        cells = (f"{row['seconds']:.3f} ({constant + slope * x:.3f})" for row, x in zip(mine, work, strict=True))
        lines.append([TITLES[network], layer, f"{constant:.3f} s", f"{slope:.2f} s", ", ".join(cells)])
    return table(titles, lines, device)


def speed_growth() -> str:
    result = read("speed-growth")
    return growth_table(result["rows"], result["environment"]["device"])


def retraining() -> str:
    result = read("retrain")
    titles = ["weights at the start", "learns from", "epochs", "before", "after", "time"]
    lines = [
        [
            row["start"], row["lesson"], str(row["epochs"]), f"{row['before']:.2f}", f"**{row['after']:.2f}**",
            f"{row['seconds_retraining']:.0f} s",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    paper = result["paper"]
    lines.append(["the paper's", "labels", "90", f"{paper['before']:.2f}", f"**{paper['after']:.2f}**", "–"])
    return table(titles, lines, result["environment"]["device"])


def larger() -> str:
    result = read("larger")
    titles = ["`memory=`", "samples x tokens", "time", "reading and capture", "device, peak", "host, peak"]
    rows = [
        [
            {"all": "none"}.get(row["memory"], f'`"{row["memory"]}"`'),
            f"{row['samples']} x {row['length']}",
            f"{row['seconds']:.0f} s",
            f"{row['phases'][0]['seconds']:.0f} s",
            gibibytes(row["peak_memory_bytes"]),
            gibibytes(row["host_bytes"]),
        ]
        for row in result["rows"]
    ]
    return table(titles, rows, result["environment"]["device"])


DOCS = HERE.parent / "docs"
TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    DOCS / "retraining.md": {"retrain": retraining},
    DOCS / "after-pruning.md": {
        "engines": bench_tables.engines,
        "on-a-gpu": bench_tables.on_a_gpu,
    },
    DOCS / "scale.md": {
        "larger": larger,
        "rank-steps": ranks_tables.rank_steps,
        "rank-projection": ranks_tables.rank_projection,
        "rank-runs": ranks_tables.rank_runs,
    },
    README: {"accuracy": accuracy},
    MASKS: {"published": published, "unstructured": unstructured, "nm-masks": nm_masks, "resnet50": resnet50},
    TRANSFORMERS: {"vit": vit, "vit-ablation": vit_ablation, "vit-sizes": vit_sizes, "language": language},
    SPEED: {
        "runs": speed_runs,
        "paper": speed_paper,
        "product": speed_product,
        "growth": speed_growth,
        "profile": speed_profile,
        "memory": speed_memory,
    },
}


def filled(text: str, tables: dict[str, Callable[[], str]]) -> str:
    for name, make in tables.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for path, tables in TABLES.items():
        text = path.read_text(encoding="utf-8")
        new = filled(text, tables)
        if options.check and new != text:
            sys.exit(f"{path.name} is not up to date: run `make docs-table`")
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
