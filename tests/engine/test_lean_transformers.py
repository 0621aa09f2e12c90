"""What an engine imports: no compiler, which can still be had, and every model as transformers knows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils import import_utils

from engine import lean_torch, model
from engine.lean_transformers import _from_names_on, models_read_once
from engine.settings import EngineSettings

fetch = import_utils.fetch__all__
pytestmark = pytest.mark.process

PROGRAM = """
import sys
from pathlib import Path
from engine import lean_torch

lean_torch.import_lean()
from engine.main import load
from engine.settings import EngineSettings
import torch

load(Path(sys.argv[1]), "tiny", EngineSettings(device="cpu"))
heavy = {"torch._dynamo", "torch.distributed.tensor", "torch._inductor", "torch._meta_registrations", "sympy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
doubled = torch.compile(lambda value: value + value, backend="eager")
assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
assert {"torch._dynamo", "torch._meta_registrations"} <= set(sys.modules)
assert not lean_torch.whole()
"""


def test_engine_loads_a_model_without_the_compiler_which_stays_usable(tiny_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_dir)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_release_of_torch_is_imported_whole() -> None:
    program = (
        "import sys; from engine import lean_torch; lean_torch.version = lambda name: '2.14.0'; lean_torch.import_lean();"
        "assert 'torch._meta_registrations' in sys.modules and not lean_torch.whole()"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_is_told_what_it_would_have_read_of_its_models() -> None:
    path = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    with models_read_once():
        told = import_utils.define_import_structure(path)
    assert told == import_utils.define_import_structure(path) != {}


def test_names_of_a_module_are_found_from_where_they_stand_on() -> None:
    for path in sorted((Path(transformers.__file__).parent / "models").glob("[a-d]*/*.py")):
        text = path.read_text()
        assert fetch(_from_names_on(text)) == fetch(text), path


def test_a_model_whose_layers_need_all_of_torch_gets_it(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_weights, missing = model._load_weights, [True]

    def load_where_nothing_is_missing(*arguments: Any) -> Any:
        if missing:
            raise NotImplementedError("Could not run 'aten::made_up' with arguments from the 'Meta' backend")
        return load_weights(*arguments)

    monkeypatch.setattr(model, "_load_weights", load_where_nothing_is_missing)
    with monkeypatch.context() as patch:
        patch.setattr(lean_torch, "whole", lambda: False)
        with pytest.raises(NotImplementedError):
            model.load(tiny_dir, "tiny", EngineSettings(device="cpu"))
    monkeypatch.setattr(lean_torch, "whole", lambda: bool(missing) and missing.pop())
    assert model.load(tiny_dir, "tiny", EngineSettings(device="cpu")).layers
