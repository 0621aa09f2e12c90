"""Finding NVIDIA's assembler where there is no GPU: the package nvidia-cuda-nvcc, or a toolkit on the PATH."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def ptxas() -> str:
    """The newest assembler; skips the test if there is none."""
    found = [str(path) for entry in sys.path for path in (Path(entry) / "nvidia").glob("*/bin/ptxas")]
    on_path = shutil.which("ptxas")
    if not found and not on_path:
        pytest.skip("no ptxas here; pip install 'concordia[cuda-tools]'")
    if not found:
        return str(on_path)
    # A wheel does not keep the executable bit everywhere.
    Path(found[0]).chmod(0o755)
    return found[0]
