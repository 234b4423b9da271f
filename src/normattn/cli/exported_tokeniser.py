"""The tokenisers of runs as those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer

from normattn.errors import InputError
from normattn.lab.data.tokeniser import SEPARATOR, Tokeniser
from normattn.lab.data.word_pieces import PAD, UNKNOWN, WordPieces

MASK = "<|mask|>"


def as_transformers(file: Path, mask_id: int | None = None) -> Any:
    """The `PreTrainedTokenizerFast` of a tokeniser that `Tokeniser.save` wrote.

    Its ids are ours for every text; `<|doc|>` in a text stays the letters it is written with. The
    separator is the end-of-text and the padding token, and padding stands on the left. With
    `mask_id`, that of a masked model, `<|mask|>` in a text is the mask, and `<|doc|>` then the
    separator: transformers splits either both into letters or neither (`split_special_tokens`).
    Raises `InputError` for a file that is missing or damaged, and a mask that is not the next id
    after the tokens.
    """
    ours = Tokeniser.load(file)
    special: dict[str, Any] = {"eos_token": SEPARATOR, "pad_token": SEPARATOR}
    if mask_id is not None:
        if mask_id != ours.vocab_size:
            raise InputError(
                f"the mask has the id {mask_id}, but {file} ends at {ours.vocab_size - 1}: "
                "the ids between have no token, so transformers' tokeniser cannot place it"
            )
        special["mask_token"] = MASK
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=Tokenizer.from_file(str(file)),
        split_special_tokens=mask_id is None,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )


def word_pieces_as_transformers(file: Path, lower_case: bool, longest: int) -> Any:
    """The `PreTrainedTokenizerFast` of a WordPiece vocab.txt.

    Its ids are ours for every text in which there is something to read. Padding stands on the
    right, and `truncation=True` keeps the first `longest` pieces, as in training. Raises
    `InputError` for a file that is missing or no vocabulary.
    """
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=WordPieces.load(file, lower_case).tokeniser,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
        unk_token=UNKNOWN,
        pad_token=PAD,
    )
