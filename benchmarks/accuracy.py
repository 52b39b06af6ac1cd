"""Predicted against measured times of collectives and kernels, by hardware, fitted and held-out rows apart.

The measurements are the tables in `tests/cost_models/data/`, and `cost_models/tables/`: each half of a
harness is predicted by the other, by the roofline at the level of the harness and with the ratios of measured
shapes near ("derate": what the GPU's file takes over what the harness measured). Whole training steps are not
scored here.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cost_models import CollectiveKind, Operation, OpKind, Price, cluster_cost_model, load_gpu
from cost_models.models.roofline import Roofline
from cost_models.shapes import MeasuredShapes, Measurement, halves, measurements

DATA = Path(__file__).resolve().parents[1] / "tests" / "cost_models" / "data"
GPUS = ("a100-pcie-80gb", "a100-sxm-80gb", "a40", "b200-sxm", "b300-sxm", "gb200", "gb300", "h100-sxm",
        "h200-sxm", "l40s", "mi210", "v100-sxm2-16gb")  # fmt: skip
DIRECTIONS = {"fwd": "fwd", "bwd": "bwd", "bwd_dgrad": "dgrad", "bwd_wgrad": "wgrad"}
BACKWARD_MATMULS = 2.5
"""FLOPs of a flash attention backward over its forward: five matrix products instead of two."""

Row = dict[str, str]
Group = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    errors: dict[Group, list[tuple[float, bool]]] = defaultdict(list)
    for group, measured_s, price in [*collectives(), *kernels()]:
        inside = price.low_s <= measured_s <= price.high_s
        errors[group].append((price.seconds / measured_s - 1, inside))
    scores = [score(group, found) for group, found in sorted(errors.items())]
    shapes = [held_out(name, key, rows) for name in GPUS for key, rows in measurements(name).items()]
    if not options.json:
        print(f"{'hardware':16}{'what':16}{'rows':12}   n  median |e|  worst |e|    bias  in band")
        for row in scores:
            print(
                f"{row['hardware']:16}{row['what']:16}{row['rows']:12}{row['n']:4}{row['median_ape']:12.1%}"
                f"{row['worst_ape']:11.1%}{row['bias']:8.1%}{row['band_coverage']:9.0%}"
            )
        print(f"\n{'gpu':16}{'harness':16}{'what':12}   n  derate    roofline  near   roofline   by shapes")
        for row in shapes:
            print(
                f"{row['gpu']:16}{row['harness']:16}{row['what']:12}{row['n']:4}{row['derate']:8.2f}"
                f"{shown(row['roofline']):>12}{row['near']:6.0%}{shown(row['roofline_near']):>11}"
                f"{shown(row['shapes_near']):>12}"
            )
    print(json.dumps({"benchmark": "accuracy", "groups": scores, "held_out_shapes": shapes}))


def shown(errors: dict[str, float] | None) -> str:
    return f"{errors['median_ape']:.1%}/{errors['p90_ape']:.0%}" if errors else "-"


def held_out(gpu: str, key: tuple[str, OpKind], measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return errors of sizes as in training (matmuls from 128, sequences from 1024)."""
    harness, kind = key
    least, sizes = (128, slice(1, None)) if kind is OpKind.MATMUL else (1024, slice(3, 4))
    rows = [row for row in measured if min(row.operation.shape[sizes]) >= least]
    roofline = Roofline(load_gpu(gpu))
    errors: dict[str, list[float]] = {"roofline": [], "roofline_near": [], "shapes_near": []}
    halved = halves(rows)
    for known, others in (halved, halved[::-1]):
        shapes = MeasuredShapes(known, roofline=roofline)
        for row in others:
            seconds, ratio = (
                roofline.operation(row.operation).seconds * shapes.level,
                shapes.ratio(row.operation),
            )
            errors["roofline"].append(abs(seconds / row.seconds - 1))
            if ratio is not None:
                errors["roofline_near"].append(errors["roofline"][-1])
                errors["shapes_near"].append(abs(seconds * ratio.value / row.seconds - 1))
    found: dict[str, Any] = {"gpu": gpu, "harness": harness, "what": kind.value, "n": len(rows)}
    found["derate"] = 1 / MeasuredShapes(rows, roofline=roofline).level
    found["near"] = len(errors["shapes_near"]) / len(rows)
    return found | {name: quantiles(values) for name, values in errors.items()}


def quantiles(errors: list[float]) -> dict[str, float] | None:
    if not errors:
        return None
    ordered = sorted(errors)
    return {"median_ape": statistics.median(ordered), "p90_ape": ordered[int(0.9 * (len(ordered) - 1))]}


def collectives() -> Iterator[tuple[Group, float, Price]]:
    """Yield (group, measured seconds, price) of every measured collective and transfer."""
    for row in rows("collectives.csv"):
        model = cluster_cost_model(row["cluster"])
        n, nodes, size = int(row["n_gpus"]), int(row["n_nodes"]), int(row["bytes"])
        per_node = n // nodes
        ranks = [node * model.cluster.gpus_per_node + i for node in range(nodes) for i in range(per_node)]
        if row["op"] == "transfer":
            price = model.transfer(size_bytes=size, source_rank=ranks[0], target_rank=ranks[-1])
        else:
            price = model.collective(CollectiveKind(row["op"]), size_bytes=size, ranks=ranks)
        used = "fitted" if row["used_in_fit"] == "yes" else "held out"
        yield (row["cluster"], row["op"], used), float(row["time_us"]) * 1e-6, price


def kernels() -> Iterator[tuple[Group, float, Price]]:
    """Yield (group, measured seconds, price) of every measured kernel."""
    for row in rows("kernels.csv"):
        gpu = load_gpu("a100-sxm-80gb" if row["gpu"].startswith("A100") else row["gpu"])
        operation = matmul(row) if row["op"] == "gemm" else attention(row)
        yield (
            (gpu.name, row["op"], "calibration"),
            float(row["time_us"]) * 1e-6,
            Roofline(gpu).operation(operation),
        )


def matmul(row: Row) -> Operation:
    m, n, k = (int(row[name]) for name in "mnk")
    return Operation(
        kind=OpKind.MATMUL,
        name="gemm",
        shape=(1, m, n, k),
        dtype=row["dtype"],
        flops=2 * m * n * k,
        bytes=2 * (m * k + k * n + m * n),
        direction=DIRECTIONS[row["pass"]],
    )


def attention(row: Row) -> Operation:
    batch, heads, kv_heads = int(row["batch"]), int(row["heads"]), int(row["kv_heads"] or row["heads"])
    seq, head_dim = int(row["seq"]), int(row["head_dim"])
    forward_flops = 2 * batch * heads * seq * seq * head_dim
    backward = row["pass"] != "fwd"
    return Operation(
        kind=OpKind.ATTENTION,
        name="flash",
        shape=(batch, heads, kv_heads, seq, seq, head_dim),
        dtype=row["dtype"],
        flops=round(forward_flops * BACKWARD_MATMULS) if backward else forward_flops,
        bytes=4 * batch * (heads + kv_heads) * seq * head_dim,
        causal=row["causal"].lower() in {"1", "true", "yes"},
        direction=DIRECTIONS[row["pass"]],
    )


def rows(name: str) -> list[Row]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def score(group: Group, found: list[tuple[float, bool]]) -> dict[str, object]:
    sizes = [abs(error) for error, _ in found]
    return {
        "hardware": group[0],
        "what": group[1],
        "rows": group[2],
        "n": len(found),
        "median_ape": statistics.median(sizes),
        "worst_ape": max(sizes),
        "bias": statistics.mean(error for error, _ in found),
        "band_coverage": sum(inside for _, inside in found) / len(found),
    }


if __name__ == "__main__":
    main()
