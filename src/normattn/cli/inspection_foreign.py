"""A model of transformers looked into: a folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normattn.cli.extension_texts import DEFAULT_TEXT, prepare_texts
from normattn.cli.inspection import (
    chosen_head,
    drawn,
    look,
    whose_attention,
    write_page,
)
from normattn.cli.inspection_inputs import DRAWN_TOKENS, Inputs, folder_of
from normattn.cli.options.inspect import InspectOptions
from normattn.errors import InputError
from normattn.hf import extend, load
from normattn.hf.model_parts import known_length, model_parts
from normattn.hf.observe import observable, observe_layers, paths
from normattn.hf.token_scorer import refuse_foreign_tokens
from normattn.io import expanded
from normattn.lab.diagnostics import Collector
from normattn.lab.diagnostics.attention import attention_weights
from normattn.lab.training.distributed import choose_device
from normattn.terminal import warn

LENGTH, WINDOWS = 512, 4
"""Tokens of a window and how many, unless said: a look takes about as long as reading them."""


def inspect_foreign(asked: InspectOptions) -> None:
    """Look into a transformers model while it reads text, and print and draw what is found.

    Raises `InputError` for what cannot be loaded, for a text that is too short, and for a model
    with attention code of its own.
    """
    torch.set_num_threads(asked.threads)
    path = expanded(asked.run)
    device = choose_device(asked.device or "auto")
    model, tokeniser = load(
        asked.run, dtype=torch.bfloat16 if asked.dtype == "bf16" else torch.float32
    )
    model = model.to(device)
    inputs = _inputs(model, tokeniser, asked)
    folder = folder_of(asked.out or Path("runs") / f"inspect-{path.name.removesuffix('.gguf')}")
    with _using(model, asked.method):
        measured = look(model, inputs, asked, looking)
        sizes = [int(measured[column].max()) + 1 for column in ("layer", "head")]  # type: ignore[arg-type]
        chosen = chosen_head(asked.attention, *sizes)
        heads = drawn(inputs, chosen, measured, lambda: _weights(model, inputs))
    names = (path.name.removesuffix(".gguf"), type(model).__name__)
    length = _trained(model, inputs)
    whose = whose_attention(model, inputs, asked, *names, asked.seed, length, "given")
    write_page(whose, measured, heads, inputs, folder, asked)


@contextmanager
def looking(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
) -> Iterator[Collector]:
    """Collect what every attention layer does while inside, each named by its path in the model.

    For `inspect_model` in the place of its own `collecting`; attention beyond the training length
    (`reach`) is not asked for. Raises `InputError` for a model none of whose layers takes its
    attention from transformers' AttentionInterface, once it has read.
    """
    collector = Collector(paths(model), edges, cosines=cosines)
    with observe_layers(model, collector):
        yield collector
    if not collector.sums:
        raise InputError("this model has attention code of its own, which cannot be observed")


def _using(model: Any, method: str) -> AbstractContextManager[Any]:
    return nullcontext() if method == "as is" else extend(model, method)


def _inputs(model: Any, tokeniser: Any, asked: InspectOptions) -> Inputs:
    """Windows of the given text, or of the standard library's source."""
    text = (str(asked.text),) if asked.text is not None else DEFAULT_TEXT
    length = LENGTH if asked.length is None else asked.length
    windows = WINDOWS if asked.windows is None else asked.windows
    texts, _, notes = prepare_texts(tokeniser, text, (length - 1,), windows, asked.seed)
    for sentence in notes:
        warn(f"normattn: {sentence}")
    rows = torch.stack(
        [torch.from_numpy(texts.window(index, length - 1)) for index in range(len(texts))]
    )
    refuse_foreign_tokens(rows, model)
    decoder = model_parts(model).decoder

    def read(ids: Tensor) -> Any:
        return decoder(input_ids=ids, use_cache=False)

    first = rows[0, :DRAWN_TOKENS]
    words: Sequence[str] = [tokeniser.decode([token]) for token in first.tolist()]
    source = f"{len(rows)} windows of {length:,} tokens of {', '.join(text)}"
    return Inputs(rows, source, length, read, first, len(first), lambda name: (words, words))


def _weights(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    with observable(model):
        row = inputs.drawn.to(model.device)
        return attention_weights(model, row, inputs.read, inputs.drawn_length, paths(model))


def _trained(model: Any, inputs: Inputs) -> int:
    """How far the model was trained to read, or how far it reads here."""
    try:
        return known_length(model_parts(model))[0]
    except InputError:
        return inputs.length
