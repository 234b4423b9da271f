"""The tasks of lm-evaluation-harness in `tasks/*.yaml`, from local text, without downloads.

They are the windows of `normattn evaluate`, decoded to text because the harness takes text.
"""

from __future__ import annotations

import difflib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import datasets
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte, mean
from lm_eval.api.task import ConfigurableTask
from pydantic import Field

from normattn.cli.generate import open_run
from normattn.errors import InputError
from normattn.hf.load import read_tokeniser
from normattn.io import expand_path
from normattn.lab.data.corpora import parse_corpus
from normattn.lab.data.retrieval import DEPTHS, retrieval_set
from normattn.lab.data.sources import Document, split_of
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser
from normattn.lab.data.tokens import DataConfig, TokenData, TokenSplit
from normattn.lab.data.windows import last_segment_sets
from normattn.settings import Settings

_BATCH = 64
_BITS = "bits_per_byte"


class TaskSettings(Settings):
    """The fields of `--metadata`.

    - `lengths`: lengths of the texts in tokens.
    - `samples`: texts of each length, in retrieval for each of five depths.
    - `segment`: tokens that `last-segment` scores (default: half the shortest length).
    - `text`: python-source (default), a file or a folder; of a run, its own corpus.
    - `join`: join all documents, for texts longer than any of them.
    - `seed`: of the random draws.
    - `tokenizer`: the tokeniser that counts tokens (default: that of `run` or `pretrained`).
    """

    lengths: tuple[Annotated[int, Field(ge=2)], ...] = Field((512, 1024, 2048), min_length=1)
    samples: int = Field(20, ge=1)
    segment: int | None = Field(None, ge=1)
    text: str | None = None
    join: bool = Field(False, strict=True)
    seed: int = Field(0, ge=0)
    tokenizer: str | None = None

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> TaskSettings:
        """Parse the task's fields of the harness's metadata, which has model arguments too."""
        names = TaskSettings.model_fields
        for key in metadata:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
            if near and key not in names:
                raise InputError(f"metadata has no {key!r}: did you mean {near[0]!r}?")
        fields = {name: metadata[name] for name in names if metadata.get(name) is not None}
        settings = TaskSettings.parse(fields, "metadata")
        return settings.model_copy(update={"lengths": tuple(sorted(set(settings.lengths)))})


class _ScoredPieces(ConfigurableTask):
    """A task whose documents are scored in pieces, each after the true text before it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    @abstractmethod
    def _documents(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The task's documents."""

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        documents = self._documents(self.config.metadata or {})
        self.dataset = {"test": datasets.Dataset.from_list(documents)}

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        return str(doc["context"])

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> str:
        return str(doc["pieces"][0])

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """One request for each scored piece, those with an even index."""
        pieces, requests = doc["pieces"], []
        kwargs = {name: value for name, value in kwargs.items() if "chat_template" not in name}
        for number, at in enumerate(range(0, len(pieces), 2)):
            arguments = (ctx + "".join(pieces[:at]), pieces[at])
            requests.append(Instance("loglikelihood", doc, arguments, number, **kwargs))
        return requests

    @property
    def _metrics(self) -> set[str]:
        names = set[str]()
        for doc in self.task_docs:
            names |= self.process_results(doc, [(0.0, False)] * len(doc["pieces"])).keys()
        return names

    def aggregation(self) -> dict[str, Callable[[Sequence[Any]], float]]:
        """Means over documents; bits per byte over all bytes."""
        return {metric: bits_per_byte if _BITS in metric else mean for metric in self._metrics}

    def higher_is_better(self) -> dict[str, bool]:
        return {metric: metric.startswith("acc") for metric in self._metrics}


class Retrieval(_ScoredPieces):
    """`acc`, `acc_LENGTH`, `acc_LENGTH_depth_PERCENT`: the share of samples answered right.

    All answers must be right. The task's name selects one of `lab.data.retrieval`.
    """

    def _documents(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        return retrieval_documents(str(self.config.task).removeprefix("normattn_"), metadata)

    def process_results(
        self, doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]
    ) -> dict[str, float]:
        """Whether all answers are right, over all and at this length and depth."""
        right = float(all(correct for _, correct in results))
        length, depth = doc["length"], doc["depth"]
        return {"acc": right, f"acc_{length}": right, f"acc_{length}_depth_{depth}": right}


class LastSegment(_ScoredPieces):
    """`loss_LENGTH`, in nats per token, and `bits_per_byte_LENGTH` of the same last segment."""

    def _documents(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        return segment_documents(metadata)

    def process_results(
        self, doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]
    ) -> dict[str, Any]:
        """The segment's loss at this length of context."""
        total, size = results[0][0], len(doc["pieces"][0].encode())
        length = doc["length"]
        return {f"loss_{length}": -total / doc["tokens"], f"{_BITS}_{length}": (total, size)}


def retrieval_documents(task: str, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Texts with facts: a `context`, then `pieces`, answers in turn with the text between them."""
    settings = TaskSettings.of(metadata)
    data, documents = _token_data(metadata, settings), []
    for length in settings.lengths:
        windows = settings.samples * len(DEPTHS)
        samples = retrieval_set(data, task, length, 1, windows, settings.seed)
        for scored, sample in zip(samples.scored, samples.windows, strict=True):
            cuts = np.flatnonzero(np.diff(np.concatenate([[False], scored]))) + 1
            for depth, window in zip(samples.depths, sample, strict=True):
                documents.append(_document(data, window, cuts.tolist(), length, round(100 * depth)))
    return documents


def segment_documents(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same last segments after contexts of every length; `pieces` is the segment."""
    settings = TaskSettings.of(metadata)
    segment = settings.segment or settings.lengths[0] // 2
    uneven = [length for length in settings.lengths if length % segment or length < 2 * segment]
    if uneven:
        raise InputError(
            f"last-segment needs lengths of at least two segments, in whole segments of {segment} "
            f"tokens, got {uneven[0]}: say segment=…"
        )
    data = _token_data(metadata, settings)
    multiples = [length // segment for length in settings.lengths]
    sets = last_segment_sets(data.test, segment, multiples, settings.samples, settings.seed)
    return [
        {**_document(data, window, [x.start + 1], x.length, -1), "tokens": segment}
        for x in sets
        for window in x.windows
    ]


def _document(
    data: TokenData, window: np.ndarray, cuts: Sequence[int], length: int, depth: int
) -> dict[str, Any]:
    """The window's text, split before the tokens `cuts`; its pieces join to the whole text."""
    assert data.tokeniser is not None
    texts = [data.tokeniser.decode(window[:end]) for end in (*cuts, len(window))]
    pieces = [text[len(before) :] for before, text in itertools.pairwise(texts)]
    return {"context": texts[0], "pieces": pieces, "length": length, "depth": depth}


def _token_data(metadata: Mapping[str, Any], settings: TaskSettings) -> TokenData:
    """The text's tokens, all in the test split; without `text`, the corpus's test documents."""
    run, name = metadata.get("run"), settings.tokenizer or metadata.get("pretrained")
    config = DataConfig()
    if run is not None and settings.tokenizer is None:
        config, tokeniser = _run_tokeniser(str(run))
    elif name is not None:
        gguf = None if settings.tokenizer else metadata.get("gguf_file")
        tokeniser = _transformers_tokeniser(str(name), gguf)
    else:
        raise InputError(
            "the tasks count tokens: give run=… or pretrained=… to the model, or tokenizer=FOLDER "
            "in the metadata"
        )
    if settings.text is not None:
        return _encode_corpus(tokeniser, settings.text, None, None, settings.join)
    share = (config.seed, config.test_fraction, config.validation_fraction)
    return _encode_corpus(tokeniser, config.corpus, config.max_bytes, share, settings.join)


@lru_cache(maxsize=2)
def _encode_corpus(
    tokeniser: Tokeniser,
    address: str,
    max_bytes: int | None,
    share: tuple[int, float, float] | None,
    join: bool,
) -> TokenData:
    documents = [
        document
        for document in parse_corpus(address).documents(max_bytes)
        if document.text and (share is None or split_of(document.split_key, *share) == "test")
    ]
    if not documents:
        raise InputError(f"corpus {address!r} holds no text" + (" to test on" if share else ""))
    if join:
        documents = [Document("all documents", "\n".join(document.text for document in documents))]
    ids, ends = list[int](), [0]
    for start in range(0, len(documents), _BATCH):
        batch = [document.text for document in documents[start : start + _BATCH]]
        for encoded in tokeniser.encode_batch(batch):
            ids += [*encoded.tolist(), SEPARATOR_ID]
            ends.append(len(ids))
    names = [document.name for document in documents]
    split = TokenSplit("test", np.array(ids, np.uint32), np.array(ends, np.int64), names)
    train, validation = (
        TokenSplit(name, np.zeros(0, np.uint32), np.zeros(1, np.int64), [])
        for name in ("train", "validation")
    )
    return TokenData(train, validation, split, tokeniser, tokeniser.vocab_size, "")


@lru_cache(maxsize=2)
def _run_tokeniser(run: str) -> tuple[DataConfig, Tokeniser]:
    config, tokeniser = open_run(expand_path(run))
    return config.data, tokeniser


@lru_cache(maxsize=2)
def _transformers_tokeniser(name: str, gguf: str | None) -> Tokeniser:
    tokeniser = read_tokeniser(name, gguf)
    if not tokeniser.is_fast:
        raise InputError(f"the tokeniser of {name} is not one of the tokenizers library")
    return Tokeniser(tokeniser.backend_tokenizer.to_str())
