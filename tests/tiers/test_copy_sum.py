"""Copying and summing in one pass: the bytes that numpy copies, and the sum that xxhash makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from xxhash import xxh3_64_intdigest

from tests.tiers.sample import World, sequence, some_tokens
from tiers import copy_sum, failpoints
from tiers.copy_sum import Memory, copy_and_sum
from tiers.lane_reader import LaneReader
from tiers.layout import Layout
from tiers.machine_code import Kernel

STRIPE = copy_sum.STRIPE_BYTES
GUARD = 0xA5


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def room(size: int, skew: int = 0) -> tuple[Memory, np.ndarray, np.ndarray]:
    """Memory that begins `skew` bytes behind a multiple of 64, and what lies before and behind it."""
    whole = np.full(size + 4 * STRIPE, GUARD, np.uint8)
    start = -whole.ctypes.data % STRIPE + STRIPE + skew
    return Memory(whole[start : start + size], whole.ctypes.data + start), whole[:start], whole[start + size :]


def check(pieces: list[np.ndarray], skew: int = 0, head: bytes = b"") -> None:
    wanted = head + b"".join(piece.tobytes() for piece in pieces)
    target, before, behind = room(len(wanted), skew)
    target.array.data[: len(head)] = head
    assert copy_and_sum([Memory.of(piece) for piece in pieces], target, len(head)) == xxh3_64_intdigest(wanted)
    assert target.array.tobytes() == wanted
    assert (before == GUARD).all() and (behind == GUARD).all()


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the kernel ran."""
    call, calls = copy_sum._kernel().call, list[int]()
    assert call is not None, "LLVM knows this machine"

    def counted(*what: object) -> int:
        calls.append(1)
        return call(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(copy_sum, "_kernel", lambda: Kernel(counted))
    return lambda: len(calls)


EDGES = sorted(
    {1, 64, 128, 192, 240, 241, 255, 256, 257, 320, 1023, 1000 * 64}
    | {1024 * blocks + rest for blocks in (1, 2, 3, 17, 1024) for rest in (-64, -1, 0, 1, 63, 64, 128)}
)


@pytest.mark.parametrize("size", EDGES)
def test_every_size_around_stripes_and_blocks(size: int) -> None:
    check([some_bytes(size)])


@settings(max_examples=150)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 40), st.sampled_from([8, 16, 64, 128, 192]), st.integers(0, 70)),
        min_size=1,
        max_size=4,
    ),
    head=st.sampled_from([0, 4, 64, 256]),
    word=st.sampled_from([np.uint8, np.uint16, np.uint64]),
    skew=st.sampled_from([0, 0, 0, 1, 8, 32]),
)
def test_rows_that_lie_apart_and_anywhere(
    groups: list[tuple[int, int, int, int]], head: int, word: type, skew: int
) -> None:
    """Planes of a larger array, as an arena has them, behind what is there already; of any alignment."""
    pieces = []
    for seed, (planes, tokens, row, start) in enumerate(groups):
        held = start + tokens + 5
        memory = np.array(some_bytes(planes * held * row + 8, seed))[seed % 3 :][: planes * held * row]
        pieces.append(memory.view(word).reshape(planes, held, -1)[:, start : start + tokens])
    check(pieces, skew, some_bytes(head).tobytes())


def test_megabytes(by_kernel: Callable[[], int]) -> None:
    planes = some_bytes(6 << 20).view(np.uint64).reshape(6, 2048, 64)
    check([some_bytes(4096), planes[:, 100:1300], planes[1:3, 5:6], some_bytes(1 << 20)])
    assert by_kernel() == 1


@pytest.mark.parametrize(
    ("pieces", "skew"),
    [
        ([some_bytes(192)], 0),  # XXH3 sums less than 241 bytes in other ways
        ([some_bytes(4096), some_bytes(40)], 0),
        ([some_bytes(4096)], 32),
        ([some_bytes(4096).reshape(8, 8, 64)[:, 3:4, :40]], 0),
    ],
    ids=["short", "odd", "not aligned", "odd rows"],
)
def test_what_the_kernel_does_not_take(by_kernel: Callable[[], int], pieces: list[np.ndarray], skew: int) -> None:
    check(pieces, skew)
    assert by_kernel() == 0


def test_runs_that_are_not_contiguous_are_made_so(by_kernel: Callable[[], int]) -> None:
    check([some_bytes(8192).reshape(8, 16, 64)[:, ::2, ::2]])
    assert by_kernel() == 1


def test_pieces_that_do_not_fill_the_record_are_refused() -> None:
    target, _, _ = room(512)
    with pytest.raises(AssertionError, match="fill"):
        copy_and_sum([Memory.of(some_bytes(576))], target)


@pytest.mark.parametrize(
    ("broken", "reason"), [(RuntimeError("no such target"), "no such target"), (lambda *_: 1, "a wrong sum")],
    ids=["not made", "wrong"],
)  # fmt: skip
def test_without_a_kernel_records_are_copied_and_summed_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, broken: object, reason: str
) -> None:
    def compile_it() -> object:
        if isinstance(broken, Exception):
            raise broken
        return broken

    monkeypatch.setattr(copy_sum, "_compile", compile_it)
    monkeypatch.setattr(copy_sum, "_kernel", cache(copy_sum._kernel.__wrapped__))
    with capture_logs() as logs:
        check([some_bytes(4096)])
    assert [entry["event"] for entry in logs] == ["append.no_kernel"]
    assert copy_sum.without() == reason


def test_a_record_appended_in_one_pass_is_the_one_that_was_reserved_filled_and_committed(
    world: World, by_kernel: Callable[[], int]
) -> None:
    layout, tokens = Layout(((3, 64), (2, 128))), some_tokens(9)
    lane, planes = world.lane(), [some_bytes(3 * 20 * 64, 1), some_bytes(2 * 20 * 128, 2)]
    pieces = [Memory.of(plane.reshape(count, 20, -1)[:, 4:13]) for plane, count in zip(planes, (3, 2), strict=True)]
    assert lane.append_rows(layout, sequence("a"), 1, 0, tokens, pieces) == 0
    reservation = lane.reserve_rows(layout, 9)
    copy_sum.copy(pieces, reservation.frame)
    reservation.commit(sequence("a"), 1, 0, tokens)
    reader = LaneReader.open(lane.path)
    one, other = reader.records(0)
    assert one.checksum == other.checksum and by_kernel() == 1
    assert reader.frame(one).tobytes() == reader.frame(other).tobytes()
    assert reader.tokens(one) == tokens.tobytes()


def test_a_record_is_not_seen_before_its_commit_word(world: World) -> None:
    lane, pieces = world.lane(), [Memory.of(some_bytes(16 * 64))]
    failpoints.arm("append.payload.after:1:EIO")
    with pytest.raises(OSError, match="Input/output error"):
        lane.append_rows(Layout(((1, 64),)), sequence("a"), 1, 0, some_tokens(16), pieces)
    reader = LaneReader.open(lane.path)
    assert reader.records(0) == [] and lane.head == 0 and not any(lane.shares.used.values())
    assert lane.append_rows(Layout(((1, 64),)), sequence("a"), 1, 0, some_tokens(16), pieces) == 0
    assert len(reader.records(0)) == 1
