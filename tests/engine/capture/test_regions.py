"""What can be registered, and what is refused with a reason."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.capture.errors import BadRegion
from engine.capture.plain import PlainDevice
from engine.capture.regions import CPU, Memory, bytes_at, memory_of


class Interface:
    """An object with CuPy's and numba's array interface."""

    def __init__(self, **changes: Any) -> None:
        base = {"shape": (4, 6), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = base | changes
        self.device = type("Device", (), {"id": 2})()


class OnlyDlpack:
    """A tensor of some other framework."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_a_tensor_and_an_array_are_their_bytes() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    memory = memory_of(tensor)
    assert (memory.address, memory.byte_count, memory.device) == (tensor.data_ptr(), 24, CPU)
    array = np.arange(5, dtype=np.int64)
    assert memory_of(array).address == array.ctypes.data
    assert np.array_equal(memory_of(array).host_bytes().view(np.int64), array)


def test_a_view_of_a_tensor_keeps_its_offset() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    memory = memory_of(tensor[3:50])
    assert (memory.address, memory.byte_count) == (tensor.data_ptr() + 3, 47)
    assert memory.alignment < 16


def test_objects_with_cupys_interface_name_their_device() -> None:
    memory = memory_of(Interface())
    assert (memory.address, memory.byte_count, memory.device) == (4096, 96, 2)
    assert memory_of(Interface(strides=(24, 4))).byte_count == 96


def test_of_objects_that_do_not_name_their_device_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    array = Interface()
    del array.device
    runtime = SimpleNamespace(pointerGetAttributes=lambda address: SimpleNamespace(device=3 if address == 4096 else -1))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    assert memory_of(array).device == 3
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert memory_of(array).device == 0


def test_any_dlpack_object_is_taken() -> None:
    tensor = torch.arange(6)
    memory = memory_of(OnlyDlpack(tensor))
    assert (memory.address, memory.byte_count) == (tensor.data_ptr(), 48)


def test_a_raw_address_is_taken_with_its_length_and_device() -> None:
    assert memory_of(4096, 64, device=1) == Memory(4096, 64, 1)
    memory = Memory(1 << 20, 5)
    assert memory_of(memory) is memory


@pytest.mark.parametrize(
    "source, why",
    [
        (torch.zeros(4, 4).T, "not contiguous"),
        (torch.zeros(0), "empty"),
        (torch.zeros(4, device="meta"), "meta"),
        (np.zeros((4, 4))[:, 1], "contiguous"),
        (np.frombuffer(b"abc", dtype=np.uint8), "writable"),
        (Interface(strides=(4, 16)), "not contiguous"),
        (Interface(data=(4096, True)), "read-only"),
        (Interface(data=(0, False)), "empty"),
        (4096, "positive byte_count"),
        ("text", "no memory"),
    ],
)
def test_what_cannot_be_captured_is_refused(source: Any, why: str) -> None:
    with pytest.raises(BadRegion, match=why):
        memory_of(source)


def test_memory_is_not_freed_while_a_view_of_it_is_looked_at() -> None:
    class Owner:
        """Frees it."""

    memory = np.arange(64, dtype=np.uint8)
    owner = Owner()
    gone = weakref.ref(owner)
    view = bytes_at(memory.ctypes.data, 64, owner)[8:16].view("<u4")
    del owner
    gc.collect()
    assert gone() is not None and view.tobytes() == bytes(range(8, 16))
    del view
    gc.collect()
    assert gone() is None


def test_the_cpu_device_refuses_memory_of_a_gpu() -> None:
    with pytest.raises(BadRegion, match="CUDA device 1"):
        PlainDevice().pages(Memory(4096, 64, 1))
