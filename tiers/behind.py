"""A lane's writer and a second thread beside it: large records are copied and summed by whichever is free, and published in order.

Stage *append*. Each record is filled and summed by one thread, whose cache then holds it: for the other one to read what was just
written costs as long as to copy it. The thread is started with the first record. Where no core is free for it sharing costs more than
it saves: then the writer takes back what the thread has not begun, and works alone for a while. A writer that is killed leaves what
isn't published unseen, as ever.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable

LINE_LIMIT = 8  # records that may wait to be published
SLOW_LIMIT = 2  # bursts in a row: one alone may have been hindered by anything
ALONE_S, ALONE_LIMIT_S = 0.02, 3.0  # how long the writer works alone when sharing was slower: twice as long each time
TOLERANCE = 1.3  # sharing may take so much longer: what a byte takes this thread alone is measured at its best
FORGET = 1.02  # the time that a byte takes this side is the least that was seen, and grows by so much with each record

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
        self._began, self._bytes, self._is_shared = 0.0, 0, False  # of the records since the last `wait`
        self._own_s = 1.0  # that a byte takes this side
        self._slow_count, self._alone_s, self._alone_until = 0, ALONE_S, 0.0

    @property
    def has_failed(self) -> bool:
        """Whether something ended in an error since the last `wait`: what came after it isn't published."""
        return self._error is not None

    def share(self, size: int, prepare: Prepare, publish: Publish, *, at_once: bool = False) -> None:
        """Have a record of `size` bytes prepared, by this thread or the other one, and published after those before it.

        at_once  also if it is alone. Otherwise it then is left for `wait`: to wake the thread would take longer than to do it
        """
        if len(self._line) >= LINE_LIMIT:
            self._finish()
        item, is_first, now = _Item(prepare, publish), not (self._bytes or at_once), time.perf_counter()
        self._began = self._began if self._bytes else now
        self._bytes += size
        self._line.append(item)
        is_alone, has_work = now < self._alone_until, bool(self._work)
        if not (is_alone or has_work):
            self._work.append(item)
        if not (is_alone or is_first):
            self._is_shared = True
            self._wake()
        if is_alone or has_work:  # the thread gets no core, or has something to go on with
            self._do(item)
            self._own_s = min(FORGET * self._own_s, (time.perf_counter() - now) / size)

    def wait(self) -> BaseException | None:
        """Until all is published, with the help of this thread; the error that kept something from it, if one did."""
        self._finish()
        if self._is_shared:
            self._judge(time.perf_counter())
        self._bytes, self._is_shared = 0, False
        error, self._error = self._error, None
        return error

    def _judge(self, now: float) -> None:
        """Was it faster than this thread alone? If not, it works alone for a while."""
        if now - self._began < TOLERANCE * self._own_s * self._bytes:
            self._slow_count, self._alone_s = 0, ALONE_S
            return
        self._slow_count += 1
        if self._slow_count >= SLOW_LIMIT:
            self._alone_until, self._alone_s = now + self._alone_s, min(2 * self._alone_s, ALONE_LIMIT_S)

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
