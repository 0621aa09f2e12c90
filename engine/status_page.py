"""One engine's page in shared memory: heartbeat, step counters, and a mutex that tells of its death. No torch here.

Written by the engine's main thread, read by the host agent and `concordia status`. The kernel reports the death of a process
(pidfd, socket EOF) only after it has freed its memory, which takes 150 ms and more for a gigabyte; but it releases robust
mutexes first. So the engine's main thread holds one for life, and a watcher that can lock it knows within about a
millisecond. The page appears by rename with the mutex already held, so there is no moment at which a live engine looks dead.
Words that change later are stored and loaded whole, as aligned words of a memoryview: `pack_into` zeroes its bytes first, and
a watcher on another processor sees the zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from pathlib import Path

MAGIC = b"CNCSTAT1"
PAGE_BYTES = 4096
STATES = ("loading", "ready", "draining", "failed")

_HEAD = struct.Struct("<8sIIQI")  # magic, pid, incarnation, start ticks, state
_STATE = 24 // 4  # index of a 4-byte word
# Indices of 8-byte words.
_BEAT = 64 // 8  # CLOCK_MONOTONIC ns
_BOUND = 72 // 8  # ns that may pass without a beat before the engine counts as hung
_STEPS = 80 // 8
_FENCED = 88 // 8  # not 0: replaced; nothing of it counts any more
_MUTEX_AT = 128

# The bound is learned: so many times the longest silence of late, which fades by a thousandth a step (half in 700 steps).
BOUND_FACTOR = 4
BOUND_LIMIT_NS = 30_000_000_000
FADE_BITS = 10
FIRST_STEPS = 16  # first steps compile, fault in pages and fill caches: until then the bound is
FIRST_BOUND_NS = 10_000_000_000

_EOWNERDEAD = 130
_ENOTRECOVERABLE = 131
_ETIMEDOUT = 110
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)
# A held robust mutex is linked into a list of its thread's that other robust mutexes (LMDB's) write to: never unmap it.
_held: list[StatusPage] = []


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if it is gone: tells a recycled pid from the one that was meant."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class StatusPage:
    """See the module docstring. `create` is for the engine, `open` for whoever watches it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._half_words = memoryview(memory).cast("I")
        self._mutex = ctypes.c_char.from_buffer(memory, _MUTEX_AT)
        self._beaten_ns = 0
        self._longest_ns = 0

    @classmethod
    def create(cls, path: Path, incarnation: int) -> StatusPage:
        """Make the page of this process and take its mutex. Call on the main thread, which must live as long as the engine."""
        temporary = path.with_suffix(f".{os.getpid()}.new")
        with open(temporary, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, PAGE_BYTES)  # a hole would end in SIGBUS where there is no room for it
            page = cls(mmap.mmap(file.fileno(), PAGE_BYTES))
        pid = os.getpid()
        _HEAD.pack_into(page._memory, 0, MAGIC, pid, incarnation, start_ticks(pid), 0)
        page.beat()
        page._lock_for_life()
        _held.append(page)
        os.rename(temporary, path)
        return page

    @classmethod
    def open(cls, path: Path) -> StatusPage:
        """Map an engine's page. Raises FileNotFoundError before it started, ValueError if the file is something else."""
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != PAGE_BYTES:
                raise ValueError(f"{path} is not a status page")
            page = cls(mmap.mmap(file.fileno(), PAGE_BYTES))
        if page._memory[:8] != MAGIC:
            raise ValueError(f"{path} is not a status page")
        return page

    def close(self) -> None:
        """Unmap. Only when no thread is inside `wait_for_death`."""
        del self._mutex
        self._words.release()
        self._half_words.release()
        self._memory.close()

    # ------------------------------------------------------------ engine

    def beat(self) -> None:
        """Say "alive". Called by the step loop and between the layers of a step, never by a thread of its own."""
        now_ns = time.monotonic_ns()
        silence_ns = now_ns - self._beaten_ns
        if silence_ns > self._longest_ns and self._beaten_ns:
            self._longest_ns = silence_ns
            self._tell_bound()
        self._beaten_ns = now_ns
        self._words[_BEAT] = now_ns

    def count_step(self) -> None:
        """Count a finished step, and beat."""
        self._words[_STEPS] = self.step_count + 1
        self._longest_ns -= self._longest_ns >> FADE_BITS
        self._tell_bound()
        self.beat()

    def _tell_bound(self) -> None:
        """What may pass without a beat, learned from what did pass."""
        bound_ns = FIRST_BOUND_NS if self.step_count < FIRST_STEPS else 0
        bound_ns = max(bound_ns, min(BOUND_LIMIT_NS, BOUND_FACTOR * self._longest_ns))
        self._words[_BOUND] = bound_ns

    def set_state(self, state: str) -> None:
        """One of STATES. What was learned of silences while loading is no measure for serving."""
        self._half_words[_STATE] = STATES.index(state)
        self._longest_ns = self._beaten_ns = 0
        self._tell_bound()
        self.beat()

    @property
    def fenced(self) -> bool:
        """This engine has been replaced: it must write and send nothing more, and end."""
        return self._words[_FENCED] != 0

    def _lock_for_life(self) -> None:
        attributes = ctypes.create_string_buffer(64)
        mutex = ctypes.byref(self._mutex)
        for call in (
            lambda: _libc.pthread_mutexattr_init(attributes),
            lambda: _libc.pthread_mutexattr_setpshared(attributes, 1),
            lambda: _libc.pthread_mutexattr_setrobust(attributes, 1),
            lambda: _libc.pthread_mutex_init(mutex, attributes),
            lambda: _libc.pthread_mutex_lock(mutex),
        ):
            code = call()
            assert code == 0, f"robust mutex: {os.strerror(code)}"

    # ------------------------------------------------------------ watchers

    def fence(self) -> None:
        """Tell the engine, should it ever run again, that it was replaced."""
        self._words[_FENCED] = 1

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return int(_HEAD.unpack_from(self._memory, 0)[1])

    @property
    def incarnation(self) -> int:
        """How many times this engine has been started."""
        return int(_HEAD.unpack_from(self._memory, 0)[2])

    @property
    def start_ticks(self) -> int:
        """Start time of the process, see `start_ticks()`."""
        return int(_HEAD.unpack_from(self._memory, 0)[3])

    @property
    def state(self) -> str:
        """One of STATES."""
        return STATES[self._half_words[_STATE]]

    @property
    def step_count(self) -> int:
        """Steps finished by this incarnation."""
        return self._words[_STEPS]

    @property
    def hang_bound_ms(self) -> float:
        """What the engine allows itself without a beat; 0: nothing said."""
        return self._words[_BOUND] / 1e6

    def beat_age_ms(self) -> float:
        """Milliseconds since the last beat (CLOCK_MONOTONIC is one clock for all processes of a machine)."""
        beaten_ns = self._words[_BEAT]
        return (time.monotonic_ns() - beaten_ns) / 1e6

    def wait_for_death(self, timeout_s: float) -> bool:
        """Block until the engine's main thread is gone (True) or the time is up (False). Run on a thread of its own.

        Several watchers may wait at once; each is told.
        """
        mutex = ctypes.byref(self._mutex)
        end_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        end = _Timespec(end_ns // 1_000_000_000, end_ns % 1_000_000_000)
        code = _libc.pthread_mutex_clocklock(mutex, _CLOCK_MONOTONIC, ctypes.byref(end))
        if code == _ETIMEDOUT:
            return False
        if code == _EOWNERDEAD:
            _libc.pthread_mutex_consistent(mutex)
        assert code in (0, _EOWNERDEAD, _ENOTRECOVERABLE), f"robust mutex: {os.strerror(code)}"
        _libc.pthread_mutex_unlock(mutex)  # the next watcher is told, too
        return True
