"""Many-shot sets: nothing cut, nothing leaked, and scored as the answers deserve."""

from __future__ import annotations

from functools import cache

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.cross_entropy import TokenScores
from normattn.lab.data import InContextSet, in_context_set, train_tokeniser
from normattn.lab.data.in_context import prompts
from normattn.lab.data.relations.documents import RelationCorpus, RelationDocument
from normattn.lab.data.splits import SplitName
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.evaluation import CellInfo, TokenScorer, evaluate_in_context, from_logits

LABELS = ("birds", "bird", "rock", "star", "tree")  # one begins like another
L = 48


@cache
def corpus() -> RelationCorpus:
    """Documents of one label each, a few of two, and of a fifth label fewer than of the others."""

    def some(split: str, count: int) -> tuple[RelationDocument, ...]:
        return tuple(
            RelationDocument(f"{split}{label}{n}", f"{split} {at} of {n} {'xy'[n % 2]}", own)
            for at, label in enumerate(LABELS)
            for n in range(count if label != "tree" else count // 2)
            for own in [(label,) if n % 9 else ("bird", "rock")]
        )

    counts: dict[SplitName, int] = {"train": 60, "validation": 4, "test": 12}
    return RelationCorpus({name: some(name, count) for name, count in counts.items()}, LABELS)


@cache
def tokeniser() -> Tokeniser:
    texts = [f"{each.text} => {each.labels[0]}" for each in corpus().splits["train"]]
    return train_tokeniser(texts, 300)


def made(multiple: int = 4, samples: int = 40, labels: int = 4, seed: int = 0) -> InContextSet:
    return in_context_set(corpus(), tokeniser(), L, multiple, samples, labels, seed)


def info() -> CellInfo:
    return CellInfo(variant="KNA", seed=0, method="", spec="KNA@48", weights="w")


def shares(scorer: TokenScorer, chosen: InContextSet, tokens: int = 16384) -> dict[str, float]:
    """Each statistic over all samples."""
    found = evaluate_in_context(scorer, chosen, info(), tokens_per_batch=tokens)
    totals = found.group_by("statistic").agg(pl.sum("sum", "of"))
    return {name: above / of for name, above, of in totals.iter_rows()}


def test_every_shot_is_whole_and_true() -> None:
    known = {each.text: each.labels for each in corpus().splits["train"]}
    asked = {each.text: each.labels for each in corpus().splits["test"]}
    for each in prompts(corpus(), tokeniser(), 4 * L, 40):
        text = tokeniser().decode(np.array(each.context))
        *shots, question = text.split("\n\n")
        assert len(shots) == each.shots
        pairs = [shot.split("\n=> ") for shot in shots]
        assert all(known[body] == (label,) for body, label in pairs)
        assert len({body for body, _ in pairs}) == len(pairs)
        answers = [tokeniser().decode(np.array(answer)) for answer in each.answers]
        assert answers == [" bird\n", " birds\n", " rock\n", " star\n"]
        counts = [[label for _, label in pairs].count(answer.strip()) for answer in answers]
        assert max(counts) - min(counts) <= 1 <= min(counts)
        assert asked[question.removesuffix("\n=>")] == (answers[each.right].strip(),)


def test_windows_hold_what_the_prompts_say_and_as_much_as_fits() -> None:
    chosen, told = made(), prompts(corpus(), tokeniser(), 4 * L, 40)
    assert chosen.windows.shape == (40, 4, 4 * L + 1)
    assert np.bincount(chosen.right).tolist() == [10] * 4
    ends = [f"{each.text}\n=>" for each in corpus().splits["train"]]
    longest = max(len(tokeniser().encode(end)) for end in ends) + len(
        tokeniser().encode(" birds\n\n")
    )
    for sample, each in enumerate(told):
        for which, answer in enumerate(each.answers):
            window, scored = chosen.windows[sample, which], chosen.scored[sample, which]
            whole = [*each.context, *answer]
            assert window[: len(whole)].tolist() == whole
            assert not window[len(whole) :].any()
            assert window[1:][scored].tolist() == list(answer)
        # Another shot would not have had room.
        assert len(each.context) + max(map(len, each.answers)) + longest > 4 * L


def test_a_longer_text_has_the_same_question_behind_more_of_the_same_shots() -> None:
    short, long = (prompts(corpus(), tokeniser(), length, 8) for length in (3 * L, 6 * L))
    for one, other in zip(short, long, strict=True):
        assert (one.name, one.right) == (other.name, other.right)
        assert other.context[-len(one.context) :] == one.context
        assert other.shots > one.shots


def test_a_set_is_a_function_of_its_arguments() -> None:
    assert made().fingerprint == made().fingerprint
    assert len({made(**{name: 3}).fingerprint for name in ("multiple", "labels", "seed")}) == 3


def answering(chosen: InContextSet, wrong: frozenset[int] = frozenset()) -> TokenScorer:
    """Logits of a model that knows each answer, but for the samples that it has wrong."""
    known = {}
    for sample, right in enumerate(chosen.right):
        which = (right + 1) % 4 if sample in wrong else right
        window, scored = chosen.windows[sample, which], chosen.scored[sample, which]
        start = int(np.flatnonzero(scored)[0]) + 1
        known[tuple(window[:start].tolist())] = window[1:][scored].tolist()

    def logits(ids: Tensor) -> Tensor:
        row = ids[0].tolist()
        found = torch.zeros(1, len(row), 300)
        for context, answer in known.items():
            if tuple(row[: len(context)]) == context:
                for place, token in enumerate(answer, len(context) - 1):
                    if place < len(row):
                        found[0, place, token] = 50.0
        return found

    return from_logits(logits)


def test_a_model_that_knows_the_answer_gets_everything_right() -> None:
    found = shares(answering(made(samples=8)), made(samples=8))
    assert (found["chosen"], found["exact"]) == (1.0, 1.0)
    assert found["loss"] == pytest.approx(0, abs=1e-6)
    assert found["shots"] == made(samples=8).shots.mean()


def test_a_model_that_answers_with_another_label_gets_that_one_wrong() -> None:
    chosen = made(samples=8)
    found = shares(answering(chosen, frozenset({0, 5})), chosen)
    assert (found["chosen"], found["exact"]) == (0.75, 0.75)


def test_a_model_that_guesses_is_right_by_chance() -> None:
    chosen = made(samples=400)
    draws = torch.Generator().manual_seed(0)

    def guessing(ids: Tensor) -> TokenScores:
        shape = (ids.shape[0], ids.shape[1] - 1)
        # The answers are of different lengths: a draw for the window, on its first scored token.
        flat = chosen.windows.reshape(-1, chosen.length + 1).tolist()
        loss = torch.zeros(shape)
        for row, window in enumerate(ids.tolist()):
            scored = chosen.scored.reshape(-1, chosen.length)[flat.index(window)]
            loss[row, int(np.flatnonzero(scored)[0])] = torch.rand((), generator=draws)
        return TokenScores(loss=loss, correct=torch.zeros(shape, dtype=torch.bool))

    found = shares(guessing, chosen)
    assert abs(found["chosen"] - 1 / 4) < 4 * np.sqrt(1 / 4 * 3 / 4 / 400)
    assert found["exact"] == 0.0


def test_answers_that_are_equally_likely_share_the_point() -> None:
    def undecided(ids: Tensor) -> TokenScores:
        shape = (ids.shape[0], ids.shape[1] - 1)
        return TokenScores(loss=torch.zeros(shape), correct=torch.ones(shape, dtype=torch.bool))

    found = shares(undecided, made(samples=8))
    assert (found["chosen"], found["exact"]) == (1 / 4, 1.0)


@pytest.mark.parametrize("budget", [1, 5 * L, 10**6])
def test_batches_change_nothing(budget: int) -> None:
    chosen = made(samples=4)
    assert shares(answering(chosen), chosen, budget)["chosen"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"multiple": 1}, "a text of 48 tokens is too short for many-shot: it holds"),
        ({"labels": 6}, "many-shot needs 6 labels .* the corpus has 5"),
        ({"labels": 1}, "many-shot needs 2 labels and 1 sample or more, got 1, 40"),
        ({"samples": 0}, "got 4, 0"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, int], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        made(**arguments)


def test_a_question_asked_again_is_no_further_unit() -> None:
    chosen = made(samples=80)
    found = evaluate_in_context(answering(chosen), chosen, info()).filter(statistic="chosen")
    assert set(found["unit"]) == set(chosen.documents)
    assert found.height == len(set(chosen.documents)) < len(chosen) == found["of"].sum()
