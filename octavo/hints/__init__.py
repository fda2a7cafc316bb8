"""What to say of an option that Octavo does not have: why, and what to write instead, where others' users may bring it along."""

from __future__ import annotations

from octavo.hints.other_flags import ELSEWHERE
from octavo.hints.vllm_flags import LEAVE_OUT, UNSUPPORTED


def explain(flag: str, shown: str, kind: str) -> str | None:
    """A sentence about ``flag`` ("--swap-space"), which is no flag here; None if no other program's is known by that name.

    shown: how the message writes it. kind: "flag" or "option".
    """
    for spelling in (flag, flag.split(".")[0], flag.replace("--no-", "--", 1)):  # vLLM: --json-arg.key, --no-flag
        if spelling in UNSUPPORTED:
            article = "an" if kind == "option" else "a"
            return f"{shown} is {article} {kind} of vLLM that Octavo does not have. {UNSUPPORTED[spelling] or LEAVE_OUT}"
    if flag in ELSEWHERE:
        return f"unknown {kind} {shown}; {ELSEWHERE[flag]}"
    return None
