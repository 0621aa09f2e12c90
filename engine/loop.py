"""The step loop of an engine: messages in, one step, captures and tokens out. The whole engine runs on this one thread.

Stages *place* (slot), *restore*, *prefill*, *force*, *decode* and *capture* of the path of a token. Every submission is a
resume: a cold prompt, a prefix hit and a recovered stream differ only in where their prefix was found.
"""

from __future__ import annotations

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import structlog
import torch

from engine import messages as m
from engine import stats
from engine.adapters import Adapters
from engine.arena import Arena, Range, Slot
from engine.attention import ArenaCache
from engine.budgets import slots_over_budget
from engine.capture import Capture, Cursor
from engine.decode_graph import DecodeGraphs
from engine.errors import BadRequest, Fenced
from engine.follow import Follower
from engine.grammar import Grammars
from engine.lane_watch import LaneWatch
from engine.link import GatewayLink
from engine.lookup import Lookup, resident_part
from engine.model import Model
from engine.placement import SlotChoice, choose_slot
from engine.plan import Kinds, Plan, Resident
from engine.points import Points
from engine.restore import Restore, Speeds
from engine.sampler import logprobs_of, sample
from engine.schedule import Action, Kind, choose
from engine.sequence import Sequence
from engine.stats import Counters
from engine.status_page import StatusPage
from tiers.layout import RootId
from tiers.settings import TierSettings

log = structlog.get_logger()

_IDLE_WAIT_S = 0.05
_STATS_INTERVAL_S = 1.0
# Ended streams that are told to a gateway that attaches: those that ended while it was away.
_REMEMBERED = 256
# And what it takes to tell of them: all of it waits for the gateway at once, beside what is told of live ones (engine/link.py).
_REMEMBERED_BYTES = 24 << 20


@dataclass(slots=True)
class Engine:
    """Everything of one engine process. `run` returns when `stop()` was called or a `Shutdown` came.

    prefill_chunk  prompts are cut at its multiples; step_tokens: most that one step prefills, a divisor of it
    """

    name: str
    incarnation: int
    model: Model
    arena: Arena
    cache: ArenaCache
    capture: Capture | None
    lookup: Lookup
    link: GatewayLink
    page: StatusPage
    speeds: Speeds
    root: RootId
    block_tokens: int
    prefill_chunk: int
    step_tokens: int
    points: Points
    keep_running: Callable[[], bool]
    grammars: Grammars
    adapters: Adapters
    follower: Follower
    lane_watch: LaneWatch
    graphs: DecodeGraphs
    tiers: TierSettings = field(default_factory=TierSettings)
    drain_s: float = 8.0
    draining_until: float = 0.0
    drained: bool = False  # by an operator
    waiting: list[Sequence] = field(default_factory=list)
    active: list[Sequence] = field(default_factory=list)
    ended: OrderedDict[tuple[str, int], Sequence] = field(default_factory=OrderedDict)
    lagging: list[tuple[Cursor, Slot]] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    # By tenant: idle slots that went because of its memory budget.
    evicted: Counter[str] = field(default_factory=Counter)
    last_kind: Kind = "idle"
    spent_tokens: int = 0
    stopping: bool = False
    stats_due: float = 0.0
    clock: int = 0

    @property
    def kinds(self) -> Kinds:
        """What the model keeps, for plans."""
        return self.arena.kinds

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until stopped; then take every capture that is still missing."""
        while not self.stopping and self.keep_running():
            busy = self.last_kind != "idle" or bool(self.waiting)
            messages = self.link.poll(0.0 if busy else self.follower.wait_s(_IDLE_WAIT_S))
            self._check_fence()
            for message in messages:
                self.handle(message)
            self.admit()
            self.step()
            self.follow()
            self._drain()
            self.watch_lane()
            self.page.beat()
            self._tell_stats()
        self._check_fence()
        self._capture_everything()

    def stop(self) -> None:
        """End after the current step. Safe in a signal handler."""
        self.stopping = True

    def drain(self) -> None:
        """End when the gateway has taken all streams elsewhere, or after `drain_s`; at once when asked again. Safe in a signal handler."""
        if self.draining_until:
            self.stopping = True
        self.draining_until = time.monotonic() + self.drain_s

    def _drain(self) -> None:
        if not self.draining_until:
            return
        if self.page.state != "draining":
            self.page.set_state("draining")
            self.link.send(m.Draining())
            log.info("drain.begun", streams=len(self.active) + len(self.waiting), limit_s=self.drain_s)
        empty = not self.active and not self.waiting
        if empty or not self.link.attached or time.monotonic() > self.draining_until:
            log.info("drain.over", streams_left=len(self.active) + len(self.waiting))
            self.stopping = True

    def follow(self) -> None:
        """A slice of what is followed, after the step."""
        for told in self.follower.step(self.lookup.finder, busy=self.last_kind != "idle"):
            self.link.send(told)

    def step(self) -> None:
        """One step of what `choose` picks, its captures, and its tokens on their way."""
        action = choose(self.active, self.spent_tokens, self.step_tokens)
        if action.kind == "idle" and self.last_kind != "idle":
            self.stats_due = 0.0  # that nothing is left to do is told at once
        self.last_kind = action.kind
        self.spent_tokens = 0 if action.kind in ("decode", "idle") else self.spent_tokens + action.end - action.start
        if action.kind == "idle":
            self._catch_up()
            return
        outputs: list[m.Output] = []
        if action.kind == "restore":
            self._restore(action.rows[0])
        elif action.kind == "prefill":
            outputs = self._prefill(action)
        else:
            outputs = self._decode(action)
        self.counters.steps += 1
        self.page.count_step()
        if outputs:
            self._check_fence()
            self.link.send(m.Step(outputs))
        self._take_points(action)
        self._retire()
        self._write_points()

    # ------------------------------------------------------------ messages

    def handle(self, message: m.ToEngine) -> None:
        """Carry out one message of the gateway."""
        match message:
            case m.Attach():
                self._hello(message)
            case m.Submit():
                self._submit(message)
            case m.Cancel():
                self._cancel(message)
            case m.Park():
                self.follower.let_go_of(message.session)
                self._park(message)
            case m.Follow():
                self._follow_stream(message)
            case m.Unfollow():
                slot = self.follower.unfollow(message.stream)
                if slot is not None:  # as fresh as if it had been worked on
                    self.clock += 1
                    slot.last_used = self.clock
            case m.Release():
                self._release(message)
            case m.LoadAdapter():
                self._load_adapter(message)
            case m.UnloadAdapter():
                self.adapters.unload(message.digest)
                self._let_adapters_go()
            case m.Drained():
                self.drained = message.on
            case m.Ping():
                self.stats_due = 0.0
            case m.Shutdown():
                self.stop()

    def _hello(self, attach: m.Attach) -> None:
        """Say what this engine is, then all that it said of each stream since it was submitted.

        What the gateway before had followed is let go of: the new one asks for what it wants.
        """
        for stream in list(self.follower.follows):
            self.follower.unfollow(stream)
        known = [*self.active, *self.waiting, *self.ended.values()]
        streams = [
            m.LiveStream(s.submit.stream, s.submit.epoch, m.pack_tokens(s.tokens), s.submit.prompt_count, s.finish)
            for s in known
        ]
        self.link.send(
            m.Hello(
                engine=self.name,
                incarnation=self.incarnation,
                pid=os.getpid(),
                root=self.root.hex(),
                model=self.model.name,
                device=str(self.model.device),
                dtype=str(self.model.dtype).removeprefix("torch."),
                context_tokens=self.arena.context_tokens,
                vocab_count=self.model.vocab_count,
                slots=len(self.arena.slots),
                streams=streams,
                residents=self._residents(),
                drained=self.drained,
            )
        )
        for sequence in known:
            self._tell_again(sequence)
        if self.draining_until:
            self.link.send(m.Draining())
        log.info("link.attached", gateway=attach.gateway, streams=len(known))

    def _residents(self) -> list[m.Resident]:
        """Named sessions in idle slots, used last at the end."""
        slots = [
            slot for slot in self.arena.slots if slot.session and slot.length and not slot.busy and not slot.filling
        ]
        return [
            m.Resident(
                slot.session,
                slot.namespace,
                slot.adapter,
                slot.tokens[: slot.length].tobytes(),
                self.follower.exact_count(slot) >= slot.length,
            )
            for slot in sorted(slots, key=lambda slot: slot.last_used)
        ]

    def _tell_again(self, sequence: Sequence) -> None:
        if sequence.started:
            self.link.send(sequence.started)
        for scored in sequence.scored:
            self.link.send(scored)
        if sequence.outputs:
            self.link.send(m.Step(sequence.outputs))
        if sequence.refused:
            self.link.send(sequence.refused)

    def _follow_stream(self, follow: m.Follow) -> None:
        """Of the slot that it is given, what was captured of another sequence ends there; points that wait don't need the slot."""
        if self.lagging and not follow.start:
            self._catch_up()
        for told in self.follower.follow(follow):
            self.link.send(told)
        followed = self.follower.follows.get(follow.stream)
        if followed is not None and not follow.start:
            self._forget_lagging(followed.slot)

    def _submit(self, submit: m.Submit) -> None:
        for known in (*self.active, *self.waiting, *self.ended.values()):
            if known.key == (submit.stream, submit.epoch):
                self._tell_again(known)
                return
            if known.submit.stream == submit.stream and known in self.active:
                self._drop(known)
        self.waiting = [s for s in self.waiting if s.submit.stream != submit.stream]
        sequence = Sequence.of(submit)
        try:
            self._check(sequence)
        except BadRequest as error:
            self._refuse(sequence, error.code, str(error))
            return
        sequence.cuts = self.points.cuts(sequence.prompt, submit.stop_tokens, self.prefill_chunk)
        if submit.grammar:
            ends = [token for token in submit.stop_tokens if token in self.model.stop_tokens]
            sequence.grammar = self.grammars.prepare(submit.grammar, ends, sequence.generated)
        self.waiting.append(sequence)

    def _refuse(self, sequence: Sequence, code: str, message: str) -> None:
        """It never gets a slot; the one that followed its stream is free again."""
        self.follower.claim(sequence.submit.stream)
        self.link.send(m.Refused(*sequence.key, code, message))

    def _check(self, sequence: Sequence) -> None:
        tokens, context = sequence.tokens, self.arena.context_tokens
        if not tokens or not 0 < sequence.submit.prompt_count <= len(tokens):
            raise BadRequest("bad_token", "the prompt is empty; send at least one token")
        if len(tokens) >= context:
            raise BadRequest("too_long", f"{len(tokens)} tokens leave no room for an answer in a context of {context}")
        ids = sequence.array()
        if ids.min() < 0 or ids.max() >= self.model.vocab_count:
            raise BadRequest("bad_token", f"token ids must lie in [0, {self.model.vocab_count})")
        biased = sequence.submit.sampling.logit_bias
        if biased and not 0 <= min(biased) <= max(biased) < self.model.vocab_count:
            raise BadRequest("bad_token", f"the tokens of logit_bias must lie in [0, {self.model.vocab_count})")
        allowed = sequence.submit.sampling.allowed
        if allowed and not 0 <= min(allowed) <= max(allowed) < self.model.vocab_count:
            raise BadRequest("bad_token", f"the tokens of allowed must lie in [0, {self.model.vocab_count})")
        if sequence.submit.adapter and sequence.submit.adapter not in self.adapters:
            raise BadRequest("bad_adapter", "its adapter can't be loaded here; the engine's log says why")

    def _load_adapter(self, load: m.LoadAdapter) -> None:
        try:
            self.adapters.load(Path(load.directory), load.digest)
        except (BadRequest, OSError) as error:
            self.link.send(m.AdapterReady(load.request, str(error)))
            return
        self.link.send(m.AdapterReady(load.request))

    def _cancel(self, cancel: m.Cancel) -> None:
        """Stop sampling a stream. What it has computed stays resident, up to where the gateway says that its truth ends."""
        key = (cancel.stream, cancel.epoch)
        self._take_off_queue(key)
        for sequence in list(self.active):
            if sequence.key == key and not sequence.finish:
                self._truncate(sequence, cancel.keep_position)
                sequence.finish = "cancelled"
        self._retire()

    def _release(self, release: m.Release) -> None:
        """Between two steps: let go of a stream with all that it computed captured; another engine goes on with it."""
        key, position = (release.stream, release.epoch), -1
        if self._take_off_queue(key):
            position = 0
        for sequence in [s for s in self.active if s.key == key and not s.finish]:
            position = 0 if sequence.cursor is None else sequence.computed
            self._drop(sequence)
            if sequence.cursor is not None:
                position = sequence.cursor.position
        self._write_points(everything=True)
        self.link.send(m.Released(*key, position))

    def _take_off_queue(self, key: tuple[str, int]) -> bool:
        """A submission that has no slot yet is given up; so is the one that followed its stream. False if none waits."""
        if not any(s.key == key for s in self.waiting):
            return False
        self.waiting = [s for s in self.waiting if s.key != key]
        self.follower.claim(key[0])
        return True

    def _truncate(self, sequence: Sequence, position: int) -> None:
        slot = sequence.slot
        assert slot is not None, "an active sequence has a slot"
        if sequence.restore is not None or not sequence.computed:  # nothing of it is worth a step
            sequence.restore = None
            self._drop(sequence)
            return
        if position < sequence.submit.prompt_count:
            position = sequence.computed  # cancelled by the client: no more steps for it
        del sequence.tokens[position:]
        sequence.computed = slot.length = min(sequence.computed, len(sequence.tokens))
        slot.stored = min(slot.stored, slot.length)
        if sequence.cursor:
            sequence.cursor.position = min(sequence.cursor.position, slot.length)
            self.points.cut(sequence.cursor, slot.length)

    def _park(self, park: m.Park) -> None:
        """Take an idle session's slots off the device; a slot whose captures lag stays."""
        while any(s.finish and s.submit.session == park.session for s in self.active):
            self.step()  # its last token is still to be fed
        running = {s.slot.index for s in self.active if s.slot}
        freed, position = 0, 0
        self._catch_up()
        for slot in self.arena.slots:
            if slot.session != park.session or slot.index in running or not slot.length:
                continue
            position = max(position, slot.stored)
            if slot.lag_tokens <= 0:
                self._vacate(slot)
                freed += 1
        self.link.send(m.Parked(park.request, freed, position))

    # ------------------------------------------------------------ place and restore

    def admit(self) -> None:
        """Give waiting sequences slots, in order of arrival, while there are any."""
        if any(s.finish for s in self.active):
            return  # its last token is fed in the next step; then its state can be taken over in place
        for sequence in list(self.waiting):
            if not self._admissible(sequence):
                continue
            submit, tokens = sequence.submit, sequence.array()
            limit = sequence.reusable
            if sequence.scoring:
                sequence.reason = "log probabilities of the prompt were asked for"
            own = self.follower.claim(submit.stream)
            choice = choose_slot(self.arena.slots, tokens, submit.namespace, submit.session, limit, submit.adapter)
            while choice is None and (gave_way := self.follower.make_room()) is not None:
                self.link.send(gave_way)
                choice = choose_slot(self.arena.slots, tokens, submit.namespace, submit.session, limit, submit.adapter)
            if choice is None:
                return
            self.waiting.remove(sequence)
            self.active.append(sequence)
            choice = self._rather_own_rows(sequence, choice, own, tokens, limit)
            plan = self.lookup.plan(sequence, tokens, limit, resident_part(choice.source, choice.shared))
            self._place(sequence, choice.target, choice.source, plan, tokens)

    def _rather_own_rows(
        self, sequence: Sequence, choice: SlotChoice, own: Slot | None, tokens: np.ndarray, limit: int
    ) -> SlotChoice:
        """A recovered stream goes on from rows that came from the tiers, where these hold as much as is chosen.

        `own` is the slot that followed the stream: what has been put back there is not looked for, nor put back again.
        """
        if not sequence.recovering or self.follower.exact_count(choice.source) >= choice.shared:
            return choice
        there = min(own.common_prefix(tokens), limit) if own is not None else 0
        if there < choice.shared and self.lookup.stored(sequence, tokens, limit, there) < choice.shared:
            return choice
        return SlotChoice(own, own, there) if own is not None else replace(choice, shared=0)

    def _admissible(self, sequence: Sequence) -> bool:
        """Not while its grammar is compiled, nor while another sequence computes a prefix that it can take over (n > 1)."""
        if sequence.compiling:
            return False
        error = sequence.grammar.exception() if sequence.grammar else None
        if error is not None:
            self.waiting.remove(sequence)
            self._refuse(sequence, "bad_grammar", str(error))
            return False
        if sequence.recovering or sequence.scoring:
            return True
        return not any(self._computes_for(sequence, other) for other in self.active)

    def _computes_for(self, sequence: Sequence, other: Sequence) -> bool:
        """At least a block of `sequence` is about to be there, because `other` begins with it."""
        if other.finish or other.slot is None or not (other.restore or other.prompt_missing):
            return False
        if not sequence.shares_state_with(other):
            return False
        return sequence.shared_prompt(other) - other.slot.length >= self.block_tokens

    def _place(self, sequence: Sequence, slot: Slot, source: Slot, plan: Plan, tokens: np.ndarray) -> None:
        """Take over a slot, with what the plan uses of `source` (the slot itself, or another), and begin what is to be restored."""
        submit = sequence.submit
        self._abandon(slot)
        self.follower.used(slot)
        if source is not slot:
            self.arena.forget(slot)
            if plan.device:
                self.arena.copy_prefix(source, slot, plan.device)
        self.clock += 1
        slot.busy, slot.last_used = True, self.clock
        slot.namespace, slot.session, slot.captured = submit.namespace, submit.session, submit.capture
        slot.adapter = submit.adapter
        slot.tokens[: len(tokens)] = tokens
        self.arena.cut(slot, plan.kept)
        slot.length = plan.device
        slot.stored = min(slot.stored, slot.length)
        sequence.slot, sequence.device_tokens = slot, slot.length
        coming = self.arena.slot_bytes(slot, len(tokens)) - self.arena.slot_bytes(slot)
        self._keep_to_memory(submit.namespace, coming)
        self._follow(sequence, plan)

    def _follow(self, sequence: Sequence, plan: Plan) -> None:
        """Put back what the plan says: state that is on the device now, the rest by slices of a restore."""
        slot = sequence.slot
        assert slot is not None, "planned without a slot"
        sequence.reason = sequence.damage.reason or plan.reason or sequence.reason
        if not plan.goal:
            slot.bases = [0] * len(slot.bases)
        if plan.goal < plan.matched and self.points.wanted and not plan.goal:
            self.points.missing += 1
        if self.points.wanted and plan.goal and plan.point is None and slot.state_position != plan.goal:
            self.arena.states.put(slot.index, slot.points[plan.goal].state)
            slot.state_position = plan.goal
        if not plan.from_tiers:
            slot.filling = False
            self._begin(sequence)
            return
        earlier = sequence.restore
        sequence.restore = Restore(
            self.lookup.root_of(sequence),
            sequence.submit.namespace,
            sequence.array(),
            self.block_tokens,
            plan,
            sequence.damage,
        )
        if earlier is not None:
            sequence.restore.carry(earlier)

    def _restore(self, sequence: Sequence) -> None:
        restore, slot = sequence.restore, sequence.slot
        assert restore is not None and slot is not None, "scheduled without a restore"
        if not restore.slice(self.lookup.finder, self.arena, slot, self.speeds):
            return
        self.counters.restored_tokens += sum(restore.reused.values()) - restore.carried
        self.counters.bad_blocks += restore.bad_blocks
        if restore.complete(slot):
            slot.stored, slot.filling = slot.length, False
            self._begin(sequence)
            return
        # Damage, or the keeper dropped something meanwhile: go on from what is left.
        tokens = sequence.array()
        rows = min(slot.length, sequence.damage.limit) if self.kinds.append_only else sequence.device_tokens
        points = frozenset(at for at in slot.points if at <= rows)
        plan = self.lookup.plan(sequence, tokens, sequence.reusable, Resident(rows, (), -1, points))
        slot.length = plan.device
        self._follow(sequence, plan)

    def _begin(self, sequence: Sequence) -> None:
        """The prefix is in place: open the capture, tell what was reused, go on with computing."""
        slot, submit = sequence.slot, sequence.submit
        assert slot is not None, "begun without a slot"
        slot.stored = min(slot.stored, slot.length)
        sequence.computed = slot.length
        self.points.restored(slot)
        if self.capture and submit.capture:
            sequence.cursor = self.capture.cursor(submit.stream, submit.epoch, slot.stored)
        now = time.monotonic()
        sequence.began = now
        restore_ms = sequence.restore.seconds * 1e3 if sequence.restore else 0.0
        sequence.started = m.Started(
            stream=submit.stream,
            epoch=submit.epoch,
            verdict=sequence.verdict,
            reason=sequence.reason,
            reused=sequence.reused,
            recomputed=len(sequence.tokens) - sequence.computed,
            prefill_start=sequence.computed,
            wait_ms=max(0.0, (now - sequence.arrived) * 1e3 - restore_ms),
            restore_ms=restore_ms,
        )
        sequence.restore = None
        self.link.send(sequence.started)
        log.debug(
            "restore.done", stream=submit.stream, epoch=submit.epoch, verdict=sequence.started.verdict,
            reused=sequence.started.reused, position=sequence.computed, ms=round(restore_ms, 3),
        )  # fmt: skip

    # ------------------------------------------------------------ compute

    def _prefill(self, action: Action) -> list[m.Output]:
        """One chunk of one prompt."""
        sequence, start, end = action.rows[0], action.start, action.end
        assert sequence.slot is not None, "prefill without a slot"
        began = time.perf_counter()
        self.cache.begin([sequence.slot], [start], end - start)
        self.adapters.begin([sequence.submit.adapter])
        wanted = end == len(sequence.tokens) and not sequence.finish
        if sequence.scoring:
            logits = self._score(sequence, start, end)
        else:
            logits = self.model.forward([sequence.tokens[start:end]], [start], self.cache, logits=wanted)
            self.model.settle()
            self.speeds.saw_prefill(end - start, time.perf_counter() - began)
        self.counters.prefill_tokens += end - start
        self._computed(sequence, end)
        return self._sample(sequence, logits[0]) if logits is not None and wanted else []

    def _score(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        """A chunk of a prompt whose tokens' log probabilities are wanted: tell them. Returns the last token's logits (1, vocab)."""
        submit, rows = sequence.submit, list[m.TokenLogprobs]()
        following = sequence.prompt[start + 1 : end + 1]
        for logits in self.model.score(sequence.tokens[start:end], start, self.cache):
            targets = following[len(rows) : len(rows) + len(logits)]
            rows += [
                logprobs_of(row, token, submit.sampling.logprobs) for row, token in zip(logits, targets, strict=False)
            ]
            self.page.beat()
        self._check_fence()
        if rows:
            sequence.scored.append(m.Scored(*sequence.key, start + 1, rows))
            self.link.send(sequence.scored[-1])
        return logits

    def _decode(self, action: Action) -> list[m.Output]:
        """One token of each sequence: forced while the next one is known, sampled at the end of the list."""
        rows = action.rows
        began = time.perf_counter()
        captures = [(s.cursor, s.slot, s.computed + 1) for s in rows if s.cursor and s.slot]
        logits = self._one_token(rows, self.capture.before_step(captures) if self.capture else [])
        if self.capture and self.capture.rows:
            self.capture.ahead(captures)
        outputs = []
        for index, sequence in enumerate(rows):
            self._computed(sequence, sequence.computed + 1)
            if sequence.computed == len(sequence.tokens) and not sequence.finish:
                outputs += self._sample(sequence, logits[index])
                self.counters.decode_tokens += 1
            else:
                self.counters.forced_tokens += 1
        self.counters.decode_steps += 1
        step_ms = (time.perf_counter() - began) * 1e3
        self.counters.decode_step_ms += 0.1 * (step_ms - self.counters.decode_step_ms)
        self.graphs.saw(step_ms)
        return outputs

    def _one_token(self, rows: tuple[Sequence, ...], captures: list[Range]) -> torch.Tensor:
        """The next token of each sequence through the model, by a recorded step where there is one. Returns logits (rows, vocab)."""
        slots, starts = [s.slot for s in rows if s.slot], [s.computed for s in rows]
        tokens, adapters = [s.tokens[s.computed] for s in rows], [s.submit.adapter for s in rows]
        self.adapters.begin(adapters)
        logits = self.graphs.step(slots, starts, tokens, adapted=any(adapters), captures=captures)
        if logits is None:
            self.cache.begin(slots, starts, 1)
            logits = self.model.forward([[token] for token in tokens], starts, self.cache, logits=True)
        assert logits is not None, "decode gives logits"
        return logits

    def _computed(self, sequence: Sequence, position: int) -> None:
        """State up to `position` is in the arena now: capture it."""
        slot = sequence.slot
        assert slot is not None, "computed without a slot"
        sequence.computed = slot.length = position
        self._check_fence()
        if self.capture and sequence.cursor:
            self.capture.advance(sequence.cursor, slot)
            slot.stored = max(slot.stored, sequence.cursor.position)

    def _check_fence(self) -> None:
        """A stopped engine that wakes up after it was replaced ends before it writes or sends. Raises Fenced."""
        if self.page.fenced:
            raise Fenced(f"{self.name} was replaced while it stood still; another engine owns its streams")

    def _take_points(self, action: Action) -> None:
        """After the step's tokens are on their way: copies of recurrent state where they are due."""
        for sequence in action.rows if self.points.wanted else ():
            slot = sequence.slot
            if slot is None or action.kind not in ("prefill", "decode"):
                continue
            if action.kind == "prefill":
                stops = sequence.submit.stop_tokens
                self.points.after_prefill(slot, sequence.cursor, sequence.computed, sequence.prompt, stops)
            else:
                self.points.after_decode(slot, sequence.cursor, sequence.computed)

    def _write_points(self, *, everything: bool = False) -> None:
        """Points that wait -> the lane; then sequences that ended and waited for theirs are closed."""
        if not self.capture or not self.points.waiting:
            return
        self.points.write(self.capture, everything=everything)
        for cursor, slot in list(self.lagging):
            if (cursor.position >= slot.length or cursor.lost) and not self.points.pending(cursor):
                self.capture.close(cursor)
                self.lagging.remove((cursor, slot))

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> list[m.Output]:
        """Draw the next token of a sequence whose whole list is computed; nothing if its grammar can't be followed."""
        submit, position = sequence.submit, len(sequence.tokens)
        if not sequence.told_forced:
            self._tell_forced(sequence)
        try:
            matcher = sequence.grammar.result() if sequence.grammar else None
            token = sample(
                logits,
                submit.sampling,
                sequence.generated,
                position,
                matcher.allowed() if matcher else None,
                prompt=sequence.prompt if submit.sampling.repetition_penalty != 1 else (),
                stop_tokens=submit.stop_tokens,
            )
            if matcher and token not in submit.stop_tokens:
                matcher.advance([token])
        except BadRequest as error:
            sequence.refused = m.Refused(*sequence.key, error.code, str(error))
            self.link.send(sequence.refused)
            sequence.finish = "cancelled"
            return []
        sequence.tokens.append(token)
        assert sequence.slot is not None, "sampled without a slot"
        sequence.slot.tokens[position] = token
        if token in submit.stop_tokens:
            sequence.finish = "stop"
        elif position + 1 >= min(submit.max_position, self.arena.context_tokens):
            sequence.finish = "length"
        count = submit.sampling.logprobs
        logprobs = logprobs_of(logits, token, count) if count >= 0 else None
        output = m.Output(submit.stream, submit.epoch, position, token, sequence.finish, logprobs)
        sequence.outputs.append(output)
        return [output]

    def _tell_forced(self, sequence: Sequence) -> None:
        assert sequence.started is not None, "sampled before it began"
        sequence.told_forced = True
        elapsed_ms = (time.monotonic() - sequence.began) * 1e3
        known = max(sequence.submit.prompt_count, sequence.started.prefill_start)
        forced = max(0, sequence.submitted_count - known)
        self.link.send(m.Forced(*sequence.key, token_count=forced, ms=elapsed_ms))
        stage = "force.done" if forced else "prefill.done"
        log.debug(
            stage, stream=sequence.submit.stream, position=sequence.computed, forced=forced, ms=round(elapsed_ms, 3)
        )

    # ------------------------------------------------------------ the end of a sequence

    def _retire(self) -> None:
        """Let go of sequences whose every token is computed after they finished; their state stays resident."""
        for sequence in [s for s in self.active if s.complete]:
            self._drop(sequence)
            self.ended[sequence.key] = sequence
            told_bytes = sum(known.told_bytes for known in self.ended.values())
            while len(self.ended) > _REMEMBERED or (told_bytes > _REMEMBERED_BYTES and len(self.ended) > 1):
                told_bytes -= self.ended.popitem(last=False)[1].told_bytes
        self._let_adapters_go()

    def _let_adapters_go(self) -> None:
        self.adapters.let_go({s.submit.adapter for s in (*self.active, *self.waiting)})

    def _drop(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        slot, cursor = sequence.slot, sequence.cursor
        sequence.slot = None
        if slot is None:
            return
        slot.busy = False
        self.clock += 1
        slot.last_used = self.clock
        if slot.filling:
            self._vacate(slot)  # ended while it was restored: windows and state are not whole
            return
        self.points.at_tip(slot, cursor if self.capture else None)
        if self.capture and cursor:
            if self.capture.advance(cursor, slot) and not self.points.pending(cursor):
                self.capture.close(cursor)
            else:
                self.lagging.append((cursor, slot))
            slot.stored = max(slot.stored, cursor.position)
            self.link.send(m.Captured([(*sequence.key, cursor.position)]))
            log.debug("capture.done", stream=cursor.stream, position=cursor.position, computed=slot.length)
        if not sequence.submit.capture:
            self._vacate(slot)
        self._keep_to_memory(sequence.submit.namespace)

    def _keep_to_memory(self, namespace: str, coming_bytes: int = 0) -> None:
        """Empty a tenant's idle slots as far as its memory budget asks for it. What goes is in the tiers."""
        limit = self.tiers.tenant_limit(namespace, "memory")
        if not limit:
            return
        lagging = {slot.index for _, slot in self.lagging}
        slots, size = self.arena.slots, self.arena.slot_bytes
        for slot in slots_over_budget(slots, namespace, limit, size, coming_bytes, lagging):
            log.info("memory.evicted", tenant=namespace, session=slot.session, tokens=slot.length)
            self.evicted[namespace] += 1
            self._vacate(slot)
            self.arena.release(slot)

    def _catch_up(self) -> None:
        """Take captures for which the lane had no room."""
        for sequence in self.active:
            if self.capture and sequence.cursor and sequence.slot:
                self.capture.advance(sequence.cursor, sequence.slot)
                sequence.slot.stored = max(sequence.slot.stored, sequence.cursor.position)
        self._write_points(everything=True)
        for cursor, slot in list(self.lagging):
            if self.capture and self.capture.advance(cursor, slot) and not self.points.pending(cursor):
                self.capture.close(cursor)
                slot.stored = max(slot.stored, cursor.position)
                self.lagging.remove((cursor, slot))

    def watch_lane(self) -> None:
        """If somebody deleted the lane's file: go on in a new one, and capture again what the tiers don't hold."""
        lane = self.lane_watch.look(self.capture.lane) if self.capture else None
        if self.capture is None or lane is None:
            return
        self.capture.renew(lane)
        live = [(s.cursor, s.slot) for s in self.active if s.cursor and s.slot]
        for cursor, slot in (*live, *self.lagging):
            if not cursor.lost:
                self.capture.begin_again(cursor, self.lookup.held(slot))
                slot.stored = min(slot.stored, cursor.position)
        self._catch_up()
        log.info("capture.lane_renewed", lane=str(lane.path), sequences=len(live) + len(self.lagging))

    def _abandon(self, slot: Slot) -> None:
        """A slot is taken over: what of it was never captured is lost to the tiers, and only costs recomputing."""
        if self.capture and any(lagging is slot for _, lagging in self.lagging):
            self._catch_up()
        self._forget_lagging(slot)

    def _forget_lagging(self, slot: Slot) -> None:
        for cursor, lagging in list(self.lagging):
            if lagging is slot:
                log.warning("capture.abandoned", stream=cursor.stream, captured=cursor.position, computed=slot.length)
                self.lagging.remove((cursor, lagging))
                self.points.cut(cursor, cursor.position if cursor.opened else -1)

    def _vacate(self, slot: Slot) -> None:
        self.arena.forget(slot)
        slot.session = slot.namespace = ""
        slot.captured = True

    def _capture_everything(self) -> None:
        self._catch_up()
        for sequence in list(self.active):
            if self.capture and sequence.cursor:
                self.capture.close(sequence.cursor)
        log.info("engine.stopped", engine=self.name, lagging=len(self.lagging))

    # ------------------------------------------------------------ what others see

    def _tell_stats(self) -> None:
        now = time.monotonic()
        if now < self.stats_due or not self.link.attached:
            return
        self.stats_due = now + _STATS_INTERVAL_S
        for namespace in {slot.namespace for slot in self.arena.slots if slot.length}:
            self._keep_to_memory(namespace)  # live sequences have grown, lagging ones are captured
        self.link.send(m.Stats(self.stats(), self.tenant_stats()))
        positions = [(*s.key, s.cursor.position) for s in self.active if s.cursor]
        if positions:
            self.link.send(m.Captured(positions))

    def stats(self) -> m.EngineStats:
        """Counters and gauges of this moment."""
        return stats.engine_stats(self)

    def tenant_stats(self) -> dict[str, m.TenantStats]:
        """What each tenant takes of this engine now."""
        return stats.tenant_stats(self)
