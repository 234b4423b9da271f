"""Messages of programs as sentences: no placeholders, tags or access keys, and only real ones."""

from __future__ import annotations

import re

MOST_WORDS = 60
LEAST_WORDS = 3
FILLER = "X"
"""What stands for whatever a program fills in: `cannot open %s` becomes `cannot open X`."""

_CONTEXT = "\x04"  # gettext writes "context\x04message"
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_FILLED_IN = re.compile(
    r"%\([^()]*\)(?:[-+0#]*\d*(?:\.\d+)?[A-Za-z])?"  # %(name)s
    r"|%(?:\d+\$)?[-+0#]*\d*(?:\.\d+)?[sdifrgxXuc]\b"  # %s, %1$s, %.0f
    r"|\$?\{[^{}]*\}"  # {name}, ${name}
    r"|\$\([^()]*\)"  # $(name)
)
_WORD = re.compile(r"[^\W\d_]{2,}|\b[aAIX]\b")
_KEY = re.compile(r"_(?=\w)")


def cleaned(source: str, target: str) -> tuple[str, str]:
    """A message and its translation as plain sentences of one line each."""
    a, b = _plain(source), _plain(target)
    # An underscore before an access key (`_Open`, `E_xit`) is not part of the word; identifiers
    # that hold one are the same in both languages and keep it.
    if len(_KEY.findall(a)) == len(_KEY.findall(b)) == 1 and not _shared_identifier(a, b):
        a, b = _KEY.sub("", a), _KEY.sub("", b)
    return a, b


def is_sentence_pair(source: str, target: str) -> bool:
    """Whether both sides are `LEAST_WORDS` to `MOST_WORDS` words, mostly letters, and differ.

    Also refused: one side more than three times as long as the other (not a translation of it).
    """
    if source.casefold() == target.casefold():
        return False
    short, long = sorted((len(source), len(target)))
    return long <= 3 * short and _readable(source) and _readable(target)


def _plain(text: str) -> str:
    text = text.rpartition(_CONTEXT)[2]
    text = _FILLED_IN.sub(FILLER, _TAG.sub(" ", text)).replace("%%", "%")
    return " ".join(text.split())


def _readable(text: str) -> bool:
    words = len(_WORD.findall(text))
    letters = sum(character.isalpha() for character in text)
    filled = sum(not character.isspace() for character in text)
    return (
        words >= LEAST_WORDS
        and LEAST_WORDS <= len(text.split()) <= MOST_WORDS
        and letters >= 0.7 * filled
        and not text.isupper()
    )


def _shared_identifier(a: str, b: str) -> bool:
    with_key = {word for word in a.split() if "_" in word}
    return bool(with_key & set(b.split()))
