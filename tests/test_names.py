"""Names say what they name: four words that could name anything name nothing here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "normattn"
NOTHING = {"found", "each", "place", "what"}


def bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every variable and argument of a file, with its line; fields of classes are none."""
    fields = {
        id(line.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in fields
        ):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_no_name_could_name_anything() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    assert not [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in files
        for name, line in bound(ast.parse(path.read_text()))
        if name in NOTHING
    ]
