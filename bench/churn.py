"""What does an hour of use cost the disk, in bytes written and in bytes kept?

Question  Bytes that reach the disk for every byte captured, and bytes of the store's file for every byte of live state.
Regime    The keeper's own code in this process, one lane, rows of the demo model's shape. Sessions take turns of a prompt and
          an answer (random lengths, records of 64 tokens in a prompt and one token in an answer, with a drain every 16
          tokens); after each turn the unfinished block is stored and everything synced, as when a session falls idle. A
          tenth of the turns goes back to an earlier point; a session that has become long is removed and another begins.
          Compaction runs every 20 turns. What an hour would do is done without its pauses; no read transaction is open. Written
          is what the process handed to the kernel to write (wchar of /proc/self/io; the lane is written by stores, not by
          calls). write_bytes would count a whole large folio for each page of it that is written: 1.2 to 1.4 times as much.
Baseline  bytes captured (`write amplification`); tokens of the sessions that are kept times the bytes of a token (`space`)
Unit      bytes per byte; ratio is the same figure (wanted: at most 1.10 and 1.15)
Seed      --seed
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench import report, rows
from tiers.compaction import Compaction
from tiers.drain import Drain
from tiers.keeper import _keep_large_buffers
from tiers.keeper_operations import Operations

SESSIONS = 12
LONG_TOKENS = 1600
COMPACT_EVERY = 20


@dataclass
class Session:
    name: str
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    turn: int = 0


class Churn:
    """The sessions, and what was captured of them."""

    def __init__(self, drain: Drain, prompts: rows.Source, answers: rows.Source, seed: int) -> None:
        self._drain, self._prompts, self._answers = drain, prompts, answers
        self._random = random.Random(seed)
        self._made = 0
        self.sessions = [self._new() for _ in range(SESSIONS)]

    def _new(self) -> Session:
        self._made += 1
        return Session(f"session-{self._made}")

    @property
    def captured_bytes(self) -> int:
        return self._prompts.captured_bytes + self._answers.captured_bytes

    def turn(self) -> None:
        """One turn of one session; a long one makes room for a new one first."""
        index = self._random.randrange(SESSIONS)
        session = self.sessions[index]
        if len(session.tokens) > LONG_TOKENS:
            Operations(self._drain).remove("bench", session.name, force=True, dry_run=False)
            session = self.sessions[index] = self._new()
        keep = len(session.tokens)
        if keep and self._random.random() < 0.1:
            keep = self._random.randrange(keep)
        start = keep // rows.BLOCK * rows.BLOCK
        session.turn += 1
        name = f"{session.name}-{session.turn}"
        prompt, answer = self._random.randrange(20, 300), self._random.randrange(20, 200)
        fresh = rows.tokens_of(self._random.randrange(1 << 30), prompt + answer)
        session.tokens = np.concatenate([session.tokens[:keep], fresh])
        self._prompts.open(name, session.tokens[:start], session.name)
        # Rows of the unfinished block are captured again under the new sequence; they count as captured, for a record holds them.
        self._prompts.append(name, session.tokens[: keep + prompt], start, self._drain)
        for position in range(keep + prompt, len(session.tokens)):
            self._answers.append(name, session.tokens[: position + 1], position, self._drain)
            if position % 16 == 0:
                self._drain.step()
        self._answers.close(name, len(session.tokens))
        self._drain.flush(sync=True)

    def live_bytes(self) -> int:
        return sum(len(session.tokens) for session in self.sessions) * rows.LAYOUT.token_bytes


def compact(drain: Drain) -> None:
    for _ in Compaction(drain, settle_s=0, grace_s=0, budget=drain.budget()).run():
        pass


def written_bytes() -> int:
    """What this process gave to write calls since it began."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def main() -> None:
    options = report.arguments(__doc__)
    _keep_large_buffers()
    turns = 60 if options.quick else 400
    result = report.Report("churn", options)
    with rows.installation() as paths:
        settings = rows.settings(128 << 20)
        lane = rows.writer(paths, settings)
        drain = Drain(paths, settings)
        drain.open()
        churn = Churn(drain, rows.Source(lane, options.seed), rows.Source(lane, options.seed, 1), options.seed)
        before = written_bytes()
        for turn in range(1, turns + 1):
            churn.turn()
            if turn % COMPACT_EVERY == 0:
                compact(drain)
                report.say(f"  turn {turn}: {churn.captured_bytes >> 20} MB captured")
        compact(drain)
        drain.flush(sync=True)
        written = written_bytes() - before
        kept = (paths.store / "data.mdb").stat().st_blocks * 512
        captured, live = churn.captured_bytes, churn.live_bytes()
        result.details = {"written": written, "captured": captured, "kept": kept, "live": live, "stats": drain.stats()}
        drain.close()
        lane.close()
    result.add(report.Row("write amplification", written / captured, "B/B", 1.0, written / captured, "<= 1.10"))
    result.add(report.Row("space", kept / live, "B/B", 1.0, kept / live, "<= 1.15"))
    result.finish()


if __name__ == "__main__":
    main()
