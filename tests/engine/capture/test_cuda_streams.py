"""What of the CUDA side is plain Python: somebody else's stream, and a recording that nothing is freed in."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from engine.capture.cuda_driver import CudaStream, ForeignStream
from engine.step_graph import _no_collection


def test_the_frameworks_stream_is_used_and_never_ended() -> None:
    calls: list[tuple[Any, ...]] = []
    # Of CuPy's runtime, what may be called on a stream that is not ours.
    runtime = SimpleNamespace(
        streamWaitEvent=lambda *given: calls.append(("wait", *given)),
        streamSynchronize=lambda *given: calls.append(("synchronize", *given)),
    )
    stream = CudaStream(SimpleNamespace(), ForeignStream(runtime, 77))  # type: ignore[arg-type]
    stream.wait(SimpleNamespace(event=SimpleNamespace(ptr=5)))
    stream.synchronize()
    assert stream.stream.ptr == 77
    del stream
    assert calls == [("wait", 77, 5), ("synchronize", 77)]


def test_nothing_is_collected_while_a_step_is_recorded() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), _no_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
