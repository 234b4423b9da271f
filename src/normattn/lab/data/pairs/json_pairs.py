"""JSON lines of sentence pairs: `{"en": "…", "de": "…"}`, also inside `"translation"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from normattn.errors import InputError
from normattn.files import expanded
from normattn.lab.data.pairs.lines import stamp
from normattn.lab.data.pairs.source import PAIRS, Languages, Pair, PairSource
from normattn.lab.data.sources import take_options
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import text_lines, without_surrogates
from normattn.structured import parse_json

_ENDS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


@PAIRS.register
@dataclass(frozen=True)
class JsonPairs(PairSource):
    """One object a line, each language's sentence under its name (or under `translation`).

    A field `split` of "train", "validation" or "test" is followed; without it splits are drawn by
    sentence. Blank lines are passed over.
    """

    path: Path
    languages: Languages

    kind: ClassVar[str] = "json"
    summary: ClassVar[str] = "JSON lines with a field for each language"

    @classmethod
    def claims(cls, body: str) -> bool:
        """An existing file that ends in .jsonl or .ndjson, also .gz."""
        return body.endswith(_ENDS) and expanded(body).is_file()

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str], languages: Languages) -> JsonPairs:
        """`FILE.jsonl`; there are no options."""
        take_options(body, options, [])
        return cls(expanded(body), languages)

    def pairs(self) -> Iterator[Pair]:
        """Stream the lines; `InputError` names the line that is no pair."""
        for number, line in text_lines(self.path, lambda n: f"{self.path}:{n}"):
            yield self._pair(line, f"{self.path}:{number}")

    def fingerprint(self) -> str:
        """By name, size and time of the file."""
        return stamp((self.path,))

    def _pair(self, line: str, where: str) -> Pair:
        value = parse_json(line, where)
        inner = value.get("translation", value) if isinstance(value, dict) else value
        if not isinstance(inner, dict):
            raise InputError(f"{where} is not a JSON object of sentences by language")
        both = (self.languages.source, self.languages.target)
        texts = [self._text(inner, name, where) for name in both]
        return Pair(texts[0], texts[1], _split(value, where))

    def _text(self, fields: Mapping[str, Any], name: str, where: str) -> str:
        text = fields.get(name)
        if isinstance(text, str):
            return without_surrogates(text)
        known = ", ".join(map(repr, fields)) or "none"
        raise InputError(f"{where} has no sentence under {name!r} (its fields: {known})")


def _split(value: Mapping[str, Any], where: str) -> SplitName | None:
    named = value.get("split")
    for split in SPLITS:
        if named == split:
            return split
    if named is None:
        return None
    raise InputError(f"{where}: split is {named!r}; expected one of {', '.join(SPLITS)}")
