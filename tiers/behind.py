"""What a lane's writer leaves to a second thread: checksum, entry and commit word of a large record, while the next one is copied.

Stage *append*. One record at a time, so they are published in order; the thread is started with the first of them, and waits
in between. Where no core is free for it the writer takes back what it gave, so that it never waits to be scheduled. A writer that is
killed leaves what isn't published unseen, as ever: the commit word is the last thing that is written.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class Behind:
    """One thread that does one thing at a time for another one. Raw locks: to hand something over costs two or three microseconds."""

    def __init__(self) -> None:
        self._given = _thread.allocate_lock()  # held: nothing is given
        self._done = _thread.allocate_lock()  # held: nothing was done since the last wait
        self._given.acquire()
        self._done.acquire()
        self._work: deque[Work] = deque()  # one at most; whoever pops it does it
        self._error: BaseException | None = None
        self._is_started = self._is_ending = False

    def start(self, work: Work) -> None:
        """Have `work` done; after `wait`, since there is one at a time."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name="lane-behind", daemon=True).start()
        self._work.append(work)
        self._wake()

    def wait(self) -> BaseException | None:
        """Until what was started last is done, by this thread if the other hasn't begun; the error that ended it, if one did."""
        try:
            work = self._work.pop()
        except IndexError:
            self._done.acquire()
        else:
            self._given.acquire(blocking=False)  # or the other thread has it, and will find nothing
            self._do(work)
        error, self._error = self._error, None
        return error

    def end(self) -> None:
        """Let the thread end; after `wait`."""
        if self._is_started:
            self._is_ending = True
            self._wake()

    def _wake(self) -> None:
        """Only this side releases: if it is unlocked, the other one is yet to take it, and looks for work after that."""
        if self._given.locked():
            self._given.release()

    def _do(self, work: Work) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def _run(self) -> None:
        while True:
            self._given.acquire()
            if self._is_ending:
                return
            try:
                work = self._work.pop()
            except IndexError:
                continue  # taken back
            self._do(work)
            self._done.release()
