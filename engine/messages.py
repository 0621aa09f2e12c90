"""Every message that crosses a process: gateway <-> engine, gateway <-> host agent. No torch here.

Frames on the wire are a 4-byte little-endian length and a msgpack body (`engine/wire.py`). Token lists travel as
packed little-endian int32 (`pack_tokens`). Times are milliseconds, positions are counts of tokens, ranges are half-open.
An `epoch` grows with every submission of the same stream: whatever arrives with an older one is dropped.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import Union

import msgspec

EXIT_UNSUPPORTED = 3  # of an engine that can never serve this model or on this device
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FUEL_LEAST, FUEL_A_CHARACTER, FUEL_MOST = 100_000, 50, 1_000_000  # 100,000 are about 0.1 s (docs/lab.md)


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids -> little-endian int32 bytes."""
    return array("i", tokens).tobytes()


def adapter_digest(directory: Path) -> str:
    """Digest of an adapter's files, 32 hex digits: what names it and the state computed with it. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16, person=b"concordia-lora")
    for name in ADAPTER_FILES:
        data = (directory / name).read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def adapter_root(root: bytes, digest: str) -> bytes:
    """Fingerprint of state computed with an adapter over a model's own fingerprint; no adapter: the model's own."""
    if not digest:
        return root
    return hashlib.blake2b(root + bytes.fromhex(digest), digest_size=16, person=b"concordia-state").digest()


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of `pack_tokens`."""
    return array("i", data).tolist()


def grammar_fuel(grammar: str) -> int:
    """What building a grammar may cost, as llguidance counts it (`initial_lexer_fuel`): in proportion to what was sent.

    With llguidance's own default "(a{1000}){1000}" takes seconds of a core before it is found to be too large.
    """
    return min(FUEL_MOST, FUEL_LEAST + FUEL_A_CHARACTER * len(grammar))


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


# ---------------------------------------------------------------- shared values


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to draw the token at a position: a pure function of (logits, tokens so far, seed, position).

    top_k 0 and top_p 1.0 and min_p 0.0 switch a filter off; temperature 0 (or below `sampler.GREEDY_BELOW`) is greedy.
    logit_bias         added to the logits of these tokens, before anything else
    repetition_penalty logits of tokens in the prompt or the answer are divided by it if positive, else multiplied; 1.0: off
    min_tokens         tokens of the answer before a stop token may be drawn
    allowed            the only tokens that may be drawn; empty: all
    barred             token lists that the answer must not hold: the last of one isn't drawn after the others
    logprobs -1: none; 0: of the chosen token; k > 0: also of the k likeliest.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int = -1
    logit_bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    allowed: list[int] = []
    barred: list[list[int]] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, before temperature and filters: chosen token, then (id, logprob) likeliest first."""

    chosen: float
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """One new token of one stream. `position` is its index in the token list; finish is "", "stop" (a stop token) or "length"."""

    stream: str
    epoch: int
    position: int
    token: int
    finish: str = ""
    logprobs: TokenLogprobs | None = None


class LiveStream(msgspec.Struct, frozen=True):
    """A stream that an engine is working on or still remembers, told to a gateway that attaches. tokens: packed, whole list."""

    stream: str
    epoch: int
    tokens: bytes
    prompt_count: int
    finish: str


class Resident(msgspec.Struct, frozen=True):
    """A named session that lies idle on the device, told to a gateway that attaches. tokens: packed, those whose state is there.

    copied  all of it was restored from the tiers because the gateway had it followed: another engine had computed it
    """

    session: str
    namespace: str
    adapter: str
    tokens: bytes
    copied: bool = False


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start of the process, and gauges. Rates are medians of what was measured.

    capture_by    how rows get off the device: `stream`, `graph`, `executor` (with the reason if they go through tier 0 instead of straight
                  into the lane), or `copy` with the reason why the framework does it; on a CPU only if it can't be done in one pass
    capture_in_two_passes  1 on a CPU where it can't, whatever it is that `capture_by` says of it
    restore_by    how rows get back onto it: `scatter`, or `copy` with the reason
    decode_graph  on a GPU `on`, or why decode steps are launched one operation at a time
    attention_by  on a CPU, why the kernel for few rows over a long context can't be used where it should be
    attention_by_kernel  1 while it is used
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    slots_in_use: int = 0
    resident_sessions: int = 0
    resident_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    restored_tokens: int = 0
    captured_bytes: int = 0
    capture_seconds: float = 0.0
    lane_full: int = 0
    lane_free_bytes: int = 0
    lanes_renewed: int = 0
    lane_gone: int = 0
    bad_blocks: int = 0
    capture_lag_tokens: int = 0
    points_taken: int = 0
    points_resident: int = 0
    points_written: int = 0
    point_bytes: int = 0
    points_waiting: int = 0
    points_dropped: int = 0
    points_missing: int = 0
    windows_lost: int = 0
    capture_by_handlers: int = 0
    capture_in_two_passes: int = 0
    attention_by_kernel: int = 0
    decode_graphs: int = 0
    decode_graph_steps: int = 0
    restore_by_handlers: int = 0
    prefill_tokens_per_s: float = 0.0
    restore_bytes_per_s: float = 0.0
    decode_step_ms: float = 0.0
    followed_streams: int = 0
    followed_tokens: int = 0
    followed_restored_tokens: int = 0
    capture_by: str = ""
    restore_by: str = ""
    decode_graph: str = ""
    attention_by: str = ""


class TenantStats(msgspec.Struct, frozen=True):
    """What one tenant takes of an engine. Limits are 0 where there is none.

    memory_bytes  state of its sequences on the device, idle ones included; evicted: idle ones that went because of the limit
    lane_bytes    its records in the lane that the keeper has not freed; lane_refused: how often its share had no room
    lag_tokens    computed and not captured yet
    """

    memory_bytes: int = 0
    memory_limit: int = 0
    evicted: int = 0
    lane_bytes: int = 0
    lane_limit: int = 0
    lane_refused: int = 0
    lag_tokens: int = 0


# ---------------------------------------------------------------- gateway -> engine


class Attach(Message, frozen=True):
    """First message of a gateway. The engine answers `Hello`, and from then on sends to this connection only."""

    gateway: str


class Submit(Message, frozen=True):
    """Go on with a stream: find the longest restorable prefix of `tokens`, compute the rest, sample from there.

    tokens         packed; prompt and every token delivered so far
    prompt_count   how many of them are prompt; those after it are fed by forced decode
    prefill_start  where prefill began the first time (from `Started`), -1 if unknown; keeps the chunk cuts of a recovery the same
    stop_tokens    sampling one of these ends the stream with finish "stop" (the token is part of the list)
    max_position   the stream ends with finish "length" when its token list is this long
    session        name under which its state stays resident afterwards; "" if anonymous
    grammar        what the tokens after the prompt must match, as llguidance takes it; "" if anything goes
    capture        False: nothing of it is written to the lane, and its device memory is free again when it ends
    adapter        digest of the adapter to compute with, "" for none; a `LoadAdapter` came before
    scored         log probabilities of the prompt's tokens are wanted too (`Scored`), and so many are known: of tokens [1, scored + 1);
                   -1: they aren't
    """

    stream: str
    epoch: int
    tokens: bytes
    prompt_count: int
    sampling: Sampling
    stop_tokens: list[int]
    max_position: int
    namespace: str = "default"
    session: str = ""
    prefill_start: int = -1
    grammar: str = ""
    capture: bool = True
    adapter: str = ""
    scored: int = -1


class LoadAdapter(Message, frozen=True):
    """Read an adapter from a directory whose files have this digest; nothing if it is known. Answered by `AdapterReady`."""

    request: int
    digest: str
    directory: str


class UnloadAdapter(Message, frozen=True):
    """Forget an adapter once no stream of the engine uses it."""

    digest: str


class Cancel(Message, frozen=True):
    """Stop a stream between steps; nothing more is sent for it. keep_position: truth ends here (stop string), -1: where it is."""

    stream: str
    epoch: int
    keep_position: int = -1


class Park(Message, frozen=True):
    """Take a session off the device, once all of it is in the lane. Answered by `Parked`."""

    request: int
    session: str


class Follow(Message, frozen=True):
    """Keep the state of another engine's stream on this device, restored from the tiers as it appears there. Answered by `Followed`.

    tokens  packed; the stream's tokens from position `start` on. 0 begins anew, else it must join what was sent before
    idle    a session between two turns: all of its state is in the tiers; it gets room that nobody else wants, and gives way first
    """

    stream: str
    start: int
    tokens: bytes
    namespace: str = "default"
    session: str = ""
    adapter: str = ""
    idle: bool = False


class Unfollow(Message, frozen=True):
    """Follow no longer. What was restored stays in its slot, idle, for whoever needs it or the room."""

    stream: str


class Release(Message, frozen=True):
    """Stop a stream at the next token boundary and capture all of it: another engine goes on. Answered by `Released`."""

    stream: str
    epoch: int


class Ping(Message, frozen=True):
    """Ask for `Stats` now."""


class Shutdown(Message, frozen=True):
    """Finish nothing more: drain captures, then exit 0. Sent after streams have ended or moved."""


class Drained(Message, frozen=True):
    """An operator keeps streams away from this engine, or no longer: remember it for the next gateway (`Hello.drained`)."""

    on: bool


ToEngine = Union[
    Attach, Submit, Cancel, Park, Follow, Unfollow, Release, Ping, Shutdown, Drained, LoadAdapter, UnloadAdapter
]

# ---------------------------------------------------------------- engine -> gateway


class Hello(Message, frozen=True):
    """What this engine is, and what it is still working on."""

    engine: str
    incarnation: int
    pid: int
    root: str  # hex of the state fingerprint
    model: str
    device: str
    dtype: str
    context_tokens: int
    vocab_count: int
    slots: int
    streams: list[LiveStream]
    residents: list[Resident] = []
    drained: bool = False


class Started(Message, frozen=True):
    """A prefix was put back; what is missing is about to be computed. Sent once a `Submit`, before its first `Output`.

    verdict     "new" (nothing stored matched), "resident", "restored", "partial" or "recomputed"
    reason      why less than everything was reused; "" if nothing was lost
    reused      tokens by tier: device, lane, disk
    recomputed  tokens of the submitted list that must be computed (prefilled or forced)
    """

    stream: str
    epoch: int
    verdict: str
    reason: str
    reused: dict[str, int]
    recomputed: int
    prefill_start: int
    wait_ms: float
    restore_ms: float


class Forced(Message, frozen=True):
    """The known list is computed to its end: `ms` since `Started`. Sent before the first `Output` of a submission.

    token_count  tokens of the answer that were known and fed again; those of the prompt are not counted
    """

    stream: str
    epoch: int
    token_count: int
    ms: float


class Scored(Message, frozen=True):
    """Log probabilities of the prompt's tokens from `position` on, each given those before it. All come before the first `Output`."""

    stream: str
    epoch: int
    position: int
    rows: list[TokenLogprobs]


class Step(Message, frozen=True):
    """All new tokens of one step."""

    outputs: list[Output]


class Captured(Message, frozen=True):
    """How far each stream's state is in the lane: (stream, epoch, position). Sent about once a second, and when a stream ends."""

    positions: list[tuple[str, int, int]]


class Refused(Message, frozen=True):
    """A `Submit` that can't be served, or no longer; message tells the user what to do.

    code  "too_long", "bad_token", "bad_grammar", "bad_adapter", "other_model" or "failed"
    """

    stream: str
    epoch: int
    code: str
    message: str


class Parked(Message, frozen=True):
    """Answer to `Park`: slots freed, and the longest captured position among them."""

    request: int
    slots: int
    position: int


class Followed(Message, frozen=True):
    """How far a followed stream's state is on this device. Sent when it grew.

    caught_up  the tiers hold nothing beyond `position` now
    refused    why it is not followed (any longer): "no_slot", "too_long", "gap" (send it from 0), "damaged"; "" if it is
    """

    stream: str
    position: int
    caught_up: bool = False
    refused: str = ""


class Released(Message, frozen=True):
    """Answer to `Release`: nothing more is sent for it. position: captured so far; -1: it is not worked on here."""

    stream: str
    epoch: int
    position: int


class Draining(Message, frozen=True):
    """This engine was told to end (SIGTERM): take its streams elsewhere; it ends when it has none, or after `drain_s`."""


class AdapterReady(Message, frozen=True):
    """Answer to `LoadAdapter`: error says why it can't be used, "" if it can."""

    request: int
    error: str = ""


class Stats(Message, frozen=True):
    """Sent about once a second and on `Ping`. tenants: by namespace, those that have anything here."""

    stats: EngineStats
    tenants: dict[str, TenantStats] = {}


FromEngine = Union[
    Hello, Started, Forced, Scored, Step, Captured, Refused, Parked, Followed, Released, Draining, Stats, AdapterReady
]

# ---------------------------------------------------------------- host agent <-> gateway


class Subscribe(Message, frozen=True):
    """First message of a gateway to the host agent; answered by one `EngineUp` for each live engine, and every `EngineGone` of late.

    Then come news as it happens.
    """

    gateway: str


class Suspect(Message, frozen=True):
    """The gateway lost its link to this incarnation: fence it if it isn't dead, then say `EngineDown`."""

    engine: str
    incarnation: int
    reason: str


class EngineUp(Message, frozen=True):
    """An engine is ready for connections at a unix socket."""

    engine: str
    incarnation: int
    pid: int
    socket: str


class EngineDown(Message, frozen=True):
    """An incarnation is dead for certain (fenced): its streams may go on elsewhere.

    detect_ms  from the moment it was last known to live (hang: last beat) or, for a death, 0 where it can't be known, to the notice
    fence_ms   from the notice to the certainty
    cause      of a hang: "stopped", "blocked", "disk" or "spinning"
    """

    engine: str
    incarnation: int
    reason: str  # "killed", "exited", "hung", "device error"
    detect_ms: float
    fence_ms: float
    cause: str = ""


class EngineGone(Message, frozen=True):
    """What is known of how a dead incarnation ended. Follows `EngineDown`.

    exit          its exit code, negative for a signal; None where nobody could learn it
    from_outside  it did not die of what it computed: somebody sent it a signal, or told it to end
    """

    engine: str
    incarnation: int
    exit: int | None
    from_outside: bool


class EngineSlow(Message, frozen=True):
    """An engine has been silent for longer than its bound, but it is not hung: nothing moves. Told once a silence.

    cause  "starved" (it gets no processor), "computing" or "disk"
    """

    engine: str
    incarnation: int
    cause: str
    beat_age_ms: float


ToHost = Union[Subscribe, Suspect]
FromHost = Union[EngineUp, EngineDown, EngineGone, EngineSlow]
