"""The web page's files as they are served, without a browser: policy, caching, keys, and that nothing points elsewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import pytest

from octavo.server.webui import FOLDER, WebPage
from tests.waiting import until

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(f for f in FOLDER.iterdir())
SCRIPTS = [f for f in FILES if f.suffix == ".js"]
TEXTS = {f: f.read_text() for f in FILES}


def served(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/web/{file.name}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_a_file_comes_with_its_type_and_a_strict_policy(http, file):
    answer = http.get(served(file), headers=HTML)
    assert answer.status_code == 200 and answer.content == file.read_bytes()
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[file.suffix])
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    again = http.get(served(file), headers={**HTML, "If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content and "content-security-policy" in again.headers
    assert http.get(served(file), headers={**HTML, "If-None-Match": '"other"'}).status_code == 200


def test_a_browser_gets_the_page_and_curl_a_text(http):
    page, text = http.get("/", headers=HTML), http.get("/")
    assert page.headers["content-type"].startswith("text/html") and text.headers["content-type"].startswith("text/plain")
    assert page.headers["vary"] == text.headers["vary"] == "Accept"
    assert "mock-model" in text.text and "mock-model" not in page.text
    assert http.head("/", headers=HTML).status_code == 200
    assert http.post("/", headers=HTML).status_code == 405


def test_nothing_but_its_files_is_served(http):
    traversals = ("/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/../app.py")
    for path in ("/web", "/web/", "/web/index.html", "/web/nope.js", "/web/app.js/", *traversals):
        assert http.get(path, headers=HTML).status_code == 404, path


def test_it_can_be_turned_off(start_server):
    running = start_server(disable_web_ui=True)
    with httpx.Client(base_url=running.url) as client:
        assert client.get("/", headers=HTML).headers["content-type"].startswith("text/plain")
        assert client.get("/web/app.js").status_code == 404


@pytest.mark.parametrize("off", [False, True])
def test_with_a_key_the_page_is_open_and_says_nothing(start_server, off):
    running = start_server(api_key=("k",), disable_web_ui=off)
    with httpx.Client(base_url=running.url) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/web/nope.js").status_code in (401, 404)
        for path in {served(f) for f in FILES} - {"/"}:
            assert (client.get(path).status_code == 200) is not off, path
        for headers in (HTML, {}):
            assert "mock-model" not in client.get("/", headers=headers).text
        assert off or client.get("/", headers=HTML).status_code == 200
        assert "mock-model" not in "".join(TEXTS.values())


async def test_under_a_prefix_the_page_ends_with_a_slash(server):
    async def under_prefix(scope, receive, send):
        await server.app({**scope, "path": scope["path"].removeprefix("/a/llm") or "/"}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(under_prefix), base_url="http://host") as client:
        answer = await client.get("/a/llm?x=1", headers=HTML)
        assert answer.status_code == 307 and answer.next_request.url == "http://host/a/llm/"
        assert (await client.get("/a/llm/", headers=HTML)).content == TEXTS[FOLDER / "index.html"].encode()
        assert (await client.get("/a/llm/web/app.js")).status_code == 200


def test_everything_that_the_files_name_is_there():
    paths = {route.path for route in WebPage(None).routes}  # type: ignore[arg-type]
    page = TEXTS[FOLDER / "index.html"]
    named = {f"/{ref}" for ref in re.findall(r'(?:href|src)="([^"#]+)"', page)}
    for file in SCRIPTS:
        named |= {f"/web/{ref}" for ref in re.findall(r'from "\./([^"]+)"', TEXTS[file])}
    assert named <= paths and named | {"/"} == paths, named ^ paths  # and nothing is left over
    icons = set(re.findall(r'id="i-([\w-]+)"', page))
    asked = set(re.findall(r'href="#i-([\w-]+)"', page))
    for file in SCRIPTS:
        asked |= set(re.findall(r'\b(?:icon|iconButton)\("([\w-]+)"', TEXTS[file]))
        asked |= set(re.findall(r'setIcon\([^,]+, "([\w-]+)"', TEXTS[file]))
    assert asked <= icons, asked - icons
    ids = set(re.findall(r'\bid="([\w-]+)"', page)) | {"empty", "span"}
    for file in SCRIPTS:
        assert set(re.findall(r'\$\("([\w-]+)"\)', TEXTS[file])) <= ids, file.name


def test_no_file_names_another_host_or_makes_markup_of_text():
    for file, text in TEXTS.items():
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert not hosts, (file.name, hosts)
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "new Function", "srcdoc"):
            assert banned not in text, (file.name, banned)
    page = TEXTS[FOLDER / "index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)


def test_the_files_are_part_of_the_package():
    line = next(x for x in (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines() if x.startswith("octavo = ["))
    assert "server/web/*" in shlex.split(line.partition("[")[2].rstrip("]").replace(",", " "))


def test_polls_of_the_page_are_not_logged(start_server, caplog):
    running = start_server(api_key=("k",))
    with caplog.at_level("INFO", "octavo.access"), httpx.Client(base_url=running.url) as client:
        for path in ("/metrics", "/health", "/web/app.js", "/web/nope.js", "/version"):
            client.get(path)
        until(lambda: len([r for r in caplog.records if r.name == "octavo.access"]) >= 2)  # written when its answer has gone out
    lines = [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
    assert [re.search(r'"GET (\S+)"', line).group(1) for line in lines] == ["/web/nope.js", "/version"]  # type: ignore[union-attr]
