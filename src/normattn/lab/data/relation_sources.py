"""Relation data by address: rows of a folder or of the hub, or the standard library's own code.

A row, in the form of NYT24 and WebNLG, has a `text` and a `triple_list`; the relations of the
triples are the text's labels.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from normattn.errors import InputError
from normattn.io import parse_json, sha256_of
from normattn.lab.data.corpora import PythonSource
from normattn.lab.data.sources import HubRows
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import read_rows, read_text

STEMS: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "valid", "validation", "val"),
    "test": ("test",),
}
"""What a split's file may be called, with `_triples` behind it or not."""
_SUFFIXES = (".json", ".jsonl", ".parquet")
LABELS_FILE = "rel2id.json"
_FORM = '{"text": "…", "triple_list": [["subject", "relation", "object"], …]}'


class _Triple(NamedTuple):
    subject: Any
    relation: Annotated[str, Field(min_length=1)]
    object: Any


class _Row(NamedTuple):
    text: Annotated[str, Field(pattern=r"\S")]
    triple_list: list[_Triple]


_ROW = TypeAdapter(_Row)
_LABELS = TypeAdapter(dict[str, int])


class RelationDocument(NamedTuple):
    """One text, its split, its name (unique inside its corpus) and its sorted labels."""

    split: SplitName
    name: str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class RelationSource:
    """Labelled documents that can be read again.

    `read` streams them split by split. `labels` are all that a document may have, in the order of
    the outputs; one that no training document has can only be missed, and still counts.
    `fingerprint` changes with the documents. Each raises `InputError` for damaged data.
    """

    read: Callable[[], Iterator[RelationDocument]]
    labels: Callable[[], tuple[str, ...]]
    fingerprint: Callable[[], str]
    notes: Callable[[], tuple[str, ...]] = tuple


def folder_source(folder: Path) -> RelationSource:
    """The three splits in `folder`, and its labels.

    The files are `train_triples.json`, `dev_triples.json` (or valid, validation, val) and
    `test_triples.json`, with or without `_triples`, `.json`, `.jsonl` or `.parquet`. The labels
    are those of rel2id.json in the order of their numbers, and without that file every relation
    that occurs in any split, sorted. Raises `InputError` for a file that is missing or ambiguous,
    and as it is read for one that is damaged or has a relation that rel2id.json does not list.
    """
    files, listed = _split_files(folder), folder / LABELS_FILE

    def read() -> Iterator[RelationDocument]:
        for split, path in files.items():
            yield from read_relations(path, split)

    @cache
    def labels() -> tuple[str, ...]:
        occurring = _occurring(read())
        if not listed.exists():
            return occurring
        known = read_labels(listed)
        for relation in occurring:
            if relation not in known:
                raise InputError(f"{listed} does not list the relation {relation!r}, which occurs")
        return known

    def fingerprint() -> str:
        paths = [*files.values(), *([listed] if listed.exists() else [])]
        parts = "".join(f"{path.name}\0{sha256_of(path)}" for path in paths)
        return hashlib.sha256(parts.encode()).hexdigest()

    return RelationSource(read, labels, fingerprint)


def hub_source(hub: HubRows) -> RelationSource:
    """The splits train, validation and test of a data set of the hub, with every relation in it."""
    if hub.split is not None:
        raise InputError(f"corpus '{hub.address}': relations are read from all splits; no ?split=")

    def read() -> Iterator[RelationDocument]:
        for split in SPLITS:
            rows = enumerate(hub.rows(split))
            yield from _documents(rows, split, f"corpus '{hub.address}', {split} row ", split)

    labels = cache(lambda: _occurring(read()))
    return RelationSource(read, labels, hub.fingerprint, hub.notes)


def _occurring(documents: Iterable[RelationDocument]) -> tuple[str, ...]:
    """Every relation, sorted; `InputError` where the train split has none."""
    occurring: set[str] = set()
    trained = False
    for document in documents:
        occurring.update(document.labels)
        trained |= document.split == "train" and bool(document.labels)
    if not trained:
        raise InputError("no document of the train split has a relation")
    return tuple(sorted(occurring))


def read_relations(path: Path, split: SplitName = "train") -> Iterator[RelationDocument]:
    """Read the documents of a `.json` file (one array), JSON lines or Parquet.

    Each has a `text` and a `triple_list` of [subject, relation, object]; its labels are the
    relations in that list. Documents are called `FILE:17`, by line, or by item of the array from
    1. Raises `InputError` naming file, place and what was expected.
    """
    return _documents(read_rows(path), split, f"{path}:", path.name)


def _documents(
    rows: Iterable[tuple[int, dict[str, Any]]], split: SplitName, where: str, name: str
) -> Iterator[RelationDocument]:
    number = None
    for number, row in rows:
        try:
            text, triples = _ROW.validate_python((row.get("text"), row.get("triple_list")))
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            raise InputError(f"{where}{number}{place}: {first['msg']}; expected {_FORM}") from error
        labels = tuple(sorted({triple.relation for triple in triples}))
        yield RelationDocument(split, f"{name}:{number}", text, labels)
    if number is None:
        raise InputError(f"{where} there is no document: expected objects {_FORM}")


def _split_files(folder: Path) -> dict[SplitName, Path]:
    """Find the one file of each split; `InputError` where there is none or more than one."""
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the relation corpus {folder} {state}; expected python-imports, hf:NAME or a folder "
            "with train, dev and test files"
        )
    files: dict[SplitName, Path] = {}
    for split, stems in STEMS.items():
        names = [f"{s}{e}{x}" for s in stems for e in ("_triples", "") for x in _SUFFIXES]
        paths = [folder / name for name in names if (folder / name).is_file()]
        if len(paths) != 1:
            holds = " and ".join(path.name for path in paths) or "none"
            raise InputError(
                f"{folder} needs one file of the {split} split, called {names[0]} or another of "
                f"{', '.join(names[1:])}; it has {holds}"
            )
        files[split] = paths[0]
    return files


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the labels of a rel2id.json: [{number: name}, {name: number}], or the second object."""
    value = parse_json(read_text(path), str(path))
    try:
        ids = _LABELS.validate_python(value[-1] if isinstance(value, list) else value, strict=True)
        if not ids or sorted(ids.values()) != list(range(len(ids))):
            raise ValueError("the numbers are not 0, 1, …")
    except (ValueError, IndexError) as error:
        raise InputError(
            f"{path}: expected relations numbered from 0, as "
            '[{"0": "country", …}, {"country": 0, …}]'
        ) from error
    return tuple(sorted(ids, key=lambda name: ids[name]))


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
) -> RelationSource:
    """Pieces of the standard library, labelled by the `modules` most used of its modules.

    It needs no download. A piece is at most `PIECE_CHARACTERS` of whole lines of one function or
    method, without any import; its labels are the modules, among those that most training pieces
    use, whose imported names its own lines use (not the package that it is part of): they have to
    be read from how the code looks and what it calls. Pieces that use none of them are left out,
    and so is a text that occurred before. The split is by file. Raises `InputError` when fewer
    modules are used.
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
    known = set(ranked[:modules])
    kept = [
        piece._replace(labels=tuple(label for label in piece.labels if label in known))
        for piece in pieces.values()
        if known.intersection(piece.labels)
    ]
    return tuple(sorted(known)), sorted(kept, key=lambda piece: SPLITS.index(piece.split))


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
    in_file = _bound(outside)
    for function in outside:  # and methods, not those inside a function
        if not isinstance(function, _Function):
            continue
        nodes = list(ast.walk(function))
        imports = [node for node in nodes if isinstance(node, _Import)]
        skipped = {line for node in imports for line in range(node.lineno, _end(node) + 1)}
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
                yield RelationDocument(split, place, text, tuple(sorted(labels)))


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
