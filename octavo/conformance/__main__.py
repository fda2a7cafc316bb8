"""The command ``python -m octavo.conformance``. Exit status: 0 nothing failed; 1 a case failed; 2 it could not run."""

from __future__ import annotations

import argparse
import http.client
import os
import sys

from octavo.conformance.cases import CASES
from octavo.conformance.client import Failed, Server
from octavo.conformance.run import FAIL, as_json, check_health, run_cases, table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo.conformance", description="Check an OpenAI-compatible server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="as OpenAI's clients take it (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--case", action="append", metavar="ID", help="only this case; may be repeated")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="longest wait for an answer (default: %(default)s)")
    parser.add_argument("--pid", type=int, help="the server's process, if it runs here: its memory is watched too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{case.id:>4}  {case.what}" for case in CASES))
        return 0
    cases = [case for case in CASES if args.case is None or case.id in args.case]
    unknown = set(args.case or ()) - {case.id for case in CASES}
    if unknown:
        parser.error(f"there is no case {', '.join(sorted(unknown))}; see --list")
    try:
        server = Server(args.base_url, api_key=args.api_key, model=args.model, timeout_s=args.timeout, pid=args.pid)
        check_health(server)
    except (Failed, ValueError, OSError, http.client.HTTPException) as error:
        print(f"error: {args.base_url} cannot be checked: {error}", file=sys.stderr)
        return 2
    results = []
    for result in run_cases(cases, server):
        results.append(result)
        if not args.json and sys.stderr.isatty():
            print(f"case {result.case}: {result.status} ({result.seconds:.1f} s)", file=sys.stderr)
    print(as_json(results, server) if args.json else table(results))
    return 1 if any(result.status == FAIL for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
