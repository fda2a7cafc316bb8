"""Formats in which a call is markup around bare values, whose types are in the tool's schema: qwen3_coder, glm.

The arguments' JSON is built here. A parameter that can only be a string is passed on while it comes; others are read
whole first, because 5 may become a number, and "nul" may become null.
"""

from __future__ import annotations

from octavo.frontend.parsers.base import MAX_NAME, ToolParser
from octavo.frontend.parsers.reader import SPACE, Steps, Tags
from octavo.frontend.parsers.scan import escaped
from octavo.frontend.parsers.schema import is_plain_string, value_as_json


class MarkupParser(ToolParser):
    """Writes arguments one parameter at a time."""

    def read_value(self, tool: str, parameter: str, first: bool, end: Tags) -> Steps[None]:
        """Read a value up to one of ``end`` (consumed) and write it as the parameter's."""
        reader = self._reader
        self.arguments(f'{"{" if first else ", "}"{escaped(parameter)}": ')
        types = self.tools.types(tool, parameter)
        if is_plain_string(types):
            self.arguments('"')
            yield from reader.until(end, lambda text: self.arguments(escaped(text)), in_value=True)
            self.arguments('"')
        else:
            parts: list[str] = []
            yield from reader.until(end, parts.append, in_value=True)
            self.arguments(value_as_json("".join(parts), types))

    def close(self, empty: bool) -> None:
        self.arguments("{}" if empty else "}", whole=True)
        self.end()


_NAME_END = Tags(">")
_CODER_VALUE_END = Tags("\n</parameter>", "</parameter>")


class Qwen3CoderParser(MarkupParser):
    """Qwen3-Coder, Qwen3.5: <tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter>...</function></tool_call>.

    One line break at either end of a value belongs to the markup. <tool_call> may be missing, as the model at times leaves it out.
    """

    tags = Tags("<tool_call>", "<function=")

    def _calls(self, tag: str) -> Steps[None]:
        reader = self._reader
        if tag == "<tool_call>":
            yield from reader.spaces()
            yield from reader.expect("<function=")
        while True:
            yield from self._function()
            yield from reader.spaces()
            following = yield from reader.accept("<function=", "</tool_call>", closing=True)
            if following != "<function=":
                return

    def _function(self) -> Steps[None]:
        reader = self._reader
        name, _ = yield from reader.collect(_NAME_END, MAX_NAME)
        name = name.strip(SPACE)
        self.start(name)
        first = True
        while True:
            yield from reader.spaces()
            if (yield from reader.expect("<parameter=", "</function>")) == "</function>":
                break
            parameter, _ = yield from reader.collect(_NAME_END, MAX_NAME)
            yield from reader.accept("\n")
            yield from self.read_value(name, parameter.strip(SPACE), first, _CODER_VALUE_END)
            first = False
        self.close(empty=first)


_GLM_NAME_END = Tags("\n", "<arg_key>", "</tool_call>")
_GLM_KEY_END = Tags("</arg_key>")
_GLM_VALUE_END = Tags("</arg_value>")


class GlmParser(MarkupParser):
    """GLM-4.5 and later: <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>...</tool_call>.

    GLM-4.7 writes no line breaks between them. A value is taken exactly as it stands.
    """

    tags = Tags("<tool_call>")

    def _calls(self, tag: str) -> Steps[None]:
        reader = self._reader
        yield from reader.next_char()
        name, following = yield from reader.collect(_GLM_NAME_END, MAX_NAME)
        name = name.strip(SPACE)
        self.start(name)
        first = True
        while True:
            if following not in ("<arg_key>", "</tool_call>"):
                yield from reader.spaces()
                following = yield from reader.expect("<arg_key>", "</tool_call>")
            if following == "</tool_call>":
                break
            parameter, _ = yield from reader.collect(_GLM_KEY_END, MAX_NAME)
            yield from reader.spaces()
            yield from reader.expect("<arg_value>")
            yield from self.read_value(name, parameter.strip(SPACE), first, _GLM_VALUE_END)
            first, following = False, ""
        self.close(empty=first)
