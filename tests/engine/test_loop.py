"""The step loop over the real tiny model: whatever a prefix came from, the tokens are those of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import lmdb
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from engine import loop
from engine import messages as m
from engine.errors import BadRequest
from engine.model import Model
from engine.wire import encode
from tests.engine.driver import EngineDriver, random_tokens, submit
from tiers import copy_sum
from tiers.drain import Drain
from tiers.machine_code import Kernel
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.view import StoreReader, View

Start = Callable[..., EngineDriver]
HOT = m.Sampling(temperature=0.8, seed=1234)
GREEDY = m.Sampling(temperature=0)


def reference(start_engine: Start, prompt: list[int], answer: int, sampling: m.Sampling) -> list[int]:
    """What an engine makes that nothing happens to."""
    engine = start_engine(f"reference{len(prompt)}")
    engine.handle(submit("reference", prompt, answer, sampling=sampling, namespace="reference"))
    engine.run()
    return engine.tokens("reference")


@pytest.mark.process
def test_greedy_tokens_are_those_of_transformers(start_engine: Start, tiny_dir) -> None:
    prompt = random_tokens(1, 300)
    engine = start_engine()
    engine.handle(submit("s", prompt, 32))
    engine.run()
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, eos_token_id=None
    )
    assert engine.tokens("s") == made[0, len(prompt) :].tolist()
    assert engine.outputs("s")[-1].finish == "length"
    assert engine.started("s").verdict == "new"


@pytest.mark.process
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drained", [False, True], ids=["lane", "disk"])
def test_a_stream_killed_at_any_token_goes_on_with_the_same_tokens(
    start_engine: Start, keeper, sampling: m.Sampling, drained: bool
) -> None:
    prompt, answer = random_tokens(2, 290), 12
    whole = reference(start_engine, prompt, answer, sampling)
    spare = start_engine("spare")
    for killed_at in range(1, answer):
        serving = start_engine(f"killed{killed_at}")
        stream, namespace = f"s{killed_at}", f"tenant{killed_at}"
        serving.handle(submit(stream, prompt, answer, sampling=sampling, namespace=namespace))
        serving.run_until_token(stream, killed_at)
        serving.close()
        if drained:
            keeper()
        delivered = serving.tokens(stream)
        spare.handle(
            submit(
                stream, prompt + delivered, answer, epoch=2, prompt_count=len(prompt), prefill_start=0,
                sampling=sampling, namespace=namespace,
            )
        )  # fmt: skip
        spare.run()
        started = spare.started(stream)
        assert delivered + spare.tokens(stream) == whole, f"killed at token {killed_at}"
        assert started.verdict == "restored"
        assert started.recomputed == 1
        assert set(started.reused) == {"disk" if drained else "lane"}


@pytest.mark.process
@pytest.mark.parametrize("chunks_done", [1, 2])
def test_a_prefill_that_was_interrupted_goes_on_from_its_last_chunk(start_engine: Start, chunks_done: int) -> None:
    prompt = random_tokens(3, 700)
    whole = reference(start_engine, prompt, 8, HOT)
    serving, spare = start_engine(), start_engine("spare")
    serving.handle(submit("s", prompt, 8, sampling=HOT))
    for _ in range(chunks_done):
        serving.step()
    spare.handle(submit("s", prompt, 8, epoch=2, prefill_start=0, sampling=HOT))
    spare.run()
    assert spare.tokens("s") == whole
    assert spare.started("s").reused == {"lane": 256 * chunks_done}
    forced = next(message for message in spare.sent if isinstance(message, m.Forced))
    assert forced.token_count == 0, "tokens of the prompt are not fed one by one"


@pytest.mark.process
def test_a_tail_that_was_never_captured_is_forced(start_engine: Start, keeper) -> None:
    prompt = random_tokens(4, 100)
    whole = reference(start_engine, prompt, 20, HOT)
    serving, spare = start_engine(), start_engine("spare")
    serving.handle(submit("s", prompt, 20, sampling=HOT))
    serving.run_until_token("s", 1)
    serving.engine.capture = None
    serving.run_until_token("s", 15)
    spare.handle(submit("s", prompt + whole[:15], 20, epoch=2, prompt_count=100, prefill_start=0, sampling=HOT))
    spare.run()
    assert spare.tokens("s") == whole[15:]
    assert spare.started("s").recomputed == 15
    assert spare.engine.counters.forced_tokens >= 14


def test_the_next_turn_computes_only_its_new_tokens(start_engine: Start, keeper) -> None:
    prompt = random_tokens(5, 150)
    first = start_engine()
    first.handle(submit("a", prompt, 10))
    first.run()
    turn = prompt + first.tokens("a") + random_tokens(6, 20)
    first.handle(submit("b", turn, 10))
    first.run()
    assert first.started("b").verdict == "resident"
    assert first.started("b").reused == {"device": 160}
    first.close()
    keeper()
    second = start_engine("second")
    second.handle(submit("c", turn, 10))
    second.run()
    assert second.tokens("c") == first.tokens("b")
    assert sum(second.started("c").reused.values()) >= 160


def test_reuse_ends_where_the_prompt_differs(start_engine: Start, keeper) -> None:
    prompt = random_tokens(7, 900)
    first = start_engine()
    first.handle(submit("a", prompt, 4))
    first.run()
    first.close()
    keeper()
    edited = prompt[:203] + random_tokens(8, 700)
    second = start_engine("second")
    second.handle(submit("b", edited, 12))
    second.run()
    assert second.started("b").reused == {"disk": 203}
    assert second.tokens("b") == reference(start_engine, edited, 12, GREEDY)


def test_two_sessions_share_a_prefix_on_the_device(start_engine: Start) -> None:
    system = random_tokens(9, 600)
    engine = start_engine()
    engine.handle(submit("a", system + random_tokens(10, 30), 6, session="a"))
    engine.run()
    engine.handle(submit("b", system + random_tokens(11, 30), 6, session="b"))
    engine.run()
    assert engine.started("b").reused == {"device": 600}
    assert engine.started("b").recomputed == 30
    assert engine.tokens("b") == reference(start_engine, system + random_tokens(11, 30), 6, GREEDY)


def test_another_tenant_reuses_nothing(start_engine: Start) -> None:
    prompt = random_tokens(12, 200)
    engine = start_engine()
    engine.handle(submit("a", prompt, 4, namespace="one"))
    engine.run()
    engine.handle(submit("b", prompt, 4, namespace="two"))
    engine.run()
    assert engine.started("b").verdict == "new"


@pytest.mark.process
def test_a_full_lane_stops_nothing_and_is_caught_up(start_engine: Start, keeper) -> None:
    prompt = random_tokens(13, 1200)
    whole = reference(start_engine, prompt, 40, HOT)
    serving = start_engine("small", lane_bytes=1 << 20)
    serving.handle(submit("s", prompt, 40, sampling=HOT))
    serving.run()
    assert serving.tokens("s") == whole
    assert serving.engine.stats().lane_full > 0
    assert serving.engine.stats().capture_lag_tokens > 0
    for _ in range(6):
        keeper()
        serving.step()
    assert serving.engine.stats().capture_lag_tokens == 0
    keeper()
    second = start_engine("second")
    second.handle(submit("t", prompt + whole + [5], 4))
    second.run()
    assert second.started("t").reused == {"disk": 1240}


@pytest.mark.process
def test_streams_that_end_beside_others_leave_them_alone(start_engine: Start) -> None:
    prompts = {f"s{i}": random_tokens(20 + i, 60 + i) for i in range(4)}
    engine = start_engine()
    engine.handle(*(submit(name, tokens, 24) for name, tokens in prompts.items()))
    engine.run_until_token("s0", 6)
    engine.handle(m.Cancel("s1", 1), m.Cancel("s2", 1, keep_position=len(prompts["s2"]) + 4))
    engine.run()
    for name in ("s0", "s3"):
        alone = reference(start_engine, prompts[name], 24, GREEDY)
        assert engine.tokens(name) == alone
    assert len(engine.tokens("s1")) < 10
    assert engine.engine.stats().slots_in_use == 0


def test_a_stream_cancelled_before_its_first_step_takes_none(start_engine: Start) -> None:
    """Its prompt has a slot already, and waits for another one's chunks."""
    engine = start_engine()
    engine.handle(submit("s", random_tokens(27, 600), 8), submit("t", random_tokens(28, 600), 8))
    engine.step()
    assert [sequence.computed for sequence in engine.engine.active] == [256, 0]
    engine.handle(m.Cancel("t", 1))
    engine.run()
    assert (len(engine.tokens("s")), engine.tokens("t")) == (8, [])
    assert engine.engine.counters.prefill_tokens == 600


def test_a_stop_string_cuts_the_state_where_the_truth_ends(start_engine: Start) -> None:
    prompt = random_tokens(30, 64)
    engine = start_engine()
    engine.handle(submit("s", prompt, 24))
    engine.run_until_token("s", 9)
    engine.handle(m.Cancel("s", 1, keep_position=64 + 5))
    engine.run()
    kept = engine.tokens("s")[:5]
    engine.handle(submit("t", prompt + kept + random_tokens(31, 6), 8))
    engine.run()
    assert engine.started("t").reused == {"device": 69}
    assert engine.tokens("t") == reference(start_engine, prompt + kept + random_tokens(31, 6), 8, GREEDY)


@pytest.mark.process
def test_bias_penalties_and_least_length_are_the_same_after_a_death(start_engine: Start) -> None:
    prompt = random_tokens(34, 60)
    plain = reference(start_engine, prompt, 24, HOT)
    stops = [plain[2], plain[5]]
    sampling = m.Sampling(
        temperature=0.8, seed=HOT.seed, logit_bias={plain[0]: -100.0, 7: 2.0}, repetition_penalty=1.4,
        presence_penalty=0.3, min_tokens=15,
    )  # fmt: skip
    whole = start_engine("whole")
    whole.handle(submit("s", prompt, 24, sampling=sampling, stop_tokens=stops))
    whole.run()
    want = whole.tokens("s")
    assert want != plain and plain[0] not in want and not set(stops) & set(want[:15])
    for killed_at in (1, 9, 14):
        serving, spare = start_engine(f"a{killed_at}"), start_engine(f"b{killed_at}")
        given = dict(sampling=sampling, stop_tokens=stops, namespace=str(killed_at))
        serving.handle(submit("s", prompt, 24, **given))
        serving.run_until_token("s", killed_at)
        known = prompt + serving.tokens("s")
        serving.close()
        spare.handle(submit("s", known, 24, epoch=2, prompt_count=60, prefill_start=0, **given))
        spare.run()
        assert known[60:] + spare.tokens("s") == want, killed_at


def test_a_bias_of_an_unknown_token_is_refused(start_engine: Start) -> None:
    engine = start_engine()
    engine.handle(submit("s", [5, 6], 4, sampling=m.Sampling(logit_bias={512: 1.0})))
    assert engine.sent[-1].code == "bad_token" and "logit_bias" in engine.sent[-1].message


def test_a_stop_token_ends_the_stream(start_engine: Start) -> None:
    prompt = random_tokens(32, 40)
    whole = reference(start_engine, prompt, 12, GREEDY)
    engine = start_engine()
    engine.handle(submit("s", prompt, 12, stop_tokens=[whole[3]]))
    engine.run()
    ended = engine.outputs("s")
    assert [o.token for o in ended] == whole[: whole.index(whole[3]) + 1]
    assert ended[-1].finish == "stop"


def test_a_gateway_that_attaches_is_told_everything(start_engine: Start) -> None:
    engine = start_engine()
    engine.handle(submit("s", random_tokens(33, 30), 8))
    engine.run_until_token("s", 3)
    engine.sent.clear()
    engine.handle(m.Attach("second"))
    hello = next(x for x in engine.sent if isinstance(x, m.Hello))
    assert [(s.stream, s.epoch, s.prompt_count) for s in hello.streams] == [("s", 1, 30)]
    assert engine.started("s").recomputed == 30
    assert [o.position for o in engine.outputs("s")] == [30, 31, 32]


def test_a_gateway_that_attaches_is_told_of_an_answer_that_ended_in_a_refusal(
    start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    engine.handle(submit("s", random_tokens(72, 8), 8))
    engine.run_until_token("s", 2)
    monkeypatch.setattr(loop, "sample", Mock(side_effect=BadRequest("bad_grammar", "no token may come next")))
    engine.run()
    engine.sent.clear()
    engine.handle(m.Attach("next"))
    *_, step, refused = engine.sent
    assert len(step.outputs) == 2
    assert refused == m.Refused("s", 1, "bad_grammar", "no token may come next")


def test_of_streams_that_ended_no_more_is_remembered_than_a_gateway_can_be_told_at_once(
    start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    plain, scored = GREEDY, m.Sampling(temperature=0, logprobs=20)
    for name, sampling in (("a", plain), ("b", scored), ("c", plain)):
        engine.handle(submit(name, random_tokens(71, 8), 4, sampling=sampling))
        engine.run()
    assert [stream for stream, _ in engine.engine.ended] == ["a", "b", "c"]
    told = len(encode(m.Step(engine.outputs("b"))))
    assert told / 2 < engine.engine.ended["b", 1].told_bytes < 2 * told
    monkeypatch.setattr(loop, "_REMEMBERED_BYTES", 1000)
    for name, left in (("d", ["c", "d"]), ("e", ["d", "e"])):
        engine.handle(submit(name, random_tokens(71, 8), 4))
        engine.run()
        assert [stream for stream, _ in engine.engine.ended] == left


def test_a_parked_session_leaves_the_device_and_comes_back(start_engine: Start, keeper) -> None:
    prompt = random_tokens(34, 100)
    engine = start_engine()
    engine.handle(submit("s", prompt, 8, session="chat"))
    engine.run()
    engine.handle(m.Park(1, "chat"))
    assert engine.sent[-1] == m.Parked(1, 1, 108)
    assert engine.engine.stats().resident_tokens == 0
    keeper()
    engine.handle(submit("t", prompt + engine.tokens("s") + [7], 4, session="chat"))
    engine.run()
    assert engine.started("t").reused == {"disk": 108}


@pytest.mark.parametrize(
    ("tokens", "code"), [([], "bad_token"), ([5] * 2048, "too_long"), ([5, 512], "bad_token"), ([-1], "bad_token")]
)
def test_what_does_not_fit_is_refused(start_engine: Start, tokens: list[int], code: str) -> None:
    engine = start_engine()
    engine.handle(submit("s", tokens))
    assert engine.sent[-1].code == code


def test_a_resubmission_with_a_new_epoch_replaces_the_old_one(start_engine: Start) -> None:
    prompt = random_tokens(35, 40)
    engine = start_engine()
    engine.handle(submit("s", prompt, 12))
    engine.run_until_token("s", 4)
    delivered = engine.tokens("s")
    engine.handle(submit("s", prompt + delivered, 12, epoch=2, prompt_count=40, prefill_start=0))
    engine.run()
    assert [o.epoch for o in engine.outputs("s")] == [1] * 4 + [2] * 8
    assert engine.tokens("s") == reference(start_engine, prompt, 12, GREEDY)


def test_logprobs_come_with_each_token(start_engine: Start) -> None:
    engine = start_engine()
    engine.handle(submit("s", random_tokens(36, 20), 4, sampling=m.Sampling(temperature=0, logprobs=2)))
    engine.run()
    for output in engine.outputs("s"):
        assert output.logprobs and output.logprobs.top[0][0] == output.token
        assert output.logprobs.chosen == pytest.approx(output.logprobs.top[0][1], abs=1e-6)


def test_a_recovery_prefers_the_dead_engines_rows_to_the_same_prefix_on_the_device(start_engine: Start) -> None:
    prompt = random_tokens(37, 120)
    serving, spare = start_engine(), start_engine("spare")
    spare.handle(submit("other", prompt[:100], 2))
    spare.run()
    serving.handle(submit("s", prompt, 12, sampling=HOT))
    serving.run_until_token("s", 5)
    delivered = serving.tokens("s")
    spare.handle(submit("s", prompt + delivered, 12, epoch=2, prompt_count=120, prefill_start=0, sampling=HOT))
    spare.run()
    assert spare.started("s").reused == {"lane": 124}
    assert delivered + spare.tokens("s") == reference(start_engine, prompt, 12, HOT)


def test_a_session_parked_before_its_last_token_is_fed_leaves_the_device(start_engine: Start) -> None:
    engine = start_engine()
    engine.handle(submit("s", random_tokens(38, 40), 6, session="chat"))
    engine.run_until_token("s", 6)
    assert engine.engine.active, "the last token is still to be fed"
    engine.handle(m.Park(1, "chat"))
    assert engine.sent[-1] == m.Parked(1, 1, 46)
    assert engine.engine.stats().resident_tokens == 0


def test_a_row_has_the_same_bits_alone_and_in_a_batch(start_engine: Start) -> None:
    prompt = random_tokens(39, 80)
    want = m.Sampling(temperature=0.9, seed=3, logprobs=0)
    alone, beside = start_engine("alone"), start_engine("beside")
    alone.handle(submit("s", prompt, 20, sampling=want, namespace="alone"))
    alone.run()
    others = [submit(f"o{i}", random_tokens(40 + i, 30 + 9 * i), 6 * (i + 1), namespace="beside") for i in range(3)]
    beside.handle(*others, submit("s", prompt, 20, sampling=want, namespace="beside"))
    beside.run()
    assert [(o.token, o.logprobs) for o in beside.outputs("s")] == [(o.token, o.logprobs) for o in alone.outputs("s")]


@pytest.mark.process
def test_an_uncaptured_stream_leaves_nothing_and_draws_the_same(start_engine: Start) -> None:
    prompt = random_tokens(31, 200)
    whole = reference(start_engine, prompt, 12, HOT)
    engine = start_engine()
    engine.handle(submit("s", prompt, 12, sampling=HOT, capture=False))
    engine.run()
    assert engine.tokens("s") == whole
    assert engine.engine.stats().captured_bytes == 0
    assert engine.engine.stats().capture_lag_tokens == 0
    assert engine.engine.stats().resident_tokens == 0
    engine.handle(submit("again", prompt, 12, sampling=HOT))
    engine.run()
    assert engine.started("again").verdict == "new"
    assert engine.engine.stats().captured_bytes > 0


@pytest.mark.process
def test_an_uncaptured_stream_is_recovered_by_computing(start_engine: Start) -> None:
    prompt = random_tokens(32, 200)
    whole = reference(start_engine, prompt, 12, HOT)
    serving, spare = start_engine("serving"), start_engine("spare")
    serving.handle(submit("s", prompt, 12, sampling=HOT, capture=False))
    serving.run_until_token("s", 5)
    serving.close()
    known = prompt + serving.tokens("s")
    again = submit("s", known, 12, epoch=2, prompt_count=len(prompt), sampling=HOT, capture=False, prefill_start=0)
    spare.handle(again)
    spare.run()
    assert serving.tokens("s") + spare.tokens("s") == whole
    assert spare.started("s").reused == {}


def test_choices_of_one_prompt_prefill_it_once(start_engine: Start) -> None:
    prompt = random_tokens(50, 600)
    engine = start_engine()
    seeds = {f"c{i}": m.Sampling(temperature=0.9, seed=i) for i in range(4)}
    engine.handle(*(submit(name, prompt, 10, sampling=sampling) for name, sampling in seeds.items()))
    engine.run()
    assert engine.engine.counters.prefill_tokens == 600 + 3, "the others compute the prompt's last token only"
    assert [engine.started(name).reused for name in seeds] == [{}] + [{"device": 599}] * 3
    assert len({tuple(engine.tokens(name)) for name in seeds}) > 1
    assert engine.tokens("c0") == reference(start_engine, prompt, 10, seeds["c0"])


@pytest.mark.process
def test_a_choice_that_lost_its_engine_goes_on_as_it_would_have(start_engine: Start) -> None:
    prompt = random_tokens(51, 600)
    seeds = {f"c{i}": m.Sampling(temperature=0.9, seed=i) for i in range(3)}
    calm, serving, spare = start_engine("calm"), start_engine("serving"), start_engine("spare")
    for engine, namespace in ((calm, "calm"), (serving, "n")):
        engine.handle(*(submit(k, prompt, 10, sampling=v, namespace=namespace) for k, v in seeds.items()))
    calm.run()
    serving.run_until_token("c2", 4)
    serving.close()
    for name, sampling in seeds.items():
        delivered = serving.tokens(name)
        spare.handle(
            submit(
                name, prompt + delivered, 10, epoch=2, prompt_count=600, sampling=sampling, namespace="n",
                prefill_start=serving.started(name).prefill_start,
            )
        )  # fmt: skip
    spare.run()
    for name in seeds:
        assert serving.tokens(name) + spare.tokens(name) == calm.tokens(name)


def test_computing_is_preferred_where_restoring_is_measured_to_be_slower(start_engine: Start, keeper) -> None:  # type: ignore[no-untyped-def]
    prompt = random_tokens(70, 200)
    first = start_engine()
    first.handle(submit("s", prompt, 4))
    first.run()
    first.close()
    keeper()
    second = start_engine("second", restore="measured")
    second.engine.speeds.restore_bytes_per_s = 1.0
    second.handle(submit("t", prompt, 4))
    second.run()
    started = second.started("t")
    assert (started.verdict, started.reused, started.recomputed) == ("recomputed", {}, 200)
    assert started.reason == "computing is faster than restoring here"
    assert second.tokens("t") == first.tokens("s")
    third = start_engine("third", restore="measured")
    third.engine.speeds.restore_bytes_per_s = 1e15
    third.handle(submit("u", prompt, 4))
    third.run()
    assert sum(third.started("u").reused.values()) == 199


@pytest.mark.parametrize("damaged", ["its own pages", "its own pages, once it was planned", "its index"])
def test_what_is_computed_because_the_store_cannot_be_read_says_so(
    start_engine: Start, keeper, drain: Drain, paths: Paths, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:  # type: ignore[no-untyped-def]
    prompt = random_tokens(72, 200)
    first = start_engine()
    first.handle(submit("s", prompt, 4))
    first.run()
    keeper()
    second = start_engine("second")
    drain.close()
    reader = StoreReader(paths.store, map_bytes=1 << 30)
    second.engine.lookup.finder = PrefixFinder(reader, paths.lane_dir)
    second.handle(submit("t", prompt, 4))
    if damaged == "its own pages, once it was planned":
        second.engine.admit()
        reader.close()
    if damaged == "its index":  # noticed by the look-up, in a store that opens
        monkeypatch.setattr(View, "node", Mock(side_effect=lmdb.CorruptedError("a page")))
    else:
        with open(paths.store / "data.mdb", "r+b") as file:
            file.write(b"\xff" * 8192)
    second.run()
    for name, tokens in (("u", prompt), ("v", prompt + random_tokens(73, 40))):
        second.handle(submit(name, tokens, 4))
        second.run()
    reader.close()
    told = [second.started(name) for name in "tuv"]
    assert [(started.verdict, started.reason, started.reused, started.recomputed) for started in told] == [
        ("recomputed", "the store can't be read", {}, 200),
        ("resident", "", {"device": 199}, 1),
        ("partial", "the store can't be read", {"device": 200}, 40),
    ]
    assert second.tokens("t") == first.tokens("s")


def test_each_stage_is_an_event_in_the_log(start_engine: Start) -> None:
    prompt = random_tokens(71, 80)
    with capture_logs() as events:
        first = start_engine()
        first.handle(submit("s", prompt, 12))
        first.run_until_token("s", 6)
        known = first.tokens("s")
        first.close()
        second = start_engine("second")
        second.handle(submit("s", prompt + known, 12, epoch=2, prompt_count=len(prompt), prefill_start=0))
        second.run()
    told = [event for event in events if event.get("stream") == "s"]
    assert [event["event"] for event in told] == [
        *("restore.done", "prefill.done"),
        *("restore.done", "force.done", "capture.done"),
    ]
    assert told[2]["reused"] == {"lane": 85} and told[3]["forced"] == 1
    assert told[4]["position"] == told[4]["computed"] == 92


def test_an_append_that_lacks_its_kernel_is_seen_in_the_stats(
    start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine().engine
    assert (engine.stats().capture_in_two_passes, engine.stats().capture_by) == (0, "")
    monkeypatch.setattr(copy_sum, "_kernel", lambda: Kernel(None, "no such target"))
    assert (engine.stats().capture_in_two_passes, engine.stats().capture_by) == (
        1,
        "copy, then checksum: no such target",
    )


def test_how_fast_a_prompt_is_computed_is_told_once_the_device_is_done(
    start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a GPU has only been given the work; by what that takes, restoring would never pay."""
    now = [0.0]

    def settle(_: Model) -> None:
        now[0] += 10.0

    monkeypatch.setattr(Model, "settle", settle)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    engine = start_engine()
    assert engine.engine.speeds.prefill_tokens_per_s == pytest.approx(32 / 10)
    engine.handle(submit("s", random_tokens(41, 256), 1))
    engine.run()
    assert engine.engine.speeds.prefill_tokens_per_s == pytest.approx(3.2 + 0.2 * (25.6 - 3.2))


def test_what_no_lane_of_this_size_can_hold_is_served_and_not_captured(start_engine: Start) -> None:
    prompt = random_tokens(42, 1200)
    first = start_engine()
    first.handle(submit("s", prompt, 4))
    first.run()
    small = start_engine("small", lane_bytes=4096)  # the first 1,200 tokens alone take more
    with capture_logs() as events:
        small.handle(submit("t", prompt + first.tokens("s"), 4))
        small.run()
    assert len(small.tokens("t")) == 4 and small.started("t").reused == {"lane": 1203}
    assert [event["stream"] for event in events if event["event"] == "capture.too_large"] == ["t"]
    assert small.engine.stats().capture_lag_tokens == 0
