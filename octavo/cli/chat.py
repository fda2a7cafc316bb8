"""``octavo chat``: a conversation in the terminal, with a server (``--url``) or with a model in this program."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from octavo import env
from octavo.cli import options, sampling_flags
from octavo.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from octavo.cli.chat_backends import ChatBackend, Message

COMMANDS = """\
/system TEXT   begin anew with this system message (without TEXT: with none)
/reset         forget the conversation, keep the system message
/help          show this
/exit          leave (also Ctrl-D); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="Model to load; with --url, the name to ask the server for.")
    parser.add_argument("--url", metavar="URL", help="Address of a server, such as http://127.0.0.1:8000/v1.")
    parser.add_argument("--api-key", metavar="TEXT", help="The server's key (default: the first in OCTAVO_API_KEY).")
    parser.add_argument("--system", metavar="TEXT", help="System message.")
    options.add_log_level(parser)
    options.add_engine_flags(parser, exclude=("seed",))
    sampling_flags.add_sampling_flags(
        parser,
        exclude=("n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
        defaults={"max_tokens": None, "temperature": None, "top_p": None, "top_k": None},
    )


def run(args: argparse.Namespace) -> int:
    backend = open_backend(args, options.start_logging(args))
    try:
        return Conversation(backend, args.system).run()
    finally:
        backend.close()


def open_backend(args: argparse.Namespace, log_level: str) -> ChatBackend:
    """The server or model that the command line names. Raises ConfigError, ModelError, OctavoError."""
    sampling = sampling_flags.chosen(args)
    sampling_flags.build({"max_tokens": None} | sampling)
    engine = options.engine_options(args)
    model = args.model_argument or engine.get("model")
    from octavo.cli.chat_backends import LocalBackend, ServerBackend  # HTTP and event loop: not needed for --help

    if args.url is not None:
        extra = sorted(name for name in engine if name != "model")
        if extra:
            raise ConfigError(f"--{extra[0].replace('_', '-')} is for a model loaded here; the server at --url has its own.")
        key = args.api_key or next(iter(env.api_keys()), None)
        return ServerBackend(args.url, api_key=key, model=model, sampling=sampling)
    if args.api_key is not None:
        raise ConfigError("--api-key needs --url.")
    config = options.check_engine(engine | {"model": model})
    if model is None:
        print(options.DEMO_LINE, file=sys.stderr)
    return LocalBackend(config, sampling=sampling, log_level=log_level)


class Conversation:
    """The loop of the terminal: reads a line, obeys a command or streams an answer."""

    def __init__(self, backend: ChatBackend, system: str | None = None) -> None:
        self.backend = backend
        self.messages: list[Message] = []
        self.interactive = sys.stdin.isatty()
        self._interrupted = False
        self._set_system(system)

    def run(self) -> int:
        if self.interactive:
            import contextlib

            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() line editing and history)
            print(f"Chatting with {self.backend.name}. /help lists the commands.", file=sys.stderr)
        while True:
            try:
                line = input("> " if self.interactive else "").strip()
            except EOFError:
                if self.interactive:
                    print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:
                if self._interrupted or not self.interactive:
                    raise
                self._interrupted = True  # a second one in a row leaves
                print("\n(Ctrl-C again or /exit leaves)", file=sys.stderr)
                continue
            self._interrupted = False
            if line.startswith("/"):
                if not self.obey(line):
                    return 0
            elif line:
                self.answer(line)

    def obey(self, line: str) -> bool:
        """Run a command; False when it ends the conversation."""
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/reset":
            del self.messages[1 if self.messages and self.messages[0]["role"] == "system" else 0 :]
            self._tell("Conversation forgotten.")
        elif command == "/system":
            self._set_system(rest.strip() or None)
            self._tell("System message set." if self.messages else "No system message.")
        elif command == "/help":
            self._tell(COMMANDS)
        else:
            self._tell(f"Unknown command {command}.\n{COMMANDS}")
        return True

    def answer(self, text: str) -> None:
        """Stream the answer to a message. A refused message is forgotten; a stopped answer is kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        stream = self.backend.stream(list(self.messages))
        try:
            for part in stream:
                parts.append(part)
                sys.stdout.write(part)
                sys.stdout.flush()
            stopped = ""
        except KeyboardInterrupt:
            stopped = "stopped; "
        except RequestError as error:
            self.messages.pop()
            self._tell(f"octavo: error: {error}")
            return
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
            print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        self._tell(f"[{stopped}{self.backend.usage.line()}]", dim=True)

    def _set_system(self, text: str | None) -> None:
        self.messages = [{"role": "system", "content": text}] if text else []

    @staticmethod
    def _tell(text: str, dim: bool = False) -> None:
        """For the person, not part of the answer: to stderr."""
        if dim and sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            text = f"\x1b[2m{text}\x1b[0m"
        print(text, file=sys.stderr, flush=True)
