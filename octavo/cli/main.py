"""The command ``octavo``: finds the subcommand, imports only that one, and turns errors into one line and a status.

Exit status: 0 done; 1 something failed; 2 the command line or a configuration value is wrong; 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

import octavo
from octavo.errors import ConfigError, OctavoError


@dataclass(frozen=True)
class Command:
    """A subcommand: ``module`` offers ``add_arguments(parser)`` and ``run(args) -> int``; a group, ``dispatch(argv) -> int``."""

    module: str
    usage: str
    summary: str


COMMANDS = {
    "serve": Command("octavo.cli.serve", "[MODEL] [flags]", "Serve a model over an OpenAI-compatible HTTP API."),
    "chat": Command("octavo.cli.chat", "[MODEL | --url URL] [flags]", "Chat in the terminal, with a server or a model."),
    "generate": Command("octavo.cli.generate", "[PROMPT …] [--model MODEL] [flags]", "Generate for prompts, and print the texts or JSON."),
    "run-batch": Command("octavo.cli.run_batch", "-i FILE -o FILE [--model MODEL] [flags]", "Answer the requests of a file."),
    "bench": Command("octavo.cli.bench", "COMMAND [flags]", "Measure a server, the offline LLM, start-up, or a sweep of loads."),
    "doctor": Command("octavo.cli.doctor", "[--json]", "Show what this machine offers: devices, torch, kernels, model caches."),
    "version": Command("octavo.cli.version", "", "Print the version."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away (octavo generate … | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OctavoError as error:
        if _wants_traceback(argv):
            import traceback

            traceback.print_exc()
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name in ("-V", "-v", "--version"):
        print(f"octavo {octavo.__version__}")
        return 0
    if name not in COMMANDS:
        _refuse_command(name)
    from octavo.cli.flags import Parser  # the two calls above do without argparse

    command = COMMANDS[name]
    module: ModuleType = importlib.import_module(command.module)
    if hasattr(module, "dispatch"):
        return module.dispatch(argv[1:])
    parser = Parser(prog=f"octavo {name}", usage=f"octavo {name} {command.usage}".rstrip(), description=command.summary)
    module.add_arguments(parser)
    return module.run(parser.parse(argv[1:])) or 0


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: octavo COMMAND …",
        "",
        "Octavo serves large language models: paged KV cache, continuous batching, an OpenAI-compatible API.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        "  octavo COMMAND --help   the command's flags",
        "  octavo --version        the version",
        "",
        "Without a model of your own:  octavo serve",
    ]
    return "\n".join(lines)


def _refuse_command(name: str) -> NoReturn:
    what = "flag" if name.startswith("-") else "command"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
    if what == "flag":
        hint = "flags follow the command: octavo serve --port 8000."
    print(f"octavo: error: unknown {what} {name}; {hint}", file=sys.stderr)
    raise SystemExit(2)


def _wants_traceback(argv: list[str]) -> bool:
    if os.environ.get("OCTAVO_LOG_LEVEL", "").lower() == "debug":
        return True
    words = [word.replace("_", "-") for word in argv]
    return "--log-level=debug" in words or any(a == "--log-level" and b == "debug" for a, b in zip(words, words[1:], strict=False))
