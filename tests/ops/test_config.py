"""The configuration: which layer wins, where a value came from, what is refused and how it is said."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ops import cli, config, document
from ops.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path


def load(data_dir: Path, toml: str = "", environment: dict[str, str] | None = None, **flags: Any) -> config.Config:
    (data_dir / "concordia.toml").write_text(toml)
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return config.load({"data_dir": str(data_dir), **given}, environment=environment or {})


def refused(data_dir: Path, toml: str = "", environment: dict[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(data_dir, toml, environment, **flags)
    return str(caught.value)


def test_each_layer_beats_the_one_before(data_dir: Path) -> None:
    toml = "[gateway]\nport = 1001\nspares = 3\n[engine]\nslots = 5"
    environment = {"CONCORDIA_GATEWAY_PORT": "1002", "CONCORDIA_ENGINE_SLOTS": "6"}
    found = load(data_dir, toml, environment, gateway__port="1003")
    assert (found.gateway.port, found.engine.slots, found.gateway.spares, found.host.engines) == (1003, 6, 3, 2)


def test_every_value_remembers_where_it_came_from(data_dir: Path) -> None:
    found = load(data_dir, "[gateway]\nspares = 3", {"CONCORDIA_ENGINE_SLOTS": "6"}, gateway__port=1003)
    assert found.sources["gateway.port"] == "flag --port"
    assert found.sources["engine.slots"] == "environment CONCORDIA_ENGINE_SLOTS"
    assert found.sources["gateway.spares"] == f"file {data_dir / 'concordia.toml'}"
    assert found.sources["host.engines"] == "default"
    assert set(found.sources) == set(config.all_keys())


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[gateway]\nprot = 1", "unknown key gateway.prot; did you mean gateway.port?"),
        ("modle = 'x'", "unknown key modle; did you mean model?"),
        ("[gatway]\nport = 1", "unknown key gatway; did you mean gateway?"),
        ("[gateway]\nport = 'x'", "gateway.port must be a whole number, not 'x'"),
        ("[gateway]\nport = true", "gateway.port must be a whole number, not True"),
        ("[gateway]\nport = 70000", "gateway.port = 70000 is not a port: at most 65535"),
        ("[host]\nsilent_limit_s = 0.2", "host.silent_limit_s = 0.2 is too small: heartbeats come twice a second"),
        ('[gateway]\napi_key = "sécret"', "gateway.api_key has what no HTTP header carries"),
        ('[tenants.acme]\napi_key = "secret\\r"', "tenants.acme.api_key has what no HTTP header carries"),
        ("[host]\nengines = 0", "host.engines = 0 is too small: at least 1"),
        ("[engine]\ncapture = 'maybe'", "engine.capture must be true or false, not 'maybe'"),
        (
            "[engine]\ndtype = 'int8'",
            "engine.dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', not 'int8'",
        ),
        (f"[tiers]\nlane_bytes = '{'9' * 400}'", "tiers.lane_bytes must be a whole number"),
        ("[gateway]\ndrain_s = nan", "gateway.drain_s must be a number, not nan"),
        ("[engine]\ndevice = 'tpu'", "engine.device = 'tpu' is not a device: expected auto, cpu, cuda or cuda:N"),
        ("gateway = 3", "gateway is a section; write [gateway] and its keys below"),
        ("[gateway", "not TOML"),
        ("data_dir = '/x'", "this file was found by data_dir, so it can't set it"),
    ],
)
def test_a_bad_file_is_refused_by_name(data_dir: Path, toml: str, said: str) -> None:
    message = refused(data_dir, toml)
    assert said in message and "cret" not in message
    assert str(data_dir / "concordia.toml") in message


def test_an_unknown_variable_is_refused_with_the_nearest(data_dir: Path) -> None:
    message = refused(data_dir, environment={"CONCORDIA_GATEWAY_PROT": "1"})
    assert "CONCORDIA_GATEWAY_PROT" in message
    assert "did you mean CONCORDIA_GATEWAY_PORT?" in message
    assert "did you mean CONCORDIA_GATEWAY_PORT?" in refused(data_dir, environment={"CONCORDIA_PROT": "1"})
    message = refused(data_dir, environment={"CONCORDIA_FOO": "1"})
    assert "did you mean" not in message and "docs/configuration.md lists all" in message


def test_a_wrong_flag_is_refused_by_name(data_dir: Path) -> None:
    assert "flag --port: gateway.port must be a whole number, not 'abc'" in refused(data_dir, gateway__port="abc")


def test_variables_for_tests_and_of_others_are_left_alone(data_dir: Path) -> None:
    load(data_dir, environment={"CONCORDIA_TEST_SEED": "1", "CONCORDIA_URL": "http://x", "PATH": "/bin"})


def test_sizes_may_have_units(data_dir: Path) -> None:
    found = load(data_dir, "[tiers]\nlane_bytes = '64MiB'", {"CONCORDIA_GATEWAY_MAX_BODY_BYTES": "2k"})
    assert (found.tiers.lane_bytes, found.gateway.max_body_bytes) == (64 << 20, 2000)


def test_booleans_and_numbers_are_read_from_text(data_dir: Path) -> None:
    found = load(data_dir, environment={"CONCORDIA_ENGINE_CAPTURE": "off", "CONCORDIA_GATEWAY_KEEPALIVE_S": "2.5"})
    assert (found.engine.capture, found.gateway.keepalive_s) == (False, 2.5)


def test_api_key_from_file_environment_and_flag(data_dir: Path) -> None:
    key_file = data_dir / "key"
    key_file.write_text("from-file\nsecond line\n")
    toml = f"api_key_file = '{key_file}'"
    from_file = load(data_dir, toml)
    assert (from_file.gateway.api_key, from_file.sources["gateway.api_key"]) == ("from-file", f"file {key_file}")
    assert load(data_dir, toml, {"CONCORDIA_API_KEY": "env"}).gateway.api_key == "env"
    assert load(data_dir, toml, {"CONCORDIA_API_KEY": "env"}, gateway__api_key="flag").gateway.api_key == "flag"


def test_a_missing_or_empty_key_file_is_refused(data_dir: Path) -> None:
    assert "can't be read" in refused(data_dir, "api_key_file = '/nowhere/key'")
    (data_dir / "key").write_text("\n")
    assert "is empty" in refused(data_dir, f"api_key_file = '{data_dir / 'key'}'")


def test_other_addresses_need_an_api_key(data_dir: Path) -> None:
    assert "no API key is set" in refused(data_dir, gateway__host="0.0.0.0")
    assert load(data_dir, gateway__host="0.0.0.0", gateway__api_key="k").gateway.host == "0.0.0.0"
    assert load(data_dir, gateway__host="::1").gateway.host == "::1"


def test_a_data_directory_that_is_a_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("")
    for data_dir, said in ((file, "it is a file; name a directory"), (file / "data", f"{file} is a file; name a")):
        with pytest.raises(ConfigError, match=f"flag --data-dir: {data_dir} can't be the data directory: {said}"):
            config.load({"data_dir": str(data_dir)}, environment={})


def test_a_named_file_must_be_there_and_may_set_the_data_dir(data_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        config.load(config_file=data_dir / "none.toml", environment={})
    named = data_dir / "named.toml"
    named.write_text(f"data_dir = '{data_dir}/elsewhere'")
    assert config.load(config_file=named, environment={}).data_dir == data_dir / "elsewhere"


def test_secrets_are_shown_only_as_set(data_dir: Path) -> None:
    found = load(data_dir, gateway__api_key="hush")
    shown = json.loads(config.as_json(found))
    assert shown["gateway.api_key"]["value"] == "(set)"
    assert "hush" not in config.as_json(found)
    assert "hush" not in json.dumps(found.host_json(Path("/m"), "m")), "only the gateway gets the key"


def test_threads_are_shared_out_among_engines(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert load(data_dir, host__engines=2).engine_json(Path("/m"), "m")["engine"]["threads"] == 4
    assert load(data_dir, host__engines=20).engine_json(Path("/m"), "m")["engine"]["threads"] == 1
    assert load(data_dir, engine__threads=3).engine_json(Path("/m"), "m")["engine"]["threads"] == 3


def test_config_is_frozen(data_dir: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(data_dir).model = "x"  # type: ignore[misc]


def test_every_key_and_variable_is_documented() -> None:
    text = DOCS.read_text()
    for key in config.all_keys():
        assert re.search(rf"`{re.escape(key)}`", text), f"docs/configuration.md does not mention {key}"
        assert f"`{config.environment_name(key)}`" in text, (
            f"docs/configuration.md does not mention {config.environment_name(key)}"
        )


def test_every_key_has_a_meaning_and_the_tables_are_true() -> None:
    assert not re.findall(r"^\| `[\w.]+` \|.*\|  *\|$", document.tables(), re.MULTILINE), (
        "describe it in its settings class"
    )
    text = DOCS.read_text()
    assert text == document.written(text), "run .venv/bin/python -m ops.document"


def test_every_flag_is_documented() -> None:
    text = DOCS.read_text()
    for option in cli.main.commands["serve"].params:
        for flag in option.opts:
            assert f"`{flag}`" in text, f"docs/configuration.md does not mention {flag}"


def test_budgets_of_single_tenants_come_from_tables(data_dir: Path) -> None:
    toml = """
[tiers]
tenant_lane_bytes = "64MiB"
[tenants.acme]
disk_bytes = "10G"
memory_bytes = 0
[tenants."a.b c"]
lane_bytes = 1000
"""
    found = load(data_dir, toml)
    limits = [
        found.tiers.tenant_limit(name, kind)
        for name in ("acme", "a.b c", "other")
        for kind in ("disk", "lane", "memory")
    ]
    assert limits == [10**10, 64 << 20, 0, 0, 1000, 0, 0, 64 << 20, 0]
    assert found.values()["tenants.acme.disk_bytes"] == 10**10
    assert found.sources["tenants.a.b c.lane_bytes"].startswith("file ")
    shown = json.loads(config.as_json(found))["tenants.acme.memory_bytes"]
    assert shown["value"] == 0 and shown["environment"] is None
    assert found.host_json(data_dir, "m")["tiers"]["tenants"]["acme"]["disk_bytes"] == 10**10


def test_keys_of_tenants_reach_the_gateway_alone_and_are_never_shown(data_dir: Path) -> None:
    (data_dir / "key").write_text("from-file\n")
    toml = f"""
[gateway]
host = "0.0.0.0"
[tenants.acme]
api_key = "hush"
disk_bytes = 5
[tenants.zeta]
api_key_file = "{data_dir / "key"}"
[tenants.none]
disk_bytes = 1
"""
    found = load(data_dir, toml)
    assert {name: row.api_key for name, row in found.gateway.tenants.items()} == {
        "acme": "hush",
        "zeta": "from-file",
        "none": "",
    }
    assert found.gateway_json(data_dir, "m")["gateway"]["tenants"]["zeta"]["api_key"] == "from-file"
    shown = json.loads(config.as_json(found))
    assert [shown[f"tenants.{name}.api_key"]["value"] for name in ("acme", "zeta")] == ["(set)", "(set)"]
    assert shown["tenants.zeta.api_key"]["source"] == f"file {data_dir / 'key'}"
    assert shown["tenants.acme.disk_bytes"]["value"] == 5 and "tenants.none.api_key" not in shown
    for text in (config.as_json(found), json.dumps(found.host_json(data_dir, "m"))):
        assert "hush" not in text and "from-file" not in text
    assert found.tiers.tenant_limit("acme", "disk") == 5


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[tenants.a]\ndisc_bytes = 1", "unknown key tenants.a.disc_bytes; did you mean disk_bytes?"),
        ("[tenants.a]\ndisk_bytes = 'x'", "tenants.a.disk_bytes must be a whole number"),
        ("[tenants.a]\ndisk_bytes = -1", "too small"),
        ("[tenants.a]\napi_key = 17", "tenants.a.api_key must be text, not what is given"),
        ("[tenants.default]\napi_key = 'k'", "set gateway.api_key"),
        ("[tenants.'a b']\napi_key = 'k'", "needs another name"),
        ("[tenants.a]\napi_key = 'k'\n[tenants.b]\napi_key = 'k'", "the key of tenants.a.api_key too"),
        ("[gateway]\napi_key = 'k'\n[tenants.b]\napi_key = 'k'", "the key of gateway.api_key too"),
        ("[tenants.a]\napi_key_file = '/nowhere/key'", "tenants.a.api_key_file /nowhere/key can't be read"),
        ("[tenants]\na = 1", "write [tenants.NAME]"),
        ("tenants = 1", "write [tenants.NAME]"),
        ("[tenant.a]\nx = 1", "did you mean tenants?"),
    ],
)
def test_tables_of_tenants_that_make_no_sense_are_refused(data_dir: Path, toml: str, said: str) -> None:
    assert said in refused(data_dir, toml)
