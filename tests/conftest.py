"""Tests keep their tokens to themselves, and check shapes and types."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shape_checks

shape_checks.install()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NORMATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
