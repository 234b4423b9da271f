"""Which scores can be trained in a setting, and which inference-time methods a score supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normattn.errors import InputError
from normattn.lab.studies.language import TextSetting
from normattn.score.parts import parts
from normattn.score.spec import UNMODIFIED, ScoreSpec, is_unmodified

ALL = "all"
WITH_LOGN = ("NTK", "YaRN", "ReRoPE")
"""The methods that are also evaluated with inference-time log-n scaling."""


def canonical_scores(variants: Sequence[str], setting: TextSetting) -> tuple[str, ...]:
    """The printed names of the scores to train; raises `InputError` if one cannot be."""
    names = []
    for variant in variants:
        spec = ScoreSpec.parse(variant)
        if spec.method:
            raise InputError(
                f"{variant} holds {spec.method}, which is applied after training; "
                f"name {spec.variant_name} among --variants and {spec.method} among --methods"
            )
        _ = setting.run(spec.text).training_config  # raises where the score cannot be trained
        names.append(spec.text)
    return tuple(dict.fromkeys(names))


def canonical_methods(methods: Sequence[str], setting: TextSetting) -> tuple[str, ...]:
    """The printed names of the methods; raises `InputError` for an unknown one."""
    names = []
    for method in methods:
        if is_unmodified(method):
            names.append(UNMODIFIED)
            continue
        spec = ScoreSpec.parse("Baseline").with_method(method)
        if spec.train_length not in (None, setting.train_length):
            raise InputError(
                f"{method} is for a training length of {spec.train_length}, but this table's is "
                f"{setting.train_length}"
            )
        if not spec.method_text:
            raise InputError(
                f"{method} changes nothing after training, so it is not an entry of --methods"
            )
        names.append(spec.method_text)
    return tuple(dict.fromkeys(names))


def applicable_methods(
    methods: Mapping[str, Sequence[str]], setting: TextSetting
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The supported methods of each score, and sentences on why the others are not supported."""
    applicable, skipped = {}, []
    for variant, requested in methods.items():
        spec = ScoreSpec.parse(variant, train_length=setting.train_length)
        applicable[variant], why = supported_methods(spec, requested, setting.evaluation.factor)
        skipped += why
    return applicable, skipped


def candidates() -> tuple[str, ...]:
    """All registered inference-time methods, then those combined with log-n scaling."""
    alone = [name for name, part in parts().items() if part.when != "training-time"]
    return (*alone, *(f"{name}-logn+" for name in WITH_LOGN if name in alone))


def supported_methods(
    spec: ScoreSpec, methods: Sequence[str], factor: float
) -> tuple[tuple[str, ...], list[str]]:
    """The methods that `spec` supports, and a sentence for each reason against the others.

    `factor` is the stretch factor, which decides whether parameters are in range.
    """
    supported: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in methods:
        try:
            spec.with_method("" if name == UNMODIFIED else name).resolve(factor=factor)
            supported.append(name)
        except InputError as error:
            # Without the names of both, so that methods with one reason share a sentence.
            statement, _, reason = str(error).partition(": ")
            why = reason if "cannot be combined" in statement else str(error)
            method = ScoreSpec.parse("Baseline").with_method(name)
            if not spec.position.rotary and any(part.needs_rotary for part in method.parts):
                why = "it has no rotary positions"
            reasons.setdefault(why, []).append(name)
    return tuple(supported), [
        f"{spec.name} is not evaluated with {', '.join(names)}: {why}"
        for why, names in reasons.items()
    ]
