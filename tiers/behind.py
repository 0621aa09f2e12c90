"""A lane's writer and a second thread beside it: large records are copied and summed by whichever is free, and published in order.

Stage *append*. Each record is filled and summed by one thread, whose cache then holds it: for the other one to read what was just
written costs as long as to copy it. The thread is started with the first record. Where no core is free for it the writer takes back
what it gave, so that it never waits to be scheduled. A writer that is killed leaves what isn't published unseen, as ever.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable

LINE_LIMIT = 8  # records that may wait to be published

Prepare = Callable[[], int]  # fills a record, and returns its checksum
Publish = Callable[[int], None]


class _Item:
    """One record on its way. checksum: None until it is filled, or if that failed."""

    __slots__ = ("checksum", "is_done", "prepare", "publish")

    def __init__(self, prepare: Prepare, publish: Publish) -> None:
        self.prepare, self.publish = prepare, publish
        self.checksum: int | None = None
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

    @property
    def has_failed(self) -> bool:
        """Whether something ended in an error since the last `wait`: what came after it isn't published."""
        return self._error is not None

    def share(self, prepare: Prepare, publish: Publish) -> None:
        """Have a record prepared, by this thread or the other one, and published after those before it.

        One alone waits for `wait`: to wake the thread for it would take longer than to do it then.
        """
        if len(self._line) >= LINE_LIMIT:
            self._finish()
        item, is_first = _Item(prepare, publish), not self._line
        self._line.append(item)
        has_work = bool(self._work)
        if not has_work:
            self._work.append(item)
        if not is_first:
            self._wake()
        if has_work:  # the thread has something to go on with
            self._do(item)

    def wait(self) -> BaseException | None:
        """Until all is published, with the help of this thread; the error that kept something from it, if one did."""
        self._finish()
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
                self._error = error
        item.is_done = True
        with self._publishing:
            while self._line and self._line[0].is_done:
                self._publish(self._line.popleft())

    def _publish(self, item: _Item) -> None:
        if self._error is None and item.checksum is not None:
            try:
                item.publish(item.checksum)
            except BaseException as error:
                self._error = error

    def _run(self) -> None:
        while not self._is_ending:
            self._given.acquire()
            while True:
                with self._doing:
                    if not self._do_given():
                        break
