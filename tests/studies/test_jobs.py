"""Child processes and their slots, with children that are a few lines of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normattn.lab.sweep import launchers
from normattn.lab.sweep.launchers import Job, Local, Needs, Observe, Outcome
from normattn.lab.sweep.planner import SweepProgress


def job(folder: Path, name: str, script: str) -> Job:
    return Job(name, ("-c", script), folder / f"{name}.txt")


def run_jobs(
    jobs: list[Job],
    at_once: int,
    observe: Observe = lambda running, ended: None,
    launcher: Local | None = None,
    device: str = "cpu",
) -> list[Outcome]:
    return launchers.run_jobs(jobs, launcher or Local(), at_once, Needs(1, device), observe)


def test_children_compute_on_one_thread(tmp_path: Path) -> None:
    script = "import os, sys; sys.exit(0 if os.environ['OMP_NUM_THREADS'] == '1' else 2)"
    assert run_jobs([job(tmp_path, "one", script)], 1)[0].code == 0


def test_a_killed_child_is_a_failure_that_names_the_signal(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    outcome = run_jobs([job(tmp_path, "killed", script)], 1)[0]
    assert outcome.failed
    assert "SIGKILL" in outcome.message


# A job that saves when it is stopped, and ends at once where it has saved before.
SAVES = """
import pathlib, signal, sys, time
state = pathlib.Path({path!r})
if state.exists():
    sys.exit(0)
def save(*_):
    time.sleep(0.5)
    state.write_text("saved")
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(120)
"""
WATCHES = """
import sys, time
sys.path[:0] = {path!r}
sys.platform = {platform!r}
from normattn.stopping import stop_with_parent
stop_with_parent(int(sys.argv[1]), poll=0.05)
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("platform", [sys.platform, "another"])
def test_children_of_a_killed_parent_stop_by_themselves(tmp_path: Path, platform: str) -> None:
    child = tmp_path / "child.py"
    child.write_text(WATCHES.format(path=sys.path, platform=platform))
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, {str(child)!r}, str(os.getpid())],"
        " stdout=subprocess.PIPE, start_new_session=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.kill()
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


SEES = """
import os, pathlib, time
pathlib.Path({path!r}).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
time.sleep(0.5)
"""


def seen(folder: Path, count: int, at_once: int, launcher: Local, device: str) -> list[str]:
    """What `count` cells saw of the GPUs, in their order."""
    paths = [folder / f"saw{n}" for n in range(count)]
    jobs = [job(folder, path.name, SEES.format(path=str(path))) for path in paths]
    run_jobs(jobs, at_once, launcher=launcher, device=device)
    return [path.read_text() for path in paths]


def test_a_cell_sees_the_gpu_of_its_slot_alone(tmp_path: Path) -> None:
    launcher = Local(devices=(4, "GPU-8932f937"))
    assert launcher.slots(Needs(1, "cuda")) == 2
    assert seen(tmp_path, 2, 2, launcher, "cuda") == ["4", "GPU-8932f937"]


def test_cells_share_gpus_evenly_and_take_what_is_free(tmp_path: Path) -> None:
    found = seen(tmp_path, 6, 4, Local(devices=(0, 1)), "auto")
    assert found[:4] == ["0", "1", "0", "1"]
    assert sorted(found[4:]) in (["0", "0"], ["0", "1"], ["1", "1"])


def test_who_names_a_device_or_the_cpu_keeps_what_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launcher = Local(devices=(0, 1))
    assert seen(tmp_path, 1, 1, launcher, "cpu") == ["all"]
    assert seen(tmp_path, 1, 1, launcher, "cuda:1") == ["all"]
    assert launcher.slots(Needs(1, "cuda:1")) == 1


def test_slots_are_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launchers.visible_gpus() == ("0", "1", "2")
    assert Local().slots(Needs(4, "auto")) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7,2")
    assert launchers.visible_gpus() == ("5", "7", "2")
    assert Local().slots(Needs(1, "cpu")) == launchers.available_cores()


def test_slots_are_shares_of_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launchers, "available_cores", lambda: 7)
    assert [Local().slots(Needs(n)) for n in (1, 2, 3, 8)] == [7, 3, 2, 1]


def test_the_time_left_counts_running_jobs_and_not_what_was_done_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    jobs = [Job(name, (), tmp_path / name / "log.txt") for name in "abcd"]
    for each in jobs:
        each.log.parent.mkdir()

    def works(each: Job, done: int) -> None:
        state = {"stage": 0, "phase": "training", "done": done, "total": 8, "text": "", "host": ""}
        each.log.with_name("progress.json").write_text(json.dumps(state))

    progress = SweepProgress(jobs, {each.name: (1.0,) for each in jobs})
    works(jobs[1], 2)  # resumed from a checkpoint
    progress(jobs[:2], [])
    works(jobs[1], 4)
    now = 180.0
    progress([jobs[1]], [Outcome(jobs[0], 0, "", 180.0)])
    # A job and a quarter in 3 min; half a job and two more are left.
    assert "(1 of 4), about 6 min left" in capsys.readouterr().err
