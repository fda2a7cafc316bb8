"""Real clients against running servers: every check_*.py whose client is installed, in a process of its own.

``make clients`` installs all of them and runs this. OCTAVO_CLIENTS_PYTHON is the Python that has them (default: the one that runs
the tests), OCTAVO_CLIENTS_NODE a folder with a node_modules.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.servers import servers

HERE = Path(__file__).parent
PYTHON = os.environ.get("OCTAVO_CLIENTS_PYTHON") or sys.executable
NODE_MODULES = os.environ.get("OCTAVO_CLIENTS_NODE", "")
NEEDS = {  # what a check imports
    "check_openai.py": ["openai"],
    "check_anthropic.py": ["anthropic"],
    "check_langchain_openai.py": ["langchain_openai"],
    "check_litellm.py": ["litellm", "mcp"],
    "check_llama_index.py": ["llama_index.llms.openai_like", "llama_index.embeddings.openai_like"],
    "check_instructor.py": ["instructor", "openai", "anthropic"],
}
FIND = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is None:
        print(name)
"""


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[str, str, dict[str, str]]]:
    with servers() as running:
        yield running


def missing(modules: list[str]) -> list[str]:
    """Those of ``modules`` that the clients' Python can't find. Looks, and does not import: some take seconds."""
    if PYTHON == sys.executable:
        return [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    return subprocess.run([PYTHON, "-c", FIND, *modules], capture_output=True, text=True).stdout.split()


def run(command: list[str], target: tuple[str, str, dict[str, str]], **environment: str) -> None:
    url, model, settings = target
    done = subprocess.run(
        [*command, url, model],
        env={**os.environ, **settings, **environment, "NO_PROXY": "127.0.0.1", "PYTHONPATH": "", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{Path(command[-1]).name}:\n{done.stdout}"


def test_every_check_is_run() -> None:
    assert {f.name for f in HERE.glob("check_*.py")} == set(NEEDS)


@pytest.mark.parametrize("script", NEEDS)
def test_client(script: str, request: pytest.FixtureRequest) -> None:
    if absent := missing(NEEDS[script]):
        pytest.skip(f"{', '.join(absent)} not installed for {PYTHON}; make clients installs all")
    run([PYTHON, str(HERE / script)], request.getfixturevalue("target"))


def test_node_clients(request: pytest.FixtureRequest) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here")
    if not Path(NODE_MODULES, "openai").is_dir() or not Path(NODE_MODULES, "@anthropic-ai", "sdk").is_dir():
        pytest.skip("OCTAVO_CLIENTS_NODE names no node_modules with openai and @anthropic-ai/sdk; make clients installs them")
    run([node, str(HERE / "check_node.cjs")], request.getfixturevalue("target"), NODE_PATH=str(Path(NODE_MODULES).resolve()))
