"""What browsers ask before they let a page call the server (CORS), and https with a certificate of our own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from octavo.cli.main import main
from octavo.config import EngineConfig, ServerOptions
from octavo.errors import ConfigError
from octavo.server.mock import MockEngine
from octavo.server.run import _Runner, bind
from octavo.server.tls import tls_context
from tests.waiting import until

PAGE = "https://chat.example"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def test_no_page_may_call_by_default(http):
    assert http.options(CHAT, headers=ASKS).status_code == 405
    answer = http.post(CHAT, json=BODY, headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_named_origin(start_server):
    running = start_server(allowed_origins=(PAGE,), allow_credentials=True, api_key=("k",))
    with httpx.Client(base_url=running.url) as http:
        answer = http.options(CHAT, headers=ASKS)  # browsers send no key with this
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-credentials"] == "true" and "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        headers = {"Origin": PAGE, "Authorization": "Bearer k"}
        for fields in ({}, {"stream": True}):
            answer = http.post(CHAT, json={**BODY, **fields}, headers=headers)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        answer = http.post(CHAT, json=BODY, headers={"Origin": PAGE})
        assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == PAGE  # so that the page can read why
        other = {**ASKS, "Origin": "https://evil.example"}
        assert http.options(CHAT, headers=other).status_code == 400
        answer = http.post(CHAT, json=BODY, headers={**headers, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        for origin in (PAGE + ".evil.example", "null", PAGE + ":8443", "http://chat.example"):
            assert http.options(CHAT, headers={**ASKS, "Origin": origin}).status_code == 400, origin
        assert http.options(CHAT).status_code == 401  # no question of a browser


def test_methods_and_headers(start_server):
    running = start_server(allowed_origins=("*",), allowed_methods=("GET",), allowed_headers=("x-mine",))
    with httpx.Client(base_url=running.url) as http:
        assert http.options(CHAT, headers=ASKS).status_code == 400
        good = {"Origin": PAGE, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
        answer = http.options("/v1/models", headers=good)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("words", "value"),
    [(["http://a", "http://b"], ("http://a", "http://b")), (['["http://a", "http://b"]'], ("http://a", "http://b")), (["*"], ("*",))],
)
def test_origins_on_the_command_line(monkeypatch, words, value):
    import octavo.server.run as run

    calls = []
    monkeypatch.setattr(run, "serve", lambda config, options: calls.append(options))
    assert main(["serve", "m", "--allowed-origins", *words]) == 0
    assert calls[0].allowed_origins == value


def test_all_origins_with_credentials_are_refused(capsys):
    assert main(["serve", "m", "--allowed-origins", "*", "--allow-credentials"]) == 2
    assert "every web page" in capsys.readouterr().err


# -- https


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """An authority, and certificates of a server (for 127.0.0.1) and of a client."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name, extra in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "subjectAltName=DNS:client")):
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / f"{name}.ext").write_text(extra)
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)
    openssl("ec", "-in", "server.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
    return folder


@contextlib.contextmanager
def https_server(folder: Path, **options) -> Iterator[str]:
    """The real start of the server (``_Runner``), in a thread."""
    settings = ServerOptions(ssl_keyfile=str(folder / "server.key"), ssl_certfile=str(folder / "server.pem"), **options)
    loop, sock = asyncio.new_event_loop(), bind("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def start(*_):
        return MockEngine()

    runner = _Runner(EngineConfig(), settings, settings.api_key, sock, start, tls_context(settings))
    monkey = lambda *args: None  # noqa: E731 (signals belong to the main thread)
    loop.add_signal_handler = monkey  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: loop.run_until_complete(runner.run()), daemon=True)
    thread.start()
    until(lambda: runner.server is not None and runner.server.started)
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(setattr, runner.server, "should_exit", True)
        thread.join(60)
        loop.close()


def trusting(folder: Path, client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if client:
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context


def test_the_openai_client_over_https(certificates):
    with https_server(certificates, api_key=("k",)) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="k", http_client=httpx.Client(verify=trusting(certificates))) as client:
            models = client.models.list().data
            answer = client.chat.completions.create(model=models[0].id, messages=BODY["messages"], max_tokens=5)
            stream = client.chat.completions.create(model=models[0].id, messages=BODY["messages"], max_tokens=5, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in stream) == answer.choices[0].message.content != ""
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")  # an authority that nobody knows
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health")  # no plain http on this port
        host, port = url.removeprefix("https://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:  # headers' limit holds in TLS too
            with trusting(certificates).wrap_socket(sock, server_hostname=host) as tls:
                tls.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 100_000 + b"\r\n\r\n")
                assert tls.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_clients_that_must_show_a_certificate(certificates):
    options = {"ssl_ca_certs": str(certificates / "ca.pem"), "ssl_cert_reqs": 2}
    with https_server(certificates, **options) as url:
        assert httpx.get(url + "/health", verify=trusting(certificates, client=True)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(url + "/health", verify=trusting(certificates))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_tls_is_refused(certificates):
    with https_server(certificates) as url:
        context = trusting(certificates)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.HTTPError):
            httpx.get(url + "/health", verify=context)


def test_files_that_cannot_be_used(certificates):
    def refused(words: str, **options):
        values = {name: value if isinstance(value, int) else str(certificates / value) for name, value in options.items()}
        with pytest.raises(ConfigError, match=words):
            tls_context(ServerOptions(**values))

    refused("--ssl-keyfile needs --ssl-certfile", ssl_keyfile="server.key")
    refused("--ssl-cert-reqs needs --ssl-ca-certs", ssl_certfile="server.pem", ssl_keyfile="server.key", ssl_cert_reqs=2)
    refused("No such file", ssl_certfile="missing.pem", ssl_keyfile="server.key")
    refused("client.key", ssl_certfile="server.pem", ssl_keyfile="client.key")
    refused("encrypted", ssl_certfile="server.pem", ssl_keyfile="locked.key")
    refused("--ssl-ca-certs", ssl_certfile="server.pem", ssl_keyfile="server.key", ssl_ca_certs="server.key")
    assert tls_context(ServerOptions()) is None
