"""Corpora of labelled documents: rows of a folder or the hub, or the standard library's code.

A row, as in NYT24 and WebNLG, has a `text` and a `triple_list`, whose relations are its labels.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import expand_path, parse_json
from normattn.lab.data.corpora import HUB, HUB_OPTIONS, hub_corpus, python_source, rows_of
from normattn.lab.data.sources import (
    SPLITS,
    Corpus,
    Document,
    FileGroup,
    SplitName,
    check_options,
    file_corpus,
    limit_bytes,
    parse_address,
    split_files,
)
from normattn.lab.data.text_files import field_of, read_text, text_of

_PATTERNS: dict[SplitName, str] = {"train": "train", "validation": "dev|validation", "test": "test"}
_HINT = 'expected {"text": "…", "triple_list": [["subject", "relation", "object"], …]}'


def parse_relations(text: str) -> Corpus:
    """Return the labelled documents of a folder or of a data set of the hub (`hf:NAME`).

    A folder has `train_triples.json`, `dev_triples.json` (or validation) and `test_triples.json`,
    with or without `_triples`, as `.json`, `.jsonl` or `.parquet`. `rel2id.json` may list the
    labels. Raises `InputError` for a file that is missing or ambiguous.
    """
    body, options = parse_address(text, "relation corpus")
    if body.startswith(HUB):
        check_options(body, options, *HUB_OPTIONS)
        return hub_corpus(text, relation_row, held_out=True)
    check_options(body, options)
    folder = expand_path(body)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the relation corpus {folder} {state}; expected python-imports, hf:NAME or a folder "
            "with train, dev and test files"
        )
    files = split_files(folder, _PATTERNS, r"(?:_triples)?\.(?:json|jsonl|parquet)")
    for split, pattern in _PATTERNS.items():
        if split not in files:
            raise InputError(
                f"{folder} has no {split} set: expected {pattern.partition('|')[0]}_triples.json "
                f"(or {pattern.replace('|', ', ')}; .jsonl, .parquet)"
            )
    groups = [FileGroup(path.name, (path,), split) for split, path in files.items()]
    listed = folder / "rel2id.json"
    labels = numbered_labels(listed) if listed.exists() else ()
    return file_corpus(groups, partial(rows_of, relation_row), labels=labels)


def relation_row(name: str, row: Mapping[str, Any], where: str) -> Document:
    """Return the `text` of a row, labelled with `triple_list`'s relations; else `InputError`."""
    text = text_of(row, "text", where, _HINT)
    triples = field_of(row, "triple_list", where, _HINT)
    if not text.strip():
        raise InputError(f"{where}: field 'text' is blank; {_HINT}")
    if not isinstance(triples, list) or not all(
        isinstance(value, list | tuple)
        and len(value) == 3
        and isinstance(value[1], str)
        and value[1]
        for value in triples
    ):
        raise InputError(f"{where}: field 'triple_list' is no list of triples; {_HINT}")
    return Document(name, text, labels=tuple(sorted({relation for _, relation, _ in triples})))


def numbered_labels(path: Path) -> tuple[str, ...]:
    """Return the labels in [{number: name}, {name: number}], or in the second object alone."""
    value = parse_json(read_text(path), str(path))
    ids = value[-1] if isinstance(value, list) and value else value
    numbers = list(ids.values()) if isinstance(ids, dict) else []
    if not numbers or any(numbers.count(n) != 1 for n in range(len(numbers))):
        raise InputError(
            f"{path}: expected relations numbered from 0, as "
            '[{"0": "country", …}, {"country": 0, …}]'
        )
    return tuple(sorted(ids, key=ids.__getitem__))


# The standard library's code.

FORMAT = 1
"""Increased when the same library would give other documents."""
PIECE_CHARACTERS = 400
"""Longest piece, in whole lines of one function: about 90 word pieces, seldom over 128."""
_IMPORT_LINE = re.compile(
    r"^\s*(?:>>>|\.\.\.)?\s*(?:import\s+[A-Za-z_]|from\s+[.\w]+\s+import\b).*$", re.MULTILINE
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PUBLIC = frozenset(name for name in sys.stdlib_module_names if not name.startswith("_"))


def python_imports(
    modules: int, split_of: Callable[[str], SplitName], max_bytes: int | None = None
) -> Corpus:
    """Return pieces of the standard library, labelled with the modules that they use.

    Needs no download. A piece is up to `PIECE_CHARACTERS` of whole lines of one function or method,
    without imports. Its labels are the modules whose imported names its lines use, other than its
    own package. Only the `modules` most frequent in training pieces are labels, so they must be
    inferred from what the code calls. Pieces without labels and repeated texts are dropped.
    `split_of` returns the split of a file; `max_bytes` limits how much of the library is read.
    Reading raises `InputError` if fewer modules are used.
    """
    library = python_source()

    @cache
    def pieces() -> list[Document]:
        unique: dict[str, Document] = {}
        for document in library.documents(max_bytes):
            split = split_of(document.name)
            for piece in pieces_of(document.name, document.text):
                unique.setdefault(piece.text, replace(piece, split=split))
        training = (piece for piece in unique.values() if piece.split == "train")
        counts = Counter(label for piece in training for label in piece.labels)
        if len(counts) < modules:
            raise InputError(
                f"the standard library's code uses {len(counts)} modules in the training split, "
                f"fewer than the {modules} labels asked for; lower data.modules or raise "
                "data.max_bytes"
            )
        frequent = set(sorted(counts, key=lambda name: (-counts[name], name))[:modules])
        labelled = [
            replace(piece, labels=tuple(label for label in piece.labels if label in frequent))
            for piece in unique.values()
            if frequent.intersection(piece.labels)
        ]
        return sorted(labelled, key=lambda piece: SPLITS.index(piece.split or "train"))

    return Corpus(
        lambda limit=None: limit_bytes(pieces(), limit),
        lambda: f"{FORMAT} {PIECE_CHARACTERS} {library.fingerprint()}",
    )


def pieces_of(name: str, source: str) -> Iterator[Document]:
    """Yield the pieces of a file that parses, labelled with all modules they use but its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    package = name.partition("/")[0].removesuffix(".py")
    # Python's line count: str.splitlines also cuts at form feeds and more.
    lines = list(io.StringIO(source, newline=""))
    statements = list(_outside_functions(tree.body))
    file_imports = _imported_names(statements)
    for function in statements:  # and methods, but no nested functions
        if not isinstance(function, _Function):
            continue
        nodes = list(ast.walk(function))
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        import_lines = {n for i in imports for n in range(i.lineno, (i.end_lineno or 0) + 1)}
        # Names that the function assigns shadow those that the file imports.
        assigned = {node.arg for node in nodes if isinstance(node, ast.arg)}
        names = [node for node in nodes if isinstance(node, ast.Name)]
        assigned |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        imported = {k: module for k, module in file_imports.items() if k not in assigned}
        imported |= _imported_names(imports)
        uses = [(node.lineno, imported[node.id]) for node in names if node.id in imported]
        for first, last in _piece_ranges(lines, function, import_lines):
            code = "".join(lines[i - 1] for i in range(first, last + 1) if i not in import_lines)
            text = _IMPORT_LINE.sub("", code).strip("\n")
            labels = {module for line, module in uses if first <= line <= last} - {package}
            if text.strip():
                yield Document(f"{name}:{first}-{last}", text, labels=tuple(sorted(labels)))


def _outside_functions(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield every statement outside functions, also inside classes and conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.stmt) and not isinstance(node, _Function):
            yield from _outside_functions(ast.iter_child_nodes(node))
        elif isinstance(node, ast.ExceptHandler):
            yield from _outside_functions(node.body)


def _imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Map the names that imports bind to their public top-level modules."""
    bound = []
    for node in nodes:
        if isinstance(node, ast.Import):
            bound += [(a.asname or a.name.partition(".")[0], a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound += [(a.asname or a.name, node.module) for a in node.names]
    return {name: top for name, module in bound if (top := module.partition(".")[0]) in _PUBLIC}


def _piece_ranges(
    lines: list[str], function: _Function, import_lines: set[int]
) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each piece of a function. One line may be too long."""
    start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    size, first = 0, start
    last = function.end_lineno or start
    for number in range(start, last + 1):
        length = 0 if number in import_lines else len(lines[number - 1])
        if size and size + length > PIECE_CHARACTERS:
            yield first, number - 1
            size, first = 0, number
        size += length
    yield first, last
