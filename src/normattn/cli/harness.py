"""`--model normattn` of lm-evaluation-harness: a trained run, or an extended model of transformers.

Importing this module registers the model; `normattn lm-eval` does so and starts the harness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # The harness loads its own models only into an empty registry.
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from normattn.cli.harness_models import (
    DTYPES,
    Drawing,
    HarnessModel,
    open_pretrained,
    open_run,
)
from normattn.errors import InputError
from normattn.files import expanded

_TOKENS_PER_BATCH = 16384
_DRAWING = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
Request = tuple[Any, list[int], list[int]]


@register_model("normattn")
class NormattnLM(TemplateLM):
    """A run or an extended model, as lm-evaluation-harness asks of a model.

    Args:
        run: the directory of a finished run of `normattn train`.
        pretrained: instead of it, a folder or a name on the hub of a model of transformers.
        gguf: the GGUF file of `pretrained`.
        method: a post-hoc method, e.g. YaRN or ReRoPE-logn+; default: none for a run, and for
            `pretrained` the one that it was saved with. "as is" is the model as trained.
        factor, parameters: those of the method, e.g. factor=2, window=2048.
        train_length: how far `pretrained` was trained to read, where its configuration is silent.
        max_length: longer requests are refused, and never cut; default: there are none.
        dtype: float32 (default), float64, float16 or bfloat16.
        batch_size: rows at a time (default 1); "auto": as many as have 16384 tokens together.
        max_batch_size: the most rows of "auto".
        device: default: CUDA if there is any. "cuda:0", which the harness says unasked, is the
            processor where there is no CUDA.

    Texts without context (`loglikelihood_rolling`) are read in windows of `max_length`, by default
    of the training length. Rows of a batch do not affect each other; those of a model whose own
    frequencies change with what is read are read one at a time. Raises `InputError`.
    """

    def __init__(
        self,
        run: str | None = None,
        pretrained: str | None = None,
        gguf: str | None = None,
        method: str | None = None,
        factor: float | int | None = None,
        train_length: int | None = None,
        max_length: int | None = None,
        dtype: str = "float32",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        if (run is None) == (pretrained is None):
            raise InputError("model_args needs either run=RUN or pretrained=FOLDER")
        if dtype not in DTYPES:
            raise InputError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
        if method in (None, "as is") and (parameters or factor is not None):
            names = ", ".join([*parameters, *(["factor"] if factor is not None else [])])
            raise InputError(
                f"model_args: {names}: neither a setting of the model, nor is there a method= "
                f"whose parameter it could be; settings are {', '.join(settings())}"
            )
        if factor is not None and (isinstance(factor, bool | str) or factor < 1):
            raise InputError(f"factor is {factor!r}; expected a number of at least 1")
        numbers = {"max_length": max_length, "max_batch_size": max_batch_size}
        for name, value in {**numbers, "train_length": train_length}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value!r}; expected a number of at least 1")
        self.batch_size = _batch_size(batch_size)
        self.max_batch_size = max_batch_size
        chosen_device = _device(device)
        if run is not None:
            for name, given in (("gguf", gguf), ("train_length", train_length)):
                if given is not None:
                    raise InputError(f"model_args: {name} belongs to pretrained=…, not to run=…")
            self.model: HarnessModel = open_run(
                expanded(run), method or "as is", factor, parameters, chosen_device, dtype
            )
        else:
            if factor is not None:
                parameters["factor"] = factor
            assert pretrained is not None
            self.model = open_pretrained(
                pretrained, gguf, method, train_length, parameters, chosen_device, dtype
            )
        self._longest = max_length
        self.max_length = max_length or self.model.train_length
        self.tokenizer = self.model.chat
        logging.getLogger(__name__).info("normattn: %s", self.model.described)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.model.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self.model.prefix

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokeniser, for caches of requests."""
        return "run" if self.tokenizer is None else str(self.tokenizer.name_or_path)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; raises `InputError` where the tokeniser has no template."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise InputError("this model's tokeniser has no chat template")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a text."""
        return self.model.encode(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, goal) for _, context, goal in requests]
        likelihoods: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        bar = tqdm(total=len(rows), desc="loglikelihood", disable=disable_tqdm)
        for batch in self._batches(order, lambda i: len(rows[i])):
            longest = max(len(rows[i]) for i in batch)
            # No token sees those behind it, so what fills a row on the right does not matter.
            ids = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in batch])
            scores = self.model.scorer(ids)
            for row, i in enumerate(batch):
                last = len(rows[i]) - 1
                part = slice(last - len(requests[i][2]), last)
                total = -float(scores.loss[row, part].double().sum())
                likelihoods[i] = total, bool(scores.correct[row, part].all())
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], likelihoods[i])
            bar.update(len(batch))
        bar.close()
        return likelihoods

    def _row(self, context: list[int], goal: list[int]) -> list[int]:
        """Context and continuation; the last token is predicted and not read."""
        row = (context or [self.prefix_token_id]) + goal
        self._refuse_cut("a text with its continuation", len(row) - 1)
        return row

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, each token predicted once."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (total, _) in zip(owners, scored, strict=True):
            totals[number] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """How the model continues each context, up to one of its `until` texts."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        kinds: dict[Drawing, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(_drawing(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        for drawing, numbers in kinds.items():
            numbers.sort(key=lambda i: -len(prompts[i]))
            for batch in self._batches(numbers, lambda i: len(prompts[i])):
                given = [self._prompt(prompts[i], drawing.most) for i in batch]
                for i, text in zip(batch, self.model.answers(given, drawing, batch), strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update(len(batch))
        bar.close()
        return answers

    def _prompt(self, tokens: list[int], most: int) -> list[int]:
        """A prompt that leaves room for its answer."""
        tokens = tokens or [self.prefix_token_id]
        self._refuse_cut(f"a prompt with an answer of {most} tokens", len(tokens) + most)
        return tokens

    def _refuse_cut(self, subject: str, tokens: int) -> None:
        """What was cut is another question: its answer would be scored as one to this."""
        if self._longest is not None and tokens > self._longest:
            raise InputError(
                f"{subject} has {tokens} tokens and would be cut to max_length={self._longest}; "
                "raise max_length, or leave it out to cut nothing"
            )

    def _batches(self, order: Sequence[int], size: Callable[[int], int]) -> list[list[int]]:
        """Requests, the longest first, in groups that are read together."""
        groups: list[list[int]] = []
        most = 0
        for number in order:
            if not groups or len(groups[-1]) >= most:
                groups.append([])
                most = self.batch_size or max(1, _TOKENS_PER_BATCH // max(1, size(number)))
                most = 1 if self.model.alone else min(most, self.max_batch_size or most)
            groups[-1].append(number)
        return groups


def settings() -> tuple[str, ...]:
    """The model arguments that are not parameters of a method."""
    return tuple(NormattnLM.__init__.__annotations__)[:-2]


def _batch_size(given: int | str) -> int:
    """Rows at a time; 0 for "auto"."""
    if isinstance(given, str) and given.split(":")[0] == "auto":
        return 0
    if not str(given).isdigit() or int(given) < 1:
        raise InputError(f"batch_size is {given!r}; expected a number of at least 1, or auto")
    return int(given)


def _device(given: str | None) -> str:
    if given is None or (given == "cuda:0" and not torch.cuda.is_available()):
        return "auto"
    return given


def _drawing(given: dict[str, Any]) -> Drawing:
    """What a task asks of answers; raises `InputError` for what neither kind of model can do."""
    asked = dict(normalize_gen_kwargs(given))
    unknown = sorted(set(asked) - _DRAWING)
    if unknown:
        raise InputError(
            f"generation by {', '.join(unknown)} is not offered; there are "
            f"{', '.join(sorted(_DRAWING))}"
        )
    until = tuple(stop for stop in asked["until"] if stop)
    if not asked["do_sample"]:
        return Drawing(asked["max_gen_toks"], until)
    return Drawing(
        asked["max_gen_toks"],
        until,
        float(asked.get("temperature", 1.0)),
        asked.get("top_k"),
        asked.get("top_p"),
    )
