"""Where a fork of a session begins. Stage: fork; pure.

A position is a count of tokens; a message is counted by the end tokens in the list, so it follows from the tokens alone.
"""

from __future__ import annotations

import msgspec

from gateway.errors import bad_request
from gateway.openai_schema import decode


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/sessions/{id}/fork; all of it may be left out.

    session_id  name of the fork; one is made up if it is missing
    position    tokens that the fork begins with
    message     the fork begins with messages 0 to this one, as the model's template wrote them (its system message counts)
    stream      one of the session's streams, to fork an earlier turn or another choice instead of the session as it is
    """

    session_id: str | None = None
    position: int | None = None
    message: int | None = None
    stream: str | None = None


def parse_fork(body: bytes) -> ForkRequest:
    """Bytes -> checked request. Raises ApiError."""
    wish: ForkRequest = decode(body, ForkRequest) if body.strip() else ForkRequest()
    if wish.position is not None and wish.message is not None:
        raise bad_request("message: position says where to fork already; send one", "message")
    return wish


def fork_position(wish: ForkRequest, tokens: list[int], stop_tokens: list[int], listed: int = 0) -> int:
    """How many of the list's tokens the fork begins with. listed: how many its record says there are. Raises ApiError."""
    count = len(tokens)
    if not count and listed:
        message = (
            f"the list of the session's {listed} tokens is damaged (checksum) or gone; its next turn writes it anew"
        )
        raise bad_request(message, code="nothing_to_fork")
    if not count:
        raise bad_request("the session has no tokens yet; fork it once it has answered", code="nothing_to_fork")
    if wish.message is not None:
        ends = [index + 1 for index, token in enumerate(tokens) if token in stop_tokens]
        if not 0 <= wish.message < len(ends):
            known = f"must be at least 0 and below {len(ends)}, the messages that have ended, got {wish.message}"
            message = f"message: {known if ends else 'none of its messages has ended by an end token; send position'}"
            raise bad_request(message, "message", "out_of_range")
        return ends[wish.message]
    position = count if wish.position is None else wish.position
    if not 1 <= position <= count:
        message = f"position: must be at least 1 and at most {count}, the session's tokens, got {position}"
        raise bad_request(message, "position", "out_of_range")
    return position
