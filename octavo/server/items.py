"""Reading the objects inside of a request whose kind only shows when they are read: content blocks, items of an input."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError


def string_of(item: dict[str, Any], key: str, where: str) -> str:
    """RequestError, naming the place, for a value that is no string or missing."""
    value = item.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{key} must be a string.", param=f"{where}.{key}")
    return value


def check_known(item: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """RequestError for a field that is not among ``names``."""
    for name in item:
        if name not in names:
            raise RequestError(f"Unknown field {name[:80]!r} in {where}.", param=f"{where}.{name[:80]}", code="unknown_field")
