"""An engine that was replaced while it stood still writes nothing and sends nothing."""

from __future__ import annotations

import pytest

from engine.errors import Fenced
from engine.loop import Engine
from engine.main import EXIT_DEVICE, EXIT_FENCED, _serve
from tests.engine.driver import random_tokens, submit


def test_nothing_is_written_or_sent_after_the_fence(start_engine) -> None:  # type: ignore[no-untyped-def]
    driver = start_engine()
    driver.handle(submit("a" * 24, random_tokens(1, 40), answer=50))
    driver.run_until_token("a" * 24, 5)
    lane, sent = driver.engine.capture.lane, len(driver.sent)
    head = lane.head
    driver.engine.page.fence()
    with pytest.raises(Fenced, match="was replaced"):
        driver.step()
    assert (lane.head, len(driver.sent)) == (head, sent)


def test_fenced_engine_ends_with_its_own_exit_code(start_engine) -> None:  # type: ignore[no-untyped-def]
    driver = start_engine()
    driver.handle(submit("b" * 24, random_tokens(2, 40), answer=50))
    driver.run_until_token("b" * 24, 5)
    driver.engine.page.fence()
    head = driver.engine.capture.lane.head
    assert _serve(driver.engine, driver.engine.page) == EXIT_FENCED
    assert driver.engine.capture.lane.head == head


def test_sticky_device_error_is_reported_by_the_engine_itself(start_engine, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    driver = start_engine()

    def fail(engine: Engine) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Device:
        type = "cuda"

    monkeypatch.setattr(Engine, "run", fail)
    monkeypatch.setattr(driver.engine.model, "device", Device())
    assert _serve(driver.engine, driver.engine.page) == EXIT_DEVICE
    assert driver.engine.page.state == "failed", "the host agent says `device error` then"


@pytest.mark.parametrize("told_to_end", [False, True])
def test_idle_engine_that_was_replaced_ends_and_writes_nothing(start_engine, told_to_end: bool) -> None:  # type: ignore[no-untyped-def]
    driver = start_engine()
    engine, lane = driver.engine, driver.engine.capture.lane
    driver.handle(submit("c" * 24, random_tokens(3, 40), answer=4))
    driver.run()
    engine.page.fence()
    if told_to_end:
        engine.stop()
    head = lane.head
    assert _serve(engine, engine.page) == EXIT_FENCED
    assert lane.head == head
