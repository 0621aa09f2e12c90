"""A tokenizer, silence in the log, and a directory in memory for journals."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from gateway.tokenizer import TextCodec, load_tokenizer
from tests.gateway.conftest import byte_tokenizer


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("codec")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.fixture
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture
def journals() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory) / "journal"
