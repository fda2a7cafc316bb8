"""The jinja2 environment of chat templates: transformers' dialect, with bounds on time, memory and output.

jinja's sandbox keeps a template from reaching Python's internals, but not from working forever or filling memory. So
loops and calls check a budget of CPU time, and every operation that can make something far bigger than its operands is
checked before it runs (repetition, powers, padding, formatting, replacing, joining) or right after (concatenation).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 5.0  # of the rendering thread's own CPU time: a busy machine doesn't use it up
MAX_CHARS = 32 * 1024 * 1024  # of one string, and of the prompt
MAX_TOTAL_CHARS = 16 * MAX_CHARS  # of all strings made on the way: a list could hold many long ones
MAX_ITEMS = 1_000_000
MAX_WIDTH = 1000
MAX_INT_BITS = 20_000
_FILE_NAME = "<chat template>"
_CHECK_EVERY = 128  # steps between looks at the clock


class TemplateRaised(jinja2.TemplateError):
    """The template's own ``raise_exception``: what it says is meant for the user."""


class TemplateTooExpensive(SecurityError):
    """The template went beyond a bound on time, memory or output."""


class _Budget(threading.local):
    """What the template that this thread renders has left of CPU time and characters."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        self.steps = self.chars = 0

    def start(self, seconds: float) -> None:
        self.deadline, self.steps, self.chars = time.thread_time() + seconds, 0, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % _CHECK_EVERY == 0 and time.thread_time() > self.deadline:
            raise TemplateTooExpensive(f"it takes more than {MAX_SECONDS:g} seconds")


_budget = _Budget()


def _check_size(value: Any) -> Any:
    if isinstance(value, str):
        _check_chars(len(value))
        _budget.chars += len(value)
        if _budget.chars > MAX_TOTAL_CHARS:
            raise TemplateTooExpensive(f"it makes strings of more than {MAX_TOTAL_CHARS} characters in all")
    elif isinstance(value, (list, tuple, dict)) and len(value) > MAX_ITEMS:
        raise TemplateTooExpensive(f"it makes a list of more than {MAX_ITEMS} items")
    return value


def _check_widths(*values: Any) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_WIDTH:
            raise TemplateTooExpensive(f"it pads or indents by more than {MAX_WIDTH}")


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TemplateTooExpensive(f"it makes a string of more than {MAX_CHARS} characters")


def _check_format(pattern: str, args: list[Any]) -> None:
    """Widths and precisions of a format: written out, or (for ``*`` and nested braces) taken from the arguments."""
    if any(len(digits) > 4 or int(digits) > MAX_WIDTH for digits in re.findall(r"\d+", pattern) if len(digits) > 3):
        raise TemplateTooExpensive(f"it formats to a width of more than {MAX_WIDTH}")
    if re.search(r"\*|\{[^{}]*\{", pattern):
        _check_widths(*args)
    fields = pattern.count("%") + pattern.count("{")
    _check_chars(len(pattern) + fields * (MAX_WIDTH + max((len(arg) for arg in args if isinstance(arg, str)), default=0)))


def _format_args(value: Any) -> list[Any]:
    """The arguments of a format in one list, whichever way they are handed over."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _Steps:
    """A loop's iterable, with a budget check an item. Knows its length if the iterable does, for ``loop.length``."""

    __slots__ = ("_items",)

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        step = _budget.step
        for item in self._items:
            step()
            yield item


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it changes nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PublicNamespace(Namespace):
    """jinja's ``namespace()``, without names that begin with an underscore (a way at Python's internals)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores a value under the name {name!r}")


class _MakeDict:
    """``dict(...)`` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Only this environment runs chat templates. Expects code that ``compile_template`` made."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace, dict=_MakeDict())
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["tojson"] = _tojson
        # Both take the context, which keeps jinja from working them out while it compiles.
        self.filters["_steps"] = jinja2.pass_context(lambda context, items: _Steps(items))
        self.filters["_sized"] = jinja2.pass_context(lambda context, value: _check_size(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INT_BITS:
                raise TemplateTooExpensive("it computes a power that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, _format_args(right))
        return _check_size(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.step()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # jinja wraps str.format
        if isinstance(owner, str):
            _check_string_method(owner, getattr(obj, "__name__", ""), args, kwargs)
        return _check_size(super().call(context, obj, *args, **kwargs))


def _check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, int) and isinstance(count, int):
            if value.bit_length() + count.bit_length() > MAX_INT_BITS:
                raise TemplateTooExpensive("it computes a product that is too large")
        elif isinstance(value, str) and isinstance(count, int):
            _check_chars(len(value) * count)
        elif isinstance(value, (list, tuple)) and isinstance(count, int) and len(value) * count > MAX_ITEMS:
            raise TemplateTooExpensive(f"it makes a list of more than {MAX_ITEMS} items")


def _check_string_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        _check_widths(*args, *kwargs.values())
    elif name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        _check_chars(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_join(args[0], text)
    elif name in ("format", "format_map"):
        _check_format(text, [*(_format_args(args[0]) if name == "format_map" and args else args), *kwargs.values()])
    elif name == "translate":
        raise SecurityError("it calls str.translate")


def _check_join(items: Any, separator: Any) -> None:
    _check_chars(sum(len(item) for item in items if isinstance(item, str)) + len(items) * len(str(separator)))


def _check_join_filter(value: Any, d: Any = "", attribute: Any = None) -> None:
    if isinstance(value, (list, tuple)) and attribute is None:
        _check_join(value, d)


def _check_replace_filter(s: Any, old: Any, new: Any, count: Any = None) -> None:
    text = str(s)
    _check_chars(len(text) + text.count(str(old)) * len(str(new)))


def _check_indent_filter(s: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    if isinstance(width, str):
        _check_chars(len(str(s)) + (str(s).count("\n") + 1) * len(width))
    else:
        _check_widths(width)
        _check_chars((str(s).count("\n") + 1) * width)


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "join": _check_join_filter,
    "replace": _check_replace_filter,
    "indent": _check_indent_filter,
    "center": lambda value, width=80: _check_widths(width),
    "format": lambda value, *args, **kwargs: _check_format(str(value), [*args, *kwargs.values()]),
    "batch": lambda value, linecount, fill_with=None: _check_widths(linecount),
    "slice": lambda value, slices, fill_with=None: _check_widths(slices),
}


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """``function`` (a filter) after ``check`` of its arguments; it keeps its wish for the environment or context."""
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        check(*args[skip:], **kwargs)
        return _check_size(function(*args, **kwargs))

    if skip:
        wrapped.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return wrapped


def _raise_exception(message: Any) -> None:
    raise TemplateRaised(str(message))


def _strftime_now(pattern: str) -> str:
    _check_format(pattern, [])
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as transformers' templates get it: no HTML escapes, non-ASCII characters as they are."""
    if isinstance(indent, int) and indent > 64 or isinstance(indent, str) and len(indent) > 64:
        raise TemplateTooExpensive("it indents JSON by more than 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> jinja2.Template:
    """Compile with the checks built in. jinja2.TemplateSyntaxError for a template that can't be."""
    environment = TemplateEnvironment()
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _through(loop.iter, "_steps")
    _bound_results(tree)
    code = environment.compile(tree, filename=_FILE_NAME)
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    template.filename = _FILE_NAME
    return template


def _through(value: nodes.Expr, filter_name: str) -> nodes.Filter:
    node = nodes.Filter(value, filter_name, [], [], None, None, lineno=value.lineno)
    return node.set_environment(value.environment) if value.environment is not None else node


def _bound_results(node: nodes.Node) -> None:
    """Check the size of every ``~`` and block assignment: with both, a value can double at each turn of a loop."""
    for child in node.iter_child_nodes():
        _bound_results(child)
    for name in node.fields:
        value = getattr(node, name, None)
        if isinstance(value, nodes.Concat):
            setattr(node, name, _through(value, "_sized"))
        elif isinstance(value, list):
            setattr(node, name, [_through(item, "_sized") if isinstance(item, nodes.Concat) else item for item in value])
    if isinstance(node, nodes.AssignBlock):
        inner = node.filter or nodes.Filter(None, "_sized", [], [], None, None, lineno=node.lineno)
        node.filter = inner


def limited_render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render within the bounds; whatever the template raises comes out as it is, with the template's frames in its traceback."""
    _budget.start(MAX_SECONDS)
    pieces, size = [], 0
    for piece in template.root_render_func(template.new_context(variables)):
        size += len(piece)
        _check_chars(size)
        _budget.step()
        pieces.append(piece)
    return "".join(pieces)


def uses_content_parts(source: str) -> tuple[bool, bool]:
    """(the template loops over the parts of a message's content, it also takes a content that is a string)."""
    tree = TemplateEnvironment().parse(source)
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _reads_content(assign.node, frozenset()):
            names.add(assign.target.name)
    loops = any(_reads_content(loop.iter, frozenset(names)) for loop in tree.find_all(nodes.For))
    strings = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return loops, strings


def _reads_content(node: nodes.Node, names: frozenset[str]) -> bool:
    """Whether an expression is a message's content, or a variable that holds it."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
