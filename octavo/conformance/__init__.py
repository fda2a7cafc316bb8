"""Checks of an OpenAI-compatible server, over HTTP alone: ``python -m octavo.conformance --base-url http://host:8000/v1``.

Each case is behaviour that users of such servers ran into when it was missing; docs/conformance.md describes them. Any
server can be checked: nothing here imports the rest of Octavo, and the standard library is all that is needed.
"""
