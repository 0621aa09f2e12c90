"""Who may talk to it: loopback needs no key, another address is refused without one, and a key is asked of all."""

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
        listing = [line for line in Path(f"/proc/{system.pid('serve')}/cmdline").read_bytes().split(b"\0") if line]
        assert b"a secret of the test" not in listing
        assert system.stop() == 0
        assert "a secret of the test" not in system.log_path.read_text(), "the key is in the log"
    finally:
        system.close()


def bare(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()
