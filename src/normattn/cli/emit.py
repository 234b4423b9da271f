"""`normattn extend MODEL --emit ENGINE`: what an engine needs, printed or written."""

from __future__ import annotations

from pathlib import Path

from normattn.cli import model_options
from normattn.cli.extend_settings import (
    choose,
    expand_methods,
    open_parameters,
    refuse_unused,
)
from normattn.errors import InputError
from normattn.hf.engines import ENGINES, Wanted, emit, gguf_values
from normattn.hf.llama_cpp import architecture_of, read_gguf, write_gguf
from normattn.hf.load import read_configuration
from normattn.hf.native import refuse_applied
from normattn.hf.plan import plan
from normattn.hf.tiny_model import small_model
from normattn.io import expand_path, write_text
from normattn.score.spec import UNMODIFIED
from normattn.terminal import show, warn


def emit_method(asked: model_options.Extend, engine: str) -> None:
    """Print, or write to `asked.out`, what an engine needs to serve a model under one method.

    A small random model of the configuration is used; no weight is read, but for a copy of a GGUF
    file. Raises `InputError` for an engine without the method, before anything is written, and
    where `out` exists.
    """
    methods = [method for method in expand_methods(asked.methods) if method != UNMODIFIED]
    if len(methods) != 1:
        raise InputError("--emit needs one method, such as --methods 'YaRN(factor=4)'")
    out = asked.out
    if out is not None and out.exists():
        raise InputError(f"{out} exists already: choose a new file")
    refuse_unused(methods, asked)
    model = expand_path(asked.model)
    source = model if asked.gguf is None else model / asked.gguf
    wanted = _wanted(asked, source, methods[0])
    text = emit(wanted, engine)
    older = "" if asked.engine_version is None else f"written for {engine} {asked.engine_version}, "
    warn(f"{older}checked with {ENGINES[engine].checked}")
    if asked.lengths is None and asked.factor is None and "factor" in open_parameters(methods[0]):
        warn(
            f"for {wanted.longest:,} tokens, twice the training length: choose another reach by "
            "--lengths or --factor"
        )
    if out is None:
        print(text, end="")
        return
    if engine == "gguf" and source.suffix == ".gguf":
        write_gguf(source, out, gguf_values(wanted))
    else:
        write_text(out, text, new=True)
    show(f"{out}: {wanted.plan.spec.method_text} for {engine}, up to {wanted.longest:,} tokens")


def _wanted(asked: model_options.Extend, source: Path, method: str) -> Wanted:
    config = read_configuration(source if asked.gguf else asked.model)
    refuse_applied(config)
    small = small_model(config)
    chosen = choose(asked, small)
    length, longest = chosen.train_length, chosen.lengths[-1]
    given = {name: getattr(chosen, name) for name in open_parameters(method)}
    planned = plan(small, method, length, **given)
    if asked.lengths is None:
        longest = int(length * getattr(planned.spec.rope_scaling, "stretch", longest / length))
    text = config.get_text_config()
    architecture = architecture_of(text.model_type)
    if source.suffix == ".gguf":
        architecture = read_gguf(source).architecture
    # The name of the text configuration in a configuration of several parts.
    parts = getattr(config, "sub_configs", {})
    inside = next((name for name in parts if getattr(config, name, None) is text), None)
    model = str(source if source.exists() else asked.model)
    return Wanted(model, planned, longest, architecture, inside, asked.engine_version)
