from __future__ import annotations

from tests.tiers.conftest import world  # noqa: F401
