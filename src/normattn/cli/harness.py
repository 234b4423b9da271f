"""`normattn lm-eval`: lm-evaluation-harness, with the model `normattn`, which this registers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from normattn.cli import model_options
from normattn.cli.export import as_transformers
from normattn.cli.generate import open_run
from normattn.errors import InputError
from normattn.hf.extend import extend
from normattn.hf.llama_cpp import refuse_scaled
from normattn.hf.load import is_adapter, read_adapter_record, source_of
from normattn.hf.model_parts import explained, known_length, model_parts
from normattn.hf.native import ADAPTER_FILE, take_record
from normattn.hf.plan import resolve_with_factor
from normattn.io import expand_path
from normattn.lab.training.distributed import choose_device
from normattn.models import load_model
from normattn.score.grammar import read
from normattn.score.spec import UNMODIFIED, is_unmodified

if importlib.util.find_spec("lm_eval") is None:
    raise InputError("this needs lm-evaluation-harness: pip install normattn[lm-eval]")

import lm_eval.models  # noqa: F401  # The harness loads its own models only into an empty registry.
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

TASKS = Path(__file__).parent / "tasks"
_UNLIMITED = (1 << 31) - 1
_RUN_OPTIONS = frozenset({"max_length", "batch_size", "max_batch_size", "device", "dtype"})
_USER_ERRORS = (
    *("Tasks not found", "Attempted to load model", "No tasks specified", "Need to specify"),
)


def run_harness(args: model_options.LmEval) -> None:
    """Run `lm_eval ARGUMENTS…` with the model and the tasks of normattn."""
    if args.tasks_path:
        sys.stdout.write(f"{TASKS}\n")
        return
    arguments = list(args.arguments or ())
    if not arguments:
        raise InputError(
            "there is nothing to evaluate: give --model normattn --model_args run=RUN --tasks TASKS"
        )
    if not any(argument.split("=")[0] == "--include_path" for argument in arguments):
        arguments += ["--include_path", str(TASKS)]
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm_eval", *arguments]
    try:
        cli_evaluate()
    except ValueError as error:
        # The harness raises a plain ValueError for a user's mistakes.
        if isinstance(error, InputError) or not str(error).startswith(_USER_ERRORS):
            raise
        raise InputError(str(error).splitlines()[0]) from error
    finally:
        sys.argv = before


@register_model("normattn")
class NormattnLM(HFLM):
    """The harness's `--model hf` with a method, or a run of normattn.

    Args:
        pretrained: a folder, a GGUF file or a name on the hub.
        run: instead of it, the directory of a finished run of `normattn train`.
        method: e.g. YaRN or ReRoPE-logn+; by default the one that the model was saved with, if any.
            "unmodified" is the model as trained.
        train_length: the training length of `pretrained`; by default that of its configuration.
        max_length: longer requests raise an error and are never cut. By default there is no limit.
        options: parameters of the method (factor=2, window=2048), and options of the harness's own
            model: dtype, peft, gguf_file, batch_size, …; for a run only dtype, device, batch sizes.

    Texts without context (`loglikelihood_rolling`) are split into windows of `max_length`, by
    default of the training length. Raises `InputError` for invalid options.
    """

    def __init__(
        self,
        run: str | None = None,
        pretrained: str | None = None,
        method: str | None = None,
        train_length: int | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        if (run is None) == (pretrained is None):
            raise InputError("model_args needs either run=RUN or pretrained=FOLDER")
        for name, value in {"max_length": max_length, "train_length": train_length}.items():
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name} is {value!r}; expected a number of at least 1")
        self._method = None if method is None else method.strip()
        self._parameters: dict[str, Any] = {}
        if self._method is not None and not is_unmodified(self._method):
            parts = [part for part, _ in read(self._method)[0]]
            names = {"factor", *(field.name for part in parts for field in fields(part))}
            self._parameters = {name: options.pop(name) for name in sorted(names & options.keys())}
        self._train_length_option, self._max_given = train_length, max_length
        self._record: dict[str, Any] | None = None
        options["max_length"] = self._max_length = max_length or _UNLIMITED
        device = options.get("device") or "cuda"
        # The harness's default is cuda:0.
        no_gpu = str(device).startswith("cuda") and not torch.cuda.is_available()
        options["device"] = "cpu" if no_gpu else device
        if run is not None:
            self._load_run(expand_path(run), options)
            return
        source, file = source_of(str(pretrained), options.pop("gguf_file", None))
        if file is not None:
            options["gguf_file"] = file
            refuse_scaled(Path(source) / file)
        with explained(str(pretrained)):
            super().__init__(source, **options)

    def _load_run(self, run: Path, options: dict[str, Any]) -> None:
        """Load a run's model and tokeniser in transformers' format, as if exported."""
        from normattn.hf import wrap

        unsupported = sorted(options.keys() - _RUN_OPTIONS)
        if unsupported or self._train_length_option is not None:
            names = ", ".join(unsupported or ["train_length"])
            raise InputError(f"model_args: {names} cannot be given for this run")
        config, _ = open_run(run)
        self._trained, parameters = config.model.train_length, dict(self._parameters)
        factor = parameters.pop("factor", None)
        spec = config.model.score.with_method(self._method or UNMODIFIED, **parameters)
        model = load_model(run / "model", config.model)
        model = model.to(choose_device(options.pop("device")))
        dtype = options.pop("dtype", "auto")
        if dtype not in ("auto", "float32", "float64", "float16", "bfloat16"):
            raise InputError(f"dtype is {dtype!r}; expected float32, float64, float16 or bfloat16")
        if dtype != "auto":
            model = model.to(getattr(torch, dtype))
        self._extension = model.using(resolve_with_factor(spec, self._trained, factor))
        tokeniser = as_transformers(run / "tokeniser.json")
        super().__init__(wrap(model.eval()), "causal", tokenizer=tokeniser, **options)

    def _get_config(self, *args: Any, **kwargs: Any) -> None:
        """Read the configuration, and the record of the method that the model was saved with."""
        super()._get_config(*args, **kwargs)
        self._record = take_record(self._config, args[0] if args else kwargs["pretrained"])

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as the harness does, with adapters, then extend it."""
        if self._record is not None:
            kwargs["config"] = self._config  # restored: the saved one may apply the method
        super()._create_model(*args, **kwargs)
        adapter = str(kwargs.get("peft") or "")
        record = Path(adapter).expanduser() / ADAPTER_FILE
        if adapter and is_adapter(adapter) and record.is_file():
            self._record = read_adapter_record(adapter)
        method, length = self._method, self._train_length_option
        if method is None and self._record is not None:
            method, saved = self._record["method"], self._record["train_length"]
            if length not in (None, saved):
                raise InputError(
                    f"train_length is {length}, and the model was saved as extended from {saved}: "
                    "give a method to extend it from another length"
                )
            length = saved
        if method is None or is_unmodified(method):
            self._trained = length or known_length(model_parts(self._model))[0]
        else:
            extension = extend(self._model, method, train_length=length, **self._parameters)
            self._trained = extension.resolved.train_length

    def _loglikelihood_tokens(
        self, requests: Any, *args: Any, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Raise `InputError` for requests that the harness would cut at the beginning."""
        for _, context, continuation in requests:
            self._refuse_cut("a text with its continuation", len(context) + len(continuation) - 1)
        return list(super()._loglikelihood_tokens(requests, *args, **kwargs))

    def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> list[float]:
        """The log-likelihood of whole texts, in windows of `max_length` or the training length."""
        with self._windows():
            return list(super().loglikelihood_rolling(*args, **kwargs))

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        with self._windows() if requests is None else nullcontext():
            return int(super()._detect_batch_size(requests, pos))

    @contextmanager
    def _windows(self) -> Iterator[None]:
        before, self._max_length = self._max_length, self._max_given or self._trained
        try:
            yield
        finally:
            self._max_length = before

    def tok_batch_encode(
        self, strings: Sequence[str], *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The tokens of prompts; raises `InputError` where the harness would cut them."""
        limit = kwargs.pop("left_truncate_len", None)
        ids, mask = super().tok_batch_encode(list(strings), *args, **kwargs)
        if limit is not None and ids.shape[1] > limit:
            answer = self.max_length - limit
            self._refuse_cut(f"a prompt with an answer of {answer} tokens", ids.shape[1] + answer)
        return ids, mask

    def _refuse_cut(self, subject: str, tokens: int) -> None:
        if self._max_given is not None and tokens > self._max_given:
            raise InputError(
                f"{subject} has {tokens} tokens and would be cut to max_length={self._max_given}; "
                "raise max_length, or leave it out to cut nothing"
            )
