"""The frozen corpus: pinned wheels, fetched by pip, the same text and tokens everywhere.

`python scripts/freeze_packages.py --check` makes all of it, and compares with `frozen_tokens.json`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.lab.data import frozen_packages as frozen
from normattn.lab.data.corpora import parse_corpus
from normattn.lab.data.frozen_packages import is_generated

SAMPLE = ("h2", "sqlparse", "toolz")
SAMPLE_TEXT = "b5528fabca02a792fda8e267919167b4a41965f0d5bdeeb13cb971325de57c25"
SAMPLE_TOKENS = "101db4c151068ab901a1e5cf9de28c953f32efb7d94828f7de15b1077bf3a79a"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the sample; skips where pip does not reach its index."""
    folder = tmp_path_factory.mktemp("wheels")
    try:
        frozen.download(write_list(folder / "list.txt"), folder)
    except InputError as error:
        pytest.skip(f"the package index is not reached: {error}")
    return folder


def write_list(path: Path, names: tuple[str, ...] = SAMPLE, *more: str) -> Path:
    """The list of a sample of the pinned packages, and further lines."""
    whole = frozen.LIST.read_text("utf-8").splitlines()
    kept = [line for line in whole if line.startswith((*(f"{n}==" for n in names), "# near-"))]
    path.write_text("\n".join([f"# text-sha256 {SAMPLE_TEXT}", *kept, *more]) + "\n", "utf-8")
    return path


MAKE = """
import sys
from pathlib import Path
from normattn.lab.data import tokens
from normattn.lab.data.tokens import DataConfig, prepare_tokens
from normattn.lab.data.frozen_packages import frozen_packages, package_text

listed = Path(sys.argv[1])
corpus = frozen_packages(listed)
tokens.parse_corpus = lambda address: corpus
shares = {"test_fraction": 0.3, "validation_fraction": 0.3, "seed": 2}
config = DataConfig(corpus="python-packages-2026", vocab_size=400, **shares)
print(package_text(listed), prepare_tokens(config).fingerprint)
assert not {"h2", "sqlparse", "toolz"} & set(sys.modules)
"""


def test_another_machine_has_the_recorded_text_and_tokens(wheels: Path, tmp_path: Path) -> None:
    """In a process of its own, with a cache, a hash seed and a language of its own."""
    listed = write_list(tmp_path / "list.txt")
    changes = {"NORMATTN_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "1", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(listed)],
        env=os.environ | changes,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    text, digest = done.stdout.split()
    assert digest == SAMPLE_TOKENS
    assert hashlib.sha256(Path(text).read_bytes()).hexdigest() == SAMPLE_TEXT
    names = {path.name for path in Path(text).parent.iterdir()}
    assert names == {"documents.jsonl", "manifest.json"}


def test_another_text_is_refused(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))

    def copy(_: object, folder: Path) -> None:
        shutil.copytree(wheels, folder, dirs_exist_ok=True)

    monkeypatch.setattr(frozen, "download", copy)
    repeated = "# near-duplicate toolz/toolz/dicttoolz.py"
    listed = write_list(tmp_path / "list.txt", SAMPLE, repeated)
    with pytest.raises(InputError, match=rf"instead of {SAMPLE_TEXT}: a different corpus"):
        frozen.package_text(listed)


def test_without_pip_or_index_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    for name in ("PIP_NO_INDEX", "PIP_RETRIES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    corpus = frozen.frozen_packages(write_list(tmp_path / "list.txt", ("h2",)))
    with pytest.raises(
        InputError, match=r"pip could not fetch the packages pinned in list\.txt: .*h2"
    ) as said:
        list(corpus.documents())
    assert "\n" not in str(said.value)


def test_the_list_is_pinned_and_says_its_size() -> None:
    corpus = parse_corpus("python-packages-2026")
    facts, lines = frozen.read_facts(frozen.LIST), frozen.LIST.read_text("utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert len(corpus.sources()) == len(pinned) == 127
    for line in pinned:
        assert re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}  # \S.*", line)
        assert "GPL" not in line
    assert 64_000_000 < int(facts["text-bytes"]) < 80_000_000
    (note,) = corpus.notes()
    assert "127 pinned packages" in note
    assert f"{int(facts['download-bytes']) / 1e6:.0f} MB" in note
    with pytest.raises(InputError, match="has no option 'split'"):
        parse_corpus("python-packages-2026?split=train")


PLAIN = "".join(f"def plain_{word}(): return {word!r}\n" for word in "abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize(
    ("text", "generated"),
    [
        ("# a parser for what people wrote by hand\n" + PLAIN, False),
        ("# Generated by the protocol compiler.  DO NOT EDIT!\n" + PLAIN, True),
        (PLAIN * 2 + "# do not edit\n", False),
        (PLAIN + "x = '" + "a" * 1001 + "'\n", True),
        (("word " * 30 + "\n") * 10, True),
        ("".join(f"    {i}: {i * i},  # one\n" for i in range(200)), True),
        ("+-*/ [] () {} == <= ab\n" * 9, True),
    ],
)
def test_what_programs_wrote_is_told_from_what_people_wrote(text: str, generated: bool) -> None:
    assert is_generated(text) is generated
