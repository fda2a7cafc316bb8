"""From compare.py's results to a Markdown table and plots: both engines, the floor, and how they relate.

    python scripts/gpu/report.py RESULTS.jsonl … [--images docs/img] [--into docs/performance.md]

Later records replace earlier ones of the same model, part and engine, batch by batch and load by load. ``--into`` puts the table between
two comment lines in the page, or at its end where they are not yet; without it, it is printed. The last column says how many times
better the first engine is: above 1 it is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare_parts import Sizes, mixed_spec, parse_load  # noqa: E402
from engine_worker import make_requests  # noqa: E402
from floors import BANDWIDTH, FLOPS, Floor  # noqa: E402

Record = dict[str, Any]
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
MERGED = ("steps", "loads", "batches")  # dicts that later records add to
COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5")


def read(paths: Sequence[Path]) -> list[Record]:
    """Records of JSONL files, in the order of their dates; a line that was cut off is left out."""
    records: list[Record] = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                print(f"report: {path}: a line is no JSON (cut off?): {line[:60]}", file=sys.stderr)
    return sorted(records, key=lambda record: record["date"])


def merge(records: Sequence[Record]) -> dict[tuple[str, str, str], Record]:
    """One record by (model, part, engine). A failed one keeps what an earlier one measured, and tells its error only if none did."""
    merged: dict[tuple[str, str, str], Record] = {}
    for record in records:
        key = (record["model"], record["part"], record["engine"])
        old = merged.get(key)
        if old is None:
            merged[key] = record
            continue
        values = dict(old["values"])
        for name, value in record["values"].items():
            if name in MERGED:
                good = {k: v for k, v in value.items() if "error" not in v or k not in values.get(name, {})}
                value = values.get(name, {}) | good
            values[name] = value
        merged[key] = (record if record["values"] else old) | {"values": values, "error": record["error"] if not old["values"] else None}
    return merged


@dataclass(frozen=True)
class Row:
    """One line. ``values`` by engine; ``floor``: the best that could be; ``more_is_better`` tells rates from times."""

    name: str
    unit: str
    values: dict[str, float | None]
    floor: float | None = None
    more_is_better: bool = False

    def ratio(self, a: str, b: str) -> float | None:
        """How many times better ``a`` is than ``b``."""
        x, y = self.values.get(a), self.values.get(b)
        if not x or not y:
            return None
        return x / y if self.more_is_better else y / x

    def reached(self, engine: str) -> float | None:
        """Share of what the floor allows."""
        x = self.values.get(engine)
        if not x or not self.floor:
            return None
        return x / self.floor if self.more_is_better else self.floor / x


class Model:
    """All that was measured of one model, and its floor."""

    def __init__(self, name: str, merged: dict[tuple[str, str, str], Record], bandwidth: float, flops: float) -> None:
        self.name = name
        self.records = {(part, engine): record for (model, part, engine), record in merged.items() if model == name}
        config = next(iter(self.records.values()))["config"]
        self.floor = Floor.of_config(config, bandwidth=bandwidth, flops=flops)

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys(engine for part, engine in self.records if part != "hf"))

    def get(self, part: str, engine: str, *keys: str) -> Any:
        """What lies under ``keys`` in a record's values; None where there is nothing."""
        found: Any = self.records.get((part, engine), {}).get("values", {})
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def row(self, name: str, unit: str, part: str, *keys: str, floor: float | None = None, rate: bool = False) -> Row | None:
        values = {engine: self.get(part, engine, *keys) for engine in self.engines}
        return Row(name, unit, values, floor, rate) if any(v is not None for v in values.values()) else None

    def keys(self, part: str, name: str) -> list[str]:
        return list(dict.fromkeys(key for engine in self.engines for key in self.get(part, engine, name) or ()))

    def sizes(self, part: str) -> Sizes:
        """As the part's records were measured with."""
        record = next(record for (p, _), record in self.records.items() if p == part)
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in record["settings"]["sizes"].items()}
        return Sizes(**fields)

    def rows(self) -> Iterator[Row | None]:
        yield from self._offline()
        for kind in ("cold", "warm"):
            yield self.row(f"start to first answer, offline, compile caches {kind}", "s", "startup", kind, "first_answer_s")
        yield self.row("start to first answer, server", "s", "serve", "start", "first_answer_s")
        yield from self._served()
        yield from self._prefix()
        yield from self._static()

    def _offline(self) -> Iterator[Row | None]:
        for batch in sorted(self.keys("decode", "steps"), key=int):
            context = next(c for e in self.engines if (c := self.get("decode", e, "context")) is not None)
            floor = self.floor.decode_s(int(batch), context) * 1e3
            yield self.row(
                f"decode step, batch {batch}, {context:.0f} tokens of context", "ms", "decode", "steps", batch, "step_ms", floor=floor
            )
        if shape := next((s for e in self.engines if (s := self.get("prefill", e, "prompts"))), None):
            floor = shape[0] * shape[1] / self.floor.prefill_s(*shape)
            yield self.row(f"prefill, {shape[0]} x {shape[1]:,}", "tok/s", "prefill", "tok_s", floor=floor, rate=True)
        for part, index in (("mixed", 0), ("mixed1024", 1)):
            if not any(p == part for p, _ in self.records):
                continue
            sizes = self.sizes(part)
            low, high = sizes.mixed_len
            name = f"mixed load, {sizes.mixed_counts[index]:,} requests of {low} to {high:,} tokens, output"
            floors = []
            for seed in (0, 1):
                lengths = [(len(ids), n) for ids, n, _ in make_requests(1000, mixed_spec(sizes, sizes.mixed_counts[index], seed))]
                floors.append(sum(n for _, n in lengths) / self.floor.mixed_s(lengths))
            yield self.row(name, "tok/s", part, "tok_s", floor=statistics.mean(floors), rate=True)
            yield self.row("the same, first run in the process", "tok/s", part, "first_run_tok_s", rate=True)

    def _served(self) -> Iterator[Row | None]:
        lengths = next((s for e in self.engines if (s := self.get("serve", e, "lengths"))), None)
        for name in sorted(self.keys("serve", "loads"), key=load_order):
            load = parse_load(name)
            at_once = load.get("max_concurrency")
            title = f"serving {lengths[0]}/{lengths[1]}, {load_title(load)}"
            floor = self._serving_floor(load, lengths)
            yield self.row(f"{title}: output", "tok/s", "serve", "loads", name, "output_throughput", floor=floor, rate=True)
            first = self.floor.prefill_s(1, lengths[0]) * 1e3 if at_once == 1 or "request_rate" in load else None
            step = self.floor.decode_s(at_once, lengths[0] + lengths[1] / 2) * 1e3 if at_once else None
            yield self.row(f"{title}: TTFT median", "ms", "serve", "loads", name, "median_ttft_ms", floor=first)
            yield self.row(f"{title}: TTFT p99", "ms", "serve", "loads", name, "p99_ttft_ms")
            yield self.row(f"{title}: TPOT median", "ms", "serve", "loads", name, "median_tpot_ms", floor=step)
            yield self.row(f"{title}: ITL p99", "ms", "serve", "loads", name, "p99_itl_ms")

    def _serving_floor(self, load: dict[str, Any], lengths: Sequence[int]) -> float | None:
        """Output tokens a second; None for a rate, which is what was offered."""
        if "request_rate" in load:
            return None
        if "max_concurrency" in load:
            return self.floor.serving_tok_s(load["max_concurrency"], *lengths)
        count = load["num_prompts"]
        return count * lengths[1] / self.floor.mixed_s([(lengths[0], lengths[1])] * count)

    def _prefix(self) -> Iterator[Row | None]:
        tokens = next((t for e in self.engines if (t := self.get("prefix", e, "tokens"))), None)
        if tokens:
            total = sum(tokens)
            for kind, cached in (("cold", 0), ("cached", tokens[0])):
                floor = self.floor.prefill_s(1, total, cached) * 1e3
                what = f"{tokens[0]:,} of them cached" if cached else "all new"
                yield self.row(f"TTFT of {total:,} tokens, {what}", "ms", "prefix", f"{kind}_ttft_ms", floor=floor)

    def _static(self) -> Iterator[Row | None]:
        """The baseline beside the engines' mixed load, which is the same kind of requests."""
        for batch, run in (self.get("hf", "hf", "batches") or {}).items():
            if "tok_s" not in run:
                continue
            rates = {engine: self.get("mixed", engine, "tok_s") for engine in self.engines}
            best = next((rate for rate in rates.values() if rate), None)
            note = f"; {self.engines[0]} on the mixed load: {best / run['tok_s']:.0f} x" if best else ""
            yield Row(f"transformers generate(), static batches of {batch}: {run['tok_s']:,.0f} output tok/s asked for{note}", "", {})


def load_order(name: str) -> tuple[int, float]:
    load = parse_load(name)
    return (0, load["request_rate"]) if "request_rate" in load else (1, load.get("max_concurrency", load["num_prompts"]))


def load_title(load: dict[str, Any]) -> str:
    if "request_rate" in load:
        return f"{load['request_rate']:g} req/s"
    return f"{load['max_concurrency']} at a time" if "max_concurrency" in load else f"{load['num_prompts']:,} at once"


# ---------------------------------------------------------------------------------------------------------------------
# the table


def number(value: float | None) -> str:
    """Three or four digits that matter."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(model: Model, *, one_commit: bool = True) -> list[str]:
    """Rows of Markdown: metric, engines, floor, share of it, ratio. ``one_commit``: all on the page is of one, which it says above."""
    engines = model.engines
    ratio = f"times better than {engines[1]}" if len(engines) > 1 else ""
    columns = [model.name, *engines, "floor", f"{engines[0]}: share of it", ratio]
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    notes = []
    for row in filter(None, model.rows()):
        if not row.unit:
            notes.append(row.name)
            continue
        share = row.reached(engines[0])
        better = row.ratio(engines[0], engines[1]) if len(engines) > 1 else None
        cells = [f"{row.name} ({row.unit})", *(number(row.values.get(engine)) for engine in engines), number(row.floor)]
        cells += ["–" if share is None else f"{100 * share:.0f}%", "–" if better is None else f"{better:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *(f"- {note}" for note in [*notes, *commits(model, one_commit), *troubles(model)])]


def commits(model: Model, one_commit: bool) -> Iterator[str]:
    """Which parts were measured at which commit, if not all of the page at one."""
    parts: dict[str, list[str]] = {}
    for (part, _), record in model.records.items():
        parts.setdefault(record["commit"], []).append(part)
    if len(parts) > 1 or (parts and not one_commit):
        yield "; ".join(f"commit {commit}: {', '.join(dict.fromkeys(found))}" for commit, found in parts.items()) + "."


def troubles(model: Model) -> Iterator[str]:
    """What did not work, and what makes figures doubtful."""
    for (part, engine), record in model.records.items():
        if record["error"]:
            yield f"{part}, {engine}: {record['error'].splitlines()[-1][:200]}"
        for name, result in (record["values"].get("loads") or {}).items():
            if result.get("error") or result.get("failed"):
                yield f"{name}, {engine}: {result.get('error') or str(result['failed']) + ' requests failed'}"[:240]
            elif result["client_cpu_cores"] > 0.8:
                yield f"{name}, {engine}: the client used {result['client_cpu_cores']:.2f} cores, and may be what limits these figures."


def header(records: Sequence[Record]) -> str:
    def of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(record[name]) for record in records if record.get(name)))

    versions = ", ".join(dict.fromkeys(f"{r['module']} {r['version']}" for r in records if r.get("version")))
    dates = sorted({record["date"][:10] for record in records})
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {of('commit')}, {of('machine')}; {versions}. Dummy weights."


def page(records: Sequence[Record], models: Sequence[Model], images: list[Path], where: Path | None) -> str:
    parts = [header(records), ""]
    one_commit = len({record["commit"] for model in models for record in model.records.values()}) <= 1
    for model in models:
        parts += [*table(model, one_commit=one_commit), ""]
    for image in images:
        shown = image
        if where is not None:
            try:
                shown = image.resolve().relative_to(where.resolve().parent)
            except ValueError:
                pass
        parts.append(f"![{image.stem.replace('_', ' ')}]({shown.as_posix()})")
    return "\n".join(parts).rstrip() + "\n"


def put_into(path: Path, text: str) -> None:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    block = f"{BEGIN}\n{text}{END}\n"
    if BEGIN in old and END in old:
        before, _, rest = old.partition(BEGIN)
        path.write_text(before + block + rest.partition(END)[2].removeprefix("\n"), encoding="utf-8")
    else:
        path.write_text(old.rstrip("\n") + "\n\n" + block if old else block, encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# plots


def plots(model: Model, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    if model.keys("decode", "steps"):
        made.append(plot_decode(model, folder / f"decode_{model.name}.png"))
    if any("request_rate" not in parse_load(name) for name in model.keys("serve", "loads")):
        made.append(plot_serving(model, folder / f"serving_{model.name}.png"))
    return made


def _figure(rows: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(axes)


def _finish(axes: Any, title: str, ticks: Sequence[float], *, log_y: bool) -> None:
    axes.set_ylabel(title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    if log_y:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def plot_decode(model: Model, path: Path) -> Path:
    figure, (axes,) = _figure(1, 4.2)
    ticks = sorted(int(batch) for batch in model.keys("decode", "steps"))
    for engine, color in zip(model.engines, COLORS, strict=False):
        steps = model.get("decode", engine, "steps") or {}
        batches = sorted(map(int, steps))
        axes.plot(batches, [steps[str(b)]["step_ms"] for b in batches], marker="o", markersize=4, color=color, label=engine)
        low, high = ([steps[str(b)][name] for b in batches] for name in ("lowest_ms", "highest_ms"))
        axes.fill_between(batches, low, high, color=color, alpha=0.15, linewidth=0)
    context = next(c for e in model.engines if (c := model.get("decode", e, "context")) is not None)
    axes.plot(ticks, [model.floor.decode_s(b, context) * 1e3 for b in ticks], color="black", linestyle=":", label="floor")
    axes.set_xlabel(f"Sequences in the batch ({context:.0f} tokens of context)")
    _finish(axes, "Decode step (ms)", ticks, log_y=False)
    figure.suptitle(model.name, fontsize=11)
    figure.savefig(path, dpi=120, format="png")
    return path


def plot_serving(model: Model, path: Path) -> Path:
    """TTFT, TPOT and throughput against the number of requests in flight, with floors."""
    figure, (top, middle, bottom) = _figure(3, 9)
    lengths = next(s for e in model.engines if (s := model.get("serve", e, "lengths")))
    at = {name: load_order(name)[1] for name in model.keys("serve", "loads") if load_order(name)[0] == 1}
    ticks = sorted(set(at.values()))
    for engine, color in zip(model.engines, COLORS, strict=False):
        loads = model.get("serve", engine, "loads") or {}
        names = sorted((n for n in loads if n in at and "error" not in loads[n]), key=at.__getitem__)
        for axes, metric, style in (
            (top, "median_ttft_ms", "-"), (top, "p99_ttft_ms", "--"), (middle, "median_tpot_ms", "-"), (middle, "p99_tpot_ms", "--"),
            (bottom, "output_throughput", "-"),
        ):  # fmt: skip
            label = f"{engine} p99" if style == "--" else engine
            values = [loads[n][metric] for n in names]
            axes.plot([at[n] for n in names], values, style, marker="o", markersize=4, color=color, label=label)
    floor = {"color": "black", "linestyle": ":", "label": "floor"}
    limited = sorted({int(at[name]) for name in at if "max_concurrency" in parse_load(name)})
    middle.plot(limited, [model.floor.decode_s(n, lengths[0] + lengths[1] / 2) * 1e3 for n in limited], **floor)
    bottom.plot(ticks, [model.floor.serving_tok_s(n, *lengths) for n in ticks], **floor | {"label": "at the floor"})
    bottom.set_xlabel("Requests in flight")
    _finish(top, "Time to first token (ms)", ticks, log_y=True)
    _finish(middle, "Time per further token (ms)", ticks, log_y=True)
    _finish(bottom, "Output tokens a second", ticks, log_y=False)
    figure.suptitle(f"{model.name}, {lengths[0]} tokens in, {lengths[1]} out", fontsize=11)
    figure.savefig(path, dpi=120, format="png")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare.py's results as a table and plots.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.jsonl")
    parser.add_argument("--images", type=Path, help="folder for plots (needs matplotlib)")
    parser.add_argument("--into", type=Path, help="Markdown page to put the table into")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes a second, for floors")
    parser.add_argument("--flops", type=float, default=FLOPS, help="operations a second, for floors")
    args = parser.parse_args(argv)
    records = read(args.results)
    if not records:
        parser.error("no records in these files")
    merged = merge(records)
    models = [Model(name, merged, args.bandwidth, args.flops) for name in dict.fromkeys(key[0] for key in merged)]
    images = [image for model in models for image in plots(model, args.images)] if args.images else []
    text = page(records, models, images, args.into)
    if args.into:
        put_into(args.into, text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
