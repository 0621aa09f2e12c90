"""What the tests of sealed lanes and of a sealed store share: keys, a tenant's state, and what of it nobody may read."""

from __future__ import annotations

import numpy as np

from tests.tiers.sample import BLOCK, ROOT, World, append_point, rows, sequence, some_tokens, state
from tiers.lane_format import PointKind
from tiers.layout import Layout

TOKENS = some_tokens(5 * BLOCK + 3)
KEY, OTHER = "11" * 32, "22" * 32
SESSION = "the-session-name"
SECRETS = (TOKENS[:4].tobytes(), TOKENS[40:43].tobytes(), rows(0, TOKENS[:8])[:16].tobytes(), SESSION.encode())
POINT_BYTES = 200


def is_readable(data: bytes) -> bool:
    """Whether a tenant's tokens, rows or names stand somewhere as they are."""
    return any(what in data for what in SECRETS)


def put_point(world: World) -> None:
    """A rollback point of the tenant `secret`, at its beginning, in the lane."""
    lane, layout = world.lane(), Layout((), state_bytes=POINT_BYTES)
    lane.append_open(sequence("a"), 1, ROOT, layout, BLOCK, "secret", "chat", "a", TOKENS[:0])
    append_point(lane, "a", 0, PointKind.MESSAGE, POINT_BYTES, namespace="secret")
    lane.close()


def check_point(world: World) -> None:
    """It is found, and whole."""
    with world.finder().reading() as read:
        (found,) = read.points(ROOT, "secret", TOKENS, limit=len(TOKENS), block_tokens=BLOCK)
        assert found.kind == PointKind.MESSAGE and np.array_equal(read.point(found), state(0, POINT_BYTES))
