"""``octavo version``."""

from __future__ import annotations

import argparse

import octavo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes no flags."""


def run(args: argparse.Namespace) -> int:
    print(f"octavo {octavo.__version__}")
    return 0
