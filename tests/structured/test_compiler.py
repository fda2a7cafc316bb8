"""What is refused, and where it says the fault is; and hostile schemas, expressions and grammars, each within its time."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.frontend import grammar_compiler
from octavo.frontend.grammar_compiler import GrammarCompiler
from octavo.frontend.structured import StructuredOutput, structured_output
from octavo.frontend.tokenizer import Tokenizer
from tests.waiting import slowness


def check(compiler: GrammarCompiler, kind: str, value: Any) -> str:
    """The complaint, or "" for what compiles."""
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        compiler.compile(StructuredOutput(kind, text))
    except RequestError as error:
        assert error.status == 400 and error.param == "structured_outputs"
        return str(error)
    return ""


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


SCHEMA_FAULTS = [
    ({"not": {}}, "/not: The keyword 'not' is not supported"),
    (obj(a={"type": "array", "uniqueItems": True}), "/properties/a/uniqueItems"),
    (obj(a={"items": {"contains": {}}}), "/properties/a/items/contains"),
    ({"anyOf": [{}, {"if": {}, "then": {}}]}, "/anyOf/1/if"),
    ({"$defs": {"x/y~z": {"dependentRequired": {}}}}, "/$defs/x~1y~0z/dependentRequired"),
    (obj(a={"nullable": True}), "/properties/a/nullable: The keyword 'nullable' is not supported: write \"type\""),
    ({"minlength": 3}, "/minlength"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "/x-guidance"),
    ({"prefixItems": [{}, {"type": "strng"}]}, '/prefixItems/1/type: "strng" is not a type'),
    ({"type": ["string", 5]}, "/type: 5 is not a type"),
    ({"$ref": "http://example.com/schema.json"}, '/$ref: $ref "http://example.com/schema.json" leads out of the schema'),
    ({"$ref": "file:///etc/passwd"}, "leads out of the schema"),
    ({"$ref": "#/$defs/none"}, "/$ref: $ref '#/$defs/none' leads to no schema"),
    ({"examples": [{"not": {}}], "$ref": "#/examples/0"}, "leads to no schema"),
    ({"$ref": "#anchor"}, "/$ref"),
    ({"$anchor": "anchor"}, "/$anchor"),
    (obj(a=5), "/properties/a: A schema is an object"),
    ({"properties": []}, "/properties: properties must be an object"),
    ({"anyOf": []}, "/anyOf: anyOf must be a list"),
    ({"enum": []}, "/enum"),
    ({"minimum": 1, "exclusiveMinimum": True}, "/exclusiveMinimum"),
    # Found by llguidance, and located by trying parts of the schema.
    (obj(a={"type": "string", "pattern": "(?=x)y"}), "/properties/a/pattern: look-around"),
    (obj(a={"items": {"type": "string", "format": "colour"}}), "/properties/a/items/format: Unknown format: colour"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema: minimum (5)"),
    ({"allOf": [{"type": "string"}, {"type": "number"}]}, "/allOf: Unsatisfiable"),
    (obj(a={"oneOf": [{"type": "string"}, {"maxLength": 2}]}), "/properties/a/oneOf: oneOf is supported only where"),
    ({"$defs": {"d": {"type": "string", "minLength": "x"}}, "items": {"$ref": "#/$defs/d"}}, "minLength"),
    ("false", "allows nothing"),
    ("5", "A schema is an object"),
    ("{", "not JSON"),
    ('{"type": "string", "type": "number"}', "has the key 'type' twice"),
    ('{"minimum": NaN}', "NaN is not JSON"),
]


@pytest.mark.parametrize(("schema", "complaint"), SCHEMA_FAULTS, ids=[str(s)[:50] for s, _ in SCHEMA_FAULTS])
def test_schemas_are_refused_by_their_place(compiler: GrammarCompiler, schema: Any, complaint: str) -> None:
    assert complaint in check(compiler, "json_schema", schema)
    assert check(compiler, "json_schema", {"type": "object"}) == ""


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(?<=a)b", "look-around"),
        ("regex", r"\bword", "not supported"),
        ("regex", "[", "unclosed character class"),
        ("grammar", "start: missing", "unknown name"),
        ("grammar", "just text", "neither Lark"),
        ("grammar", "root ::= (", "GBNF"),
        ("grammar", "start: x\nx: x", "No output can match"),
        ("grammar", "start: t\nt[temperature=0.5]: /a/", "temperature= is not supported"),
        ("grammar", "start: <|no_such_token|>", "unknown special token"),
        ("structural_tag", "[]", "must be a JSON object"),
        ("structural_tag", {"structures": [], "triggers": ["<"]}, "/structures"),
        ("structural_tag", {"format": {"type": "qwen_xml_parameter"}}, "/format/type: The format 'qwen_xml_parameter' is not supported"),
        ("structural_tag", {"format": {"type": "any_text", "excludes": ["x"]}}, "/format/excludes"),
        (
            "structural_tag",
            {"triggers": ["<f"], "structures": [{"begin": "<g>", "schema": {}, "end": ""}]},
            "/structures/0/begin: The tag begins with '<g>', and with none",
        ),
        (
            "structural_tag",
            {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"properties": {"a": {"not": {}}}}, "end": ""}]},
            "/structures/0/schema/properties/a/not",
        ),
        (
            "structural_tag",
            {"format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"not": {}}}]}},
            "/format/elements/0/json_schema/not",
        ),
    ],
)  # fmt: skip
def test_other_faults(compiler: GrammarCompiler, kind: str, value: Any, complaint: str) -> None:
    assert complaint in check(compiler, kind, value)


@pytest.mark.parametrize("grammar", ["start: (", 'start: "a" "b', 'start: "a"\n\n   (', 'start: x\nx: "a"{5,2}', 'start: "a"\nstart: "b"'])
@pytest.mark.parametrize("kind", ["grammar", "structural_tag"])
def test_messages_show_the_clients_lines_and_none_of_ours(compiler: GrammarCompiler, kind: str, grammar: str) -> None:
    said = check(compiler, kind, grammar if kind == "grammar" else {"format": {"type": "grammar", "grammar": grammar}})
    assert "1 | start: " in said and not re.search(r"llguidance|no_forcing|\|\s*$", said)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def wide_all_of(width: int, alternatives: int) -> dict[str, Any]:
    def branch(i: int) -> dict[str, Any]:
        return {"anyOf": [{**obj(**{f"p{i}_{j}": {"type": "string"}}), "required": [f"p{i}_{j}"]} for j in range(alternatives)]}

    return {"allOf": [branch(i) for i in range(width)]}


HOSTILE: list[tuple[str, str, Any]] = [
    ("a huge schema", "json_schema", obj(**{f"k{i}": {"type": "string", "pattern": f"^a{i}+$"} for i in range(8000)})),
    ("a schema past the size", "json_schema", obj(**{f"k{i}": {"description": "x" * 100} for i in range(6000)})),
    ("deep nesting", "json_schema", nested(100_000 // 2)),
    ("nesting just past the bound", "json_schema", nested(60)),
    ("nesting of arrays in an enum", "json_schema", '{"enum": [' + "[" * 100_000 + "]" * 100_000 + "]}"),
    ("nesting in an enum", "json_schema", '{"enum": [' + "[" * 110 + "]" * 110 + "]}"),
    ("a reference to itself", "json_schema", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("an intersection of many unions", "json_schema", wide_all_of(12, 4)),
    ("references that double", "json_schema", {
        "$defs": {f"a{i}": obj(x={"$ref": f"#/$defs/a{i + 1}"}, y={"$ref": f"#/$defs/a{i + 1}"}) for i in range(40)} | {"a40": {}},
        "$ref": "#/$defs/a0",
    }),
    ("unions that double", "json_schema", {
        "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}}, "$ref": "#/$defs/a0",
    }),
    ("intersections that double", "json_schema", {
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}}, "$ref": "#/$defs/a0",
    }),
    ("a long string", "json_schema", {"type": "string", "minLength": 10**9}),
    ("many items", "json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 10**9, "maxItems": 2 * 10**9}),
    ("a huge number", "json_schema", '{"type": "integer", "minimum": 1' + "0" * 4000 + "}"),
    ("a fine multiple", "json_schema", {"type": "number", "multipleOf": 1e-300, "minimum": 1}),
    ("a hostile pattern", "json_schema", obj(a={"type": "string", "pattern": "(a{1000}){1000}"})),
    ("nested repetition", "regex", "(a+)+$"),
    ("repetition of repetition", "regex", "((a{1000}){1000}){1000}"),
    ("optional repetition", "regex", "(a?){5000}a{5000}"),
    ("many alternatives in a loop", "regex", "(.*a.*|.*b.*|.*c.*){50}x{500}"),
    ("Unicode classes", "regex", "(\\w+\\s?\\p{L}*){1,5000}"),
    ("a counted lookback", "regex", ".*a.{2000}"),
    ("deep parentheses", "regex", "(" * 30_000 + ")" * 30_000),
    ("a long expression", "regex", "a" * 70_000),
    ("left recursion", "grammar", 'start: e\ne: e "+" e | e "*" e | "x"'),
    ("ambiguity", "grammar", 'start: s\ns: s s s | s s | "a" | '),
    ("hidden recursion", "grammar", 'start: a\na: b? a | "x"\nb: a?'),
    ("deep groups", "grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    ("deep GBNF", "grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    ("many rules", "grammar", "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "{i}"' for i in range(5000)) + '\nr5000: "x"'),
    ("repetition of rules", "grammar", 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x" | "y" c'),
    ("deep tags", "structural_tag", '{"format":' + '{"type":"sequence","elements":[' * 3000 + '{"type":"any_text"}' + "]}" * 3000 + "}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile_input_ends_in_time(compiler: GrammarCompiler, kind: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused or not, it is decided within the bound; and what passes can be followed within the bounds of a step."""
    from octavo.engine.grammar import Grammars

    monkeypatch.setattr(grammar_compiler, "COMPILE_S", 1.0)
    begun = time.monotonic()
    complaint = check(compiler, kind, value)
    assert time.monotonic() - begun < 60  # much more than its bound: the machine may be busy
    monkeypatch.undo()
    assert check(compiler, "json_schema", {"type": "object"}) == ""  # the next one finds a working compiler
    if complaint:
        assert len(complaint) < 1500
        return
    grammars = Grammars()
    grammars.set_vocabulary(compiler.vocabulary)
    begun = time.process_time()  # others' work does not count, here and below
    text = value if isinstance(value, str) else json.dumps(value)
    matcher = grammars.compile(compiler.compile(StructuredOutput(kind, text))).result().starts[0].deep_copy()
    assert time.process_time() - begun < 5 * slowness()
    worst = 0.0
    for step in range(60):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        worst = max(worst, time.thread_time() - begun)
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [i for i, byte in enumerate(mask) if byte]
        byte = allowed[(step * 7919) % len(allowed)]
        matcher.consume_token(byte * 8 + (mask[byte] & -mask[byte]).bit_length() - 1)
    assert worst < 0.25 * slowness()


def test_a_worker_that_hangs_or_dies_is_replaced(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    try:
        assert check(compiler, "regex", "a") == ""
        first = compiler._worker.process
        first.send_signal(19)  # SIGSTOP: it hangs
        monkeypatch.setattr(grammar_compiler, "COMPILE_S", 0.3)
        assert "takes more than" in check(compiler, "regex", "b")
        assert first.poll() is not None
        monkeypatch.undo()
        assert check(compiler, "regex", "c") == ""
        compiler._worker.process.kill()
        compiler._worker.process.wait()
        assert check(compiler, "regex", "d") == ""
        worker = compiler._worker
        compiler.close()
        assert worker.process.poll() is not None
    finally:
        compiler.close()


def test_answers_are_cached_and_the_cache_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    asked: list[Any] = []
    monkeypatch.setattr(compiler, "_work", lambda output: asked.append(output) or f"grammar {output.value}")
    monkeypatch.setattr(grammar_compiler, "CACHED_BYTES", 2000)
    for value in ("a", "b", "a", "a"):
        assert compiler.compile(StructuredOutput("regex", value)) == f"grammar {value}"
    assert len(asked) == 2
    for i in range(100):
        compiler.compile(StructuredOutput("regex", f"x{i}"))
    assert len(compiler._cache) < 25 and compiler._cached_bytes <= 2000
    assert sum(100 + len(v) for v in compiler._cache.values()) == compiler._cached_bytes


async def test_the_loop_goes_on_while_a_grammar_compiles(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling waits here until the loop has turned for a while; on the loop it would wait in vain."""
    output = structured_output({"json": {"type": "array"}})
    assert output is not None
    turned, in_time, ask = threading.Event(), [], grammar_compiler._Worker.ask

    def ask_later(self: Any, message: object, timeout_s: float) -> list[str]:
        in_time.append(turned.wait(30))
        return ask(self, message, timeout_s)

    async def turn() -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)
        turned.set()

    monkeypatch.setattr(grammar_compiler._Worker, "ask", ask_later)
    compiler._cache.clear()
    results = await asyncio.gather(*(compiler.compile_async(output) for _ in range(5)), turn())
    assert len(set(results[:5])) == 1 and in_time and all(in_time)
    many = [structured_output({"regex": f"a{i}"}) for i in range(grammar_compiler.MAX_WAITING + 10)]
    answers = await asyncio.gather(*(compiler.compile_async(output) for output in many), return_exceptions=True)
    refused = [a for a in answers if isinstance(a, RequestError)]
    assert len(refused) == 10 and all(r.status == 503 for r in refused)


def test_models_that_can_not_follow_a_grammar(tokenizer: Tokenizer) -> None:
    for compiler, match in [
        (GrammarCompiler(None, 100, (1,)), "needs a tokenizer"),
        (GrammarCompiler(tokenizer, tokenizer.vocab_size, ()), "no token that ends"),
    ]:
        with pytest.raises(RequestError, match=match):
            compiler.compile(StructuredOutput("regex", "a"))
