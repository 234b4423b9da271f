"""The commands that the campaign stops, kills and starves, and their inputs; all are small."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fault_campaign.processes import race
from normattn.stopping import run_stoppable

PRESET = """
summary = "for faults"

[training]
steps = 6
batch_size = 4
checkpoint_seconds = 0.001
log_every = 1

[training.model]
dim = 16
layers = 1
heads = 2
train_length = 8

[training.data]
corpus = "{corpus}"
vocab_size = 260
test_fraction = 0.3

[training.schedule]
warmup_steps = 1

[evaluation]
multiples = [1, 2]
max_windows = 2
"""


@dataclass(frozen=True)
class Setting:
    """The inputs of every command: a corpus, a preset, a finished run, a transformers model.

    Parts that run in one process share the inputs; each writes to its own `outputs`.
    """

    folder: Path
    outputs: Path

    @property
    def preset(self) -> Path:
        """A preset for a training of a moment."""
        return self.folder / "tiny.toml"

    @property
    def run(self) -> Path:
        """A finished and evaluated run."""
        return self.folder / "run"

    @property
    def text(self) -> Path:
        """A text for `extend`."""
        return self.folder / "corpus" / "text00.txt"

    @property
    def model(self) -> Path:
        """A tiny Llama with its tokeniser, in transformers' format."""
        return self.folder / "run-exported"

    def place(self, label: str) -> Path:
        """A separate output; its last part, which exports contain, is always the same."""
        return self.outputs / label / "out"


def make_setting(folder: Path, foreign: bool = True) -> Setting:
    """Create the inputs of all commands once a process; `foreign` adds the transformers model."""
    made = Setting(_make_inputs(folder, foreign), folder)
    made.outputs.mkdir(exist_ok=True)
    return made


_INPUTS: dict[bool, Path] = {}


def _make_inputs(folder: Path, foreign: bool) -> Path:
    if foreign in _INPUTS:
        return _INPUTS[foreign]
    setting = Setting(folder, folder)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(12):
        words = " ".join(f"word{(number * 7 + i * i) % 50}" for i in range(200))
        (corpus / f"text{number:02}.txt").write_text(words)
    setting.preset.write_text(PRESET.format(corpus=corpus))
    os.environ["NORMATTN_CACHE"] = str(folder / "cache")
    # Forks inherit these imports, so they start within milliseconds.
    for name in ("train", "evaluate", "export", "generate", "inspect"):
        importlib.import_module(f"normattn.cli.{name}")
    for name in ("normattn.cli.app", "normattn.lab.studies.keynorm"):
        importlib.import_module(name)
    if foreign:  # The tests draw no charts.
        importlib.import_module("altair")
    for arguments in (
        ("train", "--preset", setting.preset, "--score", "KNA", "--out", setting.run),
        ("evaluate", setting.run, "--multiples", "1,2", "--max-windows", "2"),
    ):
        _expect_success(arguments)
    if foreign:
        _make_llama(setting)
    _INPUTS[foreign] = folder
    return folder


def _make_llama(setting: Setting) -> None:
    import torch
    import transformers

    from normattn.cli.export import as_transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(setting.model)
    as_transformers(setting.run / "tokeniser.json", None).save_pretrained(setting.model)


@dataclass(frozen=True)
class Command:
    """A command line with its output.

    `judged` are patterns of required output files; those of `deterministic` commands have the same
    bits in every run. `share` is the command's relative number of trials: quick ones get more.
    """

    name: str
    arguments: Callable[[Setting, Path], tuple[object, ...]]
    judged: tuple[str, ...]
    deterministic: bool = True
    share: int = 1

    def line(self, setting: Setting, out: Path) -> list[str]:
        """The arguments of `normattn`."""
        return [str(argument) for argument in self.arguments(setting, out)]


COMMANDS = (
    Command(
        "train",
        lambda s, out: ("train", "--preset", s.preset, "--score", "KNA", "--out", out),
        ("config.json", "metrics.jsonl", "model/*", "tokeniser.json"),
        share=8,
    ),
    Command(
        "tokenise",
        lambda s, out: (
            *("train", "--preset", s.preset, "--score", "KNA", "--out", out),
            *("--set", f"data.validation_fraction={_fraction(out)}"),
        ),
        ("config.json", "metrics.jsonl", "model/*", "tokeniser.json"),
        deterministic=False,
        share=8,
    ),
    Command(
        "extend",
        lambda s, out: (
            *("extend", s.model, "--text", s.text, "--lengths", "16,32", "--methods", "PI"),
            *("--windows", "1", "--no-passkey", "--out", out),
        ),
        ("config.json", "measurements/*.parquet", "table.md", "table.csv"),
        deterministic=False,
    ),
    Command("export", lambda s, out: ("export", s.run, out), ("**/*",)),
    Command(
        "report",
        lambda s, out: ("report", s.run, "--out", out),
        ("table.*", "report.html", "figures/*.png"),
    ),
    Command(
        "generate",
        lambda s, out: ("generate", s.run, "--prompt", "word1", "--max-new-tokens", "20"),
        (),
        share=4,
    ),
    Command("inspect", lambda s, out: ("inspect", s.run, "--out", out), ("*.json", "*.png")),
)


def _fraction(out: Path) -> float:
    """A different fraction for every output, so that every trial builds its own cache."""
    return 0.1 + int(hashlib.sha256(out.parent.name.encode()).hexdigest()[:6], 16) / 2**24 / 10


def work_of(line: list[str]) -> Callable[[], int]:
    """The command as a function for a forked process, with the signal handling of `normattn`."""

    def work() -> int:
        from normattn.cli.app import main

        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            run_stoppable(lambda: main(line))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    return work


def judged_files(out: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """The digest of every file that matches the patterns, by relative path."""
    files = sorted({path for pattern in patterns for path in out.glob(pattern) if path.is_file()})
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def _expect_success(arguments: tuple[object, ...]) -> None:
    """Run a command in a fork, because it may start threads, which must not precede later forks."""
    (end,) = race([work_of([str(each) for each in arguments])])
    if end.code:
        raise RuntimeError(f"the setting cannot be made: {end.shown}")
