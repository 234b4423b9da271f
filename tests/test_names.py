"""Names say what they name: four words that could name anything name nothing here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "normattn"
NOTHING = {"found", "each", "place", "what"}


def bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every variable, argument, field, function and type that a file names, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name, node.lineno


def test_no_name_could_name_anything() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    assert not [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in files
        for name, line in bound(ast.parse(path.read_text()))
        if name.strip("_").lower() in NOTHING
    ]


def test_every_kind_of_name_is_read() -> None:
    tree = ast.parse(
        "class Place:\n"
        "    each: int\n"
        "    def what(self, found):\n"
        "        self._place = WHAT = found\n"
    )
    names = [name.strip("_").lower() for name, _ in bound(tree)]
    assert sorted(names) == ["each", "found", "place", "place", "self", "what", "what"]
