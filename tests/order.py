"""Which tests come first: what takes longest, roughly, on two cores. A new module needs no entry; it comes among the short ones."""

from __future__ import annotations

import pytest

# Seconds of a whole module, or of the tests of one group (tests/system/conftest.py), which one worker runs one after the other.
GROUPS = {
    "demo": 340, "window": 110, "commands": 90, "linear": 80, "hot": 60, "recurrent": 55, "cold": 55, "simulation": 55, "mamba": 50,
    "latent": 50, "warm": 45, "convolution": 40, "exact": 30, "guarded": 25,
}  # fmt: skip
MODULES = {
    "tests/faults/test_soak.py": 180,
    "tests/system/": 20,
    # These fork hundreds of times, which takes 12 ms in a small process and 70 in one of a gigabyte: first of all.
    "tests/ops/test_recovery.py": 1000,
    "tests/faults/test_restore_killed.py": 1000,
    "tests/engine/test_kinds.py": 12,
    "tests/simulation/": 12,
    "tests/faults/": 8,
    "tests/engine/capture/test_nvrtc.py": 8,
    "tests/engine/": 2,
}


def rank(item: pytest.Item) -> tuple[float, str]:
    """Smallest first; the tests of a group stay together."""
    group = item.get_closest_marker("xdist_group")
    if group is not None:
        return -float(GROUPS.get(group.args[0], 50)), group.args[0]
    seconds = next((seconds for start, seconds in MODULES.items() if item.nodeid.startswith(start)), 1)
    return -float(seconds), ""


def name_group(item: pytest.Item) -> None:
    """Let the test's id end in its group, by which pytest-xdist keeps groups together; it writes where pytest 9.2 looks no more."""
    group = item.get_closest_marker("xdist_group")
    if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
        item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")  # type: ignore[attr-defined]
