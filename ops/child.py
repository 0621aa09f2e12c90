"""First code of every process that `serve` or the host agent starts: `python -m ops.child NAME MODULE [arguments]`.

Reads the resolved settings as JSON from stdin (a pipe: they may hold the API key, and command lines are public), sets up the log,
ties the process to its parent if told so, and runs MODULE as `python -m MODULE [arguments] --config-json SETTINGS` would
(--bare: with the settings' own "arguments" instead, if there are any; the rest of them is for this file alone).
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys

from ops import log
from ops.processes import die_with_parent


def main() -> None:
    """See the module docstring; never returns normally when MODULE exits by SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m ops.child")
    parser.add_argument("--parent", type=int, default=0, help="die when this process dies")
    parser.add_argument("--bare", action="store_true", help="MODULE takes no --config-json")
    parser.add_argument("name")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.parent:
        die_with_parent(given.parent)
    text = sys.stdin.read()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    settings = json.loads(text)
    log.configure(given.name, **settings.get("log", {}))
    more = settings.get("arguments", []) if given.bare else ["--config-json", text]
    sys.argv = [given.module, *given.arguments, *more]
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
