"""Imports point only down the layers, heavy packages are imported only when they are used, and ``import octavo`` is cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"

# Top to bottom; a layer may import itself and those after it. Names in one row stand side by side.
LAYERS = [
    ["__main__"],
    ["cli", "bench", "conformance"],
    ["server"],
    ["frontend"],
    ["engine"],
    ["executor"],
    ["sampling"],
    ["speculative"],
    ["models", "weights"],
    ["layers", "quantization"],
    ["attention"],
    ["kernels"],
    ["distributed"],
    ["metrics"],
    ["config", "types", "log"],
    ["hints", "garbage"],
    ["env"],
    ["errors"],
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}

# Where torch must not be imported: at all, or when the module is imported (inside functions it may be).
NEVER_TORCH = {"engine", "server"}
LAZY_TORCH = {"frontend", "cli", "bench", "config", "types", "errors", "env", "garbage", "hints", "log", "metrics", "__init__", "__main__"}
LAZY_TORCH_MODULES = {"octavo.models.config", "octavo.models.hub", "octavo.models.registry", "octavo.models", "octavo.weights"}
HEAVY = {"torch", "transformers", "triton"}


@dataclass(frozen=True)
class Import:
    """One imported module; ``lazy``: inside a function. Imports for type checkers only are left out."""

    module: str
    line: int
    lazy: bool


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """All imports of a module of ``package`` (the dotted name that a relative import starts from)."""
    yield from _walk(tree, package, lazy=False)


def _walk(node: ast.AST, package: str, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            yield from _walk(child, package, lazy)
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, lazy)
        return
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
        if base == "octavo":  # from octavo import env: the name tells the layer
            for alias in node.names:
                yield Import(f"octavo.{alias.name}", node.lineno, lazy)
        else:
            yield Import(base, node.lineno, lazy)
        return
    inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, inside)


def modules() -> list[tuple[str, Path]]:
    """(dotted name, file) of every module of octavo, packages under their own name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found.append((".".join(parts), path))
    return found


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def problems(module: str, source: str, is_package: bool) -> list[str]:
    """What is wrong with a module's imports, a line each."""
    layer = layer_of(module)
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for item in imports_of(ast.parse(source), package):
        where = f"{module}:{item.line}"
        top = item.module.split(".")[0]
        if top == "octavo":
            found += _direction_problem(module, layer, item, where)
        elif top in HEAVY:
            lazy_layer = layer in LAZY_TORCH or module in LAZY_TORCH_MODULES
            if layer in NEVER_TORCH and top == "torch":
                found.append(f"{where}: {layer}/ never imports torch")
            elif (lazy_layer or layer in NEVER_TORCH or top == "transformers") and not item.lazy:
                found.append(f"{where}: imports {top} at module level")
    return found


def _direction_problem(module: str, layer: str, item: Import, where: str) -> list[str]:
    target = layer_of(item.module)
    if layer == "__init__":
        return [] if item.lazy else [f"{where}: octavo/__init__.py imports {item.module} at once; make it lazy"]
    if item.module in ("octavo", "octavo.__version__"):
        return [] if layer in ("cli", "bench", "server", "frontend", "metrics") else [f"{where}: imports the package's front door"]
    if target not in RANK:
        return [f"{where}: {item.module} is not in the list of layers (tests/test_imports.py)"]
    if layer not in RANK:
        return [f"{module} is not in the list of layers (tests/test_imports.py)"]
    if RANK[target] < RANK[layer]:
        return [f"{where}: {layer} imports {item.module}, which is above it"]
    return []


def test_imports_point_down() -> None:
    found = [p for name, path in modules() for p in problems(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")]
    assert not found, "\n".join(["imports that point up or load heavy packages:", *found])


def test_every_module_is_in_a_layer() -> None:
    unknown = {layer_of(name) for name, _ in modules()} - set(RANK) - {"__init__"}
    assert not unknown, f"add {sorted(unknown)} to LAYERS, where it belongs"


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("octavo.engine.core", "import torch", "never imports torch"),
        ("octavo.engine.core", "def f():\n    import torch.nn", "never imports torch"),
        ("octavo.server.app", "def f():\n    from torch import nn", "never imports torch"),
        ("octavo.frontend.llm", "import torch", "at module level"),
        ("octavo.frontend.llm", "try:\n    import torch\nexcept ImportError:\n    pass", "at module level"),
        ("octavo.cli.doctor", "class A:\n    import torch", "at module level"),
        ("octavo.models.config", "import torch", "at module level"),
        ("octavo.layers.linear", "import transformers", "at module level"),
        ("octavo.engine.core", "from octavo.frontend.params import SamplingParams", "above"),
        ("octavo.engine.core", "def f():\n    import octavo.server.app", "above"),
        ("octavo.kernels.rope", "from ..layers import rope", "above"),
        ("octavo.types", "from octavo.log import x\nfrom octavo.config import y\nfrom octavo.cli import z", "above"),
        ("octavo.env", "from octavo import config", "above"),
        ("octavo.executor.local", "from octavo import LLM", "not in the list"),
        ("octavo.executor.local", "import octavo", "front door"),
        ("octavo.executor.local", "import octavo.novelty.thing", "not in the list"),
        ("octavo", "from octavo.config import EngineConfig", "lazy"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, what: str) -> None:
    found = problems(module, source, is_package=module == "octavo")
    assert len(found) == 1 and what in found[0], found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("octavo.frontend.llm", "def f():\n    import torch\n    from octavo.executor.local import LocalExecutor"),
        ("octavo.engine.core", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from octavo.server import app"),
        ("octavo.layers.attention", "import torch\nfrom octavo.attention.base import AttentionBackend\nfrom . import rope"),
        ("octavo.weights.gguf", "from octavo.models.config import ModelConfig"),
        ("octavo.models.loader", "from octavo.weights import gguf"),
        ("octavo.cli.main", "import octavo\nfrom octavo import __version__, env"),
        ("octavo.models.llama", "import torch"),
        ("octavo.config", "from octavo.errors import ConfigError"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert problems(module, source, is_package=False) == []


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules after ``code`` ran in a new Python."""
    code += "\nimport json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing() -> None:
    heavy = {"torch", "transformers", "numpy", "msgspec", "starlette", "uvicorn", "tokenizers", "zmq", "argparse", "asyncio", "jinja2"}
    assert not loaded_after("import octavo; octavo.__version__; dir(octavo)") & heavy


def test_public_parameters_load_no_torch() -> None:
    code = "from octavo import SamplingParams, RequestOutput, CompletionOutput, EngineConfig; SamplingParams(temperature=0)"
    assert not loaded_after(code) & {"torch", "transformers", "numpy", "starlette"}


@pytest.mark.parametrize("layer", ["engine", "server", "frontend", "cli", "bench", "metrics"])
def test_a_whole_layer_imports_without_torch(layer: str) -> None:
    """Also through what it imports: the HTTP process and the scheduler do without torch's start-up time and memory."""
    names = [name for name, _ in modules() if layer_of(name) == layer]
    assert not loaded_after("import " + ", ".join(names)) & HEAVY


def test_unknown_attribute_is_an_attribute_error() -> None:
    import octavo

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = octavo.no_such_thing
    assert {"LLM", "AsyncLLM", "SamplingParams", "EngineConfig"} <= set(dir(octavo))
