"""The API's description: complete, true to the answers, and the table of fields in step with the schemas."""

from __future__ import annotations

import json
import re
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from octavo.server import answer_schemas as answers
from octavo.server import compatibility
from octavo.server.fields import ACCEPTED_OF, OFFICIAL, RANGES, REFUSED_OF, SUPPORTED, fields_of
from octavo.server.messages_input import CountTokensRequest, MessagesRequest
from octavo.server.openapi import OPERATIONS, methods_of, served
from octavo.server.responses_input import ResponsesRequest
from octavo.server.schemas import ACCEPTED, REFUSED, ChatRequest, CompletionRequest

MODEL = "mock-model"
REQUESTS = tuple(compatibility.SCHEMAS.values())
HELLO = [{"role": "user", "content": "hello"}]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def document(server: Any) -> dict[str, Any]:
    return httpx.get(server.url + "/openapi.json").json()


# -- the table of fields ------------------------------------------------------------------------------------------------


def test_every_field_has_a_line_and_every_line_a_field() -> None:
    known = {f for schema in REQUESTS for f in schema.__struct_fields__}
    for schema in REQUESTS:
        assert [f.name for f in fields_of(schema)] == list(schema.__struct_fields__)  # KeyError for one without a line
    assert not ACCEPTED.keys() & REFUSED.keys()
    assert not (ACCEPTED.keys() | REFUSED.keys()) - known, "lines of fields that no schema has"
    assert not {name.split(".")[-1] for name in SUPPORTED} - known
    for schema in REQUESTS:
        own = {*ACCEPTED_OF.get(schema.__name__, ()), *REFUSED_OF.get(schema.__name__, ())}
        assert not own - set(schema.__struct_fields__)
        assert not OFFICIAL.get(schema.__name__, set()) - set(schema.__struct_fields__)
        for name in (n.split(".")[1] for n in SUPPORTED if n.startswith(schema.__name__ + ".")):
            assert name in schema.__struct_fields__


def no_newer_than(package: str, known: tuple[int, int]) -> None:
    """A release of somebody else's may add fields; it must not turn our tests red."""
    here = tuple(int(part) for part in version(package).split(".")[:2])
    if here > known:
        pytest.skip(f"{package} {version(package)} is newer than {known}, whose fields the table has: look for new ones")


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_field_of_openais_client_is_in_the_table(schema: Any) -> None:
    no_newer_than("openai", (3, 57))
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    module = chat_create_params if schema is ChatRequest else completion_create_params
    names = set(typing.get_type_hints(module.CompletionCreateParamsBase)) | {"stream"}
    assert not names - set(schema.__struct_fields__), "fields that OpenAI's client sends and that are unknown here"
    assert names == OFFICIAL[schema.__name__]


def test_every_field_of_the_other_apis_clients_is_in_the_table() -> None:
    no_newer_than("openai", (3, 57))
    no_newer_than("anthropic", (2, 14))
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types.responses import response_create_params

    headers = {"user_profile_id", "workspace_id"}  # arguments of the client that it sends as headers
    for schema, params in (
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ):
        names = set(typing.get_type_hints(params)) - headers
        assert not names - set(schema.__struct_fields__), "fields that the client sends and that are unknown here"
        assert not names - OFFICIAL[schema.__name__]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == compatibility.current_page(), (
        "run python -m octavo.server.compatibility --write"
    )


# -- the document -------------------------------------------------------------------------------------------------------


def test_every_route_is_described(server: Any, document: dict[str, Any]) -> None:
    pairs = [(method, route.path) for route in server.app.routes for method in methods_of(route)]
    undescribed = [pair for pair in pairs if pair not in OPERATIONS and not pair[1].startswith("/web/")]
    assert pairs and not undescribed  # the web page's own files are no part of the API
    assert len(list(served(server.app.routes))) >= 14
    described = {(m.upper(), p) for p, methods in document["paths"].items() for m in methods}
    assert described == {(o.method, re.sub(r":\w+", "", o.path)) for o in served(server.app.routes)}


def test_references_resolve_and_names_are_ours(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    for name in re.findall(r"#/components/schemas/([^\"]+)", text):
        assert name in schemas and re.fullmatch(r"\w+", name), name
    chat = schemas["ChatRequest"]["properties"]
    assert chat["seed"]["description"] == SUPPORTED["seed"] and chat["user"]["description"].startswith("Accepted without effect")
    assert chat["audio"]["description"].startswith("Refused: ")
    assert "security" not in document


def test_with_a_key(start_server: Any) -> None:
    running = start_server(api_key=("key",))
    assert httpx.get(running.url + "/openapi.json").status_code == 401
    assert httpx.get(running.url + "/docs").status_code == 200  # an empty page, which asks for the key
    document = httpx.get(running.url + "/openapi.json", headers={"Authorization": "Bearer key"}).json()
    assert document["security"] == [{"key": []}] and document["components"]["securitySchemes"]
    assert document["paths"]["/health"]["get"]["security"] == [] and "security" not in document["paths"]["/load"]["get"]


def test_the_page_asks_no_other_host(server: Any) -> None:
    answer = httpx.get(server.url + "/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href|url\(|fetch\()[^>\s]*https?:", answer.text) and "@import" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and policy.count("'sha256-") == 2


# -- real answers -------------------------------------------------------------------------------------------------------


def declared(value: Any, schema: Any, where: str = "$") -> None:
    """Hold an answer to its struct: every key is declared, and every value has the declared type."""
    msgspec.convert(value, schema)
    _only_declared(value, schema, where)


def _only_declared(value: Any, schema: Any, where: str) -> None:
    options = typing.get_args(schema) if typing.get_origin(schema) in (typing.Union, type(int | str)) else (schema,)
    for option in options:
        if isinstance(option, type) and issubclass(option, msgspec.Struct) and isinstance(value, dict):
            fields = {f.encode_name: f.type for f in msgspec.structs.fields(option)}
            config = option.__struct_config__
            if config.tag is not None:
                if value[config.tag_field] != config.tag:
                    continue  # another of the union
                fields[config.tag_field] = str
            assert not value.keys() - fields.keys(), f"{where} has undeclared fields {value.keys() - fields.keys()}"
            for name, inner in value.items():
                _only_declared(inner, fields[name], f"{where}.{name}")
        elif typing.get_origin(option) is list and isinstance(value, list):
            for i, inner in enumerate(value):
                _only_declared(inner, typing.get_args(option)[0], f"{where}[{i}]")
        elif typing.get_origin(option) is dict and isinstance(value, dict):
            for name, inner in value.items():
                _only_declared(inner, typing.get_args(option)[1], f"{where}.{name}")


def test_undeclared_and_wrong_answers_are_found() -> None:
    good = {"id": "m", "object": "model", "created": 1, "owned_by": "o", "root": "m", "parent": None, "max_model_len": 5}
    declared({"object": "list", "data": [good]}, answers.ModelList)
    for bad in ({**good, "more": 1}, {**good, "created": "x"}, {k: v for k, v in good.items() if k != "root"}):
        with pytest.raises((AssertionError, msgspec.ValidationError)):
            declared({"object": "list", "data": [bad]}, answers.ModelList)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}),
        ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "n": 2}),
        ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "prompt_logprobs": 1, "return_token_ids": True}),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5}),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5, "logprobs": 3, "echo": True, "return_token_ids": True}),
        ("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5, "prompt_logprobs": 2, "use_beam_search": True, "n": 2}),
        ("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 5}),
        ("POST", "/v1/responses", {"input": "hello", "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}, "reasoning": {}}),
        ("POST", "/v1/responses", {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 50, "stop_sequences": ["octopus"]}),
        ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/models/{MODEL}", None),
        ("POST", "/tokenize", {"prompt": "abc", "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [1, 2]}),
        ("GET", "/health", None),
        ("GET", "/load", None),
        ("GET", "/version", None),
    ],
)
def test_answers_are_as_described(server: Any, method: str, path: str, body: Any) -> None:
    answer = httpx.request(method, server.url + path, json=body) if body is not None else httpx.request(method, server.url + path)
    assert answer.status_code == 200, answer.text
    operation = OPERATIONS[method, path if "models/" not in path else "/v1/models/{name:path}"]
    declared(answer.json(), operation.response)
    if operation.stream is not None and "prompt_logprobs" not in body:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": "logprobs" in body}}
        typed = path in ("/v1/responses", "/v1/messages")
        text = httpx.request(method, server.url + path, json={**body, **({"stream": True} if typed else options)}).text
        events = [line.partition("data: ")[2] for line in text.split("\n\n") if line]
        assert typed or events.pop() == "[DONE]"
        assert len(events) > 2
        for event in events:
            declared(json.loads(event), operation.stream)


# -- anything at all ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(server: Any) -> Any:
    schemathesis = pytest.importorskip("schemathesis")
    schemathesis.checks.load_all_checks()
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


# What a body of a route is given, so that it is served.
NEEDS = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": ["hello", "the sea"], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HELLO},
}


def _tame(path: str, body: Any) -> Any:
    """A generated body such that more of it is served: a model and a prompt that exist, short answers, few other fields."""
    if isinstance(body, dict) and path in NEEDS:
        schema = OPERATIONS["POST", path].request
        refused = {f.name for f in fields_of(schema) if f.status == "refused"}
        needs = {"model": MODEL, **NEEDS[path]}
        body = {name: value for name, value in body.items() if name not in refused} | needs
        for name in ("max_completion_tokens", "stream_options", "n", "best_of", "priority"):
            body.pop(name, None)
        extra = sorted(body.keys() - needs.keys())
        for name in extra[: max(0, len(extra) - 4)] if len(extra) % 2 else extra[4:]:
            del body[name]
    return body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bounds_are_those_that_are_checked(server: Any, document: dict[str, Any], path: str) -> None:
    """A value at a bound is taken, one beyond it is refused by the field's name."""
    schema = document["components"]["schemas"]["ChatRequest" if "chat" in path else "CompletionRequest"]["properties"]
    needs = {"top_logprobs": {"logprobs": True}, "beam_width": {"use_beam_search": True}, "length_penalty": {"use_beam_search": True}}
    start = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    tried = 0
    with httpx.Client(base_url=server.url) as client:
        for name in RANGES.keys() & schema.keys():
            bounds = next((o for o in schema[name]["anyOf"] if o.get("type") in ("integer", "number")), {})
            for bound, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                if bound not in bounds:
                    continue
                tried += 1
                body = {**start, "max_tokens": None if name == "max_completion_tokens" else 2, **needs.get(name, {})}
                beyond = client.post(path, json={**body, name: bounds[bound] + step})
                assert beyond.status_code == 400 and beyond.json()["error"]["param"] == name, (name, beyond.text)
                if bound != "exclusiveMinimum":
                    at = client.post(path, json={**body, name: bounds[bound]})
                    assert at.status_code == 200 or "truncate" in name, (name, at.text)
    assert tried >= 15


@pytest.mark.parametrize("tame", [False, True])
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_whatever_is_sent_is_answered_as_described(server: Any, api: Any, mode: str, tame: bool) -> None:
    """Schemathesis makes requests out of the description, right and wrong ones: no 5xx, and answers of the described kind."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis import checks

    wanted = [
        checks.not_a_server_error,
        *(checks.CHECKS.get_one(name) for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")),
    ]
    statuses: dict[int, int] = {}
    for result in api.get_all_operations():
        operation = result.ok()
        if mode == "NEGATIVE" and not operation.body:
            continue

        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
        @settings(max_examples=40 if operation.body else 3, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def run(case: Any) -> None:
            if tame:
                case.body = _tame(case.path, case.body)
            response = case.call(timeout=30)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=wanted)

        run()
    assert httpx.get(server.url + "/health").status_code == 200
    assert set(statuses) - {200}, "nothing was refused" if mode == "NEGATIVE" else statuses
    if mode == "POSITIVE":
        assert statuses.get(200, 0) >= (40 if tame else 10), statuses
