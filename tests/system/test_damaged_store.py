"""A flipped byte on the disk is a miss with a reason: the answer is right, `verify` names session and range."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np

from bench.driver import System
from tests.system import harness as h
from tests.system.store_count import drained

BLOCK_TOKENS = 32
BAD_BLOCK = 2


def flip_a_byte(store: Path, tokens: list[int]) -> None:
    """Flip the last byte of the stored block that holds exactly these tokens. No process may have the store open."""
    wanted = np.array(tokens, dtype="<i4").tobytes()
    environment = lmdb.open(str(store), max_dbs=16, map_size=1 << 40)
    try:
        blocks = environment.open_db(b"blocks", create=False)
        with environment.begin(db=blocks, write=True) as transaction:
            found = [(key, value) for key, value in transaction.cursor() if wanted in value[:512]]
            assert len(found) == 1, f"{len(found)} blocks hold these tokens"
            key, value = found[0]
            transaction.put(key, value[:-1] + bytes([value[-1] ^ 0x40]))
    finally:
        environment.close()


def verify(system: System) -> tuple[int, dict]:
    command = [str(Path(sys.executable).with_name("concordia")), "verify", "--data-dir", str(system.paths.data_dir)]
    done = subprocess.run([*command, "--json"], check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout)


def test_tiny_flipped_byte_in_a_block_is_recomputed_and_named(tiny: System) -> None:
    draw = random.Random(101)
    prompt = [draw.randrange(3, 512) for _ in range(6 * BLOCK_TOKENS)]
    body = h.completion(tiny, prompt, tokens=16)
    session = {"X-Session-Id": "damaged"}
    want = tiny.stream(h.COMPLETIONS, body, headers=session)
    drained(tiny)
    tiny.kill_all()
    status, findings = verify(tiny)
    assert (status, findings["ok"], findings["findings"]) == (0, True, [])
    start = BAD_BLOCK * BLOCK_TOKENS
    flip_a_byte(tiny.paths.store, prompt[start : start + BLOCK_TOKENS])
    status, findings = verify(tiny)
    assert status == 6, findings
    said = json.dumps(findings["findings"])
    assert "damaged" in said and str(start) in said, said
    tiny.start()
    got = tiny.stream(h.COMPLETIONS, body, headers=session)
    h.assert_same(got, want, "a block on disk was damaged")
    assert start <= h.cached(got) < start + BLOCK_TOKENS, (got.usage, got.concordia)
    assert got.concordia["reason"], got.concordia
