"""docs/compatibility.md says the truth: every accepted and refused field, and what the lines of supported ones promise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.frontend.chat_template import ChatTemplate
from octavo.server import compatibility
from octavo.server.fields import fields_of
from octavo.server.mock import FakeChatTemplate, MockEngine

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}
SAMPLES: list[Any] = ["x", True, 5, {"a": "b"}, ["x"], [{"role": "user"}]]  # one of them is of the field's type
CASES = [
    (path, field.name)
    for title, schema in compatibility.SCHEMAS.items()
    for path in [title.removeprefix("POST ").partition(",")[0]]
    for field in fields_of(schema)
    if field.status != "supported"
]
STATUS = {
    (title.removeprefix("POST ").partition(",")[0], field.name): field.status
    for title, schema in compatibility.SCHEMAS.items()
    for field in fields_of(schema)
}


def comparable(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {k: comparable(v) for k, v in answer.items() if k not in ("id", "created", "created_at", "usage", "user")}
    return [comparable(item) for item in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize(("path", "name"), CASES)
def test_accepted_and_refused_fields(http, path, name):
    body = {"model": MODEL, **BODIES[path]}
    answers = [http.post(path, json={**body, name: value}) for value in SAMPLES]
    assert http.post(path, json={**body, name: None}).status_code == 200
    if STATUS[path, name] == "accepted":
        taken = [a for a in answers if a.status_code == 200]
        assert taken, answers[0].text
        plain = comparable(http.post(path, json=body).json())
        assert all(comparable(a.json()) == plain for a in taken)
    else:
        assert not [a for a in answers if a.status_code == 200]
        messages = [a.json()["error"]["message"] for a in answers]
        assert any(m.startswith(f"{name} is not supported") for m in messages), messages


def test_all_routes_with_a_body_are_here():
    known = {title.removeprefix("POST ").partition(",")[0] for title in compatibility.SCHEMAS}
    assert known - BODIES.keys() == {"/tokenize", "/detokenize"}  # all of their fields are supported
    assert {path for path, _ in CASES} <= BODIES.keys()


RESPONSES = [
    ({"model": "nope"}, 404, "does not exist"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input_image"),
    ({"tools": [{"type": "file_search"}]}, 400, "file_search"),
    ({"text": {"verbosity": "low"}}, 400, "verbosity"),
    ({"text": {"verbosity": "medium"}}, 200, ""),
    ({"max_output_tokens": 1}, 200, ""),
    ({"top_logprobs": 1}, 400, "top_logprobs needs include"),
    ({"include": ["reasoning.encrypted_content"]}, 200, ""),
    ({"include": ["web_search_call.action.sources"]}, 400, "include"),
    ({"reasoning": {"effort": "low", "summary": "auto", "generate_summary": "auto", "context": "auto"}}, 200, ""),
    ({"metadata": {"a": "b"}}, 200, '"metadata":{"a":"b"}'),
    ({"truncation": "disabled"}, 200, '"truncation":"disabled"'),
    ({"stop": [f"{i}x" for i in range(16)]}, 200, ""),
    ({"stop": [f"{i}x" for i in range(17)]}, 400, "stop"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"min_tokens": 50, "max_output_tokens": 3}, 400, "min_tokens"),
    ({"thinking_token_budget": 5}, 400, "thinking_token_budget"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"max_output_tokens": -1}, 400, '"message":"max_output_tokens must'),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, 400, '"param":"text.format.schema"'),
]
MESSAGES = [
    ({"model": "nope"}, 404, "does not exist"),
    ({"temperature": 1.5}, 200, ""),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_k": 0}, 200, ""),
    ({"top_k": -1}, 200, ""),
    ({"stop_sequences": [f"{i}x" for i in range(16)]}, 200, ""),
    ({"stop_sequences": [f"{i}x" for i in range(17)]}, 400, "stop_sequences"),
    ({"thinking": {"type": "enabled"}}, 400, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive"}}, 200, ""),
    ({"output_config": {"format": {"type": "text"}}}, 400, "output_config.format"),
    ({"output_config": {"effort": "max"}}, 200, ""),
    ({"speed": "standard"}, 200, ""),
    ({"speed": "fast"}, 400, "speed"),
    ({"system": [{"type": "text", "text": "a"}]}, 200, ""),
    ({"system": [{"type": "image"}]}, 400, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search"),
    ({"tool_choice": {"type": "any"}}, 400, "tool"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "king"),
]


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [*(("/v1/responses", *case) for case in RESPONSES), *(("/v1/messages", *case) for case in MESSAGES)],
)
def test_what_the_lines_say(http, path, fields, status, words):
    answer = http.post(path, json={"model": MODEL, **BODIES[path], **fields})
    assert answer.status_code == status and words in answer.text, answer.text


def test_what_the_lines_say_about_the_engine(start_server):
    running = start_server(MockEngine(template=FakeChatTemplate("reasoning_effort")))

    def ask(path: str, **fields: Any) -> dict[str, Any]:
        answer = httpx.post(running.url + path, json={**BODIES[path], **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    seen = running.engine
    answer = ask("/v1/responses", instructions="Be brief.", priority=3, cache_salt="s", request_id="r", chat_template_kwargs={"k": 1})
    assert seen.last_request["prompt"].startswith("[k=1]<|im_start|>system\nBe brief.") and answer["id"] == "resp_r"
    assert (seen.last_request["priority"], seen.last_request["cache_salt"]) == (3, "s")
    ask("/v1/responses", top_k=4, min_p=0.1, seed=9, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, ignore_eos=True)
    params = seen.last_params
    assert (params.top_k, params.min_p, params.seed, params.ignore_eos) == (4, 0.1, 9, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    ask("/v1/responses", reasoning={"effort": "low"})
    assert "[reasoning_effort=low]" in seen.last_request["prompt"]
    answer = ask("/v1/messages", output_config={"effort": "max"}, request_id="r", cache_salt="s", min_p=0.2, top_k=3, stop_sequences=["q"])
    assert "[reasoning_effort=high]" in seen.last_request["prompt"] and answer["id"] == "msg_r"
    assert (seen.last_params.min_p, seen.last_params.top_k, list(seen.last_params.stop)) == (0.2, 3, ["q"])
    ask("/v1/messages", messages=[*HELLO, {"role": "assistant", "content": "I begin"}])
    assert seen.last_request["prompt"].endswith("<|im_start|>assistant\nI begin")
    ask("/v1/chat/completions", reasoning_effort="low")
    assert "[reasoning_effort=low]" in seen.last_request["prompt"]
    ask("/v1/responses", max_output_tokens=None)
    assert seen.last_params.max_tokens is None


SILENT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"  # knows no names, no efforts
NAMING = SILENT.replace("{{ message.role }}", "{{ message.name or message.role }}")


@pytest.mark.parametrize(("source", "shown"), [(SILENT, "user: hello"), (NAMING, "ann: hello")])
def test_names_and_variables_are_the_templates_affair(start_server, source, shown):
    running = start_server(MockEngine(template=ChatTemplate(source)))
    body = {"messages": [{"role": "user", "content": "hello", "name": "ann"}], "chat_template_kwargs": {"nobody_reads": 1}, "max_tokens": 1}
    assert httpx.post(running.url + "/v1/chat/completions", json=body).status_code == 200
    assert running.engine.last_request["prompt"] == f"{shown}\nassistant:"


WITHOUT_EFFECT = [
    ("/v1/chat/completions", {"reasoning_effort": "none", "include_reasoning": False}),
    ("/v1/responses", {"reasoning": {"effort": "minimal"}}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "low"}}),
]


@pytest.mark.parametrize(("path", "fields"), WITHOUT_EFFECT)
def test_reasoning_is_bounded_without_effect_where_there_is_none(start_server, path, fields):
    running = start_server(MockEngine(template=ChatTemplate(SILENT)))
    plain, asked = (httpx.post(running.url + path, json={**BODIES[path], "seed": 1, **extra}) for extra in ({}, fields))
    assert asked.status_code == 200, asked.text
    assert running.engine.last_request["prompt"] == "user: hello\nassistant:"
    first, second = comparable(plain.json()), comparable(asked.json())
    assert {k: v for k, v in second.items() if k != "reasoning"} == {k: v for k, v in first.items() if k != "reasoning"}
