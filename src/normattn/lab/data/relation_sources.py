"""Relation data by address: rows of a folder or of the hub, or the standard library's own code.

A row, in the form of NYT24 and WebNLG, has a `text` and a `triple_list`; the relations of the
triples are the text's labels.
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
from itertools import chain
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import expand_path, parse_json
from normattn.lab.data import hub
from normattn.lab.data.corpora import python_source, rows_of
from normattn.lab.data.sources import (
    SPLITS,
    Address,
    Corpus,
    Document,
    Part,
    SplitName,
    capped,
    file_corpus,
    split_files,
)
from normattn.lab.data.text_files import field_of, read_text, text_of

STARTS: Mapping[SplitName, str] = {
    "train": "train",
    "validation": "dev|validation",
    "test": "test",
}
"""What a split's file may be called, with `_triples` behind it or not."""
LABELS_FILE = "rel2id.json"
_HINT = 'expected {"text": "…", "triple_list": [["subject", "relation", "object"], …]}'


def parse_relations(text: str) -> Corpus:
    """The labelled documents in a folder, or of a data set of the hub (`hf:NAME`), by split.

    The files of a folder are `train_triples.json`, `dev_triples.json` (or validation)
    and `test_triples.json`, with or without `_triples`, `.json`, `.jsonl` or `.parquet`, and the
    names of all labels in `rel2id.json`, which may be absent. Raises `InputError` for a file that
    is missing or ambiguous.
    """
    address = Address.parse(text, "relation corpus")
    if address.body.startswith(hub.PREFIX):
        address.take(*hub.OPTIONS)
        return hub.hub_corpus(address, relation_row, held_out=True)
    address.take()
    folder = expand_path(address.body)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the relation corpus {folder} {state}; expected python-imports, hf:NAME or a folder "
            "with train, dev and test files"
        )
    files = split_files(folder, STARTS, r"(?:_triples)?\.(?:json|jsonl|parquet)")
    for split, start in STARTS.items():
        if split not in files:
            raise InputError(
                f"{folder} has no {split} set: expected {start.partition('|')[0]}_triples.json "
                f"(or {start.replace('|', ', ')}; .jsonl, .parquet)"
            )
    labels = folder / LABELS_FILE
    return file_corpus(
        [Part(path.name, (path,), split) for split, path in files.items()],
        partial(rows_of, relation_row),
        labels=numbered_labels(labels) if labels.exists() else (),
    )


def relation_row(name: str, row: Mapping[str, Any], where: str) -> Document:
    """The document in a row: its `text`, labelled by the relations in its `triple_list`.

    Raises `InputError` that says which field was expected, and which are there.
    """
    text = text_of(row, "text", where, _HINT)
    triples = field_of(row, "triple_list", where, _HINT)
    if not text.strip():
        raise InputError(f"{where}: field 'text' is blank; {_HINT}")
    if not isinstance(triples, list) or not all(map(_is_triple, triples)):
        raise InputError(f"{where}: field 'triple_list' is no list of triples; {_HINT}")
    return Document(name, text, labels=tuple(sorted({relation for _, relation, _ in triples})))


def _is_triple(value: Any) -> bool:
    three = isinstance(value, list | tuple) and len(value) == 3
    return three and isinstance(value[1], str) and value[1] != ""


def numbered_labels(path: Path) -> tuple[str, ...]:
    """The labels of rel2id.json in the order of their numbers.

    It holds [{number: name}, {name: number}], or the second object alone.
    """
    value = parse_json(read_text(path), str(path))
    ids = value[-1] if isinstance(value, list) and value else value
    numbers = list(ids.values()) if isinstance(ids, dict) else []
    if not numbers or any(numbers.count(n) != 1 for n in range(len(numbers))):
        raise InputError(
            f"{path}: expected relations numbered from 0, as "
            '[{"0": "country", …}, {"country": 0, …}]'
        )
    return tuple(sorted(ids, key=ids.__getitem__))


# The standard library's own code.

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
) -> Corpus:
    """Pieces of the standard library, labelled by the `modules` most used of its modules.

    It needs no download. A piece is at most `PIECE_CHARACTERS` of whole lines of one function or
    method, without any import; its labels are the modules, among those that most training pieces
    use, whose imported names its own lines use (not the package that it is part of): they have to
    be read from how the code looks and what it calls. Pieces that use none of them are left out,
    and so is a text that occurred before. `split_of` says which split a file is in, `max_bytes` how
    much of the library is read. Reading raises `InputError` when fewer modules are used.
    """
    library = python_source()

    @cache
    def pieces() -> list[Document]:
        """Every piece that is kept, split by split."""
        found: dict[str, Document] = {}
        for document in library.documents(max_bytes):
            split = split_of(document.name)
            for piece in pieces_of(document.name, document.text):
                found.setdefault(piece.text, replace(piece, split=split))
        training = (piece for piece in found.values() if piece.split == "train")
        counted = Counter(label for piece in training for label in piece.labels)
        if len(counted) < modules:
            raise InputError(
                f"the standard library's code uses {len(counted)} modules in the training split, "
                f"fewer than the {modules} labels asked for; lower data.modules or raise "
                "data.max_bytes"
            )
        known = set(sorted(counted, key=lambda name: (-counted[name], name))[:modules])
        kept = [
            replace(piece, labels=tuple(label for label in piece.labels if label in known))
            for piece in found.values()
            if known.intersection(piece.labels)
        ]
        return sorted(kept, key=lambda piece: SPLITS.index(piece.split or "train"))

    return Corpus(
        lambda limit=None: capped(pieces(), limit),
        lambda: f"{FORMAT} {PIECE_CHARACTERS} {library.fingerprint()}",
    )


def pieces_of(name: str, source: str) -> Iterator[Document]:
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
    in_file = _bound(outside)
    for function in outside:  # and methods, not those inside a function
        if not isinstance(function, _Function):
            continue
        nodes = list(ast.walk(function))
        imports = [node for node in nodes if isinstance(node, _Import)]
        spans = [range(node.lineno, (node.end_lineno or 0) + 1) for node in imports]
        skipped = set(chain.from_iterable(spans))
        # A name that the function sets itself hides what the file imports under it.
        hidden = {node.arg for node in nodes if isinstance(node, ast.arg)}
        names = [node for node in nodes if isinstance(node, ast.Name)]
        hidden |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        seen = {name: module for name, module in in_file.items() if name not in hidden}
        seen |= _bound(imports)
        uses = [(node.lineno, seen[node.id]) for node in names if node.id in seen]
        for first, last in _ranges(lines, function, skipped):
            kept = "".join(lines[i - 1] for i in range(first, last + 1) if i not in skipped)
            text = _IMPORT_LINE.sub("", kept).strip("\n")
            labels = {module for line, module in uses if first <= line <= last} - {own}
            if text.strip():
                place = f"{name}:{first}-{last}"
                yield Document(place, text, labels=tuple(sorted(labels)))


def _outside_functions(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement of a file that is in no function, classes and conditions opened."""
    for node in body:
        yield node
        if isinstance(node, ast.stmt) and not isinstance(node, _Function):
            yield from _outside_functions(ast.iter_child_nodes(node))
        elif isinstance(node, ast.ExceptHandler):
            yield from _outside_functions(node.body)


def _bound(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The names that imports bind → the public top-level module that each belongs to."""
    bound = {}
    for node in nodes:
        if not isinstance(node, _Import):
            continue
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
    size, first = 0, start
    last = function.end_lineno or start
    for number in range(start, last + 1):
        length = 0 if number in skipped else len(lines[number - 1])
        if size and size + length > PIECE_CHARACTERS:
            yield first, number - 1
            size, first = 0, number
        size += length
    yield first, last
