"""Typed reads out of a JSON object, whose errors name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelError


def read_json_object(path: str | Path) -> dict[str, Any]:
    """A JSON file that must hold an object. ModelError names the file and the place of a syntax error."""
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {_kind(value)}.")
    return value


class Fields:
    """A JSON object with typed reads. A field that is null counts as absent, as it does for Hugging Face's readers.

    ``where`` is put before every message: the file, and the path inside it.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; required unless there is a default. 8.0 is read as 8."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"must be an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(name, f"must be a number, got {value!r}")
        if above is not None and value <= above:
            raise self.error(name, f"must be greater than {above:g}, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def object(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, got {value!r}")
        return Fields(value, f"{self.where}, {name}")

    def numbers(self, name: str, length: int) -> list[float]:
        value = self._get(name, None)
        good = isinstance(value, list) and all(isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in value)
        if not good or len(value) != length:
            raise self.error(name, f"must be a list of {length} positive numbers, got {_shorten(value)}")
        return [float(v) for v in value]

    def strings(self, name: str) -> list[str] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.error(name, f"must be a list of strings, got {_shorten(value)}")
        return value

    def token_ids(self, name: str) -> list[int]:
        """A token id or a list of them; [] when absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in ids):
            raise self.error(name, f"must be a token id or a list of token ids, got {_shorten(value)}")
        return ids

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: field {name!r} {problem}.")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}.get(type(value), "null")


def _shorten(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
