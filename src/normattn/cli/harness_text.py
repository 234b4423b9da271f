"""Held-out text for the tasks of lm-evaluation-harness, in the tokens of the model that is asked.

Windows are made as `normattn evaluate` makes them and handed on as text, because that is what the
harness speaks; the model makes tokens of it again.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from normattn.errors import InputError
from normattn.io import expanded
from normattn.lab.data import DataConfig
from normattn.lab.data.corpora import Document, parse_corpus
from normattn.lab.data.retrieval import DEPTHS, retrieval_set
from normattn.lab.data.splits import split_of
from normattn.lab.data.token_data import TokenData, TokenSplit
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser
from normattn.lab.data.windows import last_segment_sets

LENGTHS = (512, 1024, 2048)
_BATCH = 64


@dataclass(frozen=True)
class TaskSettings:
    """What `--metadata` can say.

    - `lengths`: tokens of the texts (default 512, 1024, 2048).
    - `samples`: texts of each length (default 20), of retrieval at each of five depths.
    - `segment`: tokens that `last-segment` scores (default: half the shortest length).
    - `text`: python-source (default), a file or a folder; a run's own corpus where there is a run.
    - `join`: put the documents together, for texts longer than any of them (default False).
    - `seed`: decides what is drawn (default 0).
    - `tokenizer`: whose tokens are counted (default: those of `run` or `pretrained`).
    """

    lengths: tuple[int, ...] = LENGTHS
    samples: int = 20
    segment: int | None = None
    text: str | None = None
    join: bool = False
    seed: int = 0
    tokenizer: str | None = None

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> TaskSettings:
        """Ours among what the harness hands to a task: model arguments are there too."""
        names = tuple(TaskSettings.__dataclass_fields__)
        for key in metadata:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
            if near and key not in names:
                raise InputError(f"metadata has no {key!r}: did you mean {near[0]!r}?")
        given = {name: metadata[name] for name in names if metadata.get(name) is not None}
        if "lengths" in given:
            given["lengths"] = _lengths(given["lengths"])
        for name, least in (("samples", 1), ("segment", 1), ("seed", 0)):
            value = given.get(name, least)
            if not _whole(value) or value < least:
                raise InputError(
                    f"metadata {name} is {value!r}; expected a number of at least {least}"
                )
        if not isinstance(given.get("join", False), bool):
            raise InputError(f"metadata join is {given['join']!r}; expected true or false")
        return TaskSettings(**given)


def _lengths(given: object) -> tuple[int, ...]:
    values = (
        tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    )
    if not values or not all(_whole(length) and length > 1 for length in values):
        raise InputError(f"metadata lengths is {given!r}; expected numbers of tokens, [512,1024]")
    return tuple(sorted(set(values)))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def retrieval_documents(task: str, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Texts with facts in them: `context`, then answers and further questions in `pieces`.

    `pieces` begins with an answer; answers and questions alternate.
    """
    settings = TaskSettings.of(metadata)
    data = _data(metadata, settings)
    assert data.tokeniser is not None
    documents = []
    for length in settings.lengths:
        windows = settings.samples * len(DEPTHS)
        made = retrieval_set(data, task, length, 1, windows, settings.seed)
        for sample in range(len(made)):
            goal = np.concatenate([[False], made.scored[sample]])
            cuts = np.flatnonzero(np.diff(goal)) + 1
            for depth, window in zip(made.depths, made.windows[sample], strict=True):
                texts = _pieces(data.tokeniser, window, cuts.tolist())
                documents.append(_document(texts, length, round(100 * depth)))
    return documents


def segment_documents(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same last segment behind ever longer contexts; `pieces` is the segment."""
    settings = TaskSettings.of(metadata)
    segment = settings.segment or settings.lengths[0] // 2
    uneven = [length for length in settings.lengths if length % segment or length < 2 * segment]
    if uneven:
        raise InputError(
            f"last-segment needs lengths of at least two segments, in whole segments of {segment} "
            f"tokens, got {uneven[0]}: say segment=…"
        )
    data = _data(metadata, settings)
    assert data.tokeniser is not None
    multiples = [length // segment for length in settings.lengths]
    documents = []
    for made in last_segment_sets(data.test, segment, multiples, settings.samples, settings.seed):
        for window in made.windows:
            texts = _pieces(data.tokeniser, window, [made.start + 1])
            documents.append({**_document(texts, made.length, -1), "tokens": segment})
    return documents


def _document(texts: Sequence[str], length: int, depth: int) -> dict[str, Any]:
    return {"context": texts[0], "pieces": list(texts[1:]), "length": length, "depth": depth}


def _pieces(tokeniser: Tokeniser, window: np.ndarray, cuts: Sequence[int]) -> list[str]:
    """The window's text, cut before the tokens `cuts`; joined it is the text of the whole."""
    texts = [tokeniser.decode(window[:end]) for end in (*cuts, len(window))]
    return [
        texts[0],
        *(text[len(before) :] for before, text in itertools.pairwise(texts)),
    ]


def _data(metadata: Mapping[str, Any], settings: TaskSettings) -> TokenData:
    """The text's tokens, all in the test split."""
    tokeniser, config = _tokeniser(metadata, settings)
    own = settings.text is None
    address = config.corpus if own else str(settings.text)
    share = (config.seed, config.test_fraction, config.validation_fraction) if own else None
    return _tokens(tokeniser, address, config.max_bytes if own else None, share, settings.join)


@lru_cache(maxsize=2)
def _tokens(
    tokeniser: Tokeniser,
    address: str,
    most: int | None,
    share: tuple[int, float, float] | None,
    join: bool,
) -> TokenData:
    documents = [
        document
        for document in parse_corpus(address).documents(most)
        if document.text and (share is None or split_of(document.split_name, *share) == "test")
    ]
    if not documents:
        raise InputError(f"corpus {address!r} holds no text" + (" to test on" if share else ""))
    if join:
        documents = [Document("all documents", "\n".join(document.text for document in documents))]
    ids: list[int] = []
    ends = [0]
    for encoded in _encoded(tokeniser, documents):
        ids += [*encoded, SEPARATOR_ID]
        ends.append(len(ids))
    split = TokenSplit(
        "test",
        np.array(ids, dtype=np.uint32),
        np.array(ends, dtype=np.int64),
        [document.name for document in documents],
    )
    none = np.zeros(0, dtype=np.uint32)
    train = TokenSplit("train", none, np.zeros(1, np.int64), [])
    validation = TokenSplit("validation", none, np.zeros(1, np.int64), [])
    return TokenData(train, validation, split, tokeniser, tokeniser.vocab_size, "")


def _encoded(tokeniser: Tokeniser, documents: Sequence[Document]) -> Iterator[list[int]]:
    for start in range(0, len(documents), _BATCH):
        part: Iterable[Document] = documents[start : start + _BATCH]
        yield from tokeniser.encode_batch([document.text for document in part])


def _tokeniser(metadata: Mapping[str, Any], settings: TaskSettings) -> tuple[Tokeniser, DataConfig]:
    """Whose tokens are counted, and which text was held out from that model."""
    run, name = metadata.get("run"), settings.tokenizer or metadata.get("pretrained")
    if run is not None and settings.tokenizer is None:
        return _of_run(str(run))
    if name is None:
        raise InputError(
            "the tasks count tokens: give run=… or pretrained=… to the model, or tokenizer=FOLDER "
            "in the metadata"
        )
    gguf = None if settings.tokenizer else metadata.get("gguf_file")
    return _of_transformers(str(name), gguf), DataConfig()


@lru_cache(maxsize=2)
def _of_run(run: str) -> tuple[Tokeniser, DataConfig]:
    from normattn.cli.generation import opened

    config, tokeniser = opened(expanded(run))
    return tokeniser, config.data


@lru_cache(maxsize=2)
def _of_transformers(name: str, gguf: str | None) -> Tokeniser:
    from transformers import AutoTokenizer

    path, options = expanded(name), {} if gguf is None else {"gguf_file": gguf}
    if path.is_file():
        name, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokeniser = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        sentence = " ".join(str(error).split())[:300]
        raise InputError(f"the tokeniser of {name} cannot be loaded: {sentence}") from error
    if not tokeniser.is_fast:
        raise InputError(f"the tokeniser of {name} is not one of the tokenizers library")
    return Tokeniser(tokeniser.backend_tokenizer.to_str())
