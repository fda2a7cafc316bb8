"""Where a curve of throughput against load bends, and which load keeps a service level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MIN_BEND = 0.05  # of the unit square's height; less is a straight line with noise


def knee(loads: Sequence[float], throughputs: Sequence[float]) -> int | None:
    """Index of the knee of a rising, flattening curve; None if it does not bend.

    The method is Kneedle's for one knee (Satopää et al., 2011): both axes are scaled to [0, 1], and the knee is the point
    highest above the straight line from the first point to the best. Points after the best are left out: there the
    server is overloaded. Without a bend of at least ``MIN_BEND`` the server is not saturated yet.
    """
    if len(loads) < 3:
        return None
    best = max(range(len(loads)), key=lambda i: throughputs[i])
    x0, y0, x1, y1 = loads[0], throughputs[0], loads[best], throughputs[best]
    if best < 2 or x1 <= x0 or y1 <= y0:
        return None if best == len(loads) - 1 else best
    heights = [(y - y0) / (y1 - y0) - (x - x0) / (x1 - x0) for x, y in zip(loads[: best + 1], throughputs, strict=False)]
    index = max(range(best + 1), key=lambda i: heights[i])
    if heights[index] < MIN_BEND:
        return None if best == len(loads) - 1 else best
    return index


def within_slo(point: dict[str, Any], percentile: str, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    """Whether a load kept the limits at a percentile (``"p99"``), and failed no request."""
    limits = {"ttft": ttft_ms, "tpot": tpot_ms}
    values = {name: point[f"{percentile}_{name}_ms"] for name in limits}
    kept = (limit is None or values[name] is None or values[name] <= limit for name, limit in limits.items())
    return point["failed"] == 0 and point["completed"] > 0 and all(kept)


def recommend(points: Sequence[dict[str, Any]], percentile: str, ttft_ms: float | None, tpot_ms: float | None) -> int | None:
    """Index of the highest load up to which every one keeps the limits; None if the lowest does not.

    Not simply the highest that does: a load above a failing one has passed by luck.
    """
    index = None
    for i, point in enumerate(points):
        if not within_slo(point, percentile, ttft_ms, tpot_ms):
            break
        index = i
    return index
