"""Import structlog without rich, which it takes for tracebacks that nobody asks for here: a third of what a process costs before it works.

Each package of ours imports this before its first module does. Tracebacks on a terminal are Python's own; rich, where a command prints
tables with it, is imported by that command.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
