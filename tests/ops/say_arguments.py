"""Says its arguments as JSON: `python -m ops.child --bare NAME tests.ops.say_arguments ...`."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    print(json.dumps(sys.argv[1:]))
