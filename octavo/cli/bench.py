"""``octavo bench``: a group of commands that measure. Each is imported when it runs; here are only their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.options import (
    DatasetOptions,
    LatencyOptions,
    LoadOptions,
    ReportOptions,
    SamplingOptions,
    StartupOptions,
    SweepOptions,
    TargetOptions,
    ThroughputOptions,
)
from octavo.cli import flags, options
from octavo.config import flag_name

CLIENT_CLASSES = (TargetOptions, DatasetOptions, LoadOptions, SamplingOptions, ReportOptions)
SWEPT = ("request_rate", "max_concurrency", "save_result", "save_detailed")  # flags of serve that a sweep sets itself


@dataclass(frozen=True)
class Command:
    """A command of the group: what ``octavo.cli.main`` needs of one, as functions."""

    usage: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _add_serve(parser: argparse.ArgumentParser) -> None:
    flags.add_options(parser, *CLIENT_CLASSES)


def _serve_bench(args: argparse.Namespace) -> Any:
    from octavo.bench.serve import ServeBench

    return ServeBench(*(cls(**flags.collect(args, cls)) for cls in CLIENT_CLASSES))


def _run_serve(args: argparse.Namespace) -> int:
    from octavo.bench.serve import run

    return run(_serve_bench(args))


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    flags.add_options(parser, SweepOptions)
    flags.add_options(parser, *CLIENT_CLASSES, exclude=SWEPT)


def _run_sweep(args: argparse.Namespace) -> int:
    from octavo.bench.sweep import run

    return run(_serve_bench(args), SweepOptions(**flags.collect(args, SweepOptions)))


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    options.add_log_level(parser)
    flags.add_options(parser, ThroughputOptions, DatasetOptions)
    options.add_engine_flags(parser)


def _run_throughput(args: argparse.Namespace) -> int:
    from octavo.bench.offline import run_throughput

    own, dataset = ThroughputOptions(**flags.collect(args, ThroughputOptions)), DatasetOptions(**flags.collect(args, DatasetOptions))
    return run_throughput(own, dataset, _engine(args))


def _add_latency(parser: argparse.ArgumentParser) -> None:
    options.add_log_level(parser)
    flags.add_options(parser, LatencyOptions)
    options.add_engine_flags(parser)


def _run_latency(args: argparse.Namespace) -> int:
    from octavo.bench.offline import run_latency

    return run_latency(LatencyOptions(**flags.collect(args, LatencyOptions)), _engine(args))


def _add_startup(parser: argparse.ArgumentParser) -> None:
    options.add_log_level(parser)
    flags.add_options(parser, StartupOptions)
    options.add_engine_flags(parser)


def _run_startup(args: argparse.Namespace) -> int:
    from octavo.bench.startup import run

    own = StartupOptions(**flags.collect(args, StartupOptions))
    engine = _engine(args)
    return run(own, engine, engine_words(engine))


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="cpu, attention, linear, ops, sampling (default: all that this machine can run)."
    )


def _run_kernels(args: argparse.Namespace) -> int:
    from octavo.bench.kernels import run

    return run(args.names)


COMMANDS = {
    "serve": Command("[flags]", "Load any OpenAI-compatible server: latencies, throughput, goodput.", _add_serve, _run_serve),
    "sweep": Command("[flags]", "The same at rising loads: a table, a plot, the knee, --max-num-seqs for limits.", _add_sweep, _run_sweep),
    "throughput": Command("[flags]", "The offline LLM: requests and tokens a second.", _add_throughput, _run_throughput),
    "latency": Command("[flags]", "The offline LLM: how long one batch takes.", _add_latency, _run_latency),
    "startup": Command("[flags]", "From process start to the first answer, stage by stage.", _add_startup, _run_startup),
    "kernels": Command("[NAME …]", "Each kernel against torch and its floor (docs/benchmarking.md).", _add_kernels, _run_kernels),
}


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that the user chose, checked before anything heavy is imported."""
    options.start_logging(args)
    values = options.engine_options(args)
    options.check_engine(values)
    return values


def engine_words(values: dict[str, Any]) -> list[str]:
    """``{"max_model_len": 64, "enforce_eager": False}`` -> ["--max-model-len=64", "--no-enforce-eager"]"""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag_name(name) if value else flag_name(f"no_{name}"))
        elif value is not None:
            words.append(f"{flag_name(name)}={value}")
    return words


def dispatch(argv: Sequence[str]) -> int:
    """Run ``octavo bench`` with ``argv``; returns the exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    parser = flags.Parser(prog="octavo bench", usage="octavo bench COMMAND [flags]")
    if name.startswith("-"):
        parser.error(f"unknown flag {name}; flags follow the command: octavo bench serve --num-prompts 100")
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
        parser.error(f"unknown command bench {name}; {hint}")
    command = COMMANDS[name]
    parser = flags.Parser(prog=f"octavo bench {name}", usage=f"octavo bench {name} {command.usage}", description=command.summary)
    command.add_arguments(parser)
    return command.run(parser.parse(argv[1:])) or 0


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: octavo bench COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "  octavo bench COMMAND --help   the command's flags"]
    return "\n".join(lines)
