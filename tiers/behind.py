"""A lane's writer and a second thread beside it: large records are copied and summed by whichever is free, and published in order.

Stage *append*. Each record is filled and summed by one thread, whose cache then holds it: for the other one to read what was just
written costs as long as to copy it. The thread is started with the first record. Where no core is free for it sharing costs more than
it saves: the writer takes back what the thread has not begun, and works alone while that is faster. A writer that is killed leaves what
isn't published unseen, as ever.
"""

from __future__ import annotations

import _thread
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

LINE_LIMIT = 8  # records that may wait to be published
SAMPLES = 3  # bursts of each way whose median is compared: one alone may have been hindered by anything
CLEARLY = 0.8  # alone is faster if it takes so much of the other way's time: without a free core that takes several times as long
# Bursts between two tries of the way that is slower, twice as many each time that it was slower again.
TRY_FIRST, TRY_LIMIT = 4, 256

Prepare = Callable[[], int]  # fills a record, and returns its checksum
Publish = Callable[[int], None]


class _Item:
    """One record on its way. is_done: it is filled and `checksum` known, or `error` says what kept it from that."""

    __slots__ = ("checksum", "error", "is_done", "prepare", "publish")

    def __init__(self, prepare: Prepare, publish: Publish) -> None:
        self.prepare, self.publish = prepare, publish
        self.checksum = 0
        self.error: BaseException | None = None
        self.is_done = False


class Pace:
    """Which way is faster, to share or to work alone? What bursts took says, the slower way's too: it is tried again now and then.

    is_alone  how the next burst is to be done
    """

    def __init__(self) -> None:
        self.is_alone = False
        self._faster_alone = False
        self._taken: dict[bool, deque[float]] = {way: deque(maxlen=SAMPLES) for way in (False, True)}
        self._left = self._tries = TRY_FIRST

    def took(self, seconds: float) -> None:
        """A burst was done, in so many seconds a byte."""
        self._taken[self.is_alone].append(seconds)
        if self.is_alone != self._faster_alone:
            self._judge()
        self._left -= 1
        if not self._left:
            self._left = self._tries
            self.is_alone = not self._faster_alone
        else:
            self.is_alone = self._faster_alone

    def _judge(self) -> None:
        """The slower way was tried."""
        shared, alone = (statistics.median(self._taken[way]) if self._taken[way] else 0.0 for way in (False, True))
        if len(self._taken[self.is_alone]) < SAMPLES:
            return
        if (alone < CLEARLY * shared) == self._faster_alone:
            self._tries = min(2 * self._tries, TRY_LIMIT)
        else:
            self._faster_alone, self._tries = not self._faster_alone, TRY_FIRST


class Behind:
    """Two threads, the caller's and one of its own. Raw locks: handing something over costs two or three microseconds."""

    def __init__(self) -> None:
        self._given = _thread.allocate_lock()  # held: nothing was given since the thread looked
        self._given.acquire()
        self._doing = _thread.allocate_lock()  # held by the thread, from taking a record until it is done
        self._publishing = _thread.allocate_lock()
        self._line: deque[_Item] = deque()  # all that isn't published, in order
        self._work: deque[_Item] = deque()  # given to the thread and not begun: one at most; whoever pops it does it
        self._error: BaseException | None = None
        self._is_started = self._is_ending = False
        self._began, self._bytes, self._count = 0.0, 0, 0  # of the records since the last `wait`
        self._was_burst = False  # the last time there were several: there will be again
        self._pace = Pace()

    @property
    def has_failed(self) -> bool:
        """Whether something ended in an error since the last `wait`: what came after it isn't published."""
        return self._error is not None

    def share(self, size: int, prepare: Prepare, publish: Publish, *, at_once: bool = False) -> None:
        """Have a record of `size` bytes prepared, by this thread or the other one, and published after those before it.

        at_once  wake the thread for the first one since `wait`. Otherwise only if there were several the last time: if it stays the only
                 one it is done by `wait`, and to wake the thread would take longer
        """
        if len(self._line) >= LINE_LIMIT:
            self._finish()
        item, is_first = _Item(prepare, publish), not (self._count or at_once or self._was_burst)
        if not self._count:
            self._began = time.perf_counter()
        self._count += 1
        self._bytes += size
        self._line.append(item)
        is_alone, has_work = self._pace.is_alone, bool(self._work)
        if not (is_alone or has_work):
            self._work.append(item)
        if not (is_alone or is_first):
            self._wake()
        if is_alone or has_work:  # the thread gets no core, or has something to go on with
            self._do(item)

    def wait(self) -> BaseException | None:
        """Until all is published, with the help of this thread; the error that kept something from it, if one did."""
        self._finish()
        if self._count > 1:  # one by itself is nobody's to share
            self._pace.took((time.perf_counter() - self._began) / self._bytes)
        self._was_burst = self._count > 1
        self._bytes = self._count = 0
        error, self._error = self._error, None
        return error

    def end(self) -> None:
        """Let the thread end; after `wait`."""
        if self._is_started:
            self._is_ending = True
            self._wake()

    def _finish(self) -> None:
        self._do_given()
        with self._doing:
            pass  # the thread's own is done

    def _wake(self) -> None:
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name="lane-behind", daemon=True).start()
        # Only this side releases: if it is unlocked, the other one is yet to take it, and looks for work after that.
        if self._given.locked():
            self._given.release()

    def _do_given(self) -> bool:
        try:
            item = self._work.popleft()
        except IndexError:
            return False
        self._do(item)
        return True

    def _do(self, item: _Item) -> None:
        if self._error is None:
            try:
                item.checksum = item.prepare()
            except BaseException as error:
                item.error = error
        item.is_done = True
        with self._publishing:
            while self._line and self._line[0].is_done:
                self._publish(self._line.popleft())

    def _publish(self, item: _Item) -> None:
        """In the records' order, whichever thread comes to it: what follows a failed one stays unseen."""
        if self._error is None and item.error is None:
            try:
                item.publish(item.checksum)
            except BaseException as error:
                item.error = error
        self._error = self._error or item.error

    def _run(self) -> None:
        while not self._is_ending:
            self._given.acquire()
            while True:
                with self._doing:
                    if not self._do_given():
                        break
