"""The 32-row table of KeyNorm and length extrapolation (kexue.fm/archives/9859), as data.

Eight scores are trained (Baseline, QNA, KNA and CosA, each with and without log-n scaling), and
each reads on past its training length in four ways: as it is, and with NTK, YaRN or ReRoPE.
"all" asks for the extended table: a row for every trained-in part, and every post-hoc method on
Baseline, KNA and CosA.
"""

from __future__ import annotations

from normattn.errors import InputError
from normattn.recipes.language_studies import (
    ReadCell,
    TextConfig,
    canonical,
    checked_methods,
    described,
    opened,
    shared_training,
    usable_methods,
)
from normattn.recipes.measuring import evaluation_sets
from normattn.recipes.omissions import Omission
from normattn.recipes.reading_stages import AS_IS
from normattn.recipes.selections import ALL, candidates
from normattn.recipes.settings import Preset
from normattn.recipes.studies import (
    Request,
    Sweep,
    place_of,
    seeds_of,
)
from normattn.recipes.tabulate import tabulate
from normattn.recipes.variants import BASES, READ_WITH, trained_in_variants

KIND = "keynorm"
VARIANTS = tuple(
    f"{base}{logn}" for base in ("Baseline", "QNA", "KNA", "CosA") for logn in ("", "-logn")
)
METHODS = (AS_IS, "NTK", "YaRN", "ReRoPE")


def resolve(request: Request) -> Sweep:
    """Every choice made and checked, before anything is written or trained.

    Raises `InputError` for an unknown preset, score, method or setting, and for values out of
    range. A method that makes no sense for one of several scores leaves out that row, and says so;
    so does a part that a row of the extended table cannot have.
    """
    preset = opened(request, KIND)
    config = sweep_config(preset)
    variants, skipped = _variants(request, config)
    methods = None if request.methods == (ALL,) else _methods(request, config)
    cells = []
    for seed in seeds_of(request, preset):
        for variant in variants:
            usable, omissions = _usable(variant, methods, config)
            skipped += [each for each in omissions if each not in skipped]
            cells.append(
                ReadCell(
                    variant=variant,
                    seed=seed,
                    methods=usable,
                    training=config.training,
                    evaluation=config.evaluation,
                )
            )
    return Sweep(
        study=KIND,
        config=config,
        cells=tuple(cells),
        skipped=tuple(skipped),
        out=place_of(request, KIND, preset),
        report=lambda out: tabulate([out], out),
        describe=described(
            lambda data: evaluation_sets(data, config.train_length, config.evaluation)
        ),
        facts=config.facts,
    )


def sweep_config(preset: Preset) -> TextConfig:
    """What all rows share."""
    return TextConfig(
        preset=preset.name, training=shared_training(preset), evaluation=preset.evaluation
    )


def _variants(request: Request, config: TextConfig) -> tuple[tuple[str, ...], list[Omission]]:
    """The scores to train, and why each of the others cannot be trained here."""
    every = (ALL,) in (request.variants, request.methods) and request.variants in (None, (ALL,))
    if not every:
        return canonical(_listed(request.variants, "--variants") or VARIANTS, config), []
    found: list[str] = []
    omissions: list[Omission] = []
    for variant in trained_in_variants(int(config.training["model"]["layers"])):
        try:
            found += canonical([variant], config)
        except InputError as error:
            omissions.append(Omission(variant, "", str(error)))
    return tuple(dict.fromkeys(found)), omissions


def _methods(request: Request, config: TextConfig) -> tuple[str, ...]:
    return checked_methods(_listed(request.methods, "--methods") or METHODS, config)


def _listed(names: tuple[str, ...] | None, option: str) -> tuple[str, ...] | None:
    if names is not None and ALL in names:
        raise InputError(f"{option} {ALL} is said alone, without other names: {', '.join(names)}")
    return names


def _usable(
    variant: str, methods: tuple[str, ...] | None, config: TextConfig
) -> tuple[tuple[str, ...], list[Omission]]:
    """The methods of one row, None standing for all, and why each of the others cannot be.

    All methods are read on the scores of the table; a row that shows another part is read as it is
    and with two methods.
    """
    if methods is None:
        whole = variant in (*BASES, *VARIANTS)
        methods = (AS_IS, *(candidates() if whole else READ_WITH))
    return usable_methods(variant, methods, config)
