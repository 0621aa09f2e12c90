"""Every architecture passes the same cases: whatever was killed, rolled back or deleted, the tokens are a cold engine's.

The real loop, model, arena, lane and store; a killed engine's successor has only what lane and disk hold. A new architecture is
one line in `tests/engine/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine import main
from engine import messages as m
from engine.errors import UnsupportedModel
from engine.model import Model, load
from engine.sequence import Sequence
from tests.engine.conftest import check_once
from tests.engine.driver import EngineDriver, random_tokens, submit
from tests.engine.kinds import DENSE, KINDS, RECURRENT, REFUSED, SAMPLE, VARIANTS, WINDOWED, write_model
from tiers.compaction import Compaction
from tiers.drain import Drain
from tiers.errors import LaneFull
from tiers.lane import LaneWriter
from tiers.lane_format import PointKind
from tiers.paths import Paths
from tiers.prefix import PrefixFinder
from tiers.values import decode_point

pytestmark = pytest.mark.kinds
CHUNK = 64
ANSWER = 8
HOT = m.Sampling(temperature=0.8, seed=77)
Start = Callable[..., EngineDriver]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Directory of a model by name. Loaded and checked once: an engine that is started again gets the very same weights."""
    directory = tmp_path_factory.mktemp("kinds")
    written = cache(lambda name: write_model(name, directory / name))
    loaded = cache(load)
    patch = pytest.MonkeyPatch()
    patch.setattr(main, "load", loaded)
    patch.setattr(main, "self_check", check_once)
    yield written
    patch.undo()


@pytest.fixture
def start(models: Callable[[str], Path], kind: str, paths: Paths, drain: Drain) -> Iterator[Start]:
    """Start engines that share one data directory."""
    engines: list[EngineDriver] = []

    def started(name: str = "e0", **options: Any) -> EngineDriver:
        options = {"prefill_chunk": CHUNK, "context_tokens": 1024, "lane_bytes": 8 << 20, **options}
        engines.append(EngineDriver.start(models(kind), paths, name, **options))
        engines[-1].engine.lookup.finder = PrefixFinder(drain.store(), paths.lane_dir)
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


every_kind = pytest.mark.parametrize("kind", KINDS)
with_points = pytest.mark.parametrize("kind", RECURRENT)


def ask(engine: EngineDriver, stream: str, prompt: list[int], answer: int = ANSWER, **fields: Any) -> list[int]:
    """The whole answer to one submission."""
    engine.handle(submit(stream, prompt, answer, **fields))
    engine.run()
    return engine.tokens(stream)


def cold(engine: EngineDriver, prompt: list[int], answer: int = ANSWER, **fields: Any) -> list[int]:
    """What an engine says that reuses nothing."""
    name = f"cold{len(engine.sent)}"
    return ask(engine, name, prompt, answer, namespace=name, **fields)


def restart(start: Start, engine: EngineDriver, drain: Drain) -> EngineDriver:
    """Kill an engine, drain its lane, start another that has only the disk."""
    engine.close()
    drain.flush(sync=True)
    return start(f"after{id(engine)}")


# ---------------------------------------------------------------- answers


@every_kind
def test_cached_answers_are_the_models_own(start: Start, kind: str) -> None:
    """Chunked prefill, then decode, alone and beside others, against one full forward pass without a cache."""
    prompt = random_tokens(1, 150)
    engine = start()
    alone = cold(engine, prompt, 12)
    whole = own_logits(engine.engine.model, prompt + alone)
    for position, token in enumerate(alone, len(prompt)):
        row = whole[position - 1]
        assert float(row.max() - row[token]) < 1e-3, f"token {position} is not the model's own"
    others = [submit(f"o{i}", random_tokens(10 + i, 40 + 30 * i), 4 + 6 * i, namespace=f"o{i}") for i in range(3)]
    engine.handle(*others, submit("s", prompt, 12, namespace="beside"))
    engine.run()
    assert engine.tokens("s") == alone


def own_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab) by transformers alone."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model.module.config._name_or_path, dtype=torch.float32)
    with torch.inference_mode():
        return module.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


# ---------------------------------------------------------------- killed


@every_kind
def test_a_killed_stream_goes_on_with_the_same_tokens(start: Start, drain: Drain, kind: str) -> None:
    """Bit for bit: from the dead engine's lane, and from the disk; with points at the prompt's end, and in the answer."""
    prompt, answer = random_tokens(2, 150), 18
    want = m.Sampling(temperature=0.8, seed=77, logprobs=0)
    start = partial(start, point_answer_tokens=8)
    spare = start("spare")
    whole = start("whole")
    whole.handle(submit("whole", prompt, answer, sampling=want, namespace="whole"))
    whole.run()
    for killed_at, drained in ((3, True), (15, False)):
        serving, stream = start(f"killed{killed_at}"), f"s{killed_at}"
        serving.handle(submit(stream, prompt, answer, sampling=want, namespace=stream))
        serving.run_until_token(stream, killed_at)
        serving.close()
        if drained:
            drain.flush(sync=True)
        spare.handle(
            submit(
                stream, prompt + serving.tokens(stream), answer, epoch=2, prompt_count=len(prompt), prefill_start=0,
                sampling=want, namespace=stream,
            )
        )  # fmt: skip
        spare.run()
        assert serving.tokens(stream) + spare.tokens(stream) == whole.tokens("whole"), f"killed at {killed_at}"
        rest = [output.logprobs for output in spare.outputs(stream)]
        assert rest == [output.logprobs for output in whole.outputs("whole")][killed_at:], "the bits differ"
        started = spare.started(stream)
        assert set(started.reused) == {"disk" if drained else "lane"}
        assert started.recomputed <= (9 if kind in RECURRENT else 1), started


@every_kind
def test_a_prefill_that_was_interrupted_goes_on_with_the_same_bits(start: Start, kind: str) -> None:
    prompt = random_tokens(3, 200)
    want = m.Sampling(temperature=0.8, seed=3, logprobs=0)
    serving, spare, whole = start(), start("spare"), start("whole")
    whole.handle(submit("whole", prompt, 4, sampling=want, namespace="whole"))
    whole.run()
    serving.handle(submit("s", prompt, 4, sampling=want))
    for _ in range(2):
        serving.step()
    serving.close()
    spare.handle(submit("s", prompt, 4, epoch=2, prefill_start=0, sampling=want))
    spare.run()
    assert [(o.token, o.logprobs) for o in spare.outputs("s")] == [
        (o.token, o.logprobs) for o in whole.outputs("whole")
    ]
    assert spare.started("s").prefill_start >= CHUNK


@pytest.mark.parametrize("kind", ["gemma2", *SAMPLE.values()])
def test_log_probabilities_of_a_prompt_are_the_models_own_and_survive_a_kill(
    start: Start, drain: Drain, kind: str
) -> None:
    """Whatever is stored of the prompt, all of it is computed; after a kill, from what is known on."""
    prompt = random_tokens(39, 150)
    want = m.Sampling(temperature=0, logprobs=2)
    serving, spare = start(), start("spare")
    told = ask(serving, "before", prompt)
    serving.handle(submit("s", prompt, ANSWER, scored=0, sampling=want))
    for _ in range(2):
        serving.step()
    assert (serving.started("s").verdict, serving.started("s").recomputed) == ("recomputed", 150)
    known = scored(serving, "s")
    assert 64 <= len(known) < 149
    serving.close()
    drain.flush(sync=True)
    spare.handle(submit("s", prompt, ANSWER, epoch=2, scored=len(known), prefill_start=0, sampling=want))
    spare.run()
    assert spare.started("s").reused and spare.tokens("s") == told
    rows, first = scored(spare, "s"), min(s.position for s in spare.sent if isinstance(s, m.Scored))
    rows = known[: first - 1] + rows
    expected = torch.log_softmax(own_logits(spare.engine.model, prompt), -1)
    assert len(rows) == 149
    for position, row in enumerate(rows, 1):
        own = expected[position - 1]
        assert abs(row.chosen - float(own[prompt[position]])) < 1e-3, position
        assert [value for _, value in row.top] == pytest.approx(own.topk(2).values.tolist(), abs=1e-3), position
    ask(spare, "all known", prompt, scored=149, sampling=want)
    assert spare.started("all known").reused and not scored(spare, "all known")


def scored(engine: EngineDriver, stream: str) -> list[m.TokenLogprobs]:
    return [row for sent in engine.sent if isinstance(sent, m.Scored) and sent.stream == stream for row in sent.rows]


# ---------------------------------------------------------------- the next turn, and branches from before the tip


@every_kind
def test_turns_and_branches_after_a_restart(start: Start, drain: Drain, kind: str) -> None:
    """Exact append, last tokens changed, an edit far back, the same prompt again: each against a cold engine's answer."""
    prompt = random_tokens(4, 230)
    first = start()
    said = ask(first, "first", prompt)
    engine, reference = restart(start, first, drain), start("reference")
    told = prompt + said
    branches = {
        "append": told + random_tokens(5, 9),
        "one": told[:-1] + random_tokens(6, 5),
        "twelve": told[:-12] + random_tokens(7, 20),
        "back": told[:70] + random_tokens(8, 30),
        "again": prompt,
    }
    reused = {}
    for name, tokens in branches.items():
        assert ask(engine, name, tokens) == cold(reference, tokens), name
        reused[name] = engine.started(name)
    for name, tokens in branches.items():  # and once more, with what is on the device now
        assert ask(engine, name + "2", tokens) == engine.tokens(name), name
    assert reused["append"].prefill_start == len(told)
    assert reused["append"].verdict == "restored", reused["append"]
    if kind not in RECURRENT:
        assert [started.prefill_start for started in reused.values()] == [238, 237, 226, 70, 229]
        return
    shared = {"one": 237, "twelve": 226, "back": 70, "again": 229}
    for name, count in shared.items():
        started = reused[name]
        assert count - 40 <= started.prefill_start <= count, (name, started)
        assert started.verdict == "partial" or started.prefill_start == count
        assert "rollback point" in started.reason or started.prefill_start == count
    assert engine.engine.stats().points_missing == 0


@every_kind
def test_rolling_back_on_the_device(start: Start, kind: str) -> None:
    """One to twelve tokens back, each branch from the same resident session."""
    prompt = random_tokens(9, 100)
    engine, reference = start(), start("reference")
    told = prompt + ask(engine, "first", prompt, session="chat")
    for back in (1, 2, 5, 12):
        tokens = told[:-back] + random_tokens(20 + back, 7)
        assert ask(engine, f"back{back}", tokens, session=f"branch{back}") == cold(reference, tokens), back
        started = engine.started(f"back{back}")
        assert set(started.reused) <= {"device", "lane"} and started.prefill_start >= 100 - 32, started


@with_points
def test_a_message_that_is_edited_is_gone_back_to_exactly(start: Start, kind: str) -> None:
    prompt = random_tokens(24, 150)
    prompt[99] = 2  # a message ends before position 100
    engine, reference = start(), start("reference")
    ask(engine, "first", prompt, stop_tokens=[2])
    edited = prompt[:100] + random_tokens(25, 30)
    assert ask(engine, "edited", edited, stop_tokens=[2]) == cold(reference, edited)
    assert engine.started("edited").prefill_start == 100


@pytest.mark.parametrize("kind", sorted(WINDOWED))
def test_rolling_back_past_a_window_reads_its_rows_from_the_log(start: Start, keeper, kind: str) -> None:
    prompt = random_tokens(11, 700)
    engine, reference = start(), start("reference")
    ask(engine, "first", prompt, session="chat")
    slot = next(slot for slot in engine.engine.arena.slots if slot.length)
    assert engine.engine.arena.oldest(slot) > 400, "the buffer has moved on"
    keeper()
    tokens = prompt[:120] + random_tokens(12, 20)
    assert ask(engine, "back", tokens, session="chat") == cold(reference, tokens)
    assert engine.started("back").prefill_start == 120
    assert engine.started("back").reason == ""


@pytest.mark.parametrize("kind", ["gemma3_text"])
def test_rows_of_another_engine_extend_what_is_on_the_device(start: Start, drain: Drain, kind: str) -> None:
    """Also where the window's buffer is full to the last row, and the stored rows begin right behind it."""
    prompt = random_tokens(26, 400)
    other, engine, reference = start("other"), start("engine"), start("reference")
    ask(other, "whole", prompt, 2)
    other.close()
    drain.flush(sync=True)
    for held in (96, 127, 128, 129, 160):
        ask(engine, f"held{held}", prompt[:held], 1, session=f"held{held}", capture=True)
        tokens = prompt[: held + 33]
        assert ask(engine, f"more{held}", tokens, session=f"held{held}") == cold(reference, tokens), held


@pytest.mark.parametrize("kind", sorted(WINDOWED))
def test_memory_of_windows_does_not_grow_with_the_context(start: Start, kind: str) -> None:
    def window_bytes(arena: Any) -> int:
        groups = zip(arena.groups, arena.group_windows, strict=True)
        return sum(group[0].nbytes for group, window in groups if window)

    short, long = start(context_tokens=512), start("long", context_tokens=2048)
    assert window_bytes(short.engine.arena) == window_bytes(long.engine.arena) > 0


@pytest.mark.parametrize("kind", sorted(WINDOWED) + RECURRENT)
def test_what_compaction_leaves_serves_an_append_and_branches(start: Start, drain: Drain, kind: str) -> None:
    """Windows away from kept positions and superseded points are gone; what is left is used, and answers stay right."""
    prompt = random_tokens(18, 300)
    first = start()
    told = prompt + ask(first, "first", prompt)
    engine, reference = restart(start, first, drain), start("reference")
    for _ in Compaction(drain, settle_s=0.0, grace_s=0.0).run():
        pass
    edited, append = told[:150] + random_tokens(19, 12), told + random_tokens(20, 12)
    assert ask(engine, "append", append, session="append") == cold(reference, append)
    assert engine.started("append").prefill_start == len(told)
    assert ask(engine, "edit", edited, session="edit") == cold(reference, edited)
    started = engine.started("edit")
    assert started.prefill_start == 150 or started.reason, started


@pytest.mark.parametrize("kind", ["gemma3_text"])
@pytest.mark.parametrize("busy", [False, True])
def test_an_idle_session_is_followed_whose_early_window_rows_are_gone(start: Start, drain: Drain, busy: bool) -> None:
    """In few steps or many, where each of them would have rows of the window beside the others."""
    prompt = random_tokens(18, 200)
    first = start(prefill_chunk=256)
    told = prompt + ask(first, "first", prompt)
    first.close()
    drain.flush(sync=True)
    for _ in Compaction(drain, settle_s=0.0, grace_s=0.0).run():
        pass
    engine = start("after", prefill_chunk=256)
    if busy:
        engine.handle(submit("beside", random_tokens(21, 30), 40))
    engine.handle(m.Follow("f", 0, m.pack_tokens(told), "default", "s", "", idle=True))
    for _ in range(5000):
        engine.step()
        if any(isinstance(said, m.Followed) and said.position == len(told) for said in engine.sent):
            break
    engine.handle(m.Unfollow("f"))
    append = told + random_tokens(20, 12)
    assert ask(engine, "append", append, session="s") == cold(engine, append)
    assert engine.started("append").reused == {"device": len(told)}


@pytest.mark.parametrize("kind", ["gemma3_text"])
def test_window_rows_that_compaction_drops_once_a_restore_is_planned_are_computed(start: Start, drain: Drain) -> None:
    prompt = random_tokens(18, 300)
    first = start()
    told = prompt + ask(first, "first", prompt)
    engine = restart(start, first, drain)
    engine.handle(submit("edit", told[:150] + random_tokens(19, 12), ANSWER))
    engine.engine.admit()
    for _ in Compaction(drain, settle_s=0.0, grace_s=0.0).run():
        pass
    engine.run()
    assert engine.tokens("edit") == cold(engine, told[:150] + random_tokens(19, 12))
    assert engine.started("edit").reason, engine.started("edit")


@pytest.mark.parametrize("kind", ["mamba2"])
def test_a_slot_whose_points_wait_for_the_lane_is_followed_in_without_mixing_the_two(
    start: Start, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, engine = start("source"), start("engine")
    other = random_tokens(23, 120)
    ask(source, "other", other)
    monkeypatch.setattr(LaneWriter, "reserve_point", Mock(side_effect=LaneFull("no room")))
    told = [
        prompt + ask(engine, f"s{at}", prompt)
        for at, prompt in enumerate(random_tokens(24 + at, 70) for at in range(4))
    ]
    assert len(engine.engine.lagging) == 4
    engine.handle(m.Follow("f", 0, m.pack_tokens(other), "default", "s", "", idle=False))
    for _ in range(3):
        engine.step()
    assert engine.engine.follower.follows["f"].slot.length > len(told[0])
    monkeypatch.undo()
    engine.step()
    mixed = told[0] + other[len(told[0]) :]
    found = engine.engine.lookup.stored(Sequence.of(submit("x", mixed)), np.array(mixed, np.int32), len(mixed))
    assert found == len(told[0])


@pytest.mark.parametrize("kind", ["mamba2"])
def test_points_that_no_lane_of_this_size_can_hold_are_given_up_and_counted(start: Start) -> None:
    engine, reference = start(lane_bytes=1 << 13), start("reference")
    assert engine.engine.arena.states.state_bytes > 1 << 13
    prompt = random_tokens(29, 70)
    assert ask(engine, "s", prompt) == cold(reference, prompt)
    stats = engine.engine.stats()
    assert (stats.points_dropped > 0, stats.points_written, stats.points_waiting) == (True, 0, 0)


# ---------------------------------------------------------------- deterministic

TILES = {"llama", "qwen3", "latent_dense", "mistral", "gemma2", "gemma3_text", "short_window", "float16"}
EXACT = m.Sampling(temperature=0.8, seed=31, logprobs=2)


# One of each kind, and all whose steps are batched; the rest, which is computed alike, in `make soak`.
SOON = TILES | {"gpt_oss", *SAMPLE.values()}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SOON else pytest.mark.soak) for kind in (*KINDS, *VARIANTS)],
)
def test_deterministic_bits_do_not_depend_on_company_death_or_cache(start: Start, kind: str) -> None:
    """Log-probabilities of an answer alone; among others and killed in the middle; of a turn that is restored, and of a cold one."""
    prompt = random_tokens(30, 40)
    serving, spare = (start(name, deterministic=True, prefill_chunk=16) for name in ("serving", "spare"))
    assert serving.engine.cache.exact == ("tiles" if kind in TILES else "parts")
    ask(serving, "alone", prompt, 6, sampling=EXACT, namespace="alone", capture=False)
    beside = [submit(f"o{i}", random_tokens(32 + i, 9 + 12 * i), 6, namespace=f"o{i}") for i in range(2)]
    serving.handle(*beside, submit("s", prompt, 6, sampling=EXACT))
    serving.run_until_token("s", 3)
    serving.close()
    known = prompt + serving.tokens("s")
    spare.handle(beside[0], submit("s", known, 6, epoch=2, prompt_count=40, sampling=EXACT, prefill_start=0))
    spare.run()
    assert bits(serving, "s") + bits(spare, "s") == bits(serving, "alone")
    assert spare.started("s").reused
    turn = known + spare.tokens("s") + random_tokens(35, 5)
    ask(spare, "turn", turn, 4, sampling=EXACT, session="turn")
    ask(spare, "cold", turn, 4, sampling=EXACT, namespace="cold")
    assert spare.started("turn").reused and not spare.started("cold").reused
    assert bits(spare, "turn") == bits(spare, "cold")


@pytest.mark.parametrize("kind", ["float16", "gemma3_text", "latent_dense", "mamba2"])
def test_deterministic_bits_far_behind_the_window_and_after_a_restart(start: Start, drain: Drain, kind: str) -> None:
    """A window's buffer has slid; a restore brings back the rows of its window only, so tiles lack rows that nobody sees."""
    exact = partial(start, deterministic=True, prefill_chunk=32)
    prompt = random_tokens(36, 131)
    first = exact("first")
    told = prompt + ask(first, "first", prompt, 7, sampling=EXACT)
    first.close()
    drain.flush(sync=True)
    engine = exact("second")
    for name, tokens in (("append", told + random_tokens(37, 5)), ("back", told[:85] + random_tokens(38, 12))):
        ask(engine, name, tokens, 4, sampling=EXACT)
        ask(engine, f"cold {name}", tokens, 4, sampling=EXACT, namespace=f"cold {name}")
        assert engine.started(name).reused and bits(engine, name) == bits(engine, f"cold {name}"), name


def bits(engine: EngineDriver, stream: str) -> list[tuple[int, m.TokenLogprobs | None]]:
    """Tokens with their log-probabilities: equal ones mean equal logits."""
    return [(output.token, output.logprobs) for output in engine.outputs(stream)]


# ---------------------------------------------------------------- without points


def drop_points(drain: Drain, *, keep_tip: bool, damage: bool = False) -> int:
    """Delete or damage the stored points and return how many; those at tips stay if `keep_tip`."""
    store = drain.store()
    with store.snapshot() as view:
        tips = {key for key, raw in view.scan("points") if decode_point(bytes(raw)).kind == PointKind.TIP}
        keys = [key for key, _ in view.scan("points") if not (keep_tip and key in tips)]
        states = dict((key, bytes(raw)) for key, raw in view.scan("states"))
    with store.group() as group:
        for key in keys:
            state = states[key[-16:]]
            if damage:
                group._txn.put(key[-16:], state[:-1] + bytes([state[-1] ^ 0xFF]), db=group._db[b"states"])
            else:
                group.delete_point(key)
    return len(keys)


@with_points
@pytest.mark.parametrize("damage", [False, True], ids=["deleted", "damaged"])
def test_without_its_points_an_append_is_fast_and_the_rest_recomputes(
    start: Start, drain: Drain, kind: str, damage: bool
) -> None:
    prompt = random_tokens(13, 150)
    first = start()
    told = prompt + ask(first, "first", prompt)
    engine, reference = restart(start, first, drain), start("reference")
    assert drop_points(drain, keep_tip=True, damage=damage) >= 3
    edited = told[:-5] + random_tokens(14, 9)
    assert ask(engine, "edit", edited) == cold(reference, edited)
    started = engine.started("edit")
    assert (started.verdict, started.prefill_start) == ("recomputed", 0), started
    assert "rollback point" in started.reason
    assert engine.engine.stats().points_missing == 1
    append = told + random_tokens(15, 9)
    assert ask(engine, "append", append, namespace="default") == cold(reference, append)
    assert engine.started("append").prefill_start == len(told)


@with_points
def test_with_no_point_at_all_everything_recomputes_and_says_so(start: Start, drain: Drain, kind: str) -> None:
    prompt = random_tokens(16, 150)
    first = start()
    told = prompt + ask(first, "first", prompt)
    engine, reference = restart(start, first, drain), start("reference")
    drop_points(drain, keep_tip=False)
    append = told + random_tokens(17, 9)
    assert ask(engine, "append", append) == cold(reference, append)
    assert (engine.started("append").verdict, engine.started("append").reason) == ("recomputed", "no rollback point")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mistral", "mamba", "mamba2")])
def test_damaged_rows_are_computed_again_and_the_reason_is_told(start: Start, drain: Drain, kind: str) -> None:
    """Of layers that see everything: those of a window nobody needs any more, and a pure recurrent model has none."""
    prompt = random_tokens(40, 230)
    first = start()
    told = prompt + ask(first, "first", prompt)
    engine, reference = restart(start, first, drain), start("reference")
    damage_block(drain, prompt[96:128], engine.engine.arena.layout.frame_bytes(32))
    more = told + random_tokens(41, 9)
    assert ask(engine, "more", more) == cold(reference, more)
    started = engine.started("more")
    assert started.verdict == "partial" and "damaged from position 96" in started.reason, started
    assert 64 <= started.prefill_start <= 96, started
    assert engine.engine.stats().bad_blocks == 1


def damage_block(drain: Drain, tokens: list[int], frame_bytes: int) -> None:
    """Flip a bit of the first rows in the stored block that holds these tokens."""
    store, wanted = drain.store(), np.array(tokens, dtype="<i4").tobytes()
    with store.snapshot() as view:
        found = [(bytes(key), bytes(value)) for key, value in view.scan("blocks") if wanted in bytes(value[:512])]
    assert len(found) == 1, f"{len(found)} blocks hold these tokens"
    key, value = found[0]
    at = len(value) - frame_bytes + 5
    with store.group() as group:
        group._txn.put(key, value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :], db=group._db[b"blocks"])


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(start: Start, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[kind][1]):
        start()


@pytest.mark.parametrize("kind", ["gemma3_text"])
def test_a_window_that_moved_on_before_the_lane_had_room_is_told_and_never_stored_wrong(
    start: Start, drain: Drain, kind: str
) -> None:
    prompt = random_tokens(21, 900)
    serving, reference = start("small", lane_bytes=256 << 10), start("reference")
    said = ask(serving, "s", prompt, session="chat")
    assert said == cold(reference, prompt)
    stats = serving.engine.stats()
    assert stats.lane_full > 0 and stats.windows_lost == 1
    assert stats.capture_lag_tokens == 0, "nothing of it will ever be captured: it waits for nothing"
    more = prompt + said + random_tokens(22, 9)
    assert ask(serving, "t", more, session="chat") == cold(reference, more), "what is on the device goes on"
    serving.handle(m.Park(1, "chat"))
    assert serving.sent[-1].slots == 1 and serving.engine.stats().resident_tokens == 0
    engine = restart(start, serving, drain)
    assert ask(engine, "u", more) == cold(reference, more)
    assert engine.started("u").prefill_start < 600


@pytest.mark.parametrize("kind", sorted(DENSE | WINDOWED))
def test_models_without_recurrent_state_take_no_points(start: Start, kind: str) -> None:
    engine = start()
    ask(engine, "s", random_tokens(23, 80))
    assert engine.engine.stats().points_taken == 0
