"""What the documents name is there: flags, files, functions, sections, tests, events, metrics. What the code has of them is documented."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import msgspec
import pytest

import gateway
from engine.messages import EngineStats
from gateway import durability, metrics
from ops import cli, config, flags
from tests.ops.test_cli import COMMANDS
from tiers import keeper, values

ROOT = Path(cli.__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
PACKAGES = ("engine", "gateway", "ops", "tiers")
MADE_BY_RUNS = ("bench/results/",)
EVENT = r"[a-z_]+\.[a-z_]+"


def test_every_flag_is_documented() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    options = {
        flag: name
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option)
        for flag in option.opts
        if flag.startswith("--")
    }
    missing = {flag: name for flag, name in options.items() if not re.search(rf"{flag}(?![\w-])", text)}
    assert not missing


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("serve", "config")])
def test_every_command_and_its_own_flags_stand_together(name: str) -> None:
    """In the table of commands or in its section; flags that most commands share stand once."""
    command = name.split()[0]
    rows = "".join(re.findall(rf"^\| `{command}\b.*\n|^\|[^|]*`{command}\b.*\n", OPERATIONS, re.MULTILINE))
    parts = re.split(r"^(#+ .*)$", OPERATIONS, flags=re.MULTILINE)
    sections = "".join(
        text
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
        if re.search(rf"\b{command.rstrip('e')}", head)
    )
    shared = {"--data-dir", "--lane-dir", "--config", "--url", "--port", "--api-key", "--api-key-file", "--json"}
    own = {
        flag for option in COMMANDS[name].params if isinstance(option, click.Option) for flag in option.opts
        if flag.startswith("--") and flag not in shared | {"--model", "--model-cache"}
    }  # fmt: skip
    assert rows
    assert not [flag for flag in own if not re.search(rf"{flag}(?![\w-])", rows + sections)]


def test_commands_that_pages_show_can_be_given() -> None:
    shown = re.findall(r"^ {4}\$ concordia (.+)$", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)
    assert len(shown) > 10
    for line in shown:
        name, *words = shlex.split(line)
        if name == "sessions":
            name = f"{name} {words.pop(0)}"
        COMMANDS[name].make_parser(click.Context(COMMANDS[name])).parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_settings_are_taken_and_those_in_python_compile(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for number, example in enumerate(re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)):
        key_file = tmp_path / "acme.key"
        key_file.write_text("a key of theirs\n")
        file = tmp_path / f"{number}.toml"
        file.write_text(example.replace("/etc/concordia/acme.key", str(key_file)))
        config.load({"data_dir": str(tmp_path)}, config_file=file, environment={})
    for example in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        compile(example, str(page), "exec")


def test_every_request_to_the_keeper_and_every_database_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "log-format.md").read_text()
    assert sorted(re.findall(r'^\| `\{"op": "(\w+)"', text, re.MULTILINE)) == sorted(keeper.OPS)
    table = text.split("| database | key | value |\n")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(d.decode() for d in values.DATABASES)


def test_every_bench_is_listed_with_its_question() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_text())) or "" for file in ROOT.glob("bench/*.py")}
    asked = {name: doc.splitlines()[0] for name, doc in docs.items() if "\nQuestion " in doc}
    assert len(asked) > 20
    assert dict(re.findall(r"^\| `(\w+)` \| (.*\?) \|$", text, re.MULTILINE)) == asked


def test_every_exit_code_is_documented() -> None:
    table = re.search(r"\| exit code \|.*\n\|.*\n((?:\|.*\n)+)", OPERATIONS)
    assert table is not None
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table[1], re.MULTILINE)] == sorted(flags.EXITS)


def test_every_degraded_state_is_documented_and_no_other() -> None:
    section = OPERATIONS.split("\n## Degraded\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(durability.HINTS)
    [row] = re.findall(r"^\| `concordia_degraded` .*$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert not [state for state in durability.HINTS if f"`{state}`" not in row]


def test_every_metric_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"`(concordia_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    kinds = {"counter": "_total"}
    ours = {family.name + kinds.get(family.type, "") for family in metrics.registry.collect()}
    engines = {f"concordia_engine_{name}" for name, value in msgspec.to_builtins(EngineStats()).items() if value != ""}
    assert documented == ours | engines | {"concordia_engine_up"}


def test_every_warning_that_is_logged_is_documented() -> None:
    """And every error: whoever meets one in the log finds what it means."""
    documented = set(re.findall(rf"`({EVENT})`", "\n".join(page.read_text() for page in PAGES)))
    logged = {event for level, event in events() if level in ("warning", "error", "exception")}
    assert len(logged) > 80
    assert not sorted(logged - documented)


def test_events_that_the_table_names_are_logged() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", OPERATIONS.split("\n## Log\n")[1], re.MULTILINE)
    named = {event for row in rows for event in re.findall(rf"`({EVENT})`", row)}
    source = "\n".join(text for text in sources().values())
    made = {event for event in named if f'"{event}"' in source}
    stems = tuple(re.findall(r'f"([a-z_]+\.[a-z_]*)\{', source)), tuple(re.findall(r'\}(\.[a-z_]+)"', source))
    assert not sorted(event for event in named - made if not (event.startswith(stems[0]) or event.endswith(stems[1])))


def test_every_row_of_the_failure_model_names_its_test() -> None:
    table = (ROOT / "docs" / "failure-model.md").read_text().split("| held by |\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[1:]]
    assert len(rows) > 50
    assert not [row[0] for row in rows if not re.search(r"test_\w+|tests/simulation|make soak", row[-1])]


def test_what_code_cites_is_there() -> None:
    """Documents, their sections and files of ours, in docstrings and comments."""
    missing = []
    for file, text in sources().items():
        for page, quoted in re.findall(r'(docs/[\w/-]+\.md)((?:(?:,| and)? "[^"\n]+")*)', text):
            if not (ROOT / page).exists():
                missing.append((file, page))
                continue
            headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            missing += [(file, page, section) for section in re.findall(r'"(.+?)"', quoted) if section not in headings]
        named = re.findall(r"(?<![\w/.-])((?:engine|gateway|tiers|ops|bench|tests)/[\w/-]+\.(?:py|cuh?|md|sh))", text)
        missing += [(file, path) for path in named if not (ROOT / path).exists()]
        missing += [(file, page) for page in re.findall(r"(?<![\w/])[A-Z]+\.md", text) if not (ROOT / page).exists()]
    assert not missing


def test_functions_on_the_path_of_a_token_are_there() -> None:
    """`file.py` `function` or `Class.method`, as the page names them."""
    text = (ROOT / "docs" / "path-of-a-token.md").read_text()
    pairs = [
        (file, name)
        for file, names in re.findall(r"`(\w+/[\w/]+\.py)`((?:,? `[A-Za-z_][\w.]*`)+)", text)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    assert len(pairs) > 30
    assert not [(file, name) for file, name in pairs if name not in definitions(ROOT / file)]


def test_every_route_is_documented() -> None:
    source = Path(gateway.__file__).with_name("app.py").read_text()
    routes = {re.sub(r"\{(\w+)[^}]*\}", "{", route) for route in re.findall(r'web\.\w+\("(/[^"]*)"', source)}
    documented = re.sub(r"\{\w+\}", "{", (ROOT / "docs" / "api.md").read_text())
    assert len(routes) > 20
    assert not [route for route in routes if f"{route}`" not in documented]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_sections_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    links = [
        link for link in re.findall(r"\]\(([^)\s]+)\)", text) if re.search(r"\.md|^#|/", link) and "://" not in link
    ]
    for link in links:
        file, _, section = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not section or section in sections(target), link
    for path in re.findall(r"`((?:tests|engine|gateway|tiers|ops|bench|docs)/[\w/.-]*)`", text):
        assert (ROOT / path).exists() or path.startswith(MADE_BY_RUNS), path
    tests = "\n".join(file.read_text() for file in ROOT.glob("tests/**/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list(ROOT.glob(f"tests/**/{name}")), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """A row that a blank line parts from its table is shown as text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert re.match(r"\|.*\|\n\|[-:| ]+\|\n", table), table


def sections(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def sources() -> dict[str, str]:
    """Text of every module, by its path."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def events() -> Iterator[tuple[str, str]]:
    """(level, event) of every call of a module's `log` whose event is written out."""
    for text in sources().values():
        yield from re.findall(rf'\blog\.(\w+)\(\s*"({EVENT})"', text)


@cache
def definitions(file: Path) -> set[str]:
    """Functions and classes of a module, and methods as Class.method."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found
