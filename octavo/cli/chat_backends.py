"""Where ``octavo chat`` gets its answers: a server over HTTP, or a model in this program. Both stream text."""

from __future__ import annotations

import http.client
import json
import queue
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.errors import OctavoError, RequestError

Message = dict[str, str]


@dataclass
class Usage:
    """How long the last answer was and took. ``first_token_s`` is None until text came."""

    tokens: int = 0
    first_token_s: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None

    def line(self) -> str:
        text = f"{self.tokens} tokens"
        generating = self.seconds - (self.first_token_s or 0.0)
        if self.tokens > 1 and generating > 0:  # the first token's time is the prompt's
            text += f", {(self.tokens - 1) / generating:.1f} tok/s"
        if self.first_token_s is not None:
            text += f", first after {self.first_token_s:.2f} s"
        return text + (", cut short by the length limit" if self.finish_reason == "length" else "")


class ChatBackend(Protocol):
    """``stream`` yields new text; closing the iterator ends the request. ``usage`` is that of the latest answer.

    Raises RequestError for a request that was refused, OctavoError when nothing answers.
    """

    name: str
    usage: Usage

    def stream(self, messages: list[Message]) -> Iterator[str]: ...

    def close(self) -> None: ...


class ServerBackend:
    """Any server with an OpenAI-compatible API. ``url`` may end with /v1 or not; ``model`` None takes its first model."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        sampling: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OctavoError(f"--url {url}: must look like http://127.0.0.1:8000/v1.")
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._parts = parts
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._sampling = sampling or {}
        self.usage = Usage()
        self.name = model or self._first_model()

    def stream(self, messages: list[Message]) -> Iterator[str]:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **self._sampling}
        self.usage = usage = Usage()
        start = time.perf_counter()
        connection, response = self._request("POST", "/chat/completions", json.dumps(body))
        try:
            for event in _events(response):
                if "error" in event:
                    raise RequestError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    text = choice.get("delta", {}).get("content") or ""
                    usage.finish_reason = choice.get("finish_reason") or usage.finish_reason
                    if text:
                        usage.first_token_s = usage.first_token_s or time.perf_counter() - start
                        usage.tokens += 1  # until the server tells the true number
                        yield text
                usage.tokens = (event.get("usage") or {}).get("completion_tokens", usage.tokens)
        except (OSError, http.client.HTTPException) as error:
            raise OctavoError(f"The connection to {self._address()} broke: {error}.") from error
        finally:
            usage.seconds = time.perf_counter() - start
            connection.close()  # in the middle of an answer this is what ends the request on the server

    def close(self) -> None:
        """Nothing is kept open between answers."""

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/models")
        try:
            return str(json.load(response)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise OctavoError(f"{self._address()}/models did not list a model; name one as MODEL.") from error
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise OctavoError(
                f"Nothing answers at {self._address()} ({error}). Is the server running? Start one with: octavo serve"
            ) from error
        if response.status != 200:
            message = _error_message(response)
            connection.close()
            raise RequestError(message, status=response.status)
        return connection, response

    def _address(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}{self._base}"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until its end or ``[DONE]``."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _error_message(response: http.client.HTTPResponse) -> str:
    text = response.read(100_000).decode("utf-8", "replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text.strip()[:500] or response.reason
    hint = " Give the server's key with --api-key." if response.status == 401 else ""
    return f"The server answered {response.status}: {message}{hint}"


class LocalBackend:
    """A model in this program: the engine behind ``AsyncLLM``, with its event loop on a thread of its own.

    The loop has to run while the terminal waits for input, because it also hears whether the engine still lives.
    """

    def __init__(self, config: Any, *, sampling: dict[str, Any] | None = None, log_level: str = "warning") -> None:
        import asyncio
        import threading

        from octavo.frontend.async_llm import AsyncLLM
        from octavo.log import StartupProgress

        progress = StartupProgress()
        self._asyncio = asyncio
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat-engine", daemon=True)
        self._thread.start()
        self._count = 0
        self.usage = Usage()
        self._llm: Any = None
        started = AsyncLLM.start(config, log_level=log_level, on_progress=lambda p: progress(p.stage, p.fraction, p.detail))
        try:
            self._llm = asyncio.run_coroutine_threadsafe(started, self._loop).result()
        except BaseException:
            self._stop_loop()
            raise
        finally:
            progress.close()
        if self._llm.tokenizer is None or self._llm.chat_template is None:
            self.close()
            raise OctavoError("This model has no chat template; use octavo generate.")
        self._params = self._sampling_params(sampling or {})
        self.name = config.model or "SmolLM2-135M-Instruct"

    def _sampling_params(self, chosen: dict[str, Any]) -> Any:
        from octavo.frontend.params import SamplingParams

        defaults = getattr(self._llm.model_config, "generation_defaults", None) or {}
        known = {name: value for name, value in defaults.items() if name in SamplingParams.__struct_fields__}
        return SamplingParams(**({"max_tokens": None} | known | chosen))

    def stream(self, messages: list[Message]) -> Iterator[str]:
        prompt = self._llm.chat_template.render(messages)
        token_ids = self._llm.tokenizer.encode(prompt, add_special_tokens=False)
        self.usage = usage = Usage()
        start = time.perf_counter()
        self._count += 1
        outputs = self._llm.generate(token_ids, self._params, request_id=f"chat-{self._count}")
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        task = self._asyncio.run_coroutine_threadsafe(_pump(outputs, arrived), self._loop)
        try:
            while True:
                # A timeout, because on some platforms a wait without one can't be interrupted by Ctrl-C.
                try:
                    item = arrived.get(timeout=1.0)
                except queue.Empty:
                    continue
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                for output in item.outputs:
                    usage.tokens += len(output.token_ids)
                    usage.finish_reason = output.finish_reason or usage.finish_reason
                    if output.token_ids and usage.first_token_s is None:
                        usage.first_token_s = time.perf_counter() - start
                    if output.text:
                        yield output.text
        finally:
            usage.seconds = time.perf_counter() - start
            task.cancel()  # closes the iterator, which aborts the request if it still runs

    def close(self) -> None:
        if self._llm is not None:
            self._asyncio.run_coroutine_threadsafe(self._llm.shutdown(), self._loop).result(timeout=30)
            self._llm = None
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


async def _pump(outputs: AsyncIterator[Any], arrived: queue.SimpleQueue[Any]) -> None:
    """Hand every output to the terminal's thread; then None, or the error."""
    try:
        async for output in outputs:
            arrived.put(output)
        arrived.put(None)
    except Exception as error:
        arrived.put(error)
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
