"""Which device an engine takes, and what it says where there is none of that name."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UnsupportedDevice
from engine.model import choose_device


@pytest.mark.parametrize(("count", "setting"), [(0, "cuda"), (0, "cuda:1"), (1, "cuda:1")])
def test_device_that_is_not_there_is_named(count: int, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UnsupportedDevice, match=f"engine.device is {setting}, but torch"):
        choose_device(setting)
    assert choose_device("auto").type == ("cuda" if count else "cpu")
