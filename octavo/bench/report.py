"""How results are shown and kept: tables for the terminal, JSON files with vLLM's field names."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from octavo.bench.options import ReportOptions
from octavo.bench.stats import CLIENT_BUSY, percentile_name
from octavo.errors import ConfigError

_NAMES = {"ttft": "Time to first token", "tpot": "Time per further token", "itl": "Gap between chunks", "e2el": "Whole answer"}
_WIDTH = 72
_SHOWN_REASONS = 8


def number(value: Any, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def serve_table(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """One load's figures for a terminal."""
    head = f" {result['model_id']}: {result['num_prompts']} requests "
    rows = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Request rate (req/s)", result["request_rate"]),
        ("Maximum concurrency", result["max_concurrency"] or "no limit"),
        ("Peak concurrency", result["max_concurrent_requests"]),
        ("Duration (s)", result["duration"]),
        ("Input tokens", result["total_input_tokens"]),
        ("Output tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", result["request_goodput"]))
    lines = [head.center(_WIDTH, "="), *(f"{name + ':':<42}{_cell(value):>{_WIDTH - 42}}" for name, value in rows)]
    columns = ["mean", "median", "std", *map(percentile_name, percentiles)]
    lines.append(" Latency (ms) ".center(_WIDTH, "-"))
    lines.append(f"{'':<30}" + "".join(f"{name:>11}" for name in columns))
    for metric in metrics:
        values = (number(result[f"{name}_{metric}_ms"]) for name in columns)
        lines.append(f"{f'{_NAMES[metric]} ({metric.upper()})':<30}" + "".join(f"{value:>11}" for value in values))
    lines.append("=" * _WIDTH)
    return "\n".join([*lines, *notes(result)])


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else number(value)


def notes(result: dict[str, Any]) -> list[str]:
    """What a reader of the figures has to know: failures by reason, and what makes figures doubtful."""
    reasons = list(result["failures"].items())
    lines = []
    if result["interrupted"]:
        ended, asked = result["completed"] + result["failed"], result["num_prompts"]
        lines.append(f"Interrupted: these are the {ended} of {asked} requests that had ended; those under way are left out.")
    lines += [f"{count} failed: {reason}" for reason, count in reasons[:_SHOWN_REASONS]]
    if len(reasons) > _SHOWN_REASONS:
        lines.append(f"{sum(count for _, count in reasons[_SHOWN_REASONS:])} failed for {len(reasons) - _SHOWN_REASONS} other reasons.")
    if result["output_tokens_counted_by"] == "chunks" and result["completed"]:
        lines.append("The server reports no usage in streams: a chunk is counted as one output token.")
    if result["answers_in_one_chunk"]:
        lines.append(
            f"{result['answers_in_one_chunk']} answers of several tokens came in one chunk: their TTFT is the whole answer's, their "
            "TPOT 0. Servers hold back tokens that have no text yet."
        )
    per_chunk = result["mean_tokens_per_chunk"]
    if per_chunk is not None and per_chunk > 1.05:
        lines.append(f"A chunk had {per_chunk:.2f} tokens on average: ITL is the gap between chunks, TPOT the time per token.")
    if result["client_cpu_cores"] > CLIENT_BUSY:
        lines.append(f"This client used {result['client_cpu_cores']:.2f} CPU cores: it may be what limits these figures.")
    if result["max_dispatch_delay_ms"] > 100 and result["request_rate"] != "inf":
        late = result["max_dispatch_delay_ms"]
        lines.append(f"A request was sent {late:.0f} ms late: this machine was too busy to keep to the arrival times.")
    return lines


def default_filename(result: dict[str, Any], options: ReportOptions) -> str:
    """``openai-infqps-concurrency8-model-20260131-115959.json``"""
    model = re.sub(r"[^\w.-]+", "_", str(result["model_id"]).rstrip("/").split("/")[-1])
    limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
    return f"{options.label or result['backend']}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"


def check_writable(path: str | None) -> None:
    """Before an hour of measuring and not after it: ConfigError if no file can be written to ``path``. What is there stays as it is.
    None: nothing is to be written."""
    if path is None:
        return
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.isfile(path) or os.path.isdir(path):
            open(path, "a").close()
        elif not os.path.exists(path):  # pipes and devices are left alone
            tempfile.TemporaryFile(dir=os.path.dirname(path) or ".").close()
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}.") from error


def write(result: dict[str, Any], path: str | None) -> None:
    """``save``, and say where to; None: not at all."""
    if path is not None:
        print(f"Written: {save(result, path)}")


def save(result: dict[str, Any], path: str, *, append: bool = False) -> str:
    """Write JSON (``append``: one object a line); returns the path. Raises ConfigError."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            json.dump(jsonable(result), file, ensure_ascii=False, allow_nan=False, indent=None if append else 1)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}.") from error
    return path


def jsonable(value: Any) -> Any:
    """Infinite numbers as "inf" and the like: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def date() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as they must be, numbers to the right."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
