"""Registering memory whose changes are to be captured: a torch tensor, a CuPy or numpy array, anything with DLPack or
`__cuda_array_interface__`, or a raw address and length; on a GPU or on the host. Pure looking: nothing is copied or pinned here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.capture.errors import BadRegion

CPU = -1


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous range of memory. `device` is the CUDA device's index, or CPU; `owner` keeps it alive."""

    address: int
    byte_count: int
    device: int = CPU
    owner: Any = field(default=None, compare=False, repr=False)

    @property
    def alignment(self) -> int:
        """Largest power of two up to 16 that divides the address."""
        return min(16, self.address & -self.address) if self.address else 16

    def host_bytes(self) -> np.ndarray:
        """The bytes themselves (uint8, writable); host memory only."""
        assert self.device == CPU, "memory of a GPU cannot be read in place"
        return bytes_at(self.address, self.byte_count, self.owner)


def bytes_at(address: int, byte_count: int, owner: Any = None) -> np.ndarray:
    """Host memory as uint8, writable. `owner` lives as long as the array or a view of it; without one, somebody else sees to that."""
    memory = (ctypes.c_uint8 * byte_count).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory)


def memory_of(source: Any, byte_count: int | None = None, *, device: int = CPU) -> Memory:
    """Where `source` lies.

    source      a tensor, an array, an object with `__cuda_array_interface__` or DLPack, a Memory, or an address (int)
    byte_count  with an address: how many bytes; `device` says whose (a CUDA device's index, or CPU)
    Raises      BadRegion: not contiguous, empty, read-only, or no memory that is known here
    """
    if isinstance(source, Memory):
        return source
    if isinstance(source, int):
        return _raw(source, byte_count, device)
    if isinstance(source, torch.Tensor):
        return _tensor(source, source)
    if isinstance(source, np.ndarray):
        return _array(source)
    interface = getattr(source, "__cuda_array_interface__", None)
    if interface is not None:
        return _interface(interface, source)
    if hasattr(source, "__dlpack__"):
        return _tensor(torch.from_dlpack(source), source)
    raise BadRegion(
        f"a {type(source).__name__} is no memory that can be registered; give a tensor, an array or an address"
    )


def _raw(address: int, byte_count: int | None, device: int) -> Memory:
    if address <= 0 or not byte_count or byte_count <= 0:
        raise BadRegion("a raw address needs a positive byte_count")
    return Memory(address, byte_count, device)


def _tensor(tensor: torch.Tensor, owner: Any) -> Memory:
    if not tensor.is_contiguous():
        raise BadRegion(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; register its storage"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise BadRegion(f"a tensor on {tensor.device} cannot be captured; only cpu and cuda can")
    device = CPU if tensor.device.type == "cpu" else tensor.device.index or 0
    return _checked(Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), device, owner))


def _array(array: np.ndarray) -> Memory:
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise BadRegion("a numpy array must be contiguous and writable to be registered")
    return _checked(Memory(array.ctypes.data, array.nbytes, CPU, array))


def _interface(interface: dict[str, Any], owner: Any) -> Memory:
    address, read_only = interface["data"]
    item = np.dtype(interface["typestr"]).itemsize
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if strides is not None and tuple(strides) != _packed(shape, item):
        raise BadRegion(f"an array of shape {shape} and strides {tuple(strides)} is not contiguous; register its base")
    if read_only:
        raise BadRegion("a read-only array cannot be restored; register a writable one")
    device = _device_of(owner, address)
    return _checked(Memory(address, int(np.prod(shape, dtype=np.int64)) * item, device, owner))


def _device_of(owner: Any, address: int) -> int:
    """As CuPy's arrays name it; of others that keep it to themselves (numba's) the driver is asked."""
    named = getattr(getattr(owner, "device", None), "id", None)
    if named is not None:
        return int(named)
    try:
        from cupy.cuda import runtime
    except ImportError:
        return 0
    return max(0, int(runtime.pointerGetAttributes(address).device)) if address else 0


def _packed(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides, step = [], item
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _checked(memory: Memory) -> Memory:
    if memory.byte_count == 0 or memory.address == 0:
        raise BadRegion("an empty tensor or array has nothing to capture")
    return memory
