"""Tests keep their tokens to themselves; `--thorough` runs more of them and checks more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jaxtyping import install_import_hook


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--thorough` for what a release needs and a change does not: about twenty minutes more."""
    parser.addoption("--thorough", action="store_true", help="run the tests marked thorough too")


def pytest_configure(config: pytest.Config) -> None:
    """With `--thorough` every call of the library is checked against its shapes and types."""
    if config.getoption("--thorough"):
        install_import_hook("normattn", "beartype.beartype")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--thorough` the tests of that mark are skipped."""
    for item in [] if config.getoption("--thorough") else items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="runs with --thorough"))


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NORMATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
