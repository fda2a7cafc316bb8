"""A server that is measured: waiting for it, its model's name, and requests as bytes ready to send."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from octavo.bench.datasets import Prompt
from octavo.bench.http import Client, HttpError, parse_address
from octavo.bench.options import SamplingOptions, TargetOptions, parse_pairs
from octavo.bench.stream import stream
from octavo.bench.tokens import Counter, LocalCounter, ServerCounter
from octavo.env import api_keys
from octavo.errors import ConfigError, OctavoError

LIST_S = 30.0  # a server that takes longer to list its models is asked again, until --ready-check-timeout-sec


@dataclass(frozen=True)
class Target:
    """A server that answers. ``model``: the name to ask for; ``counter`` is None where tokens can't be counted."""

    client: Client
    options: TargetOptions
    model: str
    counter: Counter | None

    def encode(self, prompt: Prompt, sampling: SamplingOptions) -> bytes:
        """The whole HTTP request of a prompt. Raises ConfigError for token ids on the chat route."""
        body: dict[str, Any] = {"model": self.model}
        if self.options.is_chat:
            if not isinstance(prompt.content, str):
                raise ConfigError("The file has prompts of token ids; chats are text. Use --endpoint /v1/completions.")
            body["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            body["prompt"] = prompt.content
        limit = "max_completion_tokens" if self.options.is_chat else "max_tokens"
        body |= {limit: prompt.output_len, "stream": True, "stream_options": {"include_usage": True}}
        body |= sampling.fields(self.options.is_chat)
        return self.client.encode("POST", self.options.path, json.dumps(body).encode())


def headers_of(options: TargetOptions) -> dict[str, str]:
    keys = [options.api_key] if options.api_key else [*api_keys(), *filter(None, [os.environ.get("OPENAI_API_KEY")])]
    return ({"Authorization": f"Bearer {keys[0]}"} if keys else {}) | parse_pairs(options.header)


@asynccontextmanager
async def connect(options: TargetOptions, *, need_counter: bool = True) -> AsyncIterator[Target]:
    """The server once it answers. Raises OctavoError when it does not in time, ConfigError for what can't be used."""
    client = Client(parse_address(options.url), headers=headers_of(options), timeout=options.request_timeout, insecure=options.insecure)
    try:
        model = await _wait_for_model(client, options)
        counter: Counter | None = None
        if options.tokenizer is not None:
            counter = LocalCounter.load(options.tokenizer, options.is_chat)
        elif need_counter:
            counter = await ServerCounter.find(client, model, options.is_chat)
        yield Target(client, options, model, counter)
    finally:
        client.close()


async def _wait_for_model(client: Client, options: TargetOptions) -> str:
    """The name to ask for, after the server has listed its models. A server without the list needs --model."""
    deadline = time.monotonic() + options.ready_check_timeout_sec
    told = False
    wanted = options.served_model_name or options.model
    while True:
        try:
            listed = await _listed(client, deadline - time.monotonic())
            name = wanted or listed["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError
            return name
        except HttpError as error:
            if wanted and error.status not in (None, 401, 403, 502, 503):
                return wanted
            if error.status in (401, 403):
                raise OctavoError(f"{options.url} wants a key ({error}). Give --api-key or set OPENAI_API_KEY.") from None
            if error.status is not None and error.status not in (502, 503):
                raise OctavoError(f"{options.url}/v1/models: {error}. If the server does not list its model, give --model.") from None
            if time.monotonic() >= deadline:
                raise OctavoError(f"Nothing answers at {options.url} ({error}). Start a server, for example: octavo serve") from None
            if not told:
                print(f"Waiting for {options.url} ({error}) …", file=sys.stderr, flush=True)
                told = True
        except (LookupError, TypeError):
            raise OctavoError(f"{options.url}/v1/models lists no model; name one with --model.") from None
        await asyncio.sleep(0.1)


async def _listed(client: Client, seconds: float) -> Any:
    """What the server's list of models says. Raises HttpError, if it takes a connection and says nothing for long, too."""
    seconds = min(max(seconds, 0.1), LIST_S)
    try:
        return await asyncio.wait_for(client.get_json("/v1/models"), seconds)
    except asyncio.TimeoutError:
        raise HttpError(f"no answer within {seconds:.3g} s") from None


async def check_answers(target: Target, request: bytes) -> None:
    """One request before the load: what is wrong with all of them is told at once. Raises OctavoError."""
    result = await stream(target.client, request)
    if result.error is not None:
        raise OctavoError(f"The first request, a trial, failed: {result.error}")
