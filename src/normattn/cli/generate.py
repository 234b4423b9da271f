"""`normattn generate`: a finished run continues prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from normattn.cli import options
from normattn.errors import InputError
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser
from normattn.lab.runs import RunDirectory, check_unchanged, require_finished
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.models import Sampling, generate, load_model
from normattn.terminal import visible


def generate_text(asked: options.Generate) -> None:
    """Print how the finished run in the directory `asked.run` continues each prompt.

    Raises `InputError` for a run that has not finished or has no tokeniser, a method that its
    score cannot take, an empty prompt and settings out of range.
    """
    Sampling(asked.temperature, asked.top_k, asked.top_p)  # Refused before the model is loaded.
    config, tokeniser = open_run(asked.run)
    texts = [*(asked.prompt or ()), *(read_text(path) for path in asked.file or ())]
    if not texts:
        raise InputError("there is nothing to continue: give --prompt TEXT or --file PATH")
    if not all(texts):
        raise InputError("a prompt is empty; give at least one character")
    tokens = [tokeniser.encode(text) for text in texts]
    longest = max(map(len, tokens)) + asked.max_new_tokens
    length = config.model.train_length
    spec = config.model.score.with_method(asked.method)
    spec = spec.resolve(train_length=length, factor=max(1.0, longest / length))
    torch.set_num_threads(asked.threads)
    model = load_model(asked.run / "model", config.model).to(choose_device(config.device))
    with model.using(spec):
        answers = generate(
            model,
            tokens,
            asked.max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            stop=[SEPARATOR_ID, *(asked.stop or ())],
            decode=tokeniser.decode,
            seed=asked.seed,
        )
    shown = [answer.text or "" for answer in answers]
    if len(texts) > 1:
        shown = [f"> {text}\n{answer}" for text, answer in zip(texts, shown, strict=True)]
    whole = "\n\n".join(shown)
    print(visible(whole) if sys.stdout.isatty() else whole)


def open_run(run: Path) -> tuple[TrainingConfig, Tokeniser]:
    """The settings and the tokeniser of a finished run; `InputError` where it has none."""
    stored = RunDirectory.existing(run, TrainingConfig.kind)
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    require_finished(run, "generate")
    if config.data.synthetic:
        raise InputError(
            f"the run in {run} was trained on the generated tokens of {config.data.corpus}: it "
            "has no tokeniser, so it cannot continue text"
        )
    return config, Tokeniser.load(check_unchanged(run / "tokeniser.json"))
