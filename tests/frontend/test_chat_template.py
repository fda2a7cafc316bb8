"""Rendering equals transformers' for templates of the usual kinds; everything a template can do wrong is a clear 400."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.frontend import template_sandbox
from octavo.frontend.chat_template import ChatTemplate, read_chat_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENIZER = SimpleNamespace(special_tokens=TOKENS)

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function or tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {% generation %}{{- " " + message["content"]|trim + eos_token}}{% endgeneration %}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

PARTS = """{% for m in messages %}<{{ m.role }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}
{% for part in m['content'] %}{% if part['type'] == 'text' %}({{ part['text'] }}){% endif %}{% endfor %}{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3_LIKE, "qwen": QWEN_LIKE, "mistral": MISTRAL_LIKE, "parts": PARTS}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "é <b> & 'q'", "parameters": {"type": "object", "properties": {}}}}
]


def transformers_render(template: str, messages, **kwargs) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**TOKENS, **kwargs}
    return render_jinja_template(conversations=[messages], chat_template=template, **variables)[0][0]


def random_messages(rng: random.Random, parts: bool) -> list[dict]:
    def text() -> str:
        words = ["hi", " x ", "\n", "é", "🙂", "<|im_end|>", "'q'", "</think>", "<think>", "{{ a }}", " ", "a\tb"]
        return "".join(rng.choices(words, k=rng.randint(0, 5)))

    messages = [{"role": "system", "content": text()}] if rng.random() < 0.4 else []
    for i in range(rng.randint(1, 5)):
        role = "user" if i % 2 == 0 else "assistant"
        if rng.random() < 0.1:
            role = rng.choice(["user", "assistant", "tool", "system"])
        message: dict = {"role": role, "content": text()}
        if parts and rng.random() < 0.5:
            message["content"] = [{"type": "text", "text": text()} for _ in range(rng.randint(1, 3))]
        if role == "assistant" and rng.random() < 0.2:
            message["tool_calls"] = [{"type": "function", "function": {"name": "find", "arguments": {"q": text(), "n": [1, None]}}}]
        if role == "assistant" and rng.random() < 0.2:
            message[rng.choice(["reasoning_content", "reasoning"])] = text()
        messages.append(message)
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    source = TEMPLATES[name]
    template = ChatTemplate(source, TOKENIZER)
    rng = random.Random(name)
    compared = refused = 0
    for _ in range(300):
        messages = random_messages(rng, name == "parts")
        kwargs: dict = {"tools": rng.choice([None, TOOLS]), "add_generation_prompt": rng.random() < 0.5}
        if rng.random() < 0.3:
            kwargs["enable_thinking"] = rng.random() < 0.5
        if rng.random() < 0.3 and not kwargs["add_generation_prompt"]:
            kwargs["continue_final_message"] = True
        try:
            expected = transformers_render(source, messages, **kwargs)
        except Exception:  # noqa: BLE001, it raises many kinds
            with pytest.raises(RequestError):
                template.render(messages, **kwargs)
            refused += 1
            continue
        assert template.render(messages, **kwargs) == expected, messages
        compared += 1
    assert compared > 80 and compared + refused == 300


@pytest.mark.parametrize("name", ["chatml", "mistral", "qwen", "llama3"])
@pytest.mark.parametrize("text", ["I am", "I am ", " I am", "", "a\n\n"])
def test_continue_final_message_equals_transformers(name: str, text: str) -> None:
    pytest.importorskip("transformers")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    expected = transformers_render(TEMPLATES[name], messages, continue_final_message=True)
    got = ChatTemplate(TEMPLATES[name], TOKENIZER).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert got == expected
    assert messages[1]["content"] == text


def test_smollm2s_own_template() -> None:
    prompt = ChatTemplate(CHATML, TOKENIZER).render([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are") and prompt.endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")


def refusal(source, messages=({"role": "user", "content": "hi"},), **kwargs) -> RequestError:
    with pytest.raises(RequestError) as error:
        ChatTemplate(source, TOKENIZER).render(list(messages), **kwargs)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("a\n\n{{ nothing.here }}", r"line 3.*'nothing' is undefined"),
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("{{ ''.__class__.__mro__ }}", "sandbox forbids"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{{ namespace(__x=1) }}", "sandbox forbids"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_template_errors_are_refusals_that_say_what(source: str, says: str) -> None:
    import re

    error = refusal(source)
    assert re.search(says, str(error)), str(error)
    assert error.param == "messages"


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(90) %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        DOUBLING + "{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}{% endfor %}",
        DOUBLING + "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
        DOUBLING + "{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
        DOUBLING + "{% set ns.x = ns.x.replace('a', 'aaa') %}{% endfor %}",
        DOUBLING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        DOUBLING + "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING + "{% set ns.x = m(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = ns.x + ['a' * 10000000] %}{% endfor %}",
        "{{ 'a' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 'a'.ljust(10**11) }}",
        "{{ 'a'|center(10**11) }}",
        "{{ 'a\n'|indent(10**11) }}",
        "{{ messages|tojson(indent=10**11) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (10**11, 1) }}",
        "{{ '%99999999999d'|format(1) }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**11) }}",
        "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 10**11}) }}",
        "{{ ('a' * 10000000)|replace('a', 'b' * 100000) }}",
        "{{ 10**(10**10) }}",
        "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ [1]|batch(10**11, 'x')|list }}",
        "{{ range(10**9)|list }}",
        "{{ lipsum(10**9) }}",
    ],
)
def test_templates_cannot_fill_memory(source: str) -> None:
    start = time.process_time()
    refusal(source)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_templates_cannot_run_forever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)
    start = time.process_time()
    assert "stopped (line 1): it takes more than 0.3 seconds" in str(refusal(source))
    assert time.process_time() - start < 2


def test_bounds_leave_a_long_chat_alone() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 400} for i in range(2000)]
    for source in (CHATML, LLAMA3_LIKE, QWEN_LIKE, MISTRAL_LIKE):
        assert len(ChatTemplate(source, TOKENIZER).render(messages)) > 3_900_000


def test_loop_variables_survive_the_checks() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}"
        "{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% else %}none{% endfor %}"
        "{% for m in [] %}x{% else %}none{% endfor %}{% for a, b in {'k': 1}.items() if b %}{{ a }}{{ b }}{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop.depth }}{% if x is iterable %}{{ loop(x) }}{% endif %}{% endfor %}"
    )
    import jinja2

    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    messages = [{"role": "user", "content": str(i)} for i in range(3)]
    assert ChatTemplate(source).render(messages) == plain.render(messages=messages)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "bos_token"]
)
def test_kwargs_may_not_replace_the_requests_own_fields(name: str) -> None:
    error = refusal("x", template_kwargs={name: 1})
    assert repr(name) in str(error) and error.param == "chat_template_kwargs"


def test_kwargs_reach_the_template() -> None:
    template = ChatTemplate("{{ a }}{{ b }}{{ eos_token }}", TOKENIZER)
    assert template.render([{"role": "user", "content": ""}], template_kwargs={"a": 1}, b="é") == "1é</s>"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "must not be empty"),
        ([{"content": "x"}], r"messages\[0\].role"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        ([{"role": "user", "content": [7]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds a object"),
    ],
)
def test_bad_messages(messages, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        ChatTemplate(CHATML, TOKENIZER).render(messages)


def test_deep_nesting_is_refused() -> None:
    value: list = []
    for _ in range(500):
        value = [value]
    with pytest.raises(RequestError, match="deeper"):
        ChatTemplate("x").render([{"role": "user", "content": "", "x": value}])


def test_text_parts_are_joined_unless_the_template_reads_them() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(CHATML).content_format == "string"
    assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML).render(messages)
    assert ChatTemplate(PARTS).content_format == "openai"
    assert "(a)(b)" in ChatTemplate(PARTS).render(messages)
    only_parts = ChatTemplate("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}")
    assert only_parts.render(messages) == "[a][b]"
    assert only_parts.render([{"role": "user", "content": "ab"}]) == "[ab]"


def test_tool_call_arguments_become_objects() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"é": 1}', "", "{cut")]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert ChatTemplate(source).render(messages) == '{"é": 1}{}"{cut"'
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"é": 1}'


def test_null_content_is_left_out() -> None:
    assert ChatTemplate("{{ messages[0].content }}|{{ 'content' in messages[0] }}").render([{"role": "user", "content": None}]) == "|False"


def test_named_templates() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t"}, TOKENIZER)
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == "d" and template.render(messages, tools=TOOLS) == "t"
    assert template.source == "d"
    with pytest.raises(RequestError, match="named rag"):
        ChatTemplate({"rag": "r"}).render(messages)


def test_without_a_template() -> None:
    assert "--chat-template" in str(refusal(None))


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    assert refusal(CHATML, continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize("source", ["{{ 1 }}", PARTS])
@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_nothing_to_continue(source: str, message: dict) -> None:
    error = refusal(source, [message], continue_final_message=True, add_generation_prompt=False)
    assert "no text to continue" in str(error)


def test_a_template_that_hides_the_message_cannot_continue_it() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    assert "can't be continued" in str(refusal("{{ 1 }}", messages, continue_final_message=True, add_generation_prompt=False))


def test_syntax_errors_name_the_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("a\n{% if %}")


def test_read_chat_template(tmp_path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_chat_template(str(file)) == "{{ 'é' }}"
    assert read_chat_template("{{ 1 }}") == "{{ 1 }}"
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        read_chat_template(str(tmp_path / "missing.jinja"))


def test_strftime_and_tojson() -> None:
    year = time.strftime("%Y")
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([{"role": "user", "content": ""}]) == year
    source = "{{ messages|tojson(indent=2, sort_keys=true, separators=(',', ':')) }}{{ '<é>'|tojson }}{{ '<é>'|tojson(ensure_ascii=true) }}"
    out = ChatTemplate(source).render([{"role": "user", "content": "<&>"}])
    assert '"content":"<&>",\n' in out and out.endswith('"<é>""<\\u00e9>"')


def test_threads_do_not_disturb_each_other() -> None:
    template = ChatTemplate(QWEN_LIKE, TOKENIZER)
    failures: list[object] = []

    def work(seed: int) -> None:
        messages = [{"role": "user", "content": f"{seed} {'x' * seed}"}] * 20
        expected = template.render(messages)
        for _ in range(50):
            if template.render(messages) != expected:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
