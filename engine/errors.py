"""Errors of the engine, grouped by what the caller does next.

EngineError
├── Refused        the request or the model can't be served as asked; trying again changes nothing
│   ├── UnsupportedModel   at start: the model keeps state in a way that is not captured yet
│   ├── UnsupportedDevice  at start: there is no such device here
│   ├── BadRequest         a `Submit` that does not fit this model
│   └── OtherState         a log of opaque state holds other tensors, or not the version that is wanted
└── Fenced         this engine was replaced while it stood still: end at once, write and send nothing

An error of the device itself is torch's RuntimeError: the process reports it and exits (engine/main.py), sessions go on elsewhere.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors."""


class Refused(EngineError):
    """Stop: the same again ends the same."""


class UnsupportedModel(Refused):
    """Choose another model, or wait for support of this kind of state."""


class UnsupportedDevice(Refused):
    """Choose another device, or give this process one."""


class BadRequest(Refused):
    """`code` is one of the codes of `messages.Refused`; the text tells the user what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OtherState(Refused):
    """Register the tensors that were captured, or ask for a version that is there."""


class Fenced(EngineError):
    """The host agent gave this engine's work to another one."""
