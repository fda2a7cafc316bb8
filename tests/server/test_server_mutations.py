"""Rich requests of every chat API with something in them replaced, taken away or added: an answer or a 4xx, never a 5xx."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODEL = "mock-model"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "reasoning": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "sun"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CALL]}},
        "parallel_tool_calls": False,
        "include_reasoning": True,
        "reasoning_effort": "low",
        "stream_options": None,
    },
    "/v1/responses": {
        "input": [
            {"role": "developer", "content": "x"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ],
        "instructions": "i",
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"city": "Oslo"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sun"}]}]},
        ],
        "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look"},
        "thinking": {"type": "enabled", "budget_tokens": 20},
        "output_config": {"effort": "low"},
        "stop_sequences": ["zzz"],
        "top_k": 5,
    },
}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.sampled_from(["", "user", "function", "text", "required", "look"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "text", "x"]), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything within."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_mutations(http, data):
    path = data.draw(st.sampled_from(sorted(BODIES)))
    body = copy.deepcopy(BODIES[path])
    for _ in range(data.draw(st.integers(1, 2))):
        found = places(body)
        if not found:
            break
        container, key = found[data.draw(st.integers(0, len(found) - 1))]
        kind = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if kind == "replace":
            container[key] = data.draw(values)
        elif kind == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[data.draw(st.sampled_from(["x", "type", "content", "name"]))] = data.draw(values)
    limit = {} if path == "/v1/responses" else {"max_tokens": 4}
    stream = data.draw(st.booleans())
    answer = http.post(path, json={"model": MODEL, **limit, **body, "stream": stream})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif stream:
        assert "response.failed" not in answer.text and "event: error" not in answer.text and '"error":{' not in answer.text


def test_they_are_right_as_they_are(http):
    for path, body in BODIES.items():
        answer = http.post(path, json={"model": MODEL, **({} if path == "/v1/responses" else {"max_tokens": 4}), **body})
        assert answer.status_code == 200, answer.text
