"""What must not be in the code at all: unpickling, code out of data, shells, sockets for everybody, expressions that explode."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from re import _parser as sre_parse  # Python 3.11
except ImportError:
    import sre_parse  # type: ignore[no-redef]

import octavo

PACKAGE = Path(octavo.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text("utf-8")) for path in SOURCES}
UNPICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
UNPICKLING_CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "broadcast_object_list", "all_gather_object", "scatter_object_list"}
# Calls that run text as code, and where one is right: the reason stands beside it.
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
ALLOWED_CODE: dict[str, set[str]] = {"frontend/template_sandbox.py": {"compile"}}  # the sandbox's own compile, of templates


def name_of(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield name_of(node.func), node


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_unpickled_and_no_data_is_run(path):
    tree, where = TREES[path], path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in [*names, node.module or ""] if isinstance(node, ast.ImportFrom) else names:
            assert name.split(".")[0] not in UNPICKLES, f"{where}:{node.lineno} imports {name}"
    for name, call in calls(tree):
        last = name.rpartition(".")[2]
        at = f"{where}:{call.lineno} {name}"
        assert last not in UNPICKLING_CALLS, at
        if name == "torch.load":
            assert is_true(keyword(call, "weights_only")), at
        if name in ("np.load", "numpy.load"):
            assert not is_true(keyword(call, "allow_pickle")), at
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "os.popen", "tempfile.mktemp"):
            raise AssertionError(at)
        assert not is_true(keyword(call, "shell")), at
        assert not is_true(keyword(call, "trust_remote_code")), at
        if name in RUNS_CODE:
            assert name in ALLOWED_CODE.get(where, ()), at


def test_the_search_finds_what_it_looks_for():
    tree = ast.parse("import pickle\nsocket.recv_pyobj()\nsubprocess.run(x, shell=True)\neval(y)")
    names = [name for name, _ in calls(tree)]
    assert names == ["socket.recv_pyobj", "subprocess.run", "eval"] and is_true(keyword([c for _, c in calls(tree)][1], "shell"))


def test_messages_between_processes_are_data_only():
    """What arrives at a socket is decoded into declared structs; a pickle is not one of them, whatever it would do."""
    import pickle

    import msgspec

    from octavo.types import EngineInput, EngineOutput

    class Bomb:
        def __reduce__(self):
            return (print, ("run",))

    for kind in (EngineInput, EngineOutput):
        decoder = msgspec.msgpack.Decoder(kind)
        other = msgspec.msgpack.encode({"type": "generate"})
        for data in (pickle.dumps(Bomb()), pickle.dumps(["generate"]), b"", b"\xc1", other, b"\x91\xa4evil"):
            with pytest.raises(msgspec.MsgspecError):
                decoder.decode(data)


# -- sockets


def test_only_ipc_and_loopback():
    """No address in the sources opens a port to other machines, and ZeroMQ sockets are Unix sockets."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                at = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                assert not re.search(r"tcp://|epgm://|pgm://", text), at
                if re.fullmatch(r"\s*(0\.0\.0\.0|::|\*)\s*", text) and text.strip() != "*":
                    assert at.startswith(("server/run.py", "config.py")), at  # dual-stack binding of an address that the user gave


def test_the_default_address_is_this_machine():
    from octavo.config import ServerOptions
    from octavo.server.run import bind

    sock = bind(ServerOptions().host, 0)
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()


def test_engine_sockets_are_private(monkeypatch):
    """A folder that only this user can enter, gone once the engine is connected; nothing listens on TCP."""
    import os
    import stat

    from octavo.config import EngineConfig
    from octavo.frontend.engine_process import EngineProcess

    monkeypatch.setattr(EngineProcess, "_spawn", lambda self, line: _Ended())
    old = os.umask(0)  # not even a careless umask opens it
    try:
        process = EngineProcess(EngineConfig(), "nowhere")
    finally:
        os.umask(old)
    folder = Path(process.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    for socket in (process.push, process.pull):
        import zmq

        assert socket.getsockopt(zmq.LAST_ENDPOINT).startswith(f"ipc://{folder}".encode())
    process.hide()
    assert not folder.exists()
    process.close(0.1)


class _Ended:
    stdin = None
    pid = 0

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0


# -- regular expressions


def patterns() -> Iterator[tuple[str, str]]:
    """(where, pattern) of every regular expression that the sources write out."""
    functions = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
    for path, tree in TREES.items():
        for name, call in calls(tree):
            module, _, function = name.rpartition(".")
            if module in ("re", "regex") and function in functions and call.args and isinstance(call.args[0], ast.Constant):
                pattern = call.args[0].value
                yield f"{path.relative_to(PACKAGE)}:{call.lineno}", pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern


def nested_repeats(pattern: str) -> bool:
    """Whether an unbounded repeat stands inside of another, both able to take the same text: the shape that explodes."""

    def walk(items, inside: bool) -> bool:
        for op, value in items:
            kind = str(op)
            if kind in ("MAX_REPEAT", "MIN_REPEAT"):
                _, high, inner = value
                unbounded = high == sre_parse.MAXREPEAT
                if unbounded and inside:
                    return True
                if walk(inner, (inside or unbounded) and not _delimited(inner)):
                    return True
            elif kind == "SUBPATTERN" and walk(value[-1], inside):
                return True
            elif kind == "BRANCH" and any(walk(branch, inside) for branch in value[1]):
                return True
            elif kind in ("ASSERT", "ASSERT_NOT") and walk(value[1], inside):
                return True
        return False

    return walk(sre_parse.parse(pattern), False)


def _delimited(inner) -> bool:
    """A repeated group that begins or ends with a literal of its own can be cut in one way only."""
    items = list(inner)
    if len(items) == 1 and str(items[0][0]) == "SUBPATTERN":
        items = list(items[0][1][-1])
    return len(items) > 1 and ("LITERAL" in (str(items[0][0]), str(items[-1][0])))


def test_no_expression_explodes():
    found = list(patterns())
    assert len(found) > 10
    bad = [(where, pattern) for where, pattern in found if nested_repeats(pattern)]
    assert not bad, bad


def test_the_check_of_expressions_works():
    for pattern in ("(a+)+b", "(a*)*", "(?:a|b+)*c", "([a-z]+)*$", "(.*)*x", "((ab?)+)*"):
        assert nested_repeats(pattern), pattern
    for pattern in ("a+b+", "[a-z]*", "(ab)+", "(?:a,[b]+)*", "x{1,9}"):
        assert not nested_repeats(pattern), pattern
