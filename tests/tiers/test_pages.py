"""What the kernel is asked to read before somebody wants it."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tiers import pages

MB = 1 << 20


def test_each_mb_behind_what_is_used_is_asked_for_once_it_had_to_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 16 * MB), np.uint8)
    skew = -memory.__array_interface__["data"][0] % MB
    base, asked = memory.__array_interface__["data"][0] + skew, list[tuple[float, float]]()
    monkeypatch.setattr(pages, "_madvise", lambda at, size, advice: asked.append(((at - base) / MB, size / MB)))
    waited = iter([0, 0])
    monkeypatch.setattr(pages, "major_faults", lambda: next(waited, 1))
    monkeypatch.setattr(pages, "_COLD_BYTES", 4 * MB)
    ahead = pages.ReadAhead(2 * MB)

    def use(start_kb: int, size_kb: int) -> list[tuple[float, float]]:
        asked.clear()
        ahead.after(memory[skew + (start_kb << 10) : skew + (start_kb + size_kb << 10)])
        return list(asked)

    assert use(0, 200) == [], "all of it was in memory"
    assert use(0, 200) == [(1, 2)]
    assert use(200, 200) == use(400, 200) == [], "small values that follow one another"
    assert use(800, 400) == [(3, 1)]
    assert use(6 << 10, 100) == [(7, 2)], "one that lies elsewhere"
    assert use(4 << 10, 100) == [(5, 2)]
    assert use(1200, 100) == [] and use(3 << 10, 1200) == [], "and back"
    ahead.begin()
    assert use(0, 200) == [(1, 2)], "it may be gone again"
    assert use(8 << 10, 1600) == [(10, 2)] and use(10 << 10, 1200) == [], (
        "after 4 MB without a wait: in memory, it seems"
    )
