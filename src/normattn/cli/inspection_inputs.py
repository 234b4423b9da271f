"""What `normattn inspect` lets each kind of model read: windows, documents, sentences, images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from normattn.cli.options.inspect import InspectOptions
from normattn.errors import InputError
from normattn.lab.data.batches import uniforms
from normattn.lab.data.images import prepare_images
from normattn.lab.data.pairs import BOS_ID, EOS_ID, PAD_ID, prepare_pairs
from normattn.lab.data.relations import padded, prepare_relations
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.data.windows import choose_places
from normattn.lab.runs import unchanged
from normattn.lab.training import TrainingConfig
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.init_from import HasFingerprint, refuse_other_data
from normattn.lab.training.tasks.classification import ClassificationConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.lab.training.tasks.vision import VisionTrainingConfig
from normattn.models.beam_search import beam_search
from normattn.models.translator import Translator

DRAWN_TOKENS, WINDOWS = 64, 16
Data = TypeVar("Data", bound=HasFingerprint)


@dataclass(frozen=True)
class Inputs:
    """Rows that a model reads, `length` positions each at most, and where they are from.

    `read` is how the model reads some of them (None: as token ids). `drawn` is the row whose
    attention is drawn, `drawn_length` its positions, and `words` what stands on the two sides of a
    layer's attention to it, by the layer's name.
    """

    rows: Tensor
    source: str
    length: int
    read: Callable[[Tensor], Any] | None
    drawn: Tensor
    drawn_length: int
    words: Callable[[str], tuple[Sequence[str], Sequence[str]]]


def inputs_of(config: LoopConfig, asked: InspectOptions, model: nn.Module) -> Inputs:
    """What the model of a run is shown: what is asked for, or data held out from its training.

    Raises `InputError` for a corpus that is no longer there or no longer what the run was trained
    on, a text that cannot be read, and what the kind of model does not take.
    """
    if isinstance(config, TrainingConfig | MaskedConfig):
        return _windows(config, asked)
    if isinstance(config, ClassificationConfig):
        return _documents(config, asked, model)
    if isinstance(config, TranslationConfig):
        return _sentences(config, asked, model)
    assert isinstance(config, VisionTrainingConfig)
    return _images(config, asked, model)


def _windows(config: TrainingConfig | MaskedConfig, asked: InspectOptions) -> Inputs:
    """Windows of the given file, or of documents that the run did not train on."""
    length = config.model.train_length if asked.length is None else asked.length
    if config.data.synthetic and asked.text is not None:
        raise InputError(
            f"the run in {asked.run} was trained on the generated tokens of "
            f"{config.data.corpus}: it has no tokeniser, and so cannot read {asked.text}"
        )
    tokeniser = None
    if not config.data.synthetic:
        tokeniser = Tokeniser.load(unchanged(asked.run / "tokeniser.json"))
    if asked.text is None:
        split = _as_trained(prepare_tokens(config.data), asked).split("test")
        places = choose_places(split, length, _most(asked), asked.seed)
        spans = [(number, slice(first, first + length)) for number, first in places.tolist()]
        rows = np.stack([split.document(number)[span] for number, span in spans])
        ids = torch.from_numpy(rows.astype(np.int64))
        source = f"{len(rows)} windows of {length:,} held-out tokens of {config.data.corpus}"
    else:
        assert tokeniser is not None
        tokens = tokeniser.encode(read_text(asked.text))
        if len(tokens) < 2:
            raise InputError(
                f"{asked.text} has {len(tokens)} tokens; there is nothing to attend to"
            )
        length = min(length, len(tokens))
        count = min(_most(asked), len(tokens) // length)
        ids = torch.tensor(tokens[: count * length]).view(count, length)
        source = f"{count} windows of {length:,} tokens of {asked.text.name}"
    drawn = ids[0, :DRAWN_TOKENS]
    words = [str(i) if tokeniser is None else tokeniser.decode([i]) for i in drawn.tolist()]
    return Inputs(ids, source, length, None, drawn, len(drawn), lambda name: (words, words))


def _documents(config: ClassificationConfig, asked: InspectOptions, model: nn.Module) -> Inputs:
    """Lines of the given file, or validation documents; longer ones are cut as in training."""
    longest = config.data.max_tokens if asked.length is None else asked.length
    data = _as_trained(prepare_relations(config.data), asked)
    pieces = data.pieces
    if asked.text is None:
        split = data.split("validation")
        documents: list[Sequence[int]] = [split.tokens[i] for i in _chosen(len(split), asked)]
        source = f"{len(documents)} validation documents of {config.data.corpus}"
    else:
        documents = list(pieces.encode(_lines(asked)[: _most(asked)]))
        source = f"{len(documents)} lines of {asked.text.name}"
    documents = [document[:longest] for document in documents]
    ids, _ = padded(documents, pieces.pad)

    def read(rows: Tensor) -> Any:
        padding = rows == pieces.pad
        return model(rows, padding if bool(padding.any()) else None)

    drawn = documents[0][:DRAWN_TOKENS]
    words = [pieces.entries[token] for token in drawn]
    return Inputs(
        torch.from_numpy(ids),
        source,
        ids.shape[1],
        read,
        torch.tensor(drawn),
        len(drawn),
        lambda name: (words, words),
    )


def _sentences(config: TranslationConfig, asked: InspectOptions, model: nn.Module) -> Inputs:
    """Validation pairs, or lines of the given file with the model's own greedy translations."""
    if asked.length is not None:
        raise InputError(
            "--length is for windows and documents; a translation model reads sentences whole"
        )
    assert isinstance(model, Translator)
    files = (unchanged(asked.run / f"{side}.tokeniser.json") for side in ("source", "target"))
    tokenisers = [Tokeniser.load(path) for path in files]
    if asked.text is None:
        split = _as_trained(prepare_pairs(config.data), asked).split("validation")
        chosen = _chosen(len(split), asked)
        sources = [split.source_ids(i) for i in chosen]
        targets = [split.target_ids(i)[:-1] for i in chosen]
        source = f"{len(chosen)} validation pairs of {config.data.corpus}"
    else:
        encoded = tokenisers[0].encode_batch(_lines(asked)[: _most(asked)])
        sources = [[*ids, EOS_ID] for ids in encoded]
        hypotheses = beam_search(model, sources, beam=1)
        targets = [[BOS_ID, *candidates[0].tokens] for candidates in hypotheses]
        source = f"{len(sources)} lines of {asked.text.name} and their greedy translations"
    rows = torch.cat([_filled(sources), _filled(targets)], 1)
    width = max(map(len, sources))
    words = [
        [tokeniser.decode([i]) for i in side[0]]
        for tokeniser, side in zip(tokenisers, (sources, targets), strict=True)
    ]

    def read(rows: Tensor) -> Any:
        # One pair at a time: nothing is padded, so that every position is a word's.
        for row in rows:
            first, second = (side[side != PAD_ID][None] for side in (row[:width], row[width:]))
            model.decode(second, model.encode(first))

    def sides(name: str) -> tuple[Sequence[str], Sequence[str]]:
        if name.startswith("encoder"):
            return words[0], words[0]
        return words[1], words[0] if ".cross." in name else words[1]

    length = max(map(len, [*sources, *targets]))
    drawn = max(len(sources[0]), len(targets[0]))
    return Inputs(rows, source, length, read, rows[0], drawn, sides)


def _images(config: VisionTrainingConfig, asked: InspectOptions, model: Any) -> Inputs:
    """Validation images; words are the patches' rows and columns."""
    given = {"--text": asked.text, "--length": asked.length}
    for option, value in given.items():
        if value is not None:
            raise InputError(f"{option} is for models that read text; this one reads images")
    split = _as_trained(prepare_images(config.data), asked).validation
    chosen = np.array(_chosen(len(split), asked))
    images = torch.from_numpy(split.images(chosen))
    shape = config.model
    words = ["class"] if shape.pool == "class" else []
    across = shape.width // shape.patch
    words += [f"{patch // across},{patch % across}" for patch in range(shape.patches)]
    return Inputs(
        images,
        f"{len(chosen)} validation images of {config.data.source}",
        shape.tokens,
        model.features,
        images[0],
        shape.tokens,
        lambda name: (words, words),
    )


def _as_trained(data: Data, asked: InspectOptions) -> Data:
    """The data, after an `InputError` where the run was trained on other data."""
    refuse_other_data(data, asked.run)
    return data


def _most(asked: InspectOptions) -> int:
    """Windows, texts, pairs or images, at most."""
    return WINDOWS if asked.windows is None else asked.windows


def _lines(asked: InspectOptions) -> list[str]:
    """The lines of the given file that are not empty."""
    assert asked.text is not None
    lines = [line.strip() for line in read_text(asked.text).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{asked.text} holds no line of text; give one text a line")
    return lines


def _chosen(count: int, asked: InspectOptions) -> list[int]:
    """Which of so many, drawn without repetition, in their order."""
    drawn: NDArray[Any] = uniforms(asked.seed, 0, max(count, 2), 1)[:count, 0]
    order: list[int] = np.argsort(drawn, kind="stable")[: _most(asked)].tolist()
    return sorted(order)


def _filled(rows: Sequence[Sequence[int]]) -> Tensor:
    """Sentences as one matrix, padded on the right."""
    return torch.from_numpy(padded(rows, PAD_ID)[0])


def folder_of(folder: Path) -> Path:
    """The directory, made before anything is read; `InputError` where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{folder} is a file; --out names a directory") from error
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}") from error
    return folder
