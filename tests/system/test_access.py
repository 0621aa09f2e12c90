"""Who may talk to it: another address is refused without a key, a key is asked of all, and tenants with keys share nothing."""

from __future__ import annotations

import http.client
import subprocess
import sys
from pathlib import Path

from bench.driver import System
from bench.ports import free_port
from tests.system import harness as h


def serve_at(host: str, model: Path, data_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("concordia")), "serve", "--host", host, "--port", str(free_port())]
    command += ["--data-dir", str(data_dir), "--model", str(model), "--device", "cpu"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_another_address_without_a_key_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    done = serve_at("0.0.0.0", tiny_model, tmp_path / "data")
    assert done.returncode != 0
    assert "key" in done.stderr + done.stdout


def test_every_request_must_carry_the_key(guarded: System) -> None:
    assert guarded.call("POST", h.CHAT, h.chat(guarded, "x", tokens=4))[0] == 200
    for path, method in [
        ("/v1/models", "GET"),
        ("/v1/sessions", "GET"),
        ("/admin/engines", "GET"),
        (h.CHAT, "POST"),
    ]:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": guarded.api_key}):
            status, text = bare(guarded.port, method, path, header)
            assert status == 401, (method, path, header, status)
            assert "error" in text
    listing = [line for line in Path(f"/proc/{guarded.pid('serve')}/cmdline").read_bytes().split(b"\0") if line]
    assert not any(h.SECRET.encode() in line for line in listing)


def test_tenants_share_nothing(guarded: System) -> None:
    """Equal prompts under one session name: each tenant computes its own, and finds its own again. `cached_tokens` tells of no other."""
    body = h.completion(guarded, h.words(seed=91, count=100), tokens=4)
    seen = []
    for name in ("the test", "acme", "zeta", "the test", "acme", "zeta"):
        headers = {"Authorization": f"Bearer {h.SECRET} {name}", "X-Session-Id": "same"}
        status, _, answer = guarded.call("POST", h.COMPLETIONS, body, headers=headers)
        assert status == 200, answer
        usage = answer["usage"]
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert seen[:3] == [0, 0, 0] and min(seen[3:]) >= usage["prompt_tokens"] - 40, seen
    sessions = {row["id"]: row["turns"] for row in guarded.get("/admin/sessions")["data"] if "same" in row["id"]}
    assert sessions == {"same": 2, "acme~same": 2, "zeta~same": 2}
    assert bare(guarded.port, "GET", "/metrics", {"Authorization": f"Bearer {h.SECRET} acme"})[0] == 403


def bare(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()
