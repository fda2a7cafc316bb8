"""What every test gets: quiet threads, fixed randomness, a free port."""

from __future__ import annotations

import inspect
import logging
import os
import random
import sys
from collections.abc import Iterator

# Before torch or tokenizers are imported anywhere: test workers share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

from tests.waiting import PATIENCE_S  # noqa: E402
from tests.waiting import free_port as unused_port  # noqa: E402

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # Deterministic, and without a deadline: the machine's load must not decide whether a test passes.
    settings.register_profile("octavo", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("octavo")


try:
    import httpx
except ImportError:
    pass
else:
    # httpx gives up after 5 s without a word, which a busy machine may take. Its functions all have this one object as default.
    _default = inspect.signature(httpx.get).parameters["timeout"].default
    _default.connect = _default.read = _default.write = _default.pool = PATIENCE_S


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """``setup_logging`` stops records from reaching the root logger, where caplog listens in later tests."""
    logger = logging.getLogger("octavo")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1:]


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on."""
    return unused_port()
