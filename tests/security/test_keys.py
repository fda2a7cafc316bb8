"""API keys: every route is closed without one, however its path is written; nothing can be learnt from the time a key takes."""

from __future__ import annotations

import hmac
import itertools
import json
import socket

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import BaseRoute, Host, Mount, Route

from octavo.config import ServerOptions
from octavo.errors import ConfigError
from octavo.server import auth
from octavo.server.auth import ApiKeyMiddleware
from octavo.server.run import api_keys

# The only paths that answer without a key. A new route is not on it: whoever adds one here says why.
OPEN = {"/health", "/ping", "/", "/docs"}  # and the web page's files, /web/...
KEY = "first-key"


def all_paths(routes: list[BaseRoute], prefix: str = "") -> list[tuple[str, set[str]]]:
    """(path, methods) of every route, those of mounted applications too; parameters are filled in."""
    found: list[tuple[str, set[str]]] = []
    for route in routes:
        assert isinstance(route, (Route, Mount, Host)), f"a kind of route that this test does not know: {route!r}"
        path = prefix + getattr(route, "path", "").replace("{name:path}", "mock-model").replace("{path:path}", "a.js")
        if isinstance(route, Route):
            assert "{" not in path, f"fill in the parameters of {path}"
            found.append((path, set(route.methods or {"GET", "POST"})))
        else:
            found.append((path + "/x", {"GET"}))
            found += all_paths(list(route.routes or ()), path)
    return found


@pytest.mark.parametrize("metrics_too", [False, True])
@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_every_route_wants_a_key(start_server, metrics_too, root_path):
    running = start_server(api_key=(KEY, "second-key"), metrics_require_api_key=metrics_too, root_path=root_path)
    reading = OPEN | (set() if metrics_too else {"/metrics"})
    paths = all_paths(running.app.routes)
    assert len(paths) >= 10
    with httpx.Client(base_url=running.url) as http:
        for (path, methods), prefix in itertools.product(paths, {"", root_path}):
            for method in methods | {"OPTIONS", "PUT", "DELETE", "HEAD", "PATCH"}:
                answer = http.request(method, prefix + path)
                if method in ("GET", "HEAD") and (path in reading or path.startswith("/web/")):
                    assert answer.status_code in (200, 404), (method, path)
                    continue
                assert answer.status_code == 401, (method, prefix + path)
                if method != "HEAD":
                    error = answer.json()["error"]  # in OpenAI's shape, or Anthropic's
                    assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
                    assert "WWW-Authenticate" in answer.headers
                for key in (KEY, "second-key"):
                    assert http.request(method, prefix + path, headers={"Authorization": f"Bearer {key}"}).status_code != 401


def test_a_route_of_tomorrow_is_closed(start_server):
    running = start_server(api_key=(KEY,))

    async def secret(request):
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("secret")

    for path in ("/tomorrow", "/health/details", "/webhook", "/pingback"):
        running.app.router.routes.append(Route(path, secret))
        assert httpx.get(running.url + path).status_code == 401
        assert httpx.get(running.url + path, headers={"Authorization": f"Bearer {KEY}"}).text == "secret"


TRICKS = """
//v1/models /v1//models /v1/models/ /v1/models/. /./v1/models /v1/./models /v1/../v1/models /health/../v1/models /health/..%2fv1/models
/health%2f..%2fv1%2fmodels /%76%31/models /v1%2fmodels /v1/%6dodels /V1/models /v1/models; /v1/models;/health /health;/../v1/models
/v1/models%00 /v1/models%00/health /v1/models?/health /v1/models%3f/health /v1/models%23/health /v1\\models /health/../../v1/models
/web/../v1/models /web/..%2fv1/models /web/%2e%2e/v1/models /web/.%2e/v1/models /web//../v1/models /web/%2e%2e%2fv1%2fmodels
/web/..\\v1/models /web/a/../../v1/models /web/.. /web/../metrics-x /metrics/../v1/models
/metrics/x /health/x /ping/../v1/models /ping/x /healthz /web /webx
/%2fv1/models /%252fv1/models /v1/%2e%2e/v1/models /health%20 /%68ealth/x /v1/models/..%2f..%2fhealth
""".split()


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_no_way_of_writing_a_path_gets_around_it(start_server, root_path):
    """Whatever is sent: without a key nothing but the open paths' own answers comes back."""
    running = start_server(api_key=(KEY,), root_path=root_path)
    paths = [*TRICKS, *(root_path + trick for trick in TRICKS), "http://x/v1/models", "/llm/llm/v1/models", "/llm//v1/models", "*"]
    for path, method in itertools.product(paths, ("GET", "HEAD", "POST", "OPTIONS")):
        status, body = raw(running.port, method, path)
        assert status in (400, 401, 404), (method, path, status)
        assert b"mock-model" not in body and b"max_model_len" not in body, (method, path)


def raw(port: int, method: str, path: str, *headers: str) -> tuple[int, bytes]:
    """A request as it is written: no client tidies the path up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 0", *headers]
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def test_headers_that_claim_another_path(start_server):
    """Headers by which some proxies and frameworks rewrite paths, methods or addresses mean nothing here."""
    running = start_server(api_key=(KEY,))
    claims = ("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health", "X-HTTP-Method-Override: GET",
              "X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1", "X-Forwarded-Host: localhost")  # fmt: skip
    for claim in claims:
        assert raw(running.port, "GET", "/v1/models", claim)[0] == 401
        assert raw(running.port, "POST", "/health", claim)[0] == 401


@given(st.text(alphabet="/.%2fehalthwbv1modsping\\;", min_size=1, max_size=24))
def test_what_is_open_is_plain(path):
    """Of random paths only exact open ones, and plain names of files, are open."""
    guard = ApiKeyMiddleware(None, ["k"])
    if guard.is_open("GET", "/" + path):
        whole = "/" + path
        assert whole in OPEN or (whole.startswith("/web/") and ".." not in whole and not set("%\\;") & set(whole) and "//" not in whole)
    assert not guard.is_open("POST", "/" + path)


def test_the_time_of_a_key(monkeypatch):
    """Digests of equal length are compared, by hmac.compare_digest, against all keys whichever fits; a key is never compared itself."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", spy)
    guard = ApiKeyMiddleware(None, ["alpha", "beta", "g" * 1000])
    for sent, number in (("alpha", 0), ("beta", 1), ("g" * 1000, 2), ("alph", None), ("", None), ("x" * 5000, None)):
        compared.clear()
        assert guard.key_of([(b"authorization", f"Bearer {sent}".encode())]) == number
        assert len(compared) == 3 and {len(part) for pair in compared for part in pair} == {32}


def test_other_kinds_of_connections_are_refused():
    import asyncio

    async def never(*args):
        raise AssertionError("let through")

    guard = ApiKeyMiddleware(never, ["k"])
    with pytest.raises(RuntimeError):
        asyncio.run(guard({"type": "websocket", "path": "/health", "headers": []}, never, never))


def test_keys_out_of_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    path = tmp_path / "keys"
    path.write_text("# team a\none\n\n two \n")
    assert api_keys(ServerOptions(api_key=("zero", "one"), api_key_file=str(path))) == ("zero", "one", "two")
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        api_keys(ServerOptions(api_key_file=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        api_keys(ServerOptions(api_key_file=str(tmp_path / "missing")))


def test_nothing_is_said_of_a_key(start_server, caplog):
    running = start_server(api_key=("very-secret",))
    answer = httpx.get(running.url + "/v1/models?key=very-secret", headers={"Authorization": "Bearer nearly-secret"})
    assert answer.status_code == 401 and "secret" not in answer.text + caplog.text
    assert "models" not in json.dumps(dict(answer.headers))
