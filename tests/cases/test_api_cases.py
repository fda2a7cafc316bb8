"""Cases that users hit on other engines, as behaviour that must hold here: the conformance suite against the real server."""

from __future__ import annotations

import os

import pytest

from octavo.conformance.cases import CASES
from octavo.conformance.client import Server
from octavo.conformance.run import OK, SKIPPED
from tests.cases.conftest import run_patiently

MAY_BE_SKIPPED: set[str] = set()
HELLO = [{"role": "user", "content": "Name three animals that live in the sea."}]


@pytest.fixture(scope="session")
def server(any_target) -> Server:
    return Server(any_target.url, api_key=os.environ.get("OCTAVO_API_KEY"), model=any_target.model, pid=any_target.pid)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}_{case.check.__name__}")
def test_case(case, server):
    result = run_patiently(case, server)
    if result.status == SKIPPED and case.id in MAY_BE_SKIPPED:
        pytest.skip(result.why)
    assert result.status == OK, result.why


def test_the_openai_client_works(client, any_target):
    models = client.models.list().data
    assert any_target.model in [m.id for m in models]
    answer = client.chat.completions.create(model=any_target.model, messages=HELLO, max_tokens=8, temperature=0)
    chunks = client.chat.completions.create(model=any_target.model, messages=HELLO, max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
