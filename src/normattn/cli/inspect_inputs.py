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
from normattn.lab.data.images import prepare_images
from normattn.lab.data.pairs import PAD_ID, prepare_pairs
from normattn.lab.data.relations import prepare_relations
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.data.windows import choose_windows
from normattn.lab.runs import check_unchanged
from normattn.lab.training import TrainingConfig
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.init_from import refuse_other_data
from normattn.lab.training.tasks import classification, text, translation
from normattn.lab.training.tasks.classification import ClassificationConfig, VisionTrainingConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.lab.training.tasks.translation import TranslationConfig
from normattn.terminal import warn

DRAWN_TOKENS, WINDOWS = 64, 16
"""The tokens of the drawn text, and the default number of windows, texts, pairs or images."""
TRANSFORMERS_LENGTH, TRANSFORMERS_WINDOWS = 512, 4
"""Defaults for a transformers model, whose inspection takes about as long as its forward."""


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
    length, windows = args.length or TRANSFORMERS_LENGTH, args.windows or TRANSFORMERS_WINDOWS
    texts, _, notes = prepare_texts(tokeniser, files, (length - 1,), windows, args.seed)
    for sentence in notes:
        warn(f"normattn: {sentence}")
    rows = torch.from_numpy(np.stack([texts.window(n, length - 1) for n in range(len(texts))]))
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
    config: TrainingConfig | MaskedConfig, args: options.Inspect, model: nn.Module
) -> Inputs:
    """Windows of a file, by default of documents that the run did not train on."""
    length = config.model.train_length if args.length is None else args.length
    tokeniser = None
    if not config.data.synthetic:
        tokeniser = Tokeniser.load(check_unchanged(args.run / "tokeniser.json"))
    if args.text is None:
        data = prepare_tokens(config.data)
        refuse_other_data(data, args.run)
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


def _documents(config: ClassificationConfig, args: options.Inspect, model: nn.Module) -> Inputs:
    """Validation documents; longer ones are cut as in training."""
    _refuse_options(args, "text")
    data = prepare_relations(config.data)
    refuse_other_data(data, args.run)
    split = data.validation
    documents = [
        np.asarray(split.tokens[i])[: args.length].tolist() for i in _draw_indices(len(split), args)
    ]
    ids, _ = pad_rows(documents, data.pad_id)

    def read(rows: Tensor) -> Any:
        padding = rows == data.pad_id
        return model(rows, padding if bool(padding.any()) else None)

    source = f"{len(documents)} validation documents of {config.data.corpus}"
    drawn = _drawn_row(torch.tensor(documents[0]), lambda token: data.tokeniser.entries[token])
    return Inputs(torch.from_numpy(ids), source, ids.shape[1], read, *drawn)


def _sentences(config: TranslationConfig, args: options.Inspect, model: Any) -> Inputs:
    _refuse_options(args, "text", "length")
    data = prepare_pairs(config.data)
    refuse_other_data(data, args.run)
    split, chosen = data.validation, _draw_indices(len(data.validation), args)
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


def _images(config: VisionTrainingConfig, args: options.Inspect, model: Any) -> Inputs:
    """Validation images; words are the patches' rows and columns."""
    _refuse_options(args, "text", "length")
    data = prepare_images(config.data)
    refuse_other_data(data, args.run)
    split = data.validation
    images = torch.from_numpy(split.images(np.array(_draw_indices(len(split), args))))
    shape = config.model
    across = shape.width // shape.patch
    words = ["class"] if shape.pool == "class" else []
    words += [f"{patch // across},{patch % across}" for patch in range(shape.patches)]
    return Inputs(
        images,
        f"{len(images)} validation images of {config.data.source}",
        shape.tokens,
        model.features,
        images[0],
        shape.tokens,
        lambda name: (words, words),
    )


def _refuse_options(args: options.Inspect, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(f"--{name} is for language models only")


def _draw_indices(count: int, args: options.Inspect) -> list[int]:
    """Indices below `count`, drawn without replacement and sorted."""
    drawn = uniforms(args.seed, 0, max(count, 2), 1)[:count, 0]
    order: list[int] = np.argsort(drawn, kind="stable")[: args.windows or WINDOWS].tolist()
    return sorted(order)


KINDS: dict[str, tuple[type[LoopConfig], Callable[[Any, options.Inspect, Any], Inputs]]] = {
    settings.kind: (settings, inputs)
    for settings, inputs in (
        (text.TrainingConfig, _windows),
        (text.MaskedConfig, _windows),
        (classification.ClassificationConfig, _documents),
        (translation.TranslationConfig, _sentences),
        (classification.VisionTrainingConfig, _images),
    )
}
"""The settings class and the input function of each kind of run.

An input function raises `InputError` for a corpus that is missing or has changed since the
training, for an unreadable text, and for options that the kind of model does not support.
"""
