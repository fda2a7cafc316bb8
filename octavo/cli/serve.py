"""``octavo serve``: the HTTP server."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli import flags, options
from octavo.config import EngineConfig, ServerOptions
from octavo.errors import ConfigError
from octavo.log import setup_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="The same as --model.")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file of flags (max-model-len: 4096); the command line wins over it.")
    options.add_engine_flags(parser)
    flags.add_options(parser, ServerOptions)


def configure(args: argparse.Namespace) -> tuple[EngineConfig, ServerOptions]:
    """What the command line, the configuration file and the environment ask for. Raises ConfigError."""
    classes = (*options.ENGINE_CLASSES, ServerOptions)
    from_file: dict[str, Any] = flags.read_config_file(args.config, *classes) if args.config else {}
    engine = options.engine_options(args, from_file)
    if args.model_argument is not None:
        if "model" in vars(args) and args.model != args.model_argument:
            raise ConfigError(f"Two models given: {args.model_argument} and --model {args.model}.")
        engine["model"] = args.model_argument
    return options.check_engine(engine), options.server_options(args, from_file)


def run(args: argparse.Namespace) -> int:
    config, server = configure(args)
    setup_logging(server.log_level)
    if config.model is None:
        options.logger.info(options.DEMO_LINE)
    from octavo.server.run import serve

    return serve(config, server) or 0
