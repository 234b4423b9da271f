"""The fastest kernel by a table of times: what is chosen, when it is measured, how it is kept."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from normattn import InputError, attention
from normattn.kernels import Problem, Visibility, attend, calibration, choose, reasons, unrounded
from normattn.kernels.bucket import LONGEST, Bucket
from normattn.kernels.calibration import Calibration, Times, machine, measured, using, way
from normattn.kernels.dispatch import _portable
from normattn.kernels.reference import reference

OWN = {"plain": ("fused",), "two regimes": ("two-regime", "two-regime-flash"), "bias": ("bias",)}


def _problem(kind: str = "plain", dtype: torch.dtype = torch.float32, tokens: int = 12) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shape, key = (2, 4, tokens, 8), torch.arange(tokens)
    q, k, v = (normal(*shape) for _ in range(3))
    plain = Problem(q, k, v, Visibility(True, key, key, aligned=True))
    if kind == "two regimes":
        return replace(plain, far_q=normal(*shape), far_k=normal(*shape), window=4)
    return replace(plain, bias=normal(4, tokens)) if kind == "bias" else plain


def _told(problem: Problem, times: Times) -> Calibration:
    """A table with the times of two kernels for such a problem, whose clock must not be read."""
    bucket = Bucket.of(problem)
    return Calibration({}, clock=_unread, seconds={f"{bucket}: {' or '.join(times)}": dict(times)})


def _unread() -> float:
    raise AssertionError("measured")


class _Time:
    """A clock that goes on by what each kernel is said to take; `rivals` are such kernels."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.seconds, self.runs = 0.0, seconds, 0

    def __call__(self) -> float:
        return self.now

    @property
    def rivals(self) -> Mapping[str, Callable[[Problem], torch.Tensor]]:
        def run(seconds: float) -> Callable[[Problem], torch.Tensor]:
            def taken(problem: Problem) -> torch.Tensor:
                self.now, self.runs = self.now + seconds, self.runs + 1
                return problem.q * 1.0

            return taken

        return {name: run(seconds) for name, seconds in self.seconds.items()}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_chooses_and_any_choice_is_right(kind: str, dtype: torch.dtype) -> None:
    problem, rivals = _problem(kind, dtype), (*OWN[kind], "chunked")
    exact = (x if x is None else x.double() for x in problem.tensors)
    expected = reference(Problem.of(problem.settings, list(exact)))
    for quick, slow in itertools.permutations(rivals, 2):
        with using("fastest", _told(problem, {name: 1.0 + (name != quick) for name in rivals})):
            assert choose(problem).name == quick
            decision = reasons(problem)
            assert decision.kernel == quick
            assert "as measured on this machine" in decision.why
            assert decision.refused[slow] == f"it could, but {quick} comes first"
            out = attend(problem)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(out, expected.to(dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_portable_takes_the_fixed_order_whatever_the_table_says(
    kind: str, dtype: torch.dtype
) -> None:
    problem, rivals = _problem(kind, dtype), (*OWN[kind], "chunked")
    for quick in rivals:
        times = {name: 1.0 + (name != quick) for name in rivals}
        with using("portable", _told(problem, times)):
            fixed = next(_portable(problem))[0]
            assert choose(problem).name == reasons(problem).kernel == fixed
            assert torch.equal(attend(problem), attend(problem, fixed))


def test_a_kernel_that_cannot_serve_is_never_taken() -> None:
    """Three last rows of four are of one bucket with four."""
    whole = _problem(tokens=4)
    last = replace(
        whole, q=whole.q[:, :, 1:], visibility=replace(whole.visibility, query=torch.arange(1, 4))
    )
    with using("fastest", _told(whole, {"fused": 1.0, "chunked": 2.0})):
        assert choose(whole).name == "fused"
        assert Bucket.of(last) == Bucket.of(whole)
        assert choose(last).name == "chunked"


@pytest.mark.parametrize("kind", ["plain", "two regimes"])
def test_where_no_score_may_be_rounded_tiles_are_no_rival(kind: str) -> None:
    problem, own = _problem(kind, torch.bfloat16), OWN[kind]
    table = _told(problem, {**dict.fromkeys(own, 1.0), "chunked": 0.1})
    for quick in (*own, "precise"):
        times = {name: 1.0 + (name != quick) for name in (*own, "precise")}
        table.seconds |= _told(problem, times).seconds
        with using("fastest", replace(table)):
            assert unrounded(problem) == quick
            assert choose(problem).name == "chunked"
    with using("fastest", table):
        assert unrounded(_problem(kind)) == "auto"
        assert unrounded(_problem("bias", torch.bfloat16)) == "precise"


def test_the_least_of_interleaved_rounds() -> None:
    problem = replace(_problem(), q=_problem().q.requires_grad_())
    clock = _Time(one=0.01, two=0.02)
    assert measured(problem, clock.rivals, clock) == pytest.approx({"one": 0.01, "two": 0.02})
    assert clock.runs == 2 * (1 + calibration.SECONDS / 0.02)
    slow = _Time(one=3.0, two=1.0)
    assert measured(problem, slow.rivals, slow) == pytest.approx({"one": 3.0, "two": 1.0})
    assert slow.runs == 2 * (1 + calibration.LEAST_ROUNDS)


def test_a_measurement_is_kept_and_not_made_again(tmp_path: Path) -> None:
    path, bucket = tmp_path / "new" / "kernels.json", Bucket.of(_problem())
    assert bucket is not None
    clock = _Time(fused=0.5, chunked=0.25)
    first = Calibration({"cpu": 1}, path, clock).quicker(bucket, clock.rivals)
    assert (first.kernel, first.ratio) == ("chunked", 0.5)
    again = Calibration({"cpu": 1}, path, _unread)
    again.read()
    assert again.quicker(bucket, clock.rivals) == first


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        ('{"machine": {}}', "is damaged: expected machine and seconds"),
        ('{"machine": {"cpu": 2}, "seconds": {}}', "was measured on another machine"),
        ('{"machine": {"cpu": 1}, "seconds": {"a": {"fused": 1.0}}}', "'a' has no times"),
        ('{"machine": {"cpu": 1}, "seconds": {"a": {"b": 1.0, "c": -1.0}}}', "'a' has no times"),
        ('{"machine": {"cpu": 1}, "seconds": {"a": {"b": 1.0, "c": "d"}}}', "'a' has no times"),
    ],
)
def test_a_file_that_is_damaged_or_foreign_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    path, bucket = tmp_path / "kernels.json", Bucket.of(_problem())
    assert bucket is not None
    path.write_text(content)
    clock = _Time(fused=0.5, chunked=0.25)
    table = Calibration({"cpu": 1}, path, clock)
    table.read()
    assert not table.seconds
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {path} ")
    assert said in line
    assert line.endswith("; kernels are measured again")
    assert table.quicker(bucket, clock.rivals).kernel == "chunked"
    stored = json.loads(path.read_text())
    assert stored["machine"] == {"cpu": 1}
    assert len(stored["seconds"]) == 1
    assert not capsys.readouterr().err


def test_processes_that_measure_at_once_come_to_one_answer(tmp_path: Path) -> None:
    """Each finds the other quicker, and none has read what the other wrote."""
    path, bucket = tmp_path / "kernels.json", Bucket.of(_problem())
    assert bucket is not None
    together, answers = threading.Barrier(2), []

    def calibrate(clock: _Time) -> None:
        table = Calibration({}, path, clock)
        run = clock.rivals["fused"]

        def meeting(problem: Problem) -> torch.Tensor:
            if clock.runs == 0:
                together.wait(10)
            return run(problem)

        answers.append(table.quicker(bucket, {**clock.rivals, "fused": meeting}).kernel)

    clocks = _Time(fused=0.5, chunked=0.25), _Time(fused=0.25, chunked=0.5)
    threads = [threading.Thread(target=calibrate, args=(clock,)) for clock in clocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1]
    assert not (set(tmp_path.iterdir()) - {path, path.with_suffix(".lock")})


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bucket, clock = Bucket.of(_problem()), _Time(fused=0.5, chunked=0.25)
    assert bucket is not None
    table = Calibration({}, tmp_path / "file" / "kernels.json", clock)
    assert table.quicker(bucket, clock.rivals).kernel == "chunked"
    runs = clock.runs
    assert table.quicker(bucket, clock.rivals).kernel == "chunked"
    assert clock.runs == runs


def test_nothing_is_measured_where_nothing_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, table = _problem(dtype=torch.bfloat16), Calibration({}, clock=_unread)
    fixed = next(_portable(problem))[0]
    with using("fastest", table):
        with FakeTensorMode() as mode:
            q, k, v = (mode.from_tensor(x) for x in (problem.q, problem.k, problem.v))
            fake = replace(problem, q=q, k=k, v=v)
            assert choose(fake).name == fixed
            assert reasons(fake).why.endswith("; not yet measured on this machine")
            assert "not yet" not in reasons(replace(fake, cap=1.0)).why
        with FlopCounterMode(display=False):
            assert choose(problem).name == fixed
        assert choose(replace(problem, dropout=0.5)).name == "chunked"
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            assert choose(problem).name == fixed
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert choose(problem).name == fixed


def test_measuring_leaves_no_trace() -> None:
    """Within recomputation, autocast, inference and random numbers, it is by itself."""
    q = _problem().q.requires_grad_()
    state = torch.get_rng_state()
    table = Calibration({}, clock=itertools.count(0.0).__next__)

    def block(q: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q, "Baseline-NoPE").square()

    with using("fastest", table):
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(block, q, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sum(), q)
        with torch.inference_mode():
            block(q)
    assert len(table.seconds) == 2
    assert torch.equal(torch.get_rng_state(), state)
    with using("portable"):
        (expected,) = torch.autograd.grad(block(q).sum(), q)
    torch.testing.assert_close(grad, expected)


def test_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMATTN_KERNELS")
    assert way() == "fastest"
    monkeypatch.setenv("NORMATTN_KERNELS", "portable")
    assert way() == "portable"
    with using("fastest"):
        assert way() == "fastest"
    monkeypatch.setenv("NORMATTN_KERNELS", "quick")
    with pytest.raises(InputError, match="no NORMATTN_KERNELS is called 'quick'"):
        way()


def test_a_machine_is_its_processor_its_versions_and_its_threads() -> None:
    own = machine()
    assert own["torch"] == torch.__version__
    assert own["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(own)) == own


@pytest.mark.parametrize("kind", OWN)
def test_a_bucket_is_of_a_kind_and_makes_one_of_its_problems(kind: str) -> None:
    problem = _problem(kind, torch.bfloat16, tokens=100)
    bucket = Bucket.of(problem)
    assert bucket is not None
    assert bucket == Bucket.of(_problem(kind, torch.bfloat16, tokens=150))
    assert bucket != Bucket.of(_problem(kind, torch.bfloat16, tokens=200))
    assert Bucket.of(bucket.problem()) == bucket
    assert str(bucket).startswith("bfloat16 forward, 2 × 4 heads of 8, 128 × 128 causal")


@pytest.mark.parametrize(
    "shape", [(64, 32, 8, 64, 64), (3, 4, 1, 10**5, 10**5), (1, 8, 8, 1, 9000)]
)
def test_a_large_problem_is_measured_by_a_small_one(shape: tuple[int, ...]) -> None:
    batch, heads, groups, rows, keys = shape

    def empty(heads: int, tokens: int) -> torch.Tensor:
        return torch.zeros(1, 1, 1, 64).expand(batch, heads, tokens, 64)

    at = torch.zeros(1, dtype=torch.int64)
    k = empty(groups, keys)
    bucket = Bucket.of(Problem(empty(heads, rows), k, k, Visibility(True, at, at, True)))
    assert bucket is not None
    small = bucket.problem()
    assert small.q.shape[2] == min(rows, LONGEST)
    assert small.q.shape[1] // small.k.shape[1] == heads // groups
    assert max(small.q.numel(), small.k.numel()) <= 1 << 20
    if rows == 1:
        assert small.k.shape[2] == LONGEST


def test_two_regimes_are_measured_where_the_far_part_counts() -> None:
    x, at = torch.zeros(1).expand(1, 4, 9000, 64), torch.zeros(1, dtype=torch.int64)
    problem = Problem(x, x, x, Visibility(True, at, at, aligned=True))
    plain = Bucket.of(problem)
    two = Bucket.of(replace(problem, far_q=x, far_k=x, window=512))
    assert plain is not None
    assert two is not None
    assert (plain.rows, plain.keys, two.rows, two.keys) == (LONGEST,) * 2 + (2 * LONGEST,) * 2


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_a_bucket_of_some_rows_is_measured(kind: str, rows: int) -> None:
    """The last rows on grouped keys, of which the near ones are there from the first needed on."""
    whole, start = _problem(kind), 0
    own = replace(whole.visibility, query=whole.visibility.query[12 - rows :])
    far_q, far_k = whole.far_q, whole.far_k
    if far_q is not None and far_k is not None:
        far_q, far_k, start = far_q[:, :, 12 - rows :], far_k[:, :2], max(0, 12 - rows - 4 + 1)
    problem = replace(
        whole,
        q=whole.q[:, :, 12 - rows :],
        k=whole.k[:, :2, start:],
        v=whole.v[:, :2],
        far_q=far_q,
        far_k=far_k,
        near_start=start,
        visibility=own,
    )
    table = Calibration({}, clock=itertools.count(0.0).__next__)
    with using("fastest", table):
        assert choose(problem).why_not(problem) is None
    # The stock kernel's causal mask needs as many queries as keys, or one.
    measured_at_all = kind != "plain" or rows in (1, 12)
    assert len(table.seconds) == measured_at_all
