"""Who may talk to it: another address is refused without a key, a key is asked of all, and tenants with keys share nothing."""

from __future__ import annotations

import http.client
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.driver import System, free_port
from tests.system import harness as h


def serve_at(host: str, model: Path, data_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("concordia")), "serve", "--host", host, "--port", str(free_port())]
    command += ["--data-dir", str(data_dir), "--model", str(model), "--device", "cpu"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_another_address_without_a_key_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    done = serve_at("0.0.0.0", tiny_model, tmp_path / "data")
    assert done.returncode != 0
    assert "key" in done.stderr + done.stdout


def test_every_request_must_carry_the_key(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "gateway": {"host": "0.0.0.0"},
        "engine": h.ONE_THREAD,
        "tiers": h.SMALL_LANES,
    }
    settings |= {f"tenants.{name}": {"api_key": f"a secret of {name}"} for name in ("acme", "zeta")}
    system = System(tiny_model, tmp_path / "data", engines=1, settings=settings, api_key="a secret of the test")
    try:
        system.start()
        body = h.chat(system, "x", tokens=4)
        assert system.call("POST", h.CHAT, body)[0] == 200
        for path, method in [
            ("/v1/models", "GET"),
            ("/v1/sessions", "GET"),
            ("/admin/engines", "GET"),
            (h.CHAT, "POST"),
        ]:
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "a secret of the test"}):
                status, text = bare(system.port, method, path, header)
                assert status == 401, (method, path, header, status)
                assert "error" in text
        share_nothing(system)
        listing = [line for line in Path(f"/proc/{system.pid('serve')}/cmdline").read_bytes().split(b"\0") if line]
        assert not any(b"a secret of" in line for line in listing)
        assert system.stop() == 0
        assert "a secret of" not in system.log_path.read_text(), "a key is in the log"
    finally:
        system.close()


def share_nothing(system: System) -> None:
    """Equal prompts under one session name: each tenant computes its own, and finds its own again. `cached_tokens` tells of no other."""
    body = h.completion(system, h.words(seed=91, count=100), tokens=4)
    seen = []
    for name in ("the test", "acme", "zeta", "the test", "acme", "zeta"):
        headers = {"Authorization": f"Bearer a secret of {name}", "X-Session-Id": "same"}
        status, _, answer = system.call("POST", h.COMPLETIONS, body, headers=headers)
        assert status == 200, answer
        usage = answer["usage"]
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert seen[:3] == [0, 0, 0] and min(seen[3:]) >= usage["prompt_tokens"] - 40, seen
    sessions = {row["id"]: row["turns"] for row in system.get("/admin/sessions")["data"]}
    assert sessions == {"same": 2, "acme~same": 2, "zeta~same": 2}
    assert bare(system.port, "GET", "/metrics", {"Authorization": "Bearer a secret of acme"})[0] == 403


def bare(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()
