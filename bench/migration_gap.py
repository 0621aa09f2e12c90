"""How long does a stream stand still when it moves to another engine?

Question  Live migration in mid-answer: the client's wait for the first token of the target, by length of context.
Regime    Demo model, one stream, two engines on one machine, greedy; prompt of seeded random token ids; the move is asked for after the
          eighth token; median of several moves, to and fro. Every process is real.
Baseline  An ordinary wait for a token of the same answer.
Unit      ms; ratio is ours / one token. Wanted at 7k: at most one token time plus 20 ms.
Seed      --seed
"""

from __future__ import annotations

import random
import threading
from typing import Any

from bench import moving, report
from bench.driver import System, request, system
from bench.sse import Answer

LENGTHS = (256, 1024, 4096, 7168)
QUICK_LENGTHS = (256, 7168)
MOVE_AFTER_TOKENS = 8
ANSWER_TOKENS = 64


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    rows = report.Report("migration_gap", options)
    settings = {"engine": {"threads": options.threads}}
    with system(options.model, name="migration", engines=2, settings=settings) as running:
        for length in lengths:
            body = request(report.random_tokens(draw, length), ANSWER_TOKENS)
            running.stream("/v1/completions", body, timeout_s=300.0)
            found = [one_move(running, body) for _ in range(4 if options.quick else 8)]
            rows.details[str(length)] = found
            gap, token = (report.median([move[key] for move in found]) for key in ("gap_ms", "token_ms"))
            note = f"gateway's view {report.median([move['downtime_ms'] for move in found]):.0f} ms"
            wanted = "value <= baseline + 20" if length == LENGTHS[-1] else ""
            rows.add(report.Row(report.length_name(length), gap, "ms", token, gap / token, wanted, note))
    rows.finish()


def one_move(running: System, body: dict[str, Any]) -> dict[str, float]:
    running.wait_ready()
    movers: list[threading.Thread] = []

    def move(answer: Answer) -> None:
        source = running.serving_engine(answer.stream_id).id
        target = next(engine.id for engine in running.ready_engines() if engine.id != source)
        path = f"/admin/streams/{answer.stream_id}/migrate"
        movers.append(threading.Thread(target=running.call, args=("POST", path, {"engine": target})))
        movers[0].start()

    ready = moving.once_when(lambda seen: len(seen.tokens) >= MOVE_AFTER_TOKENS, move)
    answer = running.stream("/v1/completions", body, watch=ready)
    movers[0].join()
    migration = moving.only(answer, "migrations")
    gap = moving.gap_before_ms(answer, migration["position"] - len(body["prompt"]))
    return {"gap_ms": gap, "token_ms": moving.token_ms(answer), "downtime_ms": migration["downtime_ms"]}


if __name__ == "__main__":
    main()
