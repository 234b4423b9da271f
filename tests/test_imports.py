"""No files import each other, directly or around a corner, wherever in a file the import stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import grimp
import pytest


def rings(imports: Mapping[str, Set[str]]) -> Iterator[list[str]]:
    """A shortest way from a module back to itself for each group of modules that form a ring."""
    named: set[str] = set()
    for module in sorted(imports):
        ring = [] if module in named else _way_back(imports, module)
        if ring:
            named.update(ring)
            yield ring


def _way_back(imports: Mapping[str, Set[str]], module: str) -> list[str]:
    ways, reached = [[module]], {module}
    for way in ways:
        for other in sorted(imports[way[-1]]):
            if other == module:
                return [*way, module]
            if other not in reached:
                reached.add(other)
                ways.append([*way, other])
    return []


def test_no_two_files_import_each_other() -> None:
    """Imports for type checking and those inside of functions count too."""
    graph = grimp.build_graph("normattn", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    assert len(imports) > 150
    assert [" → ".join(ring) for ring in rings(imports)] == []


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b", "a"]]),
        (
            {"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": {"b"}},
            [["b", "d", "b"], ["c", "d", "b", "c"]],
        ),
        ({"a": {"a"}, "p": {"p.x"}, "p.x": {"p"}}, [["a", "a"], ["p", "p.x", "p"]]),
    ],
)
def test_rings_are_named(imports: Mapping[str, Set[str]], expected: list[list[str]]) -> None:
    assert list(rings(imports)) == expected
