"""Case 7: streams end in every way while others run; nobody else's text changes, and everything is free afterwards."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.driver import System, at_once
from bench.sse import Answer
from tests.system import harness as h

SEED = 909
ENDS = ("stop", "length", "cancel", "disconnect")
TOKENS = {"stop": 8, "length": 4, "cancel": 12, "disconnect": 12}  # few: a thousand such requests are to be cheap
AT_A_TIME = 32  # more than the engines have slots for: the others wait


def stop_string(text: str) -> str:
    """Two characters from the middle of an answer that make a usable stop string."""
    middle = len(text) // 2
    for start in [*range(middle, len(text) - 2), *range(middle)]:
        piece = text[start : start + 2]
        if piece.isascii() and piece.isprintable() and piece.strip() == piece:
            return piece
    raise AssertionError(f"no stop string in {text!r}: choose another prompt")


def one_end(system: System, end: str, prompt: str, want: str, stop: str) -> str:
    """One short request that ends as told; returns a complaint, or ''. want: what it says if nothing ends it."""
    body = h.chat(system, prompt, tokens=TOKENS[end], stop=stop if end == "stop" else None)
    if end == "disconnect":
        return no_beginning(system.stream(h.CHAT, body, stop_after=2).text, want)
    if end == "cancel":

        def cancel(answer: Answer) -> None:
            system.call("DELETE", f"/v1/streams/{answer.stream_id}")

        return no_beginning(system.stream(h.CHAT, body, watch=h.after(2, cancel)).text, want)
    got = system.stream(h.CHAT, body)
    if not got.done:
        return got.describe()
    expected = want.split(stop)[0] if end == "stop" else want
    if got.text != expected:
        return f"{end}: {got.text!r} instead of {expected!r}"
    if end == "stop" and got.finish_reason != "stop":
        return f"finish {got.finish_reason} after a stop string"
    return ""


def no_beginning(text: str, want: str) -> str:
    """A complaint if `text` isn't how `want` begins; a character that the end cut in two is shown as U+FFFD."""
    return "" if want.startswith(text.rstrip("\ufffd")) else f"{text!r} is no beginning of {want!r}"


@pytest.mark.timeout(280)
@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.soak)])
def test_tiny_requests_end_in_every_way_and_arenas_are_free(tiny: System, count: int) -> None:
    draw = random.Random(SEED)
    texts = h.prompts(SEED, 5)

    def said(tokens: int) -> dict[str, str]:
        return {text: tiny.stream(h.CHAT, h.chat(tiny, text, tokens=tokens)).text for text in texts}

    wants = {end: said(tokens) for end, tokens in TOKENS.items()}
    stops = {text: stop_string(want) for text, want in wants["stop"].items()}
    long_body = h.chat(tiny, "A long one that runs beside all others.", tokens=200)
    long_want = tiny.stream(h.CHAT, long_body)
    plan = [(draw.choice(ENDS), draw.choice(texts)) for _ in range(count)]
    print(f"seed {SEED}: {Counter(end for end, _ in plan)}")
    over = threading.Event()
    beside: list[Answer] = []

    def run_beside() -> None:
        while not over.is_set():
            beside.append(tiny.stream(h.CHAT, long_body))

    companion = threading.Thread(target=run_beside)
    companion.start()
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            jobs = [pool.submit(one_end, tiny, end, text, wants[end][text], stops[text]) for end, text in plan]
            complaints = [job.result() for job in jobs]
    finally:
        over.set()
        companion.join(60.0)
    print(f"{count} requests in {time.monotonic() - started:.1f} s, {len(beside)} long ones beside them")
    wrong = [complaint for complaint in complaints if complaint]
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:5]}"
    for answer in beside:
        h.assert_same(answer, long_want, "the long stream beside others that end")
    h.settled(tiny)
    for engine in tiny.engines():
        assert engine.stats["running"] == 0, engine.row
        assert engine.stats["waiting"] == 0, engine.row
    slots = tiny.engines()[0].stats["slots"]
    bodies = [h.chat(tiny, texts[slot % len(texts)], tokens=16) for slot in range(slots)]
    full = at_once([lambda body=body: tiny.stream(h.CHAT, body) for body in bodies])  # type: ignore[misc]
    for answer in full:
        h.assert_whole(answer)
    h.settled(tiny)
    assert said(TOKENS["length"]) == wants["length"]


def test_tiny_stop_string_ends_before_it_and_is_never_sent(tiny: System) -> None:
    prompt = h.prompts(seed=92, count=1)[0]
    whole = tiny.stream(h.CHAT, h.chat(tiny, prompt))
    stop = stop_string(whole.text)
    got = tiny.stream(h.CHAT, h.chat(tiny, prompt, stop=[stop, "never in here"]))
    assert got.finish_reason == "stop"
    assert got.text == whole.text.split(stop)[0]


def test_tiny_deleted_stream_stops_and_says_so(tiny: System) -> None:
    body = h.chat(tiny, h.prompts(seed=93, count=1)[0], tokens=1800, store=True)
    statuses: list[int] = []

    def delete(answer: Answer) -> None:
        statuses.append(tiny.call("DELETE", f"/v1/streams/{answer.stream_id}")[0])

    got = tiny.stream(h.CHAT, body, watch=h.after(10, delete))
    assert statuses and statuses[0] in (200, 202, 204)
    assert len(got.tokens) < 1700, "generation went on"
    h.settled(tiny)


def test_tiny_disconnect_cancels_an_anonymous_stream_but_not_a_stored_one(tiny: System) -> None:
    body = h.chat(tiny, h.prompts(seed=94, count=1)[0], tokens=300)
    want = tiny.stream(h.CHAT, body)
    h.settled(tiny)
    left = tiny.stream(h.CHAT, {**body, "store": True}, stop_after=5)
    h.assert_same(tiny.fetch(left.stream_id), want, "a stored stream goes on without its client")
    named = tiny.stream(h.CHAT, body, headers={"X-Session-Id": "left"}, stop_after=5)
    h.assert_same(tiny.fetch(named.stream_id), want, "a session's stream goes on without its client")


def test_demo_neighbours_text_is_unchanged_by_other_ends(demo: System) -> None:
    """On the real model: four equal long streams while others come and go; delivered tokens are what is stored."""
    texts = h.prompts(seed=95, count=3)
    long_body = h.chat(demo, texts[0], tokens=32, store=True)

    def long_one() -> Answer:
        return demo.stream(h.CHAT, long_body)

    def cancelled() -> Answer:
        return demo.stream(
            h.CHAT,
            h.chat(demo, texts[1]),
            watch=h.after(6, lambda answer: demo.call("DELETE", f"/v1/streams/{answer.stream_id}") and None),
        )

    def hung_up() -> Answer:
        return demo.stream(h.CHAT, h.chat(demo, texts[2]), stop_after=8)

    answers = at_once([long_one, cancelled, hung_up])
    h.assert_whole(answers[0])
    stored = demo.fetch(answers[0].stream_id)
    assert [(e.id, e.data) for e in stored.events] == [(e.id, e.data) for e in answers[0].events]
    h.settled(demo)
