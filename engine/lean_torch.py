"""Import torch without its Python kernels for tensors that have no memory; whoever asks for the compiler, which needs them, gets them.

torch describes many operations a second time in Python, for tensors on the device `meta`: a third of the processor time of its import.
transformers makes a model's layers there before it reads the weights, so that each fill of a layer that has no memory went through that
Python too, and imported sympy on the way. The layers of the models here are made by what torch has in C++; where it has not
enough, `whole` adds the rest (`engine/model.py` asks for it). Main thread only. Source: torch 2.13, torch/__init__.py.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any

_TRIED = ("2.13.",)  # what the import of other releases needs was not looked at: they are imported whole
_KERNELS = "torch._meta_registrations"
_COMPILERS = ("torch._dynamo", "torch._inductor")


class _BeforeCompilers(importlib.abc.MetaPathFinder):
    """Finds nothing, but lets a compiler have all of torch before it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _COMPILERS:
            whole()


_before_compilers = _BeforeCompilers()


def whole() -> bool:
    """Give torch the kernels that it was imported without; False if it had them."""
    if _before_compilers not in sys.meta_path:
        return False
    sys.meta_path.remove(_before_compilers)
    importlib.import_module(_KERNELS)
    return True


def import_lean() -> None:
    """Import torch, unless it is there already; whole, if this is another release than those that were tried."""
    if "torch" in sys.modules:
        return
    if not version("torch").startswith(_TRIED):
        importlib.import_module("torch")
        return
    sys.modules[_KERNELS] = ModuleType(_KERNELS)
    torch = importlib.import_module("torch")
    importlib.import_module("torch._prims.rng_prims")  # torch.Generator needs it
    del sys.modules[_KERNELS], torch._meta_registrations
    sys.meta_path.insert(0, _before_compilers)
