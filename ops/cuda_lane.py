"""What the CUDA driver says: how many devices there are, and whether one can write into a lane in place, tried on a small file there.

For `serve` and `doctor`, without torch or CuPy; an engine does the same at its start (engine/capture/cuda_driver.py).
Source: CUDA Driver API, cuMemHostRegister.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from pathlib import Path
from typing import Any

_CAN_USE_HOST_POINTER, _HOST_REGISTER_SUPPORTED = 91, 99  # CU_DEVICE_ATTRIBUTE_…
_PORTABLE_AND_MAPPED = 3
_TRIED_BYTES = 1 << 20


def device_count() -> int:
    """CUDA devices; -1 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return -1
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def why_not(directory: Path, index: int = 0, driver: Any = None) -> str:
    """Why memory of files in `directory` cannot be registered with CUDA device `index`; "" if it can.

    driver  libcuda; loaded if not given
    Cost    a context on the device for a moment: some hundred MB of its memory, half a second
    """
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver: {error}"
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for status in (driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), index)):
        if status:
            return _name(driver, status)
    for attribute, lack in (
        (_HOST_REGISTER_SUPPORTED, "the device cannot have the host's memory registered"),
        (_CAN_USE_HOST_POINTER, "the device cannot use the host's pointers of registered memory"),
    ):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        if not value.value:
            return lack
    if status := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return _name(driver, status)
    try:
        driver.cuCtxSetCurrent(context)
        return _try(driver, directory)
    finally:
        driver.cuCtxSetCurrent(None)
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _try(driver: Any, directory: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(_TRIED_BYTES)
            with mmap.mmap(file.fileno(), _TRIED_BYTES) as memory:
                view = ctypes.c_char.from_buffer(memory)
                address = ctypes.c_void_p(ctypes.addressof(view))
                status = driver.cuMemHostRegister_v2(address, ctypes.c_size_t(_TRIED_BYTES), _PORTABLE_AND_MAPPED)
                if not status:
                    driver.cuMemHostUnregister(address)
                del view
                return _name(driver, status) if status else ""
    except OSError as error:
        return f"{directory}: {error}"


def _name(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {status}"
