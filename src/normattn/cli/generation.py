"""A finished run continues prompts, and its first answer appears while it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from normattn.cli.options.generate import GenerateOptions
from normattn.errors import InputError
from normattn.lab.data.text_files import read_text
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser
from normattn.lab.runs import RunDirectory, require_finished, unchanged
from normattn.lab.training import TrainingConfig
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.models import Sampling, generate, load_model
from normattn.score import ScoreSpec
from normattn.terminal import visible


class TextStream:
    """Text as it grows token by token, told on as soon as it is certain.

    Held back are a character that still lacks bytes and what may yet become a stop string.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        tell: Callable[[str], None],
    ) -> None:
        self._decode, self._stops, self._tell = decode, tuple(stops), tell
        self._pending: list[int] = []
        self._text = ""
        self._told = 0

    def add(self, token: int) -> None:
        """One more token."""
        self._pending.append(token)
        new = self._decode(self._pending)
        if new.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        self._pending.clear()
        self._text += new
        self._tell_up_to(len(self._text) - self._held())

    def finish(self, text: str) -> None:
        """The whole text is known."""
        self._text = text
        self._tell_up_to(len(text))

    def _tell_up_to(self, end: int) -> None:
        if end > self._told:
            self._tell(self._text[self._told : end])
            self._told = end

    def _held(self) -> int:
        """How long the end is that a stop string may begin with, or that holds one."""
        starts = [at for at in (self._text.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            return len(self._text) - min(starts)
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return size
        return 0


def generate_run(asked: GenerateOptions) -> None:
    """Print how the finished run in the directory `asked.run` continues each prompt.

    Raises `InputError` for a run that has not finished or has no tokeniser, a method that its
    score cannot take, an empty prompt and settings out of range.
    """
    Sampling(asked.temperature, asked.top_k, asked.top_p)  # Refused before the model is read.
    config, tokeniser = opened(asked.run)
    texts = [*(asked.prompt or ()), *(read_text(path) for path in asked.file or ())]
    tokens, stop = _encoded(texts, tokeniser), asked.stop or []
    longest = max(len(prompt) for prompt in tokens) + asked.max_new_tokens
    spec = _spec(config, asked.method, longest)
    torch.set_num_threads(asked.threads)
    model = load_model(asked.run / "model", config.model).to(choose_device(config.device))

    def tell(text: str) -> None:
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    stream = TextStream(tokeniser.decode, stop, tell)
    if len(texts) > 1:
        tell(_heading(texts[0]))
    with model.using(spec):
        answers = generate(
            model,
            tokens,
            asked.max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            stop=[SEPARATOR_ID, *stop],
            decode=tokeniser.decode,
            seed=asked.seed,
            on_token=lambda row, token: stream.add(token) if row == 0 else None,
        )
    stream.finish(answers[0].text or "")
    tell("\n")
    for text, answer in zip(texts[1:], answers[1:], strict=True):
        tell(f"\n{_heading(text)}{answer.text}\n")


def _heading(prompt: str) -> str:
    return f"> {prompt}\n"


def opened(run: Path) -> tuple[TrainingConfig, Tokeniser]:
    """The settings and the tokeniser of a finished run; `InputError` where it has none."""
    stored = RunDirectory.existing(run, CausalWorkload.kind)
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    require_finished(run, "generate")
    if config.data.synthetic:
        raise InputError(
            f"the run in {run} was trained on the generated tokens of {config.data.corpus}: it has "
            "no tokeniser, and so no text to continue"
        )
    return config, Tokeniser.load(unchanged(run / "tokeniser.json"))


def _encoded(texts: Sequence[str], tokeniser: Tokeniser) -> list[list[int]]:
    if not texts:
        raise InputError("there is nothing to continue: give --prompt TEXT or --file PATH")
    if any(not text for text in texts):
        raise InputError("a prompt is empty; the model continues at least one character")
    return tokeniser.encode_batch(texts)


def _spec(config: TrainingConfig, method: str, longest: int) -> ScoreSpec:
    """The score under the method, stretched to `longest` tokens where it takes a factor."""
    length = config.model.train_length
    spec = config.model.score.with_method(method)
    return spec.resolve(train_length=length, factor=max(1.0, longest / length))
