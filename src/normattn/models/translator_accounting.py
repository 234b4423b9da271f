"""What an encoder–decoder costs: parameters, and FLOPs per pair of sentences."""

from __future__ import annotations

from normattn.errors import InputError
from normattn.models.accounting import Flops, parameter_count, planned_parameters, stack_flops
from normattn.models.translator import Translator
from normattn.models.translator_config import TranslatorConfig


def translator_parameter_count(model: Translator | TranslatorConfig) -> int:
    """The number of learned numbers; a configuration is built without memory and counted."""
    if isinstance(model, TranslatorConfig):
        return planned_parameters(Translator, model)
    return parameter_count(model)


def translator_flops(config: TranslatorConfig, source_length: int, target_length: int) -> Flops:
    """FLOPs of one pair of sentences (`Flops` per pair, not per token), head and all.

    The source's keys and values of the cross attention count once per source token, its queries
    and outputs once per target token, its scores once per pair of tokens. Raises `InputError` for
    a length below 1.
    """
    if min(source_length, target_length) < 1:
        raise InputError(
            f"FLOPs were asked for at lengths of {source_length} and {target_length}; both must be "
            "at least 1"
        )
    below = config.decoder
    encoder, decoder = stack_flops(config, source_length), stack_flops(below, target_length)
    width = config.heads * config.score_head_dim
    kv = (config.kv_heads or config.heads) * config.score_head_dim
    remembered = 2 * below.layers * config.dim * 2 * kv
    read = 2 * below.layers * 2 * config.dim * width + 2 * config.target_size * config.dim
    across = 2 * below.layers * 2 * width * source_length * target_length
    return Flops(
        source_length * (encoder.weights + remembered) + target_length * (decoder.weights + read),
        source_length * encoder.attention + target_length * decoder.attention + across,
    )
