from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tiers.acceptor import Acceptor


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("here")
        listener.listen(8)
        listener.setblocking(False)
        yield listener


def caller() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect("here")
    made.settimeout(10)
    return made


def test_whoever_comes_while_there_is_no_descriptor_is_sent_away_and_may_come_again(listener: socket.socket) -> None:
    acceptor = Acceptor(listener)
    callers = [caller(), caller()]
    for early in callers:
        with no_descriptor_left():
            assert acceptor.accept() is None
        assert early.recv(1) == b"", "it hears of it at once"
        early.close()
    assert acceptor.accept() is None, "nobody waits any more"
    with caller() as later:
        connection = acceptor.accept()
        assert connection is not None
        connection.send(b"!")
        assert later.recv(1) == b"!"
        connection.close()
    acceptor.close()


def test_one_that_can_not_be_accepted_ends_nobody(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def accept(self) -> None:
            raise ConnectionAbortedError

    acceptor = Acceptor(Failing())  # type: ignore[arg-type]
    assert acceptor.accept() is None
    acceptor.close()
