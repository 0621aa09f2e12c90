"""Kernels that are made for this processor: LLVM's text -> a function, once a process; what is forked has it too.

`tiers/copy_sum.py` and `engine/row_attention.py` each have one, and a slower way for where it can't be made or is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

log = structlog.get_logger()

_Call = TypeVar("_Call")


class Kernel(NamedTuple, Generic[_Call]):
    """The function; None if there is none, and why it is `missing`."""

    call: _Call | None
    missing: str = ""


def checked(
    make: Callable[[], _Call], is_right: Callable[[_Call], bool], wrong: str, *, event: str, hint: str
) -> Kernel[_Call]:
    """What `make` gives; none, and said so in the log, where LLVM can't make it or it doesn't do what it should.

    wrong        what it has given where `is_right` says no
    event, hint  in the log, beside the reason
    """
    try:
        call = make()
        missing = "" if is_right(call) else wrong
    except (RuntimeError, OSError) as error:
        missing = str(error)
    if missing:
        log.warning(event, error=missing, hint=hint)
        return Kernel(None, missing)
    return Kernel(call)


def function(text: str, name: str, result: Any, *arguments: Any) -> Any:
    """A function of a module in LLVM's text, with ctypes' types; it releases the GIL. Raises RuntimeError, OSError."""
    import llvmlite.binding as llvm  # here: not every process needs it

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    made: Any = ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(name))
    made.code = engine  # which goes with it
    return made
