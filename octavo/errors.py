"""Errors that a user can act on. Every message names what was wrong and what to do about it."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A flag, configuration value or combination of them that cannot be used."""


class ModelError(OctavoError):
    """A model that cannot be found, read or served (missing file, unsupported architecture, bad tensor)."""


class OutOfMemoryError(OctavoError, MemoryError):
    """Weights or KV cache do not fit; the message says what is short by how much and which flags would fit."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine process ended or stopped answering; requests in flight are lost."""


class RequestError(OctavoError, ValueError):
    """A request that cannot be served as asked.

    Attributes:
        param: name of the offending field in the client's request, or None.
        status: HTTP status that the server answers with (400 unless said).
        code: machine-readable code for the OpenAI-shaped error object, or None.
        retry_after: seconds after which the same request may succeed (the header Retry-After), or None.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after = retry_after
