"""Several processes (DDP, FSDP2): one process's curve, read back by any number of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normattn.errors import DivergedError, InputError, Interrupted, NormattnError
from normattn.lab.runs import Checkpoints, read_metrics
from normattn.lab.training.distributed import choose_device, process_group
from normattn.lab.training.planning import GPU_MEMORY, describe_plan, make_plan, memory_of
from normattn.models import CausalLM

from .group import (
    STEPS,
    curve,
    die_in_a_step,
    diverge_on_the_second,
    fail_on_main,
    fail_while_others_train,
    go,
    hold,
    together,
    without_data_on_the_second,
    without_room,
)
from .settings import BAD_STEP, faulty, losses, run, small, state_of, stop


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model/model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training on one process."""
    return run(curve(), tmp_path_factory.mktemp("alone") / "run").path


def assert_like(out: Path, alone: Path) -> None:
    assert len(losses(out)) == STEPS
    assert losses(out) == pytest.approx(losses(alone), rel=1e-5)
    torch.testing.assert_close(weights(out), weights(alone), rtol=1e-3, atol=1e-4)


def assert_interrupted(said: list[Any], out: Path, step: int) -> None:
    assert [kind for kind, _ in said] == [Interrupted] * len(said), said
    assert state_of(out) == ("interrupted", step)


def test_two_processes_follow_one_and_stop_together(alone: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", curve(accumulate=2)
    assert_interrupted(together(2, go, out, settings, 5), out, 5)
    together(2, go, out, settings)
    assert_like(out, alone)


@pytest.mark.parametrize(
    ("work", "given", "errors"),
    [
        (fail_on_main, InputError, ["InputError", "InputError"]),
        (fail_on_main, KeyboardInterrupt, ["KeyboardInterrupt", "RuntimeError"]),
        (fail_while_others_train, "ddp", ["KeyError", "RuntimeError"]),
        (fail_while_others_train, "fsdp", ["KeyError", "RuntimeError"]),
    ],
)
def test_what_fails_on_the_first_process_reaches_all(
    work: Any, given: object, errors: list[str], tmp_path: Path
) -> None:
    said = together(2, work, given, tmp_path / "run")
    assert [kind for kind, _ in said] == errors
    assert all("the disk is gone" in each for _, each in said)


def test_what_fails_on_another_process_at_the_start_fails_on_all(tmp_path: Path) -> None:
    said = together(2, without_data_on_the_second, tmp_path / "run")
    why = "there is no such text"
    assert said == [
        (NormattnError, f"another process of the group failed: {why}"),
        (InputError, why),
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_end_of_another_process_is_one_sentence(tmp_path: Path, parallel: str) -> None:
    (kind, said), nothing = together(2, die_in_a_step, tmp_path / "run", parallel)
    assert (kind, nothing) == (NormattnError, None)
    assert said.startswith("another process of the group ended")


@pytest.mark.parametrize(
    ("size", "said"), [("2", "variable RANK expected, but not set"), ("two", "'two'")]
)
def test_a_group_that_cannot_be_joined_is_one_sentence(
    size: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", size)
    if size == "two":
        monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(InputError, match=f"WORLD_SIZE is {size}.*{said}; start them with torchrun"),
        process_group("cpu"),
    ):
        pass


def test_a_divergence_of_one_process_is_found_where_all_must_compute(tmp_path: Path) -> None:
    """BatchNorm's statistics are of all processes, which so repeat the step together."""
    said = together(2, diverge_on_the_second, tmp_path / "run")
    assert [kind for kind, _ in said] == [DivergedError] * 2, said
    assert "step 3; it began in the loss, every module's output being finite" in said[0][1]


def test_a_device_that_is_not_there_is_said() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="CUDA devices"):
        choose_device("cuda:99")
    with pytest.raises(InputError, match="unknown device"):
        choose_device("abacus")


TESTS = Path(__file__).parents[1]


def test_what_one_wrote_four_read_then_two_then_one(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, newest = tmp_path / "run", None
    stop(curve(), out, 2)
    for processes, done in ((4, 4), (2, 6)):
        assert_interrupted(together(processes, go, out, curve(parallel="fsdp"), 2), out, done)
        newest = Checkpoints(out / "checkpoints").last_path()
        assert newest == out / f"checkpoints/step-{done:08d}"
        kinds = sorted(file.suffix for file in newest.iterdir())
        assert kinds == [".json"] + [".safetensors"] * processes
    # A damaged part is named, and the checkpoint before it goes on.
    assert newest is not None
    part = sorted(newest.glob("*.safetensors"))[-1]
    part.write_bytes(part.read_bytes()[:-1])
    capfd.readouterr()
    run(curve(), out)
    assert f"step-{done:08d} is damaged: its parts do not match" in capfd.readouterr().err
    assert_like(out, alone)


def test_half_precision_is_that_of_one_process_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Checkpoints are written while weights already change: what they hold is their own step's."""
    one, broken, whole = (tmp_path / name for name in ("one", "broken", "whole"))
    half: dict[str, Any] = {"precision": "bf16", "keep": [3]}
    sharded = {**half, "parallel": "fsdp", "activation_checkpointing": True}
    for steps in (4, None):
        together(2, go, broken, curve(**sharded, checkpoint_seconds=0.0), steps)
    together(2, go, whole, curve(**sharded))
    assert read_metrics(broken / "metrics.jsonl") == read_metrics(whole / "metrics.jsonl")
    for model in ("model", "kept/step-00000003"):
        file = f"{model}/model.safetensors"
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    run(curve(**half), one)
    assert losses(whole) == pytest.approx(losses(one), rel=5e-3)
    assert all(weight.dtype == torch.float32 for weight in weights(whole).values())


@pytest.mark.parametrize("split", [pytest.param(None, marks=pytest.mark.thorough), "heads"])
def test_muon_and_qk_clip_are_those_of_one_process(split: str | None, tmp_path: Path) -> None:
    """Of the 45 rows of q, k and v one process holds 23, the other 22, and a head has 5."""
    model = {"dim": 15, "heads": 3, "score": "Baseline-NoPE"}
    changes = {"model": model, "qk_clip": 0.3, "optimiser": {"name": "muon", "split": split}}
    one, two = tmp_path / "one", tmp_path / "two"
    run(curve(**changes), one)
    for steps in (5, None):  # Stopped after five steps, then on to the end.
        together(2, go, two, curve(**changes, parallel="fsdp"), steps)
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    clipped = [line["largest_logit"] for line in read_metrics(one / "metrics.jsonl")]
    assert max(clipped) > 0.3
    torch.testing.assert_close(weights(two), weights(one), rtol=2e-2, atol=2e-3)


def test_divergence_is_said_by_all_and_the_step_before_is_kept(tmp_path: Path) -> None:
    said = together(2, go, tmp_path / "run", faulty("loss", parallel="fsdp"))
    assert [kind for kind, _ in said] == [DivergedError] * 2, said
    assert "resume with parallel ddp to have it named" in said[0][1]
    last = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert last is not None
    assert (last.step, last.sharded) == (BAD_STEP - 1, True)


def test_a_part_that_cannot_be_written_is_said_by_all(tmp_path: Path) -> None:
    said = together(2, without_room, tmp_path / "run")
    assert [kind for kind, _ in said] == [InputError] * 2, said
    assert all("no space left on the disk" in each for _, each in said)
    assert not any((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.thorough
def test_a_killed_process_is_begun_again_and_the_curve_goes_on(tmp_path: Path) -> None:
    """SIGKILL of one process under torchrun's elastic restart."""
    path = os.pathsep.join([str(TESTS.parent / "src"), *filter(None, sys.path)])
    options = {"steps": STEPS, "parallel": "fsdp", "checkpoint_seconds": 0.0, "pause": 0.05}
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
            *("--nproc-per-node", "2", "-m", "training.settings"),
            *(str(tmp_path / "run"), json.dumps(options)),
        ],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    workers = psutil.Process(running.pid).children
    try:
        while int(running.stdout.readline()) < 4:
            pass
        os.kill(workers()[-1].pid, signal.SIGKILL)
        _, said = running.communicate(timeout=180)
    finally:
        # What hangs is ended, workers too, so that nothing stays behind.
        if running.poll() is None:
            for process in [*workers(), running]:
                process.kill()
    assert running.returncode == 0, said
    one = run(small(steps=STEPS), tmp_path / "one").path
    assert losses(tmp_path / "run") == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimiser": {"name": "tiger"}}, "a step of the optimiser tiger needs"),
        ({"inspect_every": 5}, "no layer is inspected"),
        ({"compile": True}, "nothing is compiled"),
        ({"precision": "fp16"}, "fp16"),
        ({"parallel": "tensor"}, "parallel"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        small(**{"parallel": "fsdp", **changes})
    assert len(str(refused.value).splitlines()) == 1


# A training that cannot fit into memory is refused before anything is allocated.
CPU = torch.device("cpu")


def test_the_estimate_is_what_weights_gradients_moments_and_inputs_of_blocks_take() -> None:
    config = small()
    numbers = sum(each.numel() for each in CausalLM(config.model).parameters())
    cost = config.cost()
    assert make_plan(config, cost).memory == numbers * 4 * 4 + 8 * 16 * 16 * 2 * 4
    tiger = small(optimiser={"name": "tiger"}, precision="bf16", accumulate=2)
    assert make_plan(tiger, cost).memory == numbers * 4 * 3 + 4 * 16 * 16 * 2 * 2
    assert make_plan(config, cost, 4).flops * 4 * config.steps == pytest.approx(cost.flops)
    assert make_plan(config, cost, 2).checkpoint == numbers * 4 * 3


def test_the_state_is_what_processes_hold() -> None:
    whole, alone = together(1, hold, "ddp")[0]
    for parallel, size in (("ddp", 2), ("fsdp", 4)):
        settings = curve(parallel=parallel)
        plan = make_plan(settings, settings.cost(), size)
        each = together(size, hold, parallel)
        assert all(ours == pytest.approx(alone, rel=1e-6) for _, ours in each)
        held = [held for held, _ in each]
        # Rows are dealt out by the largest share: vectors of two numbers leave two of four without.
        assert whole <= sum(held) <= 1.05 * whole * (size if parallel == "ddp" else 1)
        assert plan.state == pytest.approx(sum(held) / size, rel=0.03)
        # The first process holds most where rows do not divide.
        assert plan.state == pytest.approx(max(held), rel=0.15)


def test_a_plan_says_where_the_memory_is_too_small() -> None:
    large = small(model={"dim": 8192, "layers": 80})
    cost = large.cost()
    assert make_plan(large, cost, 8).memory > GPU_MEMORY["h100"]
    assert "more than it has" in describe_plan(large, cost, "h100", 1, 8)
    assert "more than it has" not in describe_plan(small(), small().cost(), "here")
    with pytest.raises(InputError, match="h100"):
        describe_plan(large, cost, "abacus")


@pytest.mark.parametrize(("words", "rows"), [(1 << 20, 4), (300, 10**7)])
def test_what_the_machine_cannot_hold_reads_no_data(words: int, rows: int, tmp_path: Path) -> None:
    model = {"dim": 1 << 14 if words > 300 else 1 << 10, "train_length": 64}
    data = {"corpus": "nowhere.txt", "vocab_size": words}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"at least [\d,.]+ GB .* cpu has [\d,.]+ GB"):
        run(small(model=model, data=data, batch_size=rows), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # kB


def test_a_limit_of_the_process_counts_as_the_machine_s() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert memory_of(CPU) <= psutil.virtual_memory().total
    limit = memory_of(CPU) - (1 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        assert memory_of(CPU) == limit
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
