"""The driver is asked whether lanes can be registered; a driver that stands in says all that one can say."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from ops import cuda_lane


class Driver:
    """As much of libcuda as is asked."""

    def __init__(self, *, lacks: int = 0, register: int = 0, initialised: int = 0) -> None:
        self.lacks, self.register, self.initialised = lacks, register, initialised
        self.registered, self.retained = 0, 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.initialised

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = int(attribute != self.lacks)
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:  # noqa: N802
        self.retained -= 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:  # noqa: N802
        assert address.value % 4096 == 0 and flags == 3
        ctypes.string_at(address.value, size.value)  # it is memory
        self.registered += not self.register
        return self.register

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        self.registered -= 1
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_NOT_SUPPORTED" if status == 801 else None
        return 0


@pytest.mark.parametrize(
    "driver, why",
    [
        (Driver(), ""),
        (Driver(initialised=100), "CUDA error 100"),
        (Driver(lacks=91), "host's pointers"),
        (Driver(lacks=99), "registered"),
        (Driver(register=801), "CUDA_ERROR_NOT_SUPPORTED"),
    ],
)
def test_the_driver_says_whether_a_lane_can_be_registered(driver: Driver, why: str, tmp_path: Path) -> None:
    said = cuda_lane.why_not(tmp_path, 0, driver)
    assert (why in said) if why else not said
    assert driver.registered == driver.retained == 0
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_the_reason(tmp_path: Path) -> None:
    assert "nowhere" in cuda_lane.why_not(tmp_path / "nowhere", 0, Driver())
