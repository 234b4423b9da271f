"""Byte-level BPE: lossless, deterministic, and the separator cannot be forged."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data import Tokeniser, tokeniser, train_tokeniser
from normattn.lab.data.tokeniser import SEPARATOR, SEPARATOR_ID

# Many pairs with equal counts: a tie decides nearly every merge.
TEXTS = ["ab cd ef gh ij kl mn op", "ba dc fe hg ji lk nm po", "xyz zyx"] * 3
TOKENISER = train_tokeniser(TEXTS, 300)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENISER.encode(text)
    assert TOKENISER.decode(ids) == text
    assert SEPARATOR_ID not in ids


def test_the_separator_is_id_0_and_text_cannot_forge_it() -> None:
    assert TOKENISER.decode([SEPARATOR_ID]) == SEPARATOR
    forged = f"a{SEPARATOR}b"
    reloaded = Tokeniser(TOKENISER._json)
    assert SEPARATOR_ID not in reloaded.encode(forged)
    assert reloaded.decode(reloaded.encode(forged)) == forged


def test_training_twice_gives_the_same_tokeniser_under_any_hash_seed_and_threads() -> None:
    code = (
        "import json, sys; from normattn.lab.data import train_tokeniser; "
        "print(train_tokeniser(json.loads(sys.argv[1]), 300).fingerprint)"
    )
    found = {TOKENISER.fingerprint, train_tokeniser(TEXTS, 300).fingerprint}
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", code, json.dumps(TEXTS)]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found == {other.stdout.strip()}


def test_saving_loading_and_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokeniser.json"
    TOKENISER.save(file)
    assert Tokeniser.load(file).fingerprint == TOKENISER.fingerprint
    file.write_text("{{", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokeniser\.json is damaged"):
        Tokeniser.load(file)
    with pytest.raises(InputError, match="does not exist"):
        Tokeniser.load(tmp_path / "none.json")
    monkeypatch.setattr(tokeniser, "MOST_BYTES", 1)
    with pytest.raises(InputError, match=r"tokeniser\.json is larger than 1 bytes"):
        Tokeniser.load(file)
    with pytest.raises(InputError, match="at least 257 entries"):
        train_tokeniser(TEXTS, 256)


@pytest.mark.parametrize("seed", range(10))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokeniser, "_PIECE_CHARACTERS", 12)
    source = random.Random(seed)
    words = ["it's", "don", "ü", "a1", "!", "...", " ", "  ", "\n", "\t", "\r\n", "\x1c", "\u00a0"]
    text = "".join(source.choice(words) + source.choice(("", " ", " ", "\n")) for _ in range(200))
    whole = TOKENISER._bpe.encode(text, add_special_tokens=False).ids
    assert TOKENISER.encode(text) == whole
    assert len(list(tokeniser.cut_pieces(text))) > 5
