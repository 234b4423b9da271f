"""Write the list of a frozen corpus: wheels with their hashes, near-duplicates, the text's digest.

    python scripts/freeze_packages.py NAME==VERSION …   write a new list; needs datasketch
    python scripts/freeze_packages.py --check           prepare text and tokens in a new cache

`--check` exits with 1 if the tokens are not those recorded in tests/data/frozen_tokens.json.
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
    """Finds texts whose sets of lines have a Jaccard similarity of at least 0.7.

    Lines are stripped, and empty ones ignored. Similarity is estimated from 64 MinHashes, with a
    deviation of about 0.06. The same texts in the same order always give the same answers.
    """

    def __init__(self) -> None:
        import datasketch

        self._new_hash: Any = datasketch.MinHash
        self._index = datasketch.MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
        self._shown: list[Any] = []

    def seen(self, text: str) -> bool:
        """Whether a similar text was seen before; if not, remember this one."""
        lines = {line.strip() for line in text.splitlines()} - {""}
        signature = self._new_hash(num_perm=PERMUTATIONS, hashfunc=zlib.crc32)
        signature.update_batch([line.encode("utf-8", "replace") for line in sorted(lines)])
        if any(
            signature.jaccard(self._shown[key]) >= THRESHOLD for key in self._index.query(signature)
        ):
            return True
        self._index.insert(len(self._shown), signature)
        self._shown.append(signature)
        return False


def pinned(file: Path) -> str:
    """The requirement line of a downloaded wheel, with its licence as a comment."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(name).decode())
    classified = [
        v.split(" :: ")[-1] for v in metadata.get_all("Classifier", []) if "License ::" in v
    ]
    licence = metadata["License-Expression"] or " / ".join(classified) or metadata["License"] or ""
    digest, line = sha256_of(file), f"{frozen.package_of(file)}=={metadata['Version']}"
    return f"{line} --hash=sha256:{digest}  # {licence.splitlines()[0]}"


def freeze(requirements: list[str], out: Path = frozen.LIST) -> None:
    """Download the wheels of some distributions and write their list."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wanted = folder / "requirements.txt"
        wanted.write_text("\n".join(requirements) + "\n")
        frozen.download(wanted, folder)
        wheels = sorted(folder.glob("*.whl"), key=frozen.package_of)
        duplicates, repeated = NearDuplicates(), list[str]()
        for wheel in wheels:
            texts = frozen.package_texts(wheel)
            repeated += [name for name, text in texts if duplicates.seen(text)]
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
    """Prepare the tokens of the recorded settings in a new cache; 1 if their digest differs."""
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
