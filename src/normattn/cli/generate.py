"""`normattn generate`: continue prompts with a finished run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from normattn.cli.options import Generate
from normattn.errors import InputError
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser
from normattn.lab.runs import RunDirectory, check_unchanged, require_finished
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.models import Sampling, generate, load_model
from normattn.terminal import visible


def generate_text(options: Generate) -> None:
    """Print the continuation of each prompt by the finished run in `options.run`."""
    # Checked before the model is loaded.
    Sampling(options.temperature, options.top_k, options.top_p)
    config, tokeniser = open_run(options.run)
    texts = [*(options.prompt or ()), *(read_text(path) for path in options.file or ())]
    if not texts:
        raise InputError("there is nothing to continue: give --prompt TEXT or --file PATH")
    if not all(texts):
        raise InputError("a prompt is empty; give at least one character")
    tokens = [tokeniser.encode(text) for text in texts]
    longest = max(map(len, tokens)) + options.max_new_tokens
    length = config.model.train_length
    spec = config.model.score.with_method(options.method)
    spec = spec.resolve(train_length=length, factor=max(1.0, longest / length))
    torch.set_num_threads(options.threads)
    model = load_model(options.run / "model", config.model).to(choose_device(config.device))
    with model.using(spec):
        answers = generate(
            model,
            tokens,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop=[SEPARATOR_ID, *(options.stop or ())],
            decode=tokeniser.decode,
            seed=options.seed,
        )
    outputs = [answer.text or "" for answer in answers]
    if len(texts) > 1:
        outputs = [f"> {text}\n{output}" for text, output in zip(texts, outputs, strict=True)]
    output = "\n\n".join(outputs)
    print(visible(output) if sys.stdout.isatty() else output)


def open_run(run: Path) -> tuple[TrainingConfig, Tokeniser]:
    """Return the settings and tokeniser of a finished run; `InputError` if it has none."""
    stored = RunDirectory.existing(run, TrainingConfig.kind)
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    require_finished(run, "generate")
    if config.data.synthetic:
        raise InputError(
            f"the run in {run} was trained on the generated tokens of {config.data.corpus}: it "
            "has no tokeniser, so it cannot continue text"
        )
    return config, Tokeniser.load(check_unchanged(run / "tokeniser.json"))
