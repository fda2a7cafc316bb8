"""Tool calls and reasoning over HTTP, with a mock engine that says what it is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.frontend.parsers import TOOL_PARSERS
from octavo.server.mock import FakeChatTemplate, MockEngine
from tests.frontend.parsers.parser_cases import CASES, TOOLS
from tests.server.conftest import running_server

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo caf\u00e9"}}\n</tool_call>'
TWO = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
BROKEN = 'So: <tool_call>\n{"name": "get_weather", "arguments": {"city": oops}}\n</tool_call> and on'


@pytest.fixture
def say(start_server):
    """Start a server whose model gives ``answer`` (a text, or a function of prompt, index and parameters)."""

    def start(answer, *, marks="<tool_call>", takes_tools=True, **options):
        engine = MockEngine(template=FakeChatTemplate(marks, takes_tools))
        engine.says = answer if callable(answer) else lambda prompt, index, params: answer
        return start_server(engine, **options)

    return start


def joined(chunks: list[dict], index: int = 0) -> dict:
    """What a client makes of a stream: the choice that the chunks of ``index`` add up to."""
    message: dict = {"content": None}
    calls: list[dict] = []
    entries, reason = [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key) is not None:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["type"] == "function" and call["id"] and call["function"]["name"] and call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    assert call["function"]["arguments"] != ""
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            entries += (choice.get("logprobs") or {"content": []})["content"]
            reason = choice["finish_reason"] or reason
    return {"message": message, "calls": calls, "reason": reason, "logprobs": entries}


def both(running, **body) -> tuple[dict, list[dict]]:
    """The whole answer and the chunks of the stream, for the same request."""
    import httpx

    body = {"messages": HELLO, "max_tokens": 400, **body}
    with httpx.Client(base_url=running.url, timeout=60) as http:
        whole = http.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        stream = http.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
        assert stream.status_code == 200, stream.text
    lines = [line for line in stream.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert all(delta.get("content") != "" for delta in deltas if "role" not in delta)
    whole = whole.json()
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    return whole, chunks


def same(whole: dict, chunks: list[dict], index: int = 0) -> dict:
    """Assert that the stream says what the answer does; the answer's choice."""
    choice, stream = whole["choices"][index], joined(chunks, index)
    message = choice["message"]
    assert (stream["message"]["content"] or None) == (message["content"] or None)
    assert stream["message"].get("reasoning") == message.get("reasoning") == message.get("reasoning_content")
    assert stream["message"].get("reasoning_content") == message.get("reasoning_content")
    assert stream["reason"] == choice["finish_reason"]
    assert [c["function"] for c in stream["calls"]] == [c["function"] for c in message.get("tool_calls", [])]
    return choice


def calls_of(choice: dict) -> list[tuple[str, object]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in choice["message"].get("tool_calls", [])]


def test_one_call(say):
    running = say(ONE)
    choice = same(*both(running, tools=[WEATHER]))
    assert calls_of(choice) == [("get_weather", {"city": "Oslo caf\u00e9"})]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")
    assert '[tools=[{"type": "function"' in running.engine.last_request["prompt"]


def test_arguments_are_streamed_in_pieces(say):
    _, chunks = both(say(ONE), tools=[WEATHER])
    pieces = [c["choices"][0]["delta"]["tool_calls"] for c in chunks[:-1] if "tool_calls" in c["choices"][0]["delta"]]
    assert len(pieces) > 5 and pieces[0][0]["function"] == {"name": "get_weather", "arguments": ""}


def test_or_whole(say):
    _, chunks = both(say(ONE, stream_tool_arguments=False), tools=[WEATHER])
    pieces = [c["choices"][0]["delta"]["tool_calls"] for c in chunks[:-1] if "tool_calls" in c["choices"][0]["delta"]]
    assert len(pieces) == 2


def test_parallel_calls_and_content(say):
    running = say(TWO)
    choice = same(*both(running, tools=[WEATHER, TIME]))
    assert [name for name, _ in calls_of(choice)] == ["get_weather", "get_time"]
    assert choice["message"]["content"].strip() == "I look."
    ids = {c["id"] for c in choice["message"]["tool_calls"]}
    assert len(ids) == 2
    single = both(running, tools=[WEATHER, TIME], parallel_tool_calls=False)
    choice = same(*single)
    assert calls_of(choice) == [("get_weather", {"city": "Oslo"})] and choice["finish_reason"] == "tool_calls"
    running.wait_idle()


def test_choice_none_and_no_tools_are_text(say):
    running = say(ONE)
    for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {}, {"tools": []}, {"tools": None}):
        choice = same(*both(running, **fields))
        assert choice["message"]["content"] == ONE and choice["finish_reason"] == "stop"
        assert "tools=" not in running.engine.last_request["prompt"]


def test_allowed_tools(say):
    choice_field = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    running = say(TWO)
    choice = same(*both(running, tools=[WEATHER, TIME], tool_choice=choice_field))
    assert calls_of(choice) == [("get_time", {})]
    assert "get_weather" in running.engine.last_request["prompt"]  # it is shown; its call is text
    assert "get_weather" in choice["message"]["content"]


def test_broken_calls_come_back_as_text(say):
    running = say(BROKEN, stream_tool_arguments=False)
    choice = same(*both(running, tools=[WEATHER]))
    assert choice["message"]["content"] == BROKEN and choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    running = say(BROKEN)
    whole, chunks = both(running, tools=[WEATHER])
    assert whole["choices"][0]["message"]["content"] == BROKEN
    stream = joined(chunks)  # its arguments have been seen to begin; then all of it comes as text
    assert stream["message"]["content"] == BROKEN and stream["reason"] == "stop"


def test_unknown_functions_are_text(say):
    choice = same(*both(say(ONE), tools=[TIME]))
    assert choice["message"]["content"] == ONE and choice["finish_reason"] == "stop"


def test_cut_calls_keep_length(say):
    running = say(ONE)
    for limit in (25, 60, 70):
        choice = same(*both(running, tools=[WEATHER], max_tokens=limit))
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_logprobs_are_all_there_once(say, n):
    running = say(lambda prompt, index, params: [ONE, TWO, "plain words"][index])
    whole, chunks = both(running, tools=[WEATHER, TIME], logprobs=True, top_logprobs=2, n=n, return_token_ids=True)
    for i in range(n):
        choice = same(whole, chunks, i)
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(choice["token_ids"])
        assert joined(chunks, i)["logprobs"] == entries
        ids = [t for c in chunks for x in c["choices"] if x["index"] == i for t in x.get("token_ids", ())]
        assert ids == choice["token_ids"]
        text = b"".join(bytes(e["bytes"]) for e in entries).decode()
        assert text == [ONE, TWO, "plain words"][i] + "<|im_end|>"


def test_logprobs_of_the_only_call_end_with_it(say):
    whole, _ = both(say(TWO), tools=[WEATHER, TIME], logprobs=True, parallel_tool_calls=False)
    assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"]


def test_history_goes_into_the_template(say):
    running = say("Sunny.")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sun"},
    ]
    same(*both(running, messages=messages, tools=[WEATHER]))
    prompt = running.engine.last_request["prompt"]
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt and "<|im_start|>tool\nsun" in prompt


def test_templates_without_tools_get_them_as_text(say):
    running = say(ONE, marks="", takes_tools=False)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
    ]
    choice = same(*both(running, messages=messages, tools=[WEATHER]))
    assert calls_of(choice)[0][0] == "get_weather"
    prompt = running.engine.last_request["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.") and '"description": "The weather."' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>" in prompt
    same(*both(running))
    assert "functions" not in running.engine.last_request["prompt"]


def test_flags(say):
    import httpx

    off = say(ONE, enable_auto_tool_choice=False)
    answer = httpx.post(off.url + "/v1/chat/completions", json={"messages": HELLO, "tools": [WEATHER]})
    assert answer.status_code == 400 and "--no-enable-auto-tool-choice" in answer.json()["error"]["message"]
    none = say(ONE, tool_call_parser="none")
    answer = httpx.post(none.url + "/v1/chat/completions", json={"messages": HELLO, "tools": [WEATHER]})
    assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    llama = say('{"name": "get_weather", "parameters": {"city": "Oslo"}}', tool_call_parser="llama3_json")
    assert calls_of(same(*both(llama, tools=[WEATHER]))) == [("get_weather", {"city": "Oslo"})]
    for options, words in (
        ({"tool_call_parser": "herms"}, "herms"),
        ({"reasoning_parser": "r1"}, "r1"),
        ({"tool_call_parser": "gpt_oss", "reasoning_parser": "qwen3"}, "exclude"),
    ):
        with pytest.raises(ConfigError, match=words):
            say(ONE, **options)
    with pytest.raises(ConfigError, match="no place for tools"):
        say(ONE, takes_tools=False, tool_call_parser="mistral")


def test_mistrals_ids_and_special_tokens(say):
    """[TOOL_CALLS] is a special token: texts leave it out, unless a parser must see it."""
    running = say('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]', marks="[TOOL_CALLS]")
    choice = same(*both(running, tools=[TIME]))
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9 and choice["message"]["tool_calls"][0]["id"].isalnum()
    assert same(*both(running))["message"]["content"] == ' [{"name": "get_time", "arguments": {}}]'


def test_without_tools_nothing_is_parsed(say, monkeypatch):
    """Not a parser is made for requests that need none."""
    from octavo.server import answers

    running = say(ONE)
    monkeypatch.setattr(answers, "make_parser", None)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"logprobs": True}):
        same(*both(running, **fields))
    import httpx

    assert httpx.post(running.url + "/v1/chat/completions", json={"messages": HELLO, "tools": [WEATHER]}).status_code == 500


PIECES = ["<tool_call>", "\n", '{"name": "get_weather", ', '"arguments": {"city": "x"}}', "</tool_call>", "text", "<think>", "</think>"]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from([*PIECES, " ", ONE, "\u00e9\U0001f600"]), max_size=8).map("".join), st.integers(1, 60), st.booleans())
def test_streams_say_what_answers_say(whole_server, text, limit, logprobs):
    """With --no-stream-tool-arguments exactly, whatever the model writes and wherever it is cut."""
    whole_server.engine.says = lambda prompt, index, params: text
    choice = same(*both(whole_server, tools=[WEATHER], max_tokens=limit, logprobs=logprobs))
    if logprobs:
        assert len(choice["logprobs"]["content"]) <= limit


@pytest.fixture(scope="module")
def whole_server():
    with running_server(MockEngine(template=FakeChatTemplate("<tool_call></think>")), stream_tool_arguments=False) as running:
        yield running


# -- forced calls --------------------------------------------------------------------------------------------------------


def test_forced_function(say):
    """The engine is asked for an answer of the function's form; what it gives are the arguments."""
    asked = []

    def answer(prompt, index, params):
        asked.append(params.structured_outputs)
        return '{"city": "Oslo"}'

    running = say(answer)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = same(*both(running, tools=[WEATHER, TIME], tool_choice=named))
    assert calls_of(choice) == [("get_weather", {"city": "Oslo"})] and choice["finish_reason"] == "tool_calls"
    schema = {**WEATHER["function"]["parameters"], "additionalProperties": False}
    assert asked[0].kind == "json_schema" and json.loads(asked[0].value) == schema
    cut = same(*both(running, tools=[WEATHER], tool_choice=named, max_tokens=8))
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"c')


def test_required(say):
    text = '[{"name": "get_time", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    running = say(text)
    choice = same(*both(running, tools=[WEATHER, TIME], tool_choice="required"))
    assert calls_of(choice) == [("get_time", {}), ("get_weather", {"city": "Oslo"})] and choice["finish_reason"] == "tool_calls"
    schema = json.loads(running.engine.last_params.structured_outputs.value)
    assert schema["type"] == "array" and schema["minItems"] == 1 and len(schema["items"]["anyOf"]) == 2
    for limit in (10, 40, 70):
        assert same(*both(running, tools=[WEATHER, TIME], tool_choice="required", max_tokens=limit))["finish_reason"] == "length"


def test_required_excludes_another_form(say):
    import httpx

    body = {"messages": HELLO, "tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert httpx.post(say("x").url + "/v1/chat/completions", json=body).status_code == 400


# -- reasoning -----------------------------------------------------------------------------------------------------------

THINKS = "<tool_call><think></think>"  # marks of a template of a model that thinks
THOUGHT = "<think>\nthe city, \u00e9h\n</think>\n\nIt rains."


def test_reasoning(say):
    running = say(THOUGHT, marks=THINKS)
    choice = same(*both(running))
    assert choice["message"]["reasoning_content"] == "the city, \u00e9h" and choice["message"]["content"] == "It rains."
    assert choice["finish_reason"] == "stop"
    whole, chunks = both(running, include_reasoning=False)
    choice = same(whole, chunks)
    assert choice["message"]["reasoning"] is None and choice["message"]["content"] == "It rains."
    assert whole["usage"]["completion_tokens"] > 20
    entries = same(*both(running, logprobs=True))["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == THOUGHT + "<|im_end|>"
    cut = same(*both(running, max_tokens=12))
    assert cut["finish_reason"] == "length" and not cut["message"]["content"] and cut["message"]["reasoning"]


def test_reasoning_then_calls(say):
    choice = same(*both(say(THOUGHT + ONE, marks=THINKS), tools=[WEATHER]))
    assert choice["message"]["reasoning"] and calls_of(choice) == [("get_weather", {"city": "Oslo caf\u00e9"})]


def test_reasoning_parser_off(say):
    choice = same(*both(say(THOUGHT, marks=THINKS, reasoning_parser="none")))
    assert choice["message"]["content"] == THOUGHT and "reasoning" not in choice["message"]


def thinker(prompt, index, params):
    """Thinks long; once the thinking is ended for it, it answers."""
    if prompt.endswith("</think>\n\n"):
        return "Done."
    return "<think>\n" + "word " * 40 + "\n</think>\n\nFree end."


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
@pytest.mark.parametrize("n", [1, 2])
def test_thinking_budget(say, budget, n):
    running = say(thinker, marks=THINKS)
    whole, chunks = both(running, thinking_token_budget=budget, n=n, logprobs=True, return_token_ids=True)
    for i in range(n):
        choice = same(whole, chunks, i)
        assert choice["message"]["content"] == "Done." and choice["finish_reason"] == "stop"
        tokens = choice["token_ids"]
        text = running.engine.tokenizer.decode(tokens)
        thought, _, rest = text.partition("\n</think>\n\n")
        assert rest == "Done."
        inside = running.engine.tokenizer.encode(thought.removeprefix("<think>"))
        assert len(inside) == budget
        assert (choice["message"]["reasoning"] or "") == thought.removeprefix("<think>").strip()
        assert len(choice["logprobs"]["content"]) == len(tokens)
        assert joined(chunks, i)["logprobs"] == choice["logprobs"]["content"]
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= n * budget
    prompt = running.engine.last_request
    assert prompt and whole["usage"]["prompt_tokens"] < 60  # the prompt is counted once
    running.wait_idle()


def test_budget_that_suffices_changes_nothing(say):
    running = say(thinker, marks=THINKS)
    free, bounded = (same(*both(running, **f)) for f in ({}, {"thinking_token_budget": 500}))
    assert free["message"] == bounded["message"] and free["message"]["content"] == "Free end."


@pytest.mark.parametrize("limit", [5, 10, 14, 18, 25])
def test_budget_and_max_tokens(say, limit):
    whole, chunks = both(say(thinker, marks=THINKS), thinking_token_budget=9, max_tokens=limit)
    choice = same(whole, chunks)
    assert whole["usage"]["completion_tokens"] == limit and choice["finish_reason"] == "length"


def test_effort(say):
    running = say(lambda p, i, params: thinker(p, i, params).replace("word " * 40, "word " * 900), marks=THINKS)
    running.engine.max_model_len = 8000
    low = both(running, reasoning_effort="low", max_tokens=7000)[0]
    assert low["choices"][0]["message"]["content"] == "Done."
    high = both(running, reasoning_effort="high", max_tokens=7000)[0]
    assert high["choices"][0]["message"]["content"] == "Free end."
    none = both(say(thinker, marks=THINKS + "reasoning_effort"), reasoning_effort="none")[0]
    assert none["choices"][0]["message"]["content"] == "Free end."  # this template is told, and what it does is its affair


def test_an_answers_form_begins_after_the_reasoning(say):
    asked = []

    def answer(prompt, index, params):
        asked.append((prompt[-9:], params.structured_outputs))
        return '{"city": "Oslo"}' if params.structured_outputs else "<think>\nhm\n</think>\n\nno JSON"

    running = say(answer, marks=THINKS)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = same(*both(running, tools=[WEATHER], tool_choice=named))
    assert choice["message"]["reasoning"] == "hm" and calls_of(choice) == [("get_weather", {"city": "Oslo"})]
    assert asked[0][1] is None and asked[1][0].endswith("</think>") and asked[1][1] is not None
    running = say(lambda p, i, params: '{"city": "Oslo"}' if params.structured_outputs else "no thought", marks=THINKS)
    choice = same(*both(running, tools=[WEATHER], tool_choice=named))
    assert choice["message"]["reasoning"] is None and calls_of(choice) == [("get_weather", {"city": "Oslo"})]
    running = say(lambda p, i, params: '{"city": "Oslo"}' if params.structured_outputs else "<think>\nends in it", marks=THINKS)
    choice = same(*both(running, tools=[WEATHER], tool_choice=named))
    assert choice["message"]["reasoning"] == "ends in it" and calls_of(choice) == [("get_weather", {"city": "Oslo"})]


def test_the_openai_client_reads_it(say):
    import openai

    running = say(THOUGHT + TWO, marks=THINKS)
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=[WEATHER, TIME]) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [c.function.name for c in final.message.tool_calls] == ["get_weather", "get_time"]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


# -- every format --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(TOOL_PARSERS))
def format_server(request):
    reasoning = "gpt_oss" if request.param == "gpt_oss" else "none"
    flags = {"tool_call_parser": request.param, "reasoning_parser": reasoning, "stream_tool_arguments": False}
    with running_server(MockEngine(), **flags) as running:
        yield request.param, running


def test_every_format(format_server):
    """The parsers' own table of answers, whole and streamed, through HTTP."""
    name, running = format_server
    cases = [case for case in CASES if case.parser == name]
    assert len(cases) > 5
    for case in cases:
        if not case.text:
            continue
        running.engine.says = lambda prompt, index, params, text=case.text: text
        limit = len(running.engine.tokenizer.encode(case.text)) if case.reason != "stop" else 1000
        choice = same(*both(running, tools=TOOLS, max_tokens=limit, skip_special_tokens=False))
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == [name for name, _ in case.calls], case
        for call, (_, arguments) in zip(calls, case.calls):
            text = call["function"]["arguments"]
            assert (text if isinstance(arguments, str) else json.loads(text)) == arguments, case
        assert (choice["message"]["content"] or None) == (case.content or None), case
        assert choice["finish_reason"] == ("length" if case.reason != "stop" else "tool_calls" if case.calls else "stop"), case


@pytest.mark.parametrize(
    "flags", [{"tool_call_parser": "herms"}, {"reasoning_parser": "r1"}, {"tool_call_parser": "gpt_oss", "reasoning_parser": "qwen3"}]
)
def test_unknown_parsers_are_errors_before_a_model_is_loaded(flags):
    from octavo.config import EngineConfig, ServerOptions
    from octavo.server.run import serve

    def start(*_):
        raise AssertionError("the engine was started")

    with pytest.raises(ConfigError, match="herms|r1|exclude"):
        serve(EngineConfig(), ServerOptions(port=0, **flags), start_engine=start)
