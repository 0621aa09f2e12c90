"""What the documents name is there: flags, files, sections, tests. What the code has of flags and routes is documented."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import gateway
from ops import cli
from tests.ops.test_cli import COMMANDS

ROOT = Path(cli.__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
MADE_BY_RUNS = ("bench/results/",)


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
