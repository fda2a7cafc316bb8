"""The plot of a sweep. matplotlib is an extra, and imported only here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from octavo.errors import ConfigError

_COLORS = {"median": "#2b6cb0", "high": "#dd6b20", "throughput": "#2f855a", "knee": "#805ad5", "slo": "#c53030", "pick": "#1a202c"}


DEFAULT_NAME = "sweep.png"


def plot_name(asked: str | None) -> str | None:
    """The plot's file name, or None for no plot: known before an hour of measuring, not after. ``asked``: --plot.

    Without matplotlib a plot that was asked for is a ConfigError; the one that comes by itself is left out, and that is said.
    """
    if asked == "none":
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        if asked is not None:
            raise ConfigError("The plot needs matplotlib: pip install matplotlib, or leave --plot out.") from None
        print("No plot: matplotlib is not installed (pip install matplotlib).", file=sys.stderr)
        return None
    return asked or DEFAULT_NAME


def plot_sweep(sweep: dict[str, Any], path: str) -> None:
    """Write a PNG: TTFT, TPOT and throughput against the load, with the knee, limits and the recommendation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points, high = sweep["points"], sweep["slo_percentile"]
    loads = [point["load"] for point in points]
    figure = Figure(figsize=(7.5, 9), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    for axes, metric, title in ((top, "ttft", "Time to first token (ms)"), (middle, "tpot", "Time per further token (ms)")):
        _line(axes, loads, [p[f"median_{metric}_ms"] for p in points], "median", _COLORS["median"])
        _line(axes, loads, [p[f"{high}_{metric}_ms"] for p in points], high, _COLORS["high"])
        limit = sweep[f"slo_{metric}_ms"]
        highest = max((p[f"{high}_{metric}_ms"] or 0.0 for p in points), default=0.0)
        if limit is not None and limit <= 4 * highest:  # a limit far above would press the curves to the floor
            axes.axhline(limit, color=_COLORS["slo"], linestyle=":", linewidth=1.4, label=f"limit {limit:g} ms")
        _scale(axes, points, metric, high)
        axes.set_ylabel(title)
    _line(bottom, loads, [p["output_throughput"] for p in points], "output tokens", _COLORS["throughput"])
    bottom.set_ylabel("Throughput (tok/s)")
    bottom.set_ylim(bottom=0)
    by_rate = sweep["sweep_over"] == "request_rate"
    bottom.set_xlabel("Requests a second offered" if by_rate else "Requests at the same time")
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(loads, [f"{load:g}" for load in loads])
    bottom.minorticks_off()
    for axes in (top, middle, bottom):
        _marks(axes, sweep)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{sweep['model_id']}, {sweep['date']}", fontsize=11)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}.") from error


def _line(axes: Any, x: Sequence[float], y: Sequence[float | None], label: str, color: str) -> None:
    axes.plot(x, [float("nan") if v is None else v for v in y], marker="o", markersize=4, linewidth=1.6, label=label, color=color)


def _scale(axes: Any, points: Sequence[dict[str, Any]], metric: str, high: str) -> None:
    """Logarithmic where values are far apart: else the low loads are one flat line."""
    values = [p[f"{name}_{metric}_ms"] for p in points for name in ("median", high)]
    values = [v for v in values if v]
    if values and max(values) > 20 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _marks(axes: Any, sweep: dict[str, Any]) -> None:
    if sweep["knee"] is not None:
        axes.axvline(sweep["knee"], color=_COLORS["knee"], linestyle="--", linewidth=1.2, label=f"knee: {sweep['knee']:g}")
    picked = sweep["recommended_load"]
    if picked is not None and picked != sweep["knee"]:
        axes.axvline(picked, color=_COLORS["pick"], linestyle="-.", linewidth=1.2, label=f"keeps the limits: {picked:g}")
