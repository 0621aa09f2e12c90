"""The command line as a user meets it: help, exit codes, JSON on stdout, one line for an error.

A small HTTP server stands in for the gateway.
"""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import gateway
from bench.ports import free_port
from engine import pid_file
from engine.status_page import StatusPage
from ops import cli, config, listening, running, serve, show
from ops.client import for_commands
from ops.errors import AlreadyRunning, ConfigError, OpsError
from ops.models import Model
from ops.processes import FileLock
from tiers.paths import Paths


def leaves(group: click.Group = cli.main, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield before + name, command


COMMANDS = dict(leaves())
DOCUMENTED = (
    *(
        "serve",
        "pull",
        "status",
        "config",
        "demo",
        "verify",
        "inspect",
        "recover",
        "repair",
        "export",
        "import",
        "backup",
    ),
    *("restore", "compact", "gc", "stats", "doctor", "migrate", "drain", "upgrade"),
    *(f"sessions {name}" for name in ("ls", "show", "fork", "park", "pin", "unpin", "rm")),
)
DESTRUCTIVE = ("repair", "import", "restore", "compact", "gc", "sessions rm")


def concordia(*arguments: str, **environment: str) -> Result:
    clean = {name: None for name in os.environ if name.startswith("CONCORDIA_")}
    return CliRunner().invoke(cli.main, list(arguments), env={**clean, **environment})


def test_every_command_has_help_that_ends_with_its_exit_codes() -> None:
    assert set(DOCUMENTED) <= set(COMMANDS)
    for command in ("", "sessions", *COMMANDS):
        result = concordia(*command.split(), "--help")
        assert result.exit_code == 0 and "Usage: " in result.stdout, command
        codes = result.stdout.partition("Exit codes:")[2].split("\n")[1:]
        assert [line.split()[0] for line in codes if line.strip()][:3] == ["0", "1", "2"], command
    for command in ("verify", "inspect", "repair", "import", "restore", "backup"):
        assert "6  damage was found" in concordia(command, "--help").stdout


def test_every_command_has_json_and_what_takes_away_has_yes_and_dry_run() -> None:
    flags = {name: {flag for option in command.params for flag in option.opts} for name, command in COMMANDS.items()}
    assert [name for name in flags if "--json" not in flags[name]] == ["serve"]
    assert [name for name in DESTRUCTIVE if not {"--yes", "--dry-run"} <= flags[name]] == []


def test_wrong_usage_exits_with_2(tmp_path: Path) -> None:
    assert concordia("serve", "--nonsense").exit_code == 2
    assert concordia("serve", "--port", "abc", "--data-dir", str(tmp_path)).exit_code == 2


def test_a_missing_argument_is_asked_for_with_where_to_find_one() -> None:
    for name, command in COMMANDS.items():
        wanted = [option for option in command.params if isinstance(option, click.Argument) and option.required]
        if wanted:
            result = concordia(*name.split())
            assert result.exit_code == 2 and f"`concordia {name} " in result.stderr, (name, result.stderr)
            assert f"which {wanted[0].human_readable_name.lower()}" in result.stderr, (name, result.stderr)
    assert "`concordia migrate SESSION ENGINE`; `concordia sessions ls` lists" in concordia("migrate").stderr


def test_errors_are_one_line_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "concordia.toml").write_text("[gateway]\nprot = 1")
    result = concordia("config", "--data-dir", str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"concordia: {tmp_path}/concordia.toml: unknown key gateway.prot; did you mean gateway.port?"
    ]


def test_a_command_works_with_every_standard_stream_closed(tmp_path: Path) -> None:
    """The file that it opens next is none that things are printed into."""
    program = (
        "import os, sys; [os.close(n) for n in range(3)]; sys.stdin = sys.stdout = sys.stderr = None\n"
        "from ops.cli import main; main(['config', '--data-dir', sys.argv[1]], standalone_mode=False)\n"
        "print('printed'); os.write(2, b'said')\n"
        "sys.exit(10 + os.open(sys.argv[1] + '/file', os.O_RDWR | os.O_CREAT))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode > 12 and (tmp_path / "file").read_bytes() == b""


def test_config_shows_value_and_source(tmp_path: Path) -> None:
    result = concordia("config", "--json", "--data-dir", str(tmp_path), "--port", "9001", CONCORDIA_ENGINE_SLOTS="3")
    shown = json.loads(result.stdout)
    assert shown["gateway.port"] == {"value": 9001, "source": "flag --port", "environment": "CONCORDIA_GATEWAY_PORT"}
    assert shown["engine.slots"]["source"] == "environment CONCORDIA_ENGINE_SLOTS"
    table = concordia("config", "--data-dir", str(tmp_path), "--port", "9001").stdout
    assert "gateway.port" in table
    assert "flag --port" in table


def test_config_shows_what_is_left_to_the_machine(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "data"))
    shown = json.loads(concordia("config", "--json", *where).stdout)
    budget, disk = shown["tiers.disk_budget_bytes"], os.statvfs(tmp_path)
    assert budget["value"] == 0 and 0 < budget["resolved"] <= disk.f_bavail * disk.f_frsize
    assert shown["engine.threads"]["resolved"] >= 1 and "resolved" not in shown["gateway.port"]
    assert "(now " in concordia("config", *where).stdout
    given = json.loads(concordia("config", "--json", *where, CONCORDIA_TIERS_DISK_BUDGET_BYTES="5G").stdout)
    assert given["tiers.disk_budget_bytes"]["value"] == 5 * 10**9
    assert "resolved" not in given["tiers.disk_budget_bytes"]


def test_config_shows_what_a_running_serve_was_given(tmp_path: Path) -> None:
    data, lanes = tmp_path / "data", tmp_path / "lanes"
    data.mkdir()
    flags = {"data_dir": str(data), "lane_dir": str(lanes), "gateway.port": 9009, "gateway.api_key": "secret"}
    served = config.load({**flags, "engine.threads": 3, "engine.deterministic": True}, environment={})
    lock = FileLock(served.paths.serve_lock).take("served")
    for unreadable in ("{", "[]", '{"gateway.port": "automatic"}'):  # torn, or another version's
        served.paths.serve_settings.write_text(unreadable)
        assert concordia("config", "--data-dir", str(data)).exit_code == 0
    running.note(served)
    result = concordia("config", "--data-dir", str(data))
    assert "8080 (now 9009)" in result.stdout and "runs on this data directory" in result.stdout
    assert f"lanes and sockets: {lanes}" in result.stdout
    shown = json.loads(concordia("config", "--json", "--data-dir", str(data), "--engines", "4").stdout)
    now = {key: row["resolved"] for key, row in shown.items() if "resolved" in row}
    assert now.pop("tiers.disk_budget_bytes") > 0
    assert now == {
        "lane_dir": str(lanes),
        "gateway.port": 9009,
        "gateway.api_key": "(set)",
        "engine.threads": 3,
        "engine.deterministic": True,
        "host.engines": 2,
    }
    lock.release()
    assert "9009" not in concordia("config", "--data-dir", str(data)).stdout, "what a killed one left"


def test_unknown_model_exits_with_3(tmp_path: Path) -> None:
    result = concordia("pull", "nosuch", "--model-cache", str(tmp_path))
    assert result.exit_code == 3
    assert "known: smollm2" in result.stderr


def test_pull_of_what_is_there_says_where(tmp_path: Path) -> None:
    directory = tmp_path / "smollm2"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text("{}")
    result = concordia("pull", "smollm2", "--model-cache", str(tmp_path), "--json")
    assert json.loads(result.stdout) == {"model": "smollm2", "directory": str(directory), "pulled": False}
    assert concordia("pull", "--if-missing", "smollm2", "--model-cache", str(tmp_path)).stdout == ""


def test_status_without_a_gateway_shows_what_is_on_disk(tmp_path: Path) -> None:
    paths = Paths.at(tmp_path / "data", tmp_path / "lanes").make()
    StatusPage.create(paths.status("e0"), 3).set_state("ready")
    pid_file.write(paths.pid_file("e0"), pid=os.getpid(), incarnation=3)
    paths.pid_file("gateway").write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1, "incarnation": 1}))
    paths.lane("e0").write_bytes(b"x" * 8192)
    places = ("--data-dir", str(paths.data_dir), "--lane-dir", str(paths.lane_dir), "--port", str(free_port()))
    result = concordia("status", "--json", *places)
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["gateway"]) == (4, "down")
    states = {row["name"]: (row["state"], row["incarnation"]) for row in shown["processes"]}
    assert states == {"e0": ("ready", 3), "gateway": ("dead", 1)}
    assert [row["name"] for row in shown["lanes"]] == ["e0"]
    table = concordia("status", *places)
    assert "ready" in table.stdout
    assert "concordia serve" in table.stderr


class Gateway(BaseHTTPRequestHandler):
    """Answers as the gateway would, and remembers what was asked."""

    asked: list[tuple[str, str, str | None]] = []
    statuses: dict[str, int] = {}
    answers: dict[str, Any] = {
        "/admin/engines": [{"id": "e0", "pid": 7, "state": "ready", "device": "cpu", "stats": {}}],
        "/v1/sessions?all=true": {"object": "list", "data": [{"id": "a b", "tokens": 12}]},
        "/v1/sessions/a%20b": {"id": "a b", "tokens": 12, "turns": 1, "forgotten": True, "streams": ["s1"]},
        "/v1/sessions/a%20b/park": {"slots": 1, "durable": 11},
        "/v1/sessions/a%20b/fork": {"id": "c", "tokens": 7},
    }

    def answer(self) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization")))
        known = self.answers.get(self.path)
        status = self.statuses.get(self.path, 200 if known is not None else 404)
        said = known if status == 200 or "error" in list(known or ()) else {"error": {"message": "no such session"}}
        body = known if isinstance(known, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Gateway.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_sessions_are_listed_shown_parked_and_removed(url: str) -> None:
    assert json.loads(concordia("sessions", "ls", "--json", "--url", url).stdout)["data"][0]["id"] == "a b"
    assert "a b" in concordia("sessions", "ls", "--url", url).stdout
    assert "s1" in concordia("sessions", "show", "a b", "--url", url).stdout
    assert concordia("sessions", "park", "a b", "--url", url).stdout == "a b is parked, 11 tokens on disk\n"
    forked = concordia("sessions", "fork", "a b", "--name", "c", "--position", "7", "--url", url)
    assert forked.stdout == "c begins with 7 tokens of a b\n"
    assert concordia("sessions", "rm", "a b", "--url", url).exit_code == 5, "nobody can be asked"
    assert concordia("sessions", "rm", "a b", "--url", url, "--dry-run").exit_code == 0
    assert all(method == "GET" for method, path, _ in Gateway.asked if "park" not in path and "fork" not in path), (
        "nothing was deleted"
    )
    assert concordia("sessions", "rm", "a b", "--url", url, "--api-key", "k", "--yes").exit_code == 0
    assert Gateway.asked[-1] == ("DELETE", "/v1/sessions/a%20b", "Bearer k")


def test_what_the_gateway_says_is_passed_on(url: str) -> None:
    result = concordia("sessions", "show", "none", "--url", url)
    assert result.exit_code == 1
    assert result.stderr == "concordia: no such session\n"


@pytest.mark.parametrize("status", [200, 401, 404])
def test_another_program_at_the_port_is_no_gateway(
    url: str, tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Gateway.answers, "/admin/engines", b"<html>")
    monkeypatch.setitem(Gateway.statuses, "/admin/engines", status)
    where = ("--data-dir", str(tmp_path), "--lane-dir", str(tmp_path / "lanes"))
    result = concordia("drain", "e0", "--url", url, *where)
    assert result.exit_code == 4 and len(result.stderr.splitlines()) == 1, result.stderr
    assert concordia("recover", "--url", url, *where).exit_code == 0, "it needs none"


def test_this_machines_gateway_is_not_looked_for_by_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)
    result = concordia("sessions", "ls", "--json", "--url", url, http_proxy="http://127.0.0.1:1", no_proxy="")
    assert json.loads(result.stdout)["data"][0]["id"] == "a b"


def test_what_the_gateway_says_names_commands(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"message": "there is no session 'none'", "code": "session_not_found"}
    monkeypatch.setitem(Gateway.answers, "/v1/sessions/none", {"error": said})
    monkeypatch.setitem(Gateway.statuses, "/v1/sessions/none", 404)
    result = concordia("sessions", "show", "none", "--url", url)
    assert result.stderr == "concordia: there is no session 'none'; `concordia sessions ls` lists them\n"
    assert for_commands("position: must be at least 1") == "--position: must be at least 1"
    assert for_commands("session_id: expected 1 to 128 letters").startswith("a session's name is 1 to")
    told = {m for m in gateway_messages() if "/admin/" in m or "/v1/sessions" in m}
    assert any("/admin/engines" in message for message in told)
    for message in map(for_commands, told):
        assert "concordia" in message and "/admin/" not in message and "/v1/" not in message, message


def gateway_messages() -> set[str]:
    """Every piece of text that the gateway may put into a message: constants that are more than a path or a name."""
    found = set()
    for file in Path(gateway.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        docs = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        found |= {value for value in values if isinstance(value, str) and " " in value and value not in docs}
    return found


@pytest.mark.parametrize("command", [["migrate", "a b"], ["drain"]])
def test_commands_about_an_engine_say_which_there_are(command: list[str], url: str) -> None:
    result = concordia(*command, "--url", url)
    assert result.exit_code == 2
    assert (
        "Usage: " in result.stderr and f"`concordia {' '.join(command)} ENGINE`; there are e0 (ready)" in result.stderr
    )
    unknown = concordia(*command, "e9", "--url", url)
    assert unknown.exit_code == 1
    assert "there is no engine 'e9'; there are e0 (ready). `concordia status`" in unknown.stderr
    nobody = concordia(*command, "--port", str(free_port()))
    assert nobody.exit_code == 2 and "`concordia status` lists them" in nobody.stderr


@pytest.mark.parametrize(("status", "code"), [(409, 5), (400, 2), (404, 1)])
def test_what_the_gateway_refuses_has_its_exit_code(
    url: str, monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    monkeypatch.setitem(Gateway.statuses, "/v1/sessions/busy/park", status)
    assert concordia("sessions", "park", "busy", "--url", url).exit_code == code


def test_status_shows_what_the_gateway_says(url: str, tmp_path: Path) -> None:
    result = concordia("status", "--json", "--url", url, "--data-dir", str(tmp_path))
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["gateway"], shown["engines"][0]["id"]) == (0, "up", "e0")


def test_status_without_the_key_shows_what_runs_and_that_a_key_is_needed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths.at(tmp_path / "data", tmp_path / "lanes").make()
    pid_file.write(paths.pid_file("serve"), pid=os.getpid())
    paths.lane("e0").write_bytes(b"x" * 8192)
    monkeypatch.setitem(Gateway.statuses, "/admin/engines", 401)
    places = ("--url", url, "--data-dir", str(paths.data_dir), "--lane-dir", str(paths.lane_dir))
    result = concordia("status", *places)
    assert result.exit_code == 1 and "running" in result.stdout and "e0" in result.stdout
    assert result.stderr == "concordia: the gateway wants an API key: --api-key, CONCORDIA_API_KEY or api_key_file\n"
    assert json.loads(concordia("status", "--json", *places).stdout)["gateway"] == "locked"


def test_status_shows_the_directory_that_the_gateway_serves(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Gateway.answers["/admin/engines"]
    served = {"data": rows, "data_dir": str(tmp_path / "served"), "lane_dir": str(tmp_path / "lanes")}
    degraded = {"state": "disk_full", "reason": "the disk is full", "hint": "free some", "engine": ""}
    monkeypatch.setitem(Gateway.answers, "/admin/engines", served)
    monkeypatch.setitem(
        Gateway.answers, "/admin/sessions", {"data": [], "degraded": [degraded], "keeper": {"up": True}}
    )
    shown = json.loads(concordia("status", "--json", "--url", url, "--data-dir", str(tmp_path / "other")).stdout)
    assert shown["data_dir"] == str(tmp_path / "served")
    assert shown["degraded"] == [degraded]
    said = concordia("status", "--url", url, "--data-dir", str(tmp_path / "other")).stdout
    assert "not on this machine" in said and "disk_full" in said
    refused = concordia("export", "chat", "--url", url, "--data-dir", str(tmp_path / "other"))
    assert refused.exit_code == 5, "a session of another installation isn't meant"


def test_a_refused_serve_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = concordia("serve", "--data-dir", str(tmp_path / "new"), "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 5
    assert not (tmp_path / "new").exists()
    assert not Paths.at(tmp_path / "new").lane_dir.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lane-dir", "/dev/shm/" + "x" * 90), "is too long"),
        (("--device", "cuda:9"), "engine.device is cuda:9"),
        (("--host", "192.0.2.1", "--api-key", "x"), "choose another with --host"),
        (("--host", "no host", "--api-key", "x"), "choose another with --host"),
    ],
)
def test_what_can_never_serve_is_refused_before_anything_is_made(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = concordia("serve", "--data-dir", str(tmp_path / "new"), "--port", str(free_port()), *flags)
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()
    assert not Path("/dev/shm", "x" * 90).exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(OpsError, match="/proc/nobodys: .*--data-dir"):
        serve.serve(
            config.load({"data_dir": "/proc/nobodys", "gateway.port": free_port()}, environment={}), tmp_path, "x"
        )


@pytest.mark.parametrize("host", ["a" * 70, "a\udc80", "nowhere.invalid"], ids=["long", "no text", "unknown"])
def test_a_host_that_is_none_is_said_at_once(host: str) -> None:
    with pytest.raises(ConfigError, match="is no address of this machine"):
        listening.check_port(host, 8080)


def test_a_taken_port_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AlreadyRunning, match="choose another with --port"):
            listening.check_port("127.0.0.1", taken.getsockname()[1])


def test_of_two_that_begin_to_serve_at_once_one_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bind, port = listening.bind, free_port()
    (rival,) = bind("127.0.0.1", port)

    def overtaken(*given: Any) -> list[socket.socket]:
        bound = bind(*given)
        rival.listen()
        return bound

    monkeypatch.setattr(listening, "bind", overtaken)
    with pytest.raises(AlreadyRunning, match="choose another with --port"):
        listening.listen("127.0.0.1", port)
    rival.close()


def test_a_second_serve_is_told_who_holds_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        FileLock(tmp_path / "serve.lock").take("on a full disk").release()
    lock = FileLock(tmp_path / "serve.lock").take("served already")
    with pytest.raises(AlreadyRunning, match=f"served already \\(pid {os.getpid()}"):
        FileLock(tmp_path / "serve.lock").take("served already")
    lock.release()
    FileLock(tmp_path / "serve.lock").take("served already").release()


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["verify", "--limit-mb-s", "fast"],
        ["export"],
        ["import"],
        ["backup"],
        ["restore", "--nonsense"],
        ["compact", "--settle-s", "soon"],
        ["gc", "all"],
        ["sessions", "pin"],
        ["sessions", "rm", "--yes"],
        ["doctor", "now"],
    ],
)
def test_bad_input_is_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    result = concordia(*arguments, "--data-dir", str(tmp_path / "none"))
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert "Usage: " in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["recover"], 5),
        (["repair"], 5),
        (["compact"], 5),
        (["gc"], 5),
        (["stats"], 5),
        (["sessions", "pin", "x"], 5),
        (["export", "x"], 5),
        (["backup", "TARGET"], 5),
        (["import", "TARGET"], 1),
        (["restore", "TARGET"], 1),
        (["verify"], 5),
        (["verify", "TARGET"], 1),
        (["inspect", "x"], 5),
        (["sessions", "ls"], 4),
        (["sessions", "show", "x"], 4),
        (["sessions", "park", "x"], 4),
        (["sessions", "rm", "x", "--yes"], 4),
        (["status"], 4),
    ],
)
def test_nothing_there_is_said_and_nothing_is_made(arguments: list[str], code: int, tmp_path: Path) -> None:
    given = [str(tmp_path / "target") if part == "TARGET" else part for part in arguments]
    result = concordia(*given, "--data-dir", str(tmp_path / "none"), *_ports(arguments))
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert result.stderr.startswith("concordia: ")
    if code == 5:
        assert "--data-dir" in result.stderr
    if code == 4:
        assert "answers at http://127.0.0.1:" in result.stderr
    assert not (tmp_path / "none").exists()


def _ports(arguments: list[str]) -> list[str]:
    return [] if arguments[0] == "verify" else ["--port", str(free_port())]


@pytest.mark.parametrize("files", [("chat_template.jinja", "tokenizer.json"), ("tokenizer.json",), ()])
def test_the_welcome_shows_what_the_model_answers(files: tuple[str, ...], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    found = config.load({"model": str(tmp_path)}, environment={})
    curl, python = show.examples("http://x", found, Model(tmp_path, "its-name"))
    compile(python, "welcome", "exec")
    body = json.loads(curl[curl.index("-d '") + 4 : -1])
    assert body["model"] == "its-name" and 'model="its-name"' in python
    if len(files) == 2:
        assert ("/v1/chat/completions" in curl, "chat.completions.create" in python, "messages" in body) == (True,) * 3
        return
    assert "/v1/completions" in curl and "client.completions.create" in python
    assert isinstance(body["prompt"], str if files else list)


def test_what_a_terminal_shows_to_try_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found, model = config.load({"model": str(tmp_path)}, environment={}), Model(tmp_path, "a-name-" * 12)
    narrow = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    monkeypatch.setattr(show, "console", narrow)
    show.print_welcome("http://x", found, model, seconds=1.0)
    shown = re.sub(r"\x1b\[[\d;]*m", "", narrow.file.getvalue())  # type: ignore[attr-defined]
    for code in show.examples("http://x", found, model):
        assert code in shown


@pytest.mark.process
def test_no_process_that_serves_imports_what_only_commands_print_with() -> None:
    program = "import sys, gateway.app, ops.host, tiers.keeper, engine.nursery; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
