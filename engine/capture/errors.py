"""Errors of the device handlers, by what the caller does next.

CaptureError
├── NoCompiler       refused: handlers cannot be compiled here; capture copies by the framework's own calls
├── CompileFailed    refused: this handler's source does not compile (a bug, or an architecture too old)
├── NoDevice         refused: no CUDA device, or CuPy is not installed
├── BadRegion        refused: what was registered cannot be handled; the message says what would do
├── ExecutorStuck    poisoned: the resident block did not leave in time; use another way to launch
└── RingFull         retry: the executor's ring holds as many tasks as it has room for
"""

from __future__ import annotations


class CaptureError(Exception):
    """Any error of this package."""


class NoCompiler(CaptureError):
    """There is no NVRTC, or it cannot be loaded."""


class CompileFailed(CaptureError):
    """The compiler refused a source; the message has its log."""


class NoDevice(CaptureError):
    """No CUDA device, or no CuPy to reach it."""


class BadRegion(CaptureError):
    """Memory that cannot be registered."""


class ExecutorStuck(CaptureError):
    """The persistent executor is past its lease and does not leave."""


class RingFull(CaptureError):
    """No free task; wait for one to be done."""
