"""The inputs of `normattn inspect` for each kind of model: windows, documents, pairs, images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normattn.cli import options
from normattn.cli.extend_reading import DEFAULT_TEXT, prepare_texts
from normattn.errors import InputError
from normattn.hf.model_parts import model_parts
from normattn.hf.token_scorer import refuse_foreign_tokens
from normattn.lab.data.batches import pad_rows, uniforms
from normattn.lab.data.pairs import PAD_ID
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.windows import choose_windows
from normattn.lab.runs import check_unchanged
from normattn.lab.training import TrainingConfig
from normattn.lab.training.tasks.base import ModelTrainingConfig
from normattn.lab.training.tasks.classification import ClassificationConfig, VisionTrainingConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.terminal import warn

DRAWN_TOKENS, WINDOWS = 64, 16
"""The tokens of the drawn text, and the default number of windows, texts, pairs or images."""


@dataclass(frozen=True)
class Inputs:
    """Rows of input with at most `length` positions each, and a sentence on their source.

    `read` runs the model on some rows (None: the rows are token ids). `drawn` is the row whose
    attention is drawn, with `drawn_length` positions; `words` are its query and key tokens, by the
    layer's name.
    """

    rows: Tensor
    source: str
    length: int
    read: Callable[[Tensor], Any] | None
    drawn: Tensor
    drawn_length: int
    words: Callable[[str], tuple[Sequence[str], Sequence[str]]]


def transformers_inputs(model: Any, tokeniser: Any, args: options.Inspect) -> Inputs:
    """Windows of a text for a transformers model, by default of the standard library's source."""
    files = (str(args.text),) if args.text is not None else DEFAULT_TEXT
    length, windows = args.length or 512, args.windows or 4  # Inspection is slower than a forward.
    texts, _, notes = prepare_texts(tokeniser, files, (length - 1,), windows, args.seed)
    for sentence in notes:
        warn(f"normattn: {sentence}")
    rows = torch.from_numpy(np.stack([texts.window(n, length - 1) for n in range(len(texts.ids))]))
    refuse_foreign_tokens(rows, model)
    decoder = model_parts(model).decoder
    return Inputs(
        rows,
        f"{len(rows)} windows of {length:,} tokens of {', '.join(files)}",
        length,
        lambda ids: decoder(input_ids=ids, use_cache=False),
        *_drawn_row(rows[0], lambda token: tokeniser.decode([token])),
    )


def _drawn_row(row: Tensor, word: Callable[[int], str]) -> tuple[Tensor, int, Any]:
    """`drawn`, `drawn_length` and `words` of `Inputs` for the start of a row of tokens."""
    drawn = row[:DRAWN_TOKENS]
    words = [word(token) for token in drawn.tolist()]
    return drawn, len(drawn), lambda name: (words, words)


def _windows(
    config: TrainingConfig | MaskedConfig, args: options.Inspect, model: nn.Module, data: Any
) -> Inputs:
    """Windows of a file, by default of documents that the run did not train on."""
    length = config.model.train_length if args.length is None else args.length
    tokeniser = None
    if not config.data.synthetic:
        tokeniser = Tokeniser.load(check_unchanged(args.run / "tokeniser.json"))
    if args.text is None:
        split = data.split("test")
        starts = choose_windows(split, length, args.windows or WINDOWS, args.seed).tolist()
        rows = [split.document(number)[first : first + length] for number, first in starts]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))
        source = f"{len(rows)} windows of {length:,} held-out tokens of {config.data.corpus}"
    else:
        if tokeniser is None:
            raise InputError(
                f"the run in {args.run} was trained on the generated tokens of "
                f"{config.data.corpus}: it has no tokeniser, so it cannot read {args.text}"
            )
        tokens = tokeniser.encode(read_text(args.text))
        if len(tokens) < 2:
            raise InputError(f"{args.text} has {len(tokens)} tokens; at least 2 are needed")
        length = min(length, len(tokens))
        count = min(args.windows or WINDOWS, len(tokens) // length)
        ids = torch.tensor(tokens[: count * length]).view(count, length)
        source = f"{count} windows of {length:,} tokens of {args.text.name}"

    def word(token: int) -> str:
        return str(token) if tokeniser is None else tokeniser.decode([token])

    return Inputs(ids, source, length, None, *_drawn_row(ids[0], word))


def _documents(
    config: ClassificationConfig, args: options.Inspect, model: nn.Module, data: Any
) -> Inputs:
    """Validation documents; longer ones are cut as in training."""
    tokens = data.validation.tokens
    documents = [
        np.asarray(tokens[i])[: args.length].tolist() for i in _draw(len(data.validation), args)
    ]
    ids, _ = pad_rows(documents, data.pad_id)

    def read(rows: Tensor) -> Any:
        padding = rows == data.pad_id
        return model(rows, padding if bool(padding.any()) else None)

    source = f"{len(documents)} validation documents of {config.data.corpus}"
    drawn = _drawn_row(torch.tensor(documents[0]), lambda token: data.tokeniser.entries[token])
    return Inputs(torch.from_numpy(ids), source, ids.shape[1], read, *drawn)


def _sentences(config: TranslationConfig, args: options.Inspect, model: Any, data: Any) -> Inputs:
    split, chosen = data.validation, _draw(len(data.validation), args)
    sources = [split.source_ids(i) for i in chosen]
    targets = [split.target_ids(i)[:-1] for i in chosen]
    sides = [torch.from_numpy(pad_rows(side, PAD_ID)[0]) for side in (sources, targets)]
    rows, width = torch.cat(sides, 1), sides[0].shape[1]
    words = [[data.tokeniser.decode([i]) for i in side[0]] for side in (sources, targets)]

    def read(rows: Tensor) -> Any:
        # One pair at a time, so that no position is padding.
        for row in rows:
            first, second = (side[side != PAD_ID][None] for side in (row[:width], row[width:]))
            model.decode(second, model.encode(first))

    def sides_of(name: str) -> tuple[Sequence[str], Sequence[str]]:
        queries = 0 if name.startswith("encoder") else 1
        return words[queries], words[0 if ".cross." in name else queries]

    source = f"{len(chosen)} validation pairs of {config.data.corpus}"
    length = max(map(len, [*sources, *targets]))
    return Inputs(rows, source, length, read, rows[0], max(map(len, words)), sides_of)


def _images(config: VisionTrainingConfig, args: options.Inspect, model: Any, data: Any) -> Inputs:
    """Validation images; words are the patches' rows and columns."""
    split, shape = data.validation, config.model
    images = torch.from_numpy(split.images(np.array(_draw(len(split), args))))
    across = shape.width // shape.patch
    words = ["class"] if shape.pool == "class" else []
    words += [f"{patch // across},{patch % across}" for patch in range(shape.patches)]
    source = f"{len(images)} validation images of {config.data.source}"
    drawn = (images[0], shape.tokens, lambda name: (words, words))
    return Inputs(images, source, shape.tokens, model, *drawn)


def _draw(count: int, args: options.Inspect) -> list[int]:
    """Indices below `count`, drawn without replacement and sorted."""
    drawn = uniforms(args.seed, 0, max(count, 2), 1)[:count, 0]
    order: list[int] = np.argsort(drawn, kind="stable")[: args.windows or WINDOWS].tolist()
    return sorted(order)


InputsOf = Callable[[Any, options.Inspect, Any, Any], Inputs]
"""(settings, options, model, data) → inputs; raises `InputError` for an unreadable text."""
KINDS: dict[str, tuple[type[ModelTrainingConfig], InputsOf, tuple[str, ...]]] = {
    TrainingConfig.kind: (TrainingConfig, _windows, ()),
    MaskedConfig.kind: (MaskedConfig, _windows, ()),
    ClassificationConfig.kind: (ClassificationConfig, _documents, ("text",)),
    TranslationConfig.kind: (TranslationConfig, _sentences, ("text", "length")),
    VisionTrainingConfig.kind: (VisionTrainingConfig, _images, ("text", "length")),
}
"""The settings, the inputs and the refused options of each kind of run."""
