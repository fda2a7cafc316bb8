"""Command-line flags out of the option dataclasses, and back.

One field = one flag: the field's name, type and metadata are all that a flag is made from, and a group of flags is
titled with its dataclass's docstring. Nothing is defaulted here: a namespace holds only what the user wrote, so that a
configuration file can lie between the user's flags and the dataclass's defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from octavo.config import flag_name, size_of
from octavo.errors import ConfigError
from octavo.hints import explain

# vLLM's other spellings of flags that exist here.
ALIASES = {"kv_cache_memory": ("--kv-cache-memory-bytes",)}


def parse_size(text: str) -> int:
    """``"2G"`` -> 2147483648, as ``size_of``."""
    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_size_or_auto(text: str) -> int | None:
    """Like parse_size; ``"auto"`` -> None."""
    return _or_auto(parse_size, text)


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def parse_float_or_auto(text: str) -> float | None:
    """Like parse_float; ``"auto"`` -> None."""
    return _or_auto(parse_float, text)


def _or_auto(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return None if text == "auto" else parse(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


class Toggle(argparse.Action):
    """``--enable-x`` and ``--no-enable-x``; for a field ``disable_x``, ``--enable-x`` means its opposite."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        strings = list(option_strings)
        self._off = ["--no-" + s[2:] for s in strings if s.startswith("--")]
        self._off += ["--enable-" + s[10:] for s in strings if s.startswith("--disable-")]
        self.on, self.off = strings[0], self._off[-1]
        strings += ["--no-enable-" + s[10:] for s in strings if s.startswith("--disable-")]  # vLLM's newer spelling
        super().__init__(strings + self._off, dest, nargs=0, **kwargs)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option_string not in self._off)

    def format_usage(self) -> str:
        return " | ".join(self.option_strings)


class Parser(argparse.ArgumentParser):
    """Refuses unknown flags by name, with the nearest known one; takes ``--max_model_len`` for ``--max-model-len``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", functools.partial(HelpFormatter, max_help_position=36, width=118))
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        words = [_with_dashes(a) for a in argv]
        for word in words:
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if equals and isinstance(action, Toggle):  # argparse would say that it ignores the value
                self.error(f"{name} takes no value; write {action.on} or {action.off}")
        args, rest = self.parse_known_intermixed_args(words)
        for word in rest:
            self.refuse(word)
        return args

    def refuse(self, word: str) -> NoReturn:
        """End with status 2 and say what is wrong with an argument that no flag took."""
        name = word.split("=", 1)[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        if (hint := explain(name, name, "flag")) is not None:
            self.error(hint)
        known = [s for s in self._option_string_actions if s.startswith("--")]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        self.error(f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"octavo: error: {message}\n")


class HelpFormatter(argparse.HelpFormatter):
    """Writes a flag's spellings once, with one metavar after them, and keeps usage to a line."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        strings = action.option_strings
        if isinstance(action, Toggle):
            return f"{action.on}, {action.off}"
        if action.nargs == 0:
            return ", ".join(strings)
        metavar = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(s for s in strings if s not in _ALL_ALIASES)} {metavar}"


_ALL_ALIASES = {alias for aliases in ALIASES.values() for alias in aliases}


def add_options(parser: argparse.ArgumentParser, *classes: type, exclude: Collection[str] = ()) -> None:
    """Add a group of flags for every dataclass; fields named in ``exclude`` get none."""
    for cls in classes:
        group = parser.add_argument_group((cls.__doc__ or cls.__name__).strip())
        types = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name not in exclude:
                _add_field(group, field, types[field.name])


def _add_field(group: Any, field: dataclasses.Field[Any], annotation: Any) -> None:
    meta = field.metadata
    names = [meta["short"]] if "short" in meta else []
    names += [flag_name(field.name), *meta.get("aliases", ()), *ALIASES.get(field.name, ())]
    kwargs: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help_text(field)}
    base = _base_type(annotation)
    if base is bool:
        group.add_argument(*names, action=Toggle, **kwargs)
        return
    if meta.get("repeat"):
        kwargs["action"] = "extend"
        kwargs["nargs"] = meta.get("nargs", 1)
        base = _base_type(typing.get_args(annotation)[0])
    if "choices" in meta:
        kwargs["choices"] = meta["choices"]
        kwargs["metavar"] = meta.get("metavar") or "{" + ",".join(map(str, meta["choices"])) + "}"
    else:
        kwargs["metavar"] = meta.get("metavar") or _METAVARS[base]
    group.add_argument(*names, type=(_CONVERTERS_OR_AUTO if meta.get("auto") else _CONVERTERS)[base], **kwargs)


# Every whole number takes a suffix: it is as useful for tokens (--max-model-len 32k) as for bytes.
_CONVERTERS: dict[Any, Any] = {int: parse_size, float: parse_float, str: str}
_CONVERTERS_OR_AUTO: dict[Any, Any] = {int: parse_size_or_auto, float: parse_float_or_auto}
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
parse_size.__name__ = parse_size_or_auto.__name__ = "number"  # argparse names the converter in its messages


def _base_type(annotation: Any) -> Any:
    """``int | None`` -> int; a tuple stays what it is."""
    args = [a for a in typing.get_args(annotation) if a is not type(None)]
    if typing.get_origin(annotation) is tuple or not args:
        return annotation
    return args[0]


def _help_text(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if "default:" in text or field.default in (None, (), ""):
        return text
    default = field.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif field.metadata.get("parse") == "bytes" and default % 2**20 == 0:
        default = f"{default // 2**20}M"
    return f"{text} (default: {default})"


def collect(args: argparse.Namespace, *classes: type) -> dict[str, Any]:
    """What the user wrote for the classes' fields, by field name."""
    names = {f.name: f.metadata for cls in classes for f in dataclasses.fields(cls)}
    return {k: tuple(v) if names[k].get("repeat") else v for k, v in vars(args).items() if k in names}


def read_config_file(path: str, *classes: type) -> dict[str, Any]:
    """Options out of a YAML or JSON file: a mapping of flag names, with dashes or underscores, to values.

    Raises ConfigError for a file that can't be read, an unknown name or a value of a wrong type.
    """
    data = _load_mapping(path)
    fields = {f.name: (f, typing.get_type_hints(cls)[f.name]) for cls in classes for f in dataclasses.fields(cls)}
    spellings = {alias: name for name, (f, _) in fields.items() for alias in (*f.metadata.get("aliases", ()), *ALIASES.get(name, ()))}
    values: dict[str, Any] = {}
    for key, value in data.items():
        flag = "--" + str(key).replace("_", "-").lstrip("-")
        name = spellings.get(flag, flag[2:].replace("-", "_"))
        opposite = _opposite(flag)
        if name not in fields and opposite in fields and isinstance(value, bool):
            name, value = opposite, not value
        if name not in fields:
            if (hint := explain(flag, repr(key), "option")) is not None:
                raise ConfigError(f"{path}: {hint}")
            near = difflib.get_close_matches(name, fields, n=1)
            raise ConfigError(f"{path}: unknown option {key!r}." + (f" Did you mean {near[0].replace('_', '-')!r}?" if near else ""))
        values[name] = _from_file(path, str(key), value, *fields[name])
    return values


def _opposite(flag: str) -> str:
    """The field whose opposite a switch is: ``--enable-log-stats`` -> disable_log_stats, ``--no-enforce-eager`` -> enforce_eager."""
    name = flag[2:].replace("-", "_")
    return "disable_" + name[7:] if name.startswith("enable_") else name.removeprefix("no_")


def _load_mapping(path: str) -> Mapping[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from error
    try:
        if path.endswith(".json"):
            import json

            data = json.loads(text)
        else:
            import yaml

            data = yaml.safe_load(text)
    except ImportError:
        raise ConfigError(f"--config {path}: reading YAML needs the package pyyaml; install it or write the file as .json.") from None
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except Exception as error:  # yaml's errors are no ValueErrors, and their class needs the import to be named
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"--config {path}: must hold a mapping of flag names to values.")
    return data


def _from_file(path: str, key: str, value: Any, field: dataclasses.Field[Any], annotation: Any) -> Any:
    base = _base_type(annotation)
    if field.metadata.get("repeat"):
        items = value if isinstance(value, list) else [value]
        return tuple(str(item) for item in items)
    if value == "auto" and field.metadata.get("auto"):
        return None
    if base is int and isinstance(value, str):
        try:
            return parse_size(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{path}: {key}: {error}.") from None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is None and type(None) in typing.get_args(annotation):
        return None
    if not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
        raise ConfigError(f"{path}: {key} must be of type {base.__name__}, got {value!r}.")
    return value


def _with_dashes(word: str) -> str:
    """``--max_model_len=5_0`` -> ``--max-model-len=5_0``; values are left alone."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
