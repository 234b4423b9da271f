"""The options of commands on transformers models, with their help; quick to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from normattn.cli.parsing import argument, flag, names, option, token_counts

ALL = "all"


def method_names(text: str, name: str) -> tuple[str, ...]:
    """`"YaRN,ReRoPE(window=512)-logn+"` as two names.

    Raises `InputError` for an empty, repeated or unknown name, before transformers is imported.
    """
    methods = names(text, name)
    for method in set(methods) - {ALL}:
        from normattn.score.grammar import read
        from normattn.score.spec import is_unmodified

        if not is_unmodified(method):
            read(method)
    return methods


@dataclass(frozen=True, kw_only=True)
class Extend:
    """Find the best way to run a pretrained model past its context length, without training.

    Evaluates every method on your text, and recommends one for each length, with its cost.
    """

    examples: ClassVar[str] = """
`normattn extend ./my-model` – every method, at the training length and twice that

`normattn extend ./my-model --text book.txt --lengths 8k,16k,32k` – on your own text

`normattn extend weights.gguf --methods "YaRN(factor=4),ReRoPE-logn+" --lengths 16k` – two methods

`normattn extend ./my-model --text book.txt --lengths 16k --save longer` – also save the model with
the recommended method, for `normattn.from_pretrained("longer")`

`normattn extend ./my-model --methods "YaRN(factor=4)" --emit vllm` – print the settings for vLLM;
also hf, sglang, llama.cpp, mlx, and gguf (a copy of a GGUF file: `--out longer.gguf`)

Loss and accuracy are measured on the same final tokens after contexts of every length, and by
position; the cost at the training length; time and memory of a prefill; and whether a pass key is
found. Results are kept in OUT: rerun the command to resume, or with other --methods to add some.
Another model, text or length needs another directory. Time grows with the square of the length.
"""

    model: str = argument(help="A folder, a GGUF file, or a name on the hub.")
    lengths: tuple[int, ...] | None = option(
        None,
        "Lengths in tokens, separated by commas; 8k is 8192. [default: the training length "
        "and twice that]",
        read=token_counts,
    )
    out: Path | None = option(
        None, "Folder of measurements and report. [default: runs/extend-MODEL]"
    )
    gguf: str | None = option(None, "The GGUF file in the folder or in the hub's repository.")
    text: list[str] | None = option(
        None,
        "File or folder of text; may be repeated. [default: the standard library's source]",
        metavar="FILE",
    )
    methods: tuple[str, ...] = option(
        ALL,
        "Methods, separated by commas: PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN, ReRoPE, "
        "LeakyReRoPE, SelfExtend, DualChunk, logn+, or one with logn+ (YaRN-logn+). all: every one "
        "but DualChunk, and five with logn+.",
        read=method_names,
    )
    windows: int = option(2, "Windows of text, at most.", min=1)
    train_length: int | None = option(
        None, "Training length of the model. [default: from its configuration]", min=1
    )
    factor: float | None = option(
        None,
        "Factor of PI, NTK, YaRN and similar methods. [default: longest length / training length]",
    )
    window: int | None = option(
        None, "Window of ReRoPE and similar methods. [default: training length / 4]"
    )
    passkey: bool = option(
        True, "Whether to hide a pass key in the text.", flag="--passkey/--no-passkey"
    )
    dtype: Literal["fp32", "bf16"] = option("fp32", "Type of the weights.")
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    seed: int = option(0, "Chooses windows and pass keys.", min=0)
    save: Path | None = option(
        None,
        "Save the model with the recommended method, or the one of --methods, to this new folder.",
    )
    emit: str | None = option(
        None,
        "Evaluate nothing; print the settings for hf, vllm, sglang, llama.cpp, gguf or mlx, "
        "or write them to the new file --out. Needs exactly one of --methods.",
        metavar="ENGINE",
    )
    engine_version: str | None = option(
        None, "Version of the engine, where versions differ. [default: the one that was checked]"
    )


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that a serving engine applies the intended method."""

    examples: ClassVar[str] = """
`normattn verify ./extended --against /srv/model/config.json` – a model saved
by `normattn extend --save`, against what is served

`normattn verify ./my-model --method "YaRN(factor=4)" --against overrides.json` – fields
for vLLM's `--hf-overrides`

`normattn verify ./my-model --method "YaRN(factor=4)" --against serve.sh` – a script with
flags of vLLM, SGLang or llama.cpp; a GGUF file works as well

**Exit code**: 0 if inverse frequencies, attention factor and lengths match, 1 if they do not, 2 for
bad input. It names usual mistakes, one sentence each.
"""

    model: str = argument(
        help="The model: a folder, a GGUF file, a config.json, or a name on the hub."
    )
    against: str = option(
        ...,
        "The engine's settings: a config.json or its folder, a JSON file with some fields, a "
        "GGUF file, or a text file with the engine's flags.",
    )
    method: str | None = option(
        None, "The intended method. [default: the one that MODEL was saved with]"
    )
    train_length: int | None = option(
        None, "Training length of the model. [default: from its configuration]", min=1
    )
    as_json: bool = flag("--json", "Print the result as JSON.")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Name the attention score of every layer of a transformers model, and verify it."""

    examples: ClassVar[str] = """
`normattn score ./my-model` – the score of every layer, as a name for `--score` and
`ScoreSpec.parse`

`normattn score model.gguf`, `normattn score config.json`, `normattn score Qwen/Qwen3-8B`

`normattn score ./my-model --json` – as JSON

**How it works**: a small random model is built from the configuration and run on a few tokens.
Normalisation, rotation, scale, window, cap, sink and gate are determined from what its layers do.
Then `normattn.attention` with that score is compared with each layer's own attention.

**Exit code**: 0 if the score of every layer is verified, 1 if not, 2 for bad input.
"""

    model: str = argument(help="A folder, a GGUF file, a config.json or a name on the hub.")
    tokens: int = option(48, "Number of tokens to run.", min=8, max=4096)
    as_json: bool = flag("--json", "Print the result as JSON.")


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """Run lm-evaluation-harness; all arguments are those of its command `lm_eval`.

    It needs the extra `lm-eval`. The model `normattn` is a run (`run=RUN`) or a model of
    transformers (`pretrained=FOLDER`), extended by `method=`. The tasks `normattn` need no
    download; your own `--include_path` replaces them.
    """

    examples: ClassVar[str] = """
`normattn lm-eval --model normattn --model_args run=runs/kna --tasks normattn` – a run on
normattn's tasks

`normattn lm-eval --model normattn --model_args pretrained=FOLDER,method=YaRN,factor=2 --tasks
normattn_passkey --metadata '{"lengths": [8192, 16384], "samples": 5}'` – an extended model

`normattn lm-eval ls tasks` – list every task of the harness

`normattn lm-eval --tasks-path` – the folder of normattn's tasks, for `lm_eval --include_path`
"""

    arguments: list[str] | None = argument(None, help="Arguments of `lm_eval`.", show_default=False)
    tasks_path: bool = flag("--tasks-path", "Print the folder of normattn's tasks and exit.")
