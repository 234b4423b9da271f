"""Which scores can be trained in a setting, and which inference-time methods a score can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normattn.errors import InputError
from normattn.lab.studies.language import TextSetting
from normattn.score.parts import parts
from normattn.score.spec import UNMODIFIED, ScoreSpec, is_unmodified

ALL = "all"
WITH_LOGN = ("NTK", "YaRN", "ReRoPE")
"""The methods that are also read together with inference-time log-n scaling."""


def canonical(variants: Sequence[str], setting: TextSetting) -> tuple[str, ...]:
    """The scores to train, by their printed names; each must be whole and trainable here."""
    names = []
    for variant in variants:
        spec = ScoreSpec.parse(variant)
        if spec.method:
            raise InputError(
                f"{variant} holds {spec.method}, which is applied after training; "
                f"name {spec.variant_name} among --variants and {spec.method} among --methods"
            )
        _ = setting.run(spec.text).training_config  # raises where it cannot be trained
        names.append(spec.text)
    return tuple(dict.fromkeys(names))


def checked_methods(methods: Sequence[str], setting: TextSetting) -> tuple[str, ...]:
    """The methods by their printed names; an unknown one is refused with the nearest named."""
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


def usable(
    methods: Mapping[str, Sequence[str]], setting: TextSetting
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Of each score the methods that can be applied to it, and why others cannot."""
    applicable, skipped = {}, []
    for variant, asked in methods.items():
        spec = ScoreSpec.parse(variant, train_length=setting.train_length)
        reasons = _refusals(spec, asked, setting.evaluation.factor)
        applicable[variant] = tuple(method for method in asked if method not in reasons)
        skipped += _sentences(spec, reasons)
    return applicable, skipped


def candidates() -> tuple[str, ...]:
    """Every registered inference-time method by itself, then those read with log-n scaling too."""
    alone = [name for name, part in parts().items() if part.when != "training-time"]
    return (*alone, *(f"{name}-logn+" for name in WITH_LOGN if name in alone))


def post_hoc_methods(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """The `candidates` that `spec` can take, as texts for `with_method`.

    `factor` is what stretching methods stretch by: it decides whether parameters are in range.
    """
    refused = _refusals(spec, candidates(), factor)
    return tuple(method for method in candidates() if method not in refused)


def left_out(spec: ScoreSpec, factor: float = 8.0) -> tuple[str, ...]:
    """Which registered inference-time methods `spec` cannot take: a sentence for each reason."""
    return tuple(_sentences(spec, _refusals(spec, candidates(), factor)))


def _refusals(spec: ScoreSpec, methods: Sequence[str], factor: float) -> dict[str, str]:
    """Why `spec` cannot take each of the methods that it cannot take."""
    reasons = {}
    for method in methods:
        try:
            spec.with_method("" if method == UNMODIFIED else method).resolve(factor=factor)
        except InputError as error:
            reasons[method] = str(error)
    return reasons


def _sentences(spec: ScoreSpec, refused: Mapping[str, str]) -> list[str]:
    """A sentence for each reason, with all the methods that it holds for."""
    groups: dict[str, list[str]] = {}
    for name, error in refused.items():
        rotary = any(
            part.needs_rotary for part in ScoreSpec.parse("Baseline").with_method(name).parts
        )
        what, _, reason = error.partition(": ")
        known = " cannot be combined with " in what or what.endswith(" is not possible")
        why = reason if known else error
        if rotary and not spec.position.rotary:
            why = "it has no rotary positions"
        groups.setdefault(why, []).append(name)
    return [
        f"{spec.name} is not evaluated with {', '.join(names)}: {why}"
        for why, names in groups.items()
    ]
