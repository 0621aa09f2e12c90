"""Import transformers without what an engine never uses: torch's compiler, and tensors that are spread over devices; its models' sources
are read once, and not twice.

transformers decorates a few functions for torch.compile and looks for DTensor while it is imported, and torch looks for its compiler as a
model's layers are made. That pulls in torch._dynamo, torch._inductor and torch.distributed.tensor: a quarter of the processor time that
a start takes. Here the decorators do nothing, and transformers is told what a torch without torch.distributed would tell it. An engine is
one process with one device; if that changes, this goes. Main thread only. Source: transformers 5.24, torch/_compile.py.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

_COMPILER = "torch._dynamo"


class _NoCompiler(ModuleType):
    """In the place of torch._dynamo: each of its decorators gives back what it decorates; its submodules are the real ones."""

    __path__ = [str(Path(torch.__file__).with_name("_dynamo"))]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _as_it_is


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _as_it_is


@contextmanager
def lean() -> Iterator[None]:
    """For the block, torch has neither compiler nor torch.distributed; transformers remembers the latter. Who imported more keeps it."""
    if _COMPILER in sys.modules:
        yield
        return
    is_available = torch.distributed.is_available
    torch._dynamo = sys.modules[_COMPILER] = _NoCompiler(_COMPILER)  # type: ignore[assignment]
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        del torch._dynamo, sys.modules[_COMPILER]


@contextmanager
def models_read_once() -> Iterator[None]:
    """For the block, `transformers.models` takes from `transformers` which names lie where; each reads every model for it."""
    import transformers
    from transformers.utils import import_utils

    read = import_utils.define_import_structure
    directory = Path(transformers.__file__).parent / "models"

    def define(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != directory / "__init__.py":
            return read(module_path, prefix)
        known = read(directory, prefix="models")  # remembered since transformers asked
        return {
            backends: {name.removeprefix("models."): found for name, found in places.items() if name in of_models}
            for backends, places in known.items()
            if (of_models := {name for name in places if name.startswith("models.")})
        }

    import_utils.define_import_structure = define  # type: ignore[assignment]
    try:
        yield
    finally:
        import_utils.define_import_structure = read


class _ReadQuickly(importlib.abc.MetaPathFinder):
    """Lets transformers look for the names of each of its modules from where they stand on: it would look at a million lines."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            fetch = module.fetch__all__
            module.fetch__all__ = lambda text: fetch(_from_names_on(text))

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _from_names_on(text: str) -> str:
    """A module's text from its `__all__` on, the last one, which is all that is read of it."""
    return text[text.rfind("\n__all__") + 1 :]


with nullcontext() if "transformers" in sys.modules else lean():
    sys.meta_path.insert(0, _read_quickly := _ReadQuickly())
    with models_read_once():
        import transformers.models
    import transformers.generation.utils  # noqa: F401  every model imports it
    import transformers.models.auto.modeling_auto  # noqa: F401
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache

    sys.meta_path.remove(_read_quickly)

__all__ = ["AttentionInterface", "Cache", "lean"]
