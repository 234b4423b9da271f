"""`generate`: a causal language model continues prompts, independent of each other."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError, require_sizes
from normattn.models.cache import CHUNK
from normattn.models.utils import without_dropout

Decode = Callable[[Sequence[int]], str]
Ending = Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """The continuation of one prompt: `tokens` without the stop token, and `text` with `decode`.

    `ended` is "stop" after a stop token or string, else "length"; `text` omits that string.
    """

    tokens: tuple[int, ...]
    ended: Ending
    text: str | None = None


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[SupportsIndex | str] = (),
    decode: Decode | None = None,
    seed: int | Sequence[int] = 0,
    on_token: Callable[[int, int], None] | None = None,
    chunk: int = CHUNK,
) -> list[Answer]:
    """Generate up to `max_new_tokens` tokens after each prompt, with the active scores.

    Args:
        model: a `CausalLM`; its dropout is off during the call.
        prompts: the token ids of each prompt, of any lengths, at least one token each.
        max_new_tokens: a row ends after this many tokens.
        temperature: 0 takes the most likely token; above 0, tokens are sampled (`Sampling`).
        top_k: sample from this many most likely tokens.
        top_p: sample from the most likely tokens of this total probability.
        stop: token ids and strings at which a row ends.
        decode: tokens to text; for stop strings and the answers' text.
        seed: prompt r has its own generator, with seed + r or seed[r].
        on_token: called with the prompt's index and each generated token.
        chunk: prompts are processed this many tokens at a time.

    A row's answer does not depend on the other rows, nor on earlier calls. Raises `InputError` for
    an empty prompt, ids outside the vocabulary and settings out of range.
    """
    sampling = Sampling(temperature, top_k, top_p)
    stop_tokens, stop_strings = _checked_stop(stop, model.head_weight.shape[0])
    if stop_strings and decode is None:
        raise InputError("stop strings need decode=…, a function from tokens to text")
    # Tokens that hold any stop string, of a byte or more each; 4 more for a cut first character.
    tail = max((len(string.encode()) for string in stop_strings), default=0) + 4
    require_sizes("generate", max_new_tokens=max_new_tokens)
    ids, padding = left_padded(prompts, model.head_weight.device)
    generators = row_generators(seed, len(prompts))
    written: list[list[int]] = [[] for _ in prompts]
    stopped: set[int] = set()
    with without_dropout(model):
        logits, cache = model.prefill(ids, padding, chunk=chunk)
        alive = list(range(len(prompts)))
        while alive:
            tokens = sampling.next_tokens(logits, [generators[row] for row in alive])
            for row, token in zip(alive, tokens, strict=True):
                if token in stop_tokens:
                    stopped.add(row)
                    continue
                written[row].append(token)
                if on_token is not None:
                    on_token(row, token)
                if stop_strings and decode is not None:
                    end = decode(written[row][-tail:])
                    if any(string in end for string in stop_strings):
                        stopped.add(row)
            kept = [row not in stopped and len(written[row]) < max_new_tokens for row in alive]
            if any(kept) and not all(kept):
                cache.reorder([index for index, keep in enumerate(kept) if keep])
            alive = [row for row, keep in zip(alive, kept, strict=True) if keep]
            if alive:
                last = torch.tensor([written[row][-1:] for row in alive], device=ids.device)
                logits = model(last, cache=cache)[:, -1]
    answers = []
    for row, row_tokens in enumerate(written):
        text = None if decode is None else decode(row_tokens)
        if text is not None:
            text = text[: min((text.find(s) for s in stop_strings if s in text), default=len(text))]
        answers.append(Answer(tuple(row_tokens), "stop" if row in stopped else "length", text))
    return answers


@dataclass(frozen=True)
class Sampling:
    """p ∝ exp(logit / temperature), limited to the `top_k` most likely tokens and `top_p` nucleus.

    temperature: 0 (default) always takes the most likely token. top_k: how many tokens remain.
    top_p: of these, the fewest most likely ones whose probabilities add up to at least top_p
    remain. Ties are ordered by id. Raises `InputError` for values out of range, and for top_k and
    top_p with temperature 0, where they have no effect. Source of top_p: arXiv 1904.09751.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature!r}; it must be 0 or more")
        if self.top_k is not None:
            require_sizes("sampling", top_k=self.top_k)
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise InputError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1")
        if self.temperature == 0 and not (self.top_k is None and self.top_p is None):
            raise InputError(
                "top_k and top_p choose among random tokens, and temperature 0 always takes the "
                "most likely one: give a temperature above 0, or neither of them"
            )

    def probabilities(
        self, logits: Float[Tensor, "b v"]
    ) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
        """Probabilities in float64 in descending order, and their tokens; 0 for excluded ones."""
        logits, tokens = torch.sort(logits.double(), stable=True, dim=-1, descending=True)
        if self.top_k is not None:
            logits, tokens = logits[:, : self.top_k], tokens[:, : self.top_k]
        probs = torch.softmax(logits / self.temperature, -1)
        if self.top_p is not None and self.top_p < 1:
            before = probs.cumsum(-1) - probs
            probs = probs.masked_fill(before >= self.top_p, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs, tokens

    def next_tokens(
        self, logits: Float[Tensor, "b v"], generators: Sequence[torch.Generator]
    ) -> list[int]:
        """Choose a token for each row, with one random number of the row's generator."""
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            raise InputError("the model's logits are not finite: its weights cannot be used")
        if self.temperature == 0:
            greedy: list[int] = logits.argmax(-1).tolist()
            return greedy
        probs, tokens = self.probabilities(logits)
        uniform = [
            torch.rand((), generator=generator, dtype=torch.float64, device="cpu")
            for generator in generators
        ]
        cumulative = probs.cumsum(-1)
        threshold = torch.stack(uniform)[:, None].to(probs.device) * cumulative[:, -1:]
        index = (cumulative <= threshold).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
        sampled: list[int] = tokens.gather(-1, index)[:, 0].tolist()
        return sampled


def row_generators(seed: int | Sequence[int], rows: int) -> list[torch.Generator]:
    """A generator for each row, seeded with seed + row or seed[row]."""
    try:
        if isinstance(seed, Sequence):
            seeds = [operator.index(row_seed) for row_seed in seed]
        else:
            seeds = [operator.index(seed) + row for row in range(rows)]
    except TypeError:
        seeds = []
    if len(seeds) != rows or any(not 0 <= row_seed < 1 << 63 for row_seed in seeds):
        raise InputError(
            f"seed must be a whole number from 0 to 2^63 − 1, or {rows} of them, not {seed!r}"
        )
    return [torch.Generator().manual_seed(row_seed) for row_seed in seeds]


def left_padded(prompts: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Stack prompts into one matrix of ids, padded on the left; return it and its padding mask.

    Raises `InputError` for empty prompts and for anything but lists of whole numbers.
    """
    if not isinstance(prompts, Sequence | Tensor | np.ndarray):
        kind = type(prompts).__name__
        raise InputError(f"prompts must be lists of token ids, but they are a {kind}")
    rows = []
    for number, prompt in enumerate(prompts):
        try:
            row = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            row = torch.tensor(0.0)
        if row.ndim != 1 or len(row) == 0 or row.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"prompt {number} is not a list of token ids, whole numbers, one at least"
            )
        rows.append(row.long())
    if not rows:
        raise InputError("there is no prompt: give at least one token")
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    padding = torch.arange(longest) < longest - lengths[:, None]
    return ids.to(device), padding.to(device) if bool(padding.any()) else None


def _checked_stop(
    stop: Collection[SupportsIndex | str], vocabulary: int
) -> tuple[set[int], list[str]]:
    """The token ids and the strings at which a row ends."""
    if isinstance(stop, str) or not isinstance(stop, Collection):
        raise InputError(f"stop takes a list of token ids and strings, not {stop!r}")
    tokens = {_stop_token(x, vocabulary) for x in stop if not isinstance(x, str)}
    strings = [string for string in stop if isinstance(string, str)]
    if not all(strings):
        raise InputError("a stop string is empty; every text contains it")
    return tokens, strings


def _stop_token(token: Any, vocabulary: int) -> int:
    try:
        number = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = -1
    if not 0 <= number < vocabulary:
        raise InputError(
            f"stop takes strings and token ids of the vocabulary 0 … {vocabulary - 1}, not "
            f"{token!r}"
        )
    return number
