"""The list of a frozen corpus: wheels with their hashes, near-duplicates, and what the text is.

    python scripts/freeze_packages.py NAME==VERSION …   write the list anew; needs datasketch
    python scripts/freeze_packages.py --check           make the text and its tokens in a new cache

`--check` ends with 1 where the tokens are not those that tests/data/frozen_tokens.json records.
"""

from __future__ import annotations

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


def pinned(file: Path) -> str:
    """The line of the list for a wheel that was downloaded, its licence as a comment."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        about = email.message_from_string(archive.read(name).decode())
    classified = [v.split(" :: ")[-1] for v in about.get_all("Classifier", []) if "License ::" in v]
    licence = about["License-Expression"] or " / ".join(classified) or about["License"] or ""
    digest, line = sha256_of(file), f"{frozen.package_of(file)}=={about['Version']}"
    return f"{line} --hash=sha256:{digest}  # {licence.splitlines()[0]}"


def freeze(requirements: list[str], out: Path = frozen.LIST) -> None:
    """Download the wheels of some distributions and write their list."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wanted = folder / "requirements.txt"
        wanted.write_text("\n".join(requirements) + "\n")
        frozen.download(wanted, folder)
        wheels = sorted(folder.glob("*.whl"), key=frozen.package_of)
        shown, repeated = NearDuplicates(), list[str]()
        for wheel in wheels:
            texts = frozen.package_texts(wheel, frozen.package_of(wheel))
            repeated += [name for name, text in texts if shown.seen(text)]
        size = sum(wheel.stat().st_size for wheel in wheels)
        total = frozen.write_documents(folder, repeated, folder / "text")
        lines = [
            "# The corpus python-packages-2026: what pip fetches for it, and what its text is.",
            "# Written by scripts/freeze_packages.py.",
            f"# text-sha256 {sha256_of(folder / 'text')}",
            f"# text-bytes {total}",
            f"# download-bytes {size}",
            *map(pinned, wheels),
            *(f"# near-duplicate {name}" for name in sorted(repeated)),
        ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(
        f"{len(wheels)} wheels, {size:,} bytes; {total:,} bytes of text, {len(repeated)} repeated"
    )


def check() -> int:
    """The digest of the tokens of the recorded settings, made in a cache of their own."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["NORMATTN_CACHE"] = temporary
        data = prepare_tokens(DataConfig(**record["data"]))
    print(data.fingerprint, f"{data.train.total:,} tokens to train on", sep="\n")
    return int(data.fingerprint != record["fingerprint"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    freeze(sys.argv[1:])
