"""``octavo run-batch``: the requests of a file, through the code of the server, without a port."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import flags, options
from octavo.config import EngineConfig, ServerOptions
from octavo.errors import ConfigError, OctavoError
from octavo.log import setup_logging

if TYPE_CHECKING:
    from octavo.server.batch_file import Counts

# The server's options that say how requests are answered; the others are about its port.
OPTIONS = {
    *("served_model_name", "chat_template", "trust_request_chat_template", "max_logprobs", "max_n", "log_level", "disable_log_stats"),
    *("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "max_prompts_per_request"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", metavar="FILE", help="Requests, a JSON object a line (OpenAI's batch format).")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="Where the answers go, a JSON object a line.")
    parser.add_argument("--resume", action="store_true", help="Go on with an output file: requests that it answers are left out.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an output file that is there.")
    parser.add_argument(
        "--in-order", action="store_true", help="Write answers in the order of the requests, not as they finish (some wait for others)."
    )
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="Requests that are worked on at the same time (default: twice --max-num-seqs)."
    )
    options.add_engine_flags(parser)
    flags.add_options(parser, ServerOptions, exclude=[f.name for f in dataclasses.fields(ServerOptions) if f.name not in OPTIONS])


def run(args: argparse.Namespace) -> int:
    config = options.check_engine(options.engine_options(args))
    server = dataclasses.replace(options.server_options(args), api_key=(), disable_log_requests=True)
    setup_logging(server.log_level)
    source, target = _files(args)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}.")
    if config.model is None:
        options.logger.info(options.DEMO_LINE)
    try:
        counts = asyncio.run(_run(args, config, server, source, target))
    except asyncio.CancelledError:
        print(f"Stopped. What is answered is in {target}; --resume goes on with the rest.", file=sys.stderr)
        return 130
    before = f", {counts.skipped:,} answered before" if counts.skipped else ""
    print(f"{counts.total:,} requests: {counts.succeeded:,} answered, {counts.failed:,} failed{before}. See {target}", file=sys.stderr)
    return 0


def _files(args: argparse.Namespace) -> tuple[Path, Path]:
    """Both paths, checked before anything is loaded. Raises ConfigError."""
    from octavo.server.batch_file import local_path

    if args.input_file is None or args.output_file is None:
        raise ConfigError("run-batch needs both: -i FILE with requests, and -o FILE for the answers.")
    source, target = local_path(args.input_file, "--input-file"), local_path(args.output_file, "--output-file")
    if not source.is_file():
        raise ConfigError(f"--input-file {source}: there is no such file.")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"--output-file {target}: the folder does not exist, or this is one.")
    if target.exists():
        if source.samefile(target):
            raise ConfigError("--output-file is the input file.")
        if args.resume and args.overwrite:
            raise ConfigError("--resume goes on with the output file and --overwrite replaces it; give one.")
        if not (args.resume or args.overwrite):
            raise ConfigError(f"--output-file {target} is there already: --resume goes on with it, --overwrite replaces it.")
    return source, target


async def _run(args: argparse.Namespace, config: EngineConfig, server: ServerOptions, source: Path, target: Path) -> Counts:
    from octavo.server.batch_file import BatchRun, finished_before
    from octavo.server.run import _start_async_llm, model_names

    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)  # type: ignore[union-attr]
    done = finished_before(target) if args.resume and target.exists() else set()
    engine = await _start_async_llm(config, server)
    try:
        from octavo.server.app import create_app

        app = create_app(engine, server, model_names(config, server), scheduling_policy=config.scheduling_policy)
        bar = _Bar(source)
        try:
            with source.open("rb") as lines, target.open("ab" if done else "wb") as output:
                concurrency = args.max_concurrency or 2 * config.rows
                batch = BatchRun(app, output, concurrency, args.in_order, done, bar, engine.is_healthy)
                return await batch.run(iter(lines))
        except OSError as error:  # a full disk, most often; closing the file says it once more
            raise OctavoError(
                f"Reading {source} or writing {target} failed: {error.strerror or error}. What was written before is kept: "
                "run it again with --resume."
            ) from None
        finally:
            bar.close()
            app.state.context.pool.shutdown(wait=False, cancel_futures=True)
    finally:
        await engine.shutdown()


class _Bar:
    """Requests done, of all in the file."""

    def __init__(self, source: Path) -> None:
        from tqdm import tqdm

        with source.open("rb") as lines:
            total = sum(1 for line in lines if line.strip())
        self.bar: Any = tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True, disable=None)

    def __call__(self, counts: Counts) -> None:
        if counts.failed:
            self.bar.set_postfix_str(f"{counts.failed} failed", refresh=False)
        self.bar.update(counts.skipped + counts.succeeded + counts.failed - self.bar.n)

    def close(self) -> None:
        self.bar.close()
