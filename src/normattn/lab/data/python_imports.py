"""Relation data that needs no download: which modules a piece of Python code stands on.

The texts are the running interpreter's own standard library; the label of a piece is each module of
the standard library that its code uses by a name which an import brought in. All import lines are
taken out of the text, so that the label has to be read from how the code looks and what it calls.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from normattn.errors import InputError
from normattn.lab.data.corpora import PythonSource
from normattn.lab.data.relation_files import RelationDocument, RelationSource
from normattn.lab.data.splits import SPLITS, SplitName

FORMAT = 1
"""Raised when the same library would give other documents."""

PIECE_CHARACTERS = 400
"""A piece is as many whole lines of one function as fit: about 90 word pieces, seldom over 128."""

_IMPORT_LINE = re.compile(
    r"^\s*(?:>>>|\.\.\.)?\s*(?:import\s+[A-Za-z_]|from\s+[.\w]+\s+import\b).*$", re.MULTILINE
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Import = ast.Import | ast.ImportFrom
_PUBLIC = frozenset(name for name in sys.stdlib_module_names if not name.startswith("_"))


def python_imports(
    modules: int, split_of: Callable[[str], SplitName], max_bytes: int | None = None
) -> RelationSource:
    """Pieces of the standard library, labelled by the `modules` most used of its modules.

    A piece is at most `PIECE_CHARACTERS` of whole lines of one function or method, without any
    import; its labels are the modules, among those that most training pieces use, whose imported
    names its own lines use (not the package that it is part of). Pieces that use none of them are
    left out, and so is a text that occurred before. The split is by file. Raises `InputError` when
    fewer modules are used.
    """

    @cache
    def corpus() -> tuple[tuple[str, ...], list[RelationDocument]]:
        return _labelled(modules, split_of, max_bytes)

    def fingerprint() -> str:
        rules = (FORMAT, PIECE_CHARACTERS, PythonSource().fingerprint())
        return hashlib.sha256(repr(rules).encode()).hexdigest()

    return RelationSource(lambda: iter(corpus()[1]), lambda: corpus()[0], fingerprint)


def _labelled(
    modules: int, split_of: Callable[[str], SplitName], max_bytes: int | None
) -> tuple[tuple[str, ...], list[RelationDocument]]:
    """The labels, and the pieces with one of them, split by split."""
    pieces: dict[str, RelationDocument] = {}
    for document in PythonSource().documents(max_bytes):
        split = split_of(document.name)
        for piece in pieces_of(document.name, document.text, split):
            pieces.setdefault(piece.text, piece)
    training = (piece for piece in pieces.values() if piece.split == "train")
    counted = Counter(label for piece in training for label in piece.labels)
    if len(counted) < modules:
        raise InputError(
            f"the standard library's code uses {len(counted)} modules in the training split, fewer "
            f"than the {modules} labels asked for; lower data.modules or raise data.max_bytes"
        )
    ranked = sorted(counted, key=lambda name: (-counted[name], name))
    labels = tuple(sorted(ranked[:modules]))
    known = set(labels)
    kept = [
        piece._replace(labels=tuple(label for label in piece.labels if label in known))
        for piece in pieces.values()
        if known.intersection(piece.labels)
    ]
    return labels, sorted(kept, key=lambda piece: SPLITS.index(piece.split))


def pieces_of(name: str, source: str, split: SplitName = "train") -> Iterator[RelationDocument]:
    """The pieces of one file, with every module that each uses; none where it does not parse.

    The package that the file itself belongs to is no label of it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    own = name.partition("/")[0].removesuffix(".py")
    # Cut as Python counts lines: str.splitlines also cuts at form feeds and more.
    lines = list(io.StringIO(source, newline=""))
    outside = list(_outside_functions(tree.body))
    in_file = _imports(outside)
    for function in outside:  # and methods, not those inside a function
        if not isinstance(function, _Function):
            continue
        nodes = list(ast.walk(function))
        imports = _imports(nodes)
        skipped = {line for node in imports for line in range(node.lineno, _end(node) + 1)}
        uses = _uses(nodes, {**_visible(in_file, nodes), **_bound(imports)})
        for first, last in _ranges(lines, function, skipped):
            kept = "".join(lines[i - 1] for i in range(first, last + 1) if i not in skipped)
            text = _IMPORT_LINE.sub("", kept).strip("\n")
            labels = {module for line, module in uses if first <= line <= last} - {own}
            if text.strip():
                place = f"{name}:{first}-{last}"
                yield RelationDocument(split, place, text, tuple(sorted(labels)))


def _outside_functions(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement of a file that is in no function, classes and conditions opened."""
    for node in body:
        yield node
        if isinstance(node, ast.stmt) and not isinstance(node, _Function):
            yield from _outside_functions(ast.iter_child_nodes(node))
        elif isinstance(node, ast.ExceptHandler):
            yield from _outside_functions(node.body)


def _imports(nodes: Iterable[ast.AST]) -> list[_Import]:
    return [node for node in nodes if isinstance(node, _Import)]


def _visible(imports: Iterable[_Import], nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The names that a file's imports bind, less those that a function sets itself."""
    hidden = set()
    for node in nodes:
        if isinstance(node, ast.arg):
            hidden.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            hidden.add(node.id)
    return {name: module for name, module in _bound(imports).items() if name not in hidden}


def _uses(nodes: Iterable[ast.AST], modules: Mapping[str, str]) -> list[tuple[int, str]]:
    """Line and module of every imported name that is read."""
    return [
        (node.lineno, modules[node.id])
        for node in nodes
        if isinstance(node, ast.Name) and node.id in modules
    ]


def _bound(imports: Iterable[_Import]) -> dict[str, str]:
    """The names that imports bind → the public top-level module that each belongs to."""
    bound = {}
    for node in imports:
        for alias in node.names:
            if isinstance(node, ast.Import):
                module, name = alias.name, alias.asname or alias.name.partition(".")[0]
            elif node.level or not node.module:
                continue  # relative: the package's own
            else:
                module, name = node.module, alias.asname or alias.name
            top = module.partition(".")[0]
            if top in _PUBLIC:
                bound[name] = top
    return bound


def _ranges(lines: list[str], function: _Function, skipped: set[int]) -> Iterator[tuple[int, int]]:
    """First and last line of each piece of a function; a single line may be longer."""
    start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    end = _end(function)
    size, first = 0, start
    for number in range(start, end + 1):
        length = 0 if number in skipped else len(lines[number - 1])
        if size and size + length > PIECE_CHARACTERS:
            yield first, number - 1
            size, first = 0, number
        size += length
    yield first, end


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
