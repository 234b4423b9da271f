"""The list of a frozen corpus: wheels with their hashes, near-duplicates, and what the text is.

    python scripts/freeze_packages.py NAME==VERSION …   write the list anew; needs datasketch
    python scripts/freeze_packages.py --check           make the text and its tokens in a new cache

`--check` ends with 1 where the tokens are not those that tests/data/frozen_tokens.json records.
"""

from __future__ import annotations

import dataclasses
import email
import json
import os
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from normattn.io import sha256_of
from normattn.lab.data import frozen_packages as frozen
from normattn.lab.data.tokens import DataConfig, prepare_tokens

THRESHOLD, PERMUTATIONS = 0.7, 64
RECORD = Path(__file__).parents[1] / "tests" / "data" / "frozen_tokens.json"


class NearDuplicates:
    """Remembers the texts it was shown; two are alike above a Jaccard similarity of their lines.

    A line counts once, without the space around it, and an empty one not at all. Similarity is
    estimated from 64 MinHashes: an estimate of 0.7 or more, at a deviation of about 0.06, makes a
    duplicate. The same texts in the same order always give the same answers.
    """

    def __init__(self) -> None:
        import datasketch

        self._new_hash: Any = datasketch.MinHash
        self._index = datasketch.MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
        self._shown: list[Any] = []

    def seen(self, text: str) -> bool:
        """Whether a text like this one was shown before; if not, it is remembered."""
        lines = {line.strip() for line in text.splitlines()} - {""}
        own = self._new_hash(num_perm=PERMUTATIONS, hashfunc=zlib.crc32)
        own.update_batch([line.encode("utf-8", "replace") for line in sorted(lines)])
        if any(own.jaccard(self._shown[key]) >= THRESHOLD for key in self._index.query(own)):
            return True
        self._index.insert(len(self._shown), own)
        self._shown.append(own)
        return False


def pinned(file: Path) -> frozen.Wheel:
    """The entry of a wheel that was downloaded."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        about = email.message_from_string(archive.read(name).decode())
    classified = [v.split(" :: ")[-1] for v in about.get_all("Classifier", []) if "License ::" in v]
    licence = about["License-Expression"] or " / ".join(classified) or about["License"] or ""
    project = about["Name"].lower().replace("_", "-").replace(".", "-")
    digest = sha256_of(file)
    return frozen.Wheel(project, about["Version"], file.name, digest, licence.splitlines()[0])


def freeze(requirements: list[str], out: Path = frozen.LIST) -> None:
    """Download the wheels of some distributions and write their list."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        problem = frozen.download(requirements, folder)
        if problem is not None:
            sys.exit(problem)
        wheels = tuple(sorted(map(pinned, folder.glob("*.whl")), key=lambda wheel: wheel.name))
        shown, repeated = NearDuplicates(), []
        for wheel in wheels:
            texts = frozen.package_texts(folder / wheel.file, wheel.name)
            repeated += [name for name, text in texts if shown.seen(text)]
        size = sum((folder / wheel.file).stat().st_size for wheel in wheels)
        listed = frozen.PackageList(wheels, frozenset(repeated), "", 0, size)
        total = frozen.write_documents(folder, listed, folder / "text")
        made = dataclasses.replace(listed, text_sha256=sha256_of(folder / "text"), text_bytes=total)
    stored = {**dataclasses.asdict(made), "near_duplicates": sorted(repeated)}
    out.write_text(_one_entry_a_line(stored), encoding="utf-8")
    print(
        f"{len(wheels)} wheels, {size:,} bytes; {total:,} bytes of text, {len(repeated)} repeated"
    )


def _one_entry_a_line(stored: dict[str, Any]) -> str:
    """JSON with one wheel or name on each line."""
    lines = []
    for key, value in stored.items():
        text = json.dumps(value)
        if isinstance(value, list | tuple):
            inner = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            text = f"[\n  {inner}\n ]"
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def check() -> int:
    """The digest of the tokens of the recorded settings, made in a cache of their own."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["NORMATTN_CACHE"] = temporary
        data = prepare_tokens(DataConfig(**record["data"]))
    print(data.fingerprint, f"{data.train.total:,} tokens to train on", sep="\n")
    return int(data.fingerprint != record["fingerprint"])


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["--check"] else freeze(sys.argv[1:]))
