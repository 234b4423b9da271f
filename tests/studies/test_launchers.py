"""Jobs of every launcher: child processes here, submitit's own executor, Slurm, a Ray cluster."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from normattn.errors import InputError, Interrupted
from normattn.lab.studies import find
from normattn.lab.sweep import clusters, launchers
from normattn.lab.sweep.clusters import Ray, RemoteJob, Slurm
from normattn.lab.sweep.launchers import Job, Launcher, Local, Needs, Outcome, run_jobs
from normattn.lab.sweep.planner import SweepProgress
from normattn.lab.sweep.run import Request
from normattn.lab.sweep.runner import reproduce
from studies.test_sweep import SECONDS, result, wait_for_training, wait_until

# Ray puts its workers behind everything else on a machine; the tests wait for them.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
BYTES = 80 << 20
WATCHES_ITS_PARENT = """
import sys
from normattn.stopping import stop_with_parent
stop_with_parent(int(sys.argv[-1]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of one small node, to which a test may add others."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    # A node that is gone is noticed after five seconds instead of fifteen.
    config = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    try:
        node(cluster, include_dashboard=False, _system_config=config)
        yield cluster
    finally:
        cluster.shutdown()


def node(cluster: Any, cpus: int = 1, **settings: Any) -> Any:
    """A node more, small. Ray gives one half a minute to begin, which a busy machine may exceed."""
    for attempt in range(3):
        try:
            return cluster.add_node(num_cpus=cpus, object_store_memory=BYTES, **settings)
        except Exception as error:  # Ray raises no narrower one.
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
    raise AssertionError


# Stand-ins for Slurm's commands run each job on this machine. A job's place in the queue is a file
# that holds its name and its process.
COMMANDS = {
    "sbatch": """
        number=$(( $(cat $SLURM/last 2>/dev/null || echo 100) + 1 )); echo $number > $SLURM/last
        name=$(sed -n 's/^#SBATCH --job-name=//p' "$1" | tr -d "'\\"")
        tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
        export SLURM_JOB_ID=$number SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_PROCID=0
        export SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NODELIST=here
        begin() {
          PLACE=$2 setsid bash "$1" >/dev/null 2>&1 & echo "$name $!" > $SLURM/queue/$2
          echo $2 >> $SLURM/jobs
        }
        if [ -z "$tasks" ]; then begin "$1" $number; else
          export SLURM_ARRAY_JOB_ID=$number
          for task in $(seq 0 $tasks); do
            SLURM_ARRAY_TASK_ID=$task begin "$1" ${number}_$task
          done
        fi
        echo "Submitted batch job $number"
    """,
    "srun": """
        while [[ $1 == -* ]]; do
          case $1 in --output | --error) shift;; esac
          shift
        done
        trap '' TERM
        (trap - TERM; exec "$@") & wait $!
        while kill -0 $! 2>/dev/null; do wait $!; done
        rm -f $SLURM/queue/$PLACE
    """,
    "sacct": """
        echo "JobID|State|NodeList"
        for job in $(cat $SLURM/jobs); do
          read name process 2>/dev/null < $SLURM/queue/$job || process=
          if [ -n "$process" ] && kill -0 $process 2>/dev/null; then
            echo "$job|RUNNING|here"; else
            echo "$job|CANCELLED|here"; fi
        done
    """,
    "scancel": """
        for word in "$@"; do
          case $word in --signal=*) kind=${word#*=};; esac
          [ -e $SLURM/queue/$word ] || continue
          read name process < $SLURM/queue/$word
          pkill -${kind:-TERM} -s $process
        done
    """,
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands, and where their stand-ins keep the queue."""
    from submitit.slurm.slurm import SlurmJob

    SlurmJob.watcher.clear()  # It knows jobs of other tests by these numbers.
    folder, planted = tmp_path / "slurm", tmp_path / "jobs" / ".submitit"
    planted.mkdir(parents=True)
    # Results that lie in the folder are pickles: who reads one runs what it says.
    for number, task in itertools.product(range(95, 120), ("0", "0_0", "1_0")):
        (planted / f"{number}_{task}_result.pkl").write_bytes(b"cos\nabort\n(tR.")
    (folder / "queue").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, text in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text("#!/bin/bash\n" + textwrap.dedent(text))
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM", str(folder))


@pytest.fixture(params=["local", "ray", "slurm"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "ray":
        return Ray(address=request.getfixturevalue("cluster").address)
    if request.param == "slurm":
        request.getfixturevalue("slurm")
        return Slurm()
    return Local()


def job(folder: Path, name: str, script: str) -> Job:
    place = folder / "jobs" / name / "seed0"
    return Job(name, ("-c", script), place / "log.txt")


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
INTERRUPTED = """
import _thread, sys, threading, time
from pathlib import Path
from normattn.lab.sweep.clusters import RemoteJob
from normattn.lab.sweep.launchers import Job
place = Path(sys.argv[1])
job = Job("one", ("-c", sys.argv[2]), place / "log.txt")

def interrupt():
    while not (place / "log.txt").exists() or "ready" not in (place / "log.txt").read_text():
        time.sleep(0.01)
    for _ in range(2000):
        _thread.interrupt_main()

place.mkdir()
threading.Thread(target=interrupt, daemon=True).start()
sys.exit(RemoteJob(job)()[0])
"""


def test_a_remote_job_interrupted_over_and_over_has_its_child_save(tmp_path: Path) -> None:
    saved = tmp_path / "state"
    line = (INTERRUPTED, str(tmp_path / "job"), SAVES.format(path=str(saved)))
    done = subprocess.run([sys.executable, "-c", *line], timeout=SECONDS, check=False)
    assert done.returncode == 130
    assert saved.read_text() == "saved"


def test_outcomes_tell_ends_of_every_kind_apart(launcher: Launcher, tmp_path: Path) -> None:
    """And every job computes on one thread."""
    say = "import os, sys; print('threads', os.environ['OMP_NUM_THREADS'], flush=True);"
    say += "print('normattn: why', file=sys.stderr);"
    ends = {0: "sys.exit(0)", 2: "sys.exit(2)", 3: "sys.exit(3)", -9: "os.kill(os.getpid(), 9)"}
    jobs = [job(tmp_path, str(code), say + end) for code, end in ends.items()]
    seen: list[int] = []
    ended = run_jobs(jobs, launcher, 2, Needs(), lambda running, _: seen.append(len(running)))
    found = {int(outcome.job.name): outcome for outcome in ended}
    assert [found[code].code for code in ends] == [*ends]
    assert [found[code].message for code in (0, 2)] == ["", "why"]
    assert "SIGKILL" in found[-9].message
    assert sorted(jobs[0].log.read_text().splitlines()) == ["normattn: why", "threads 1"]
    assert max(seen) <= 2


def test_a_failed_job_whose_log_is_gone_does_not_end_the_others(tmp_path: Path) -> None:
    gone = job(tmp_path, "gone", "")
    script = f"import os; os.remove({str(gone.log)!r}); os._exit(4)"
    jobs = [replace(gone, arguments=("-c", script)), job(tmp_path, "other", "pass")]
    ended = run_jobs(jobs, Local(), 1)
    assert [(outcome.code, outcome.message) for outcome in ended] == [(4, "no output"), (0, "")]


def test_a_signal_lets_jobs_save(launcher: Launcher, tmp_path: Path) -> None:
    saved = tmp_path / "state"
    # As a cell does: a busy cluster may end a task's process before its interruption is heard.
    script = WATCHES_ITS_PARENT + SAVES.format(path=str(saved))
    jobs = [job(tmp_path, "saving", script), job(tmp_path, "never", "pass")]

    def when_ready(running: Any, ended: Any) -> None:
        if jobs[0].log.exists() and jobs[0].log.read_text().startswith("ready"):
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM with 2 of 2 jobs unfinished"):
        run_jobs(jobs, launcher, 1, Needs(), when_ready)
    wait_until(saved.exists)
    assert saved.read_text() == "saved"
    assert not jobs[1].log.exists()
    assert signal.getsignal(signal.SIGTERM) is handler


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getppid(), flush=True)
while os.getppid() == int(sys.argv[-1]):
    time.sleep(0.1)
"""


@pytest.mark.parametrize("where", ["slurm", "local"])
def test_a_second_signal_ends_a_job_that_does_not_save(
    where: Literal["slurm", "local"], slurm: None, tmp_path: Path
) -> None:
    one = job(tmp_path, "one", STUBBORN)

    def when_ready(running: Any, ended: Any) -> None:
        if one.log.exists() and one.log.read_text().endswith("\n"):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run_jobs([one], Slurm(cluster=where), 1, Needs(), when_ready)
    parent = int(one.log.read_text())
    wait_until(
        lambda: (
            not psutil.pid_exists(parent) or psutil.Process(parent).status() == psutil.STATUS_ZOMBIE
        )
    )


def test_at_the_end_of_its_time_a_job_saves_and_is_requeued(tmp_path: Path) -> None:
    """By submitit's own signal: the job resumes from what it saved, under the same handle."""
    one = job(tmp_path, "long", SAVES.format(path=str(tmp_path / "state")))
    warned: list[int] = []

    def when_ready(running: Any, ended: Any) -> None:
        if not warned and one.log.exists() and one.log.read_text().startswith("ready"):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "submitit.core._submit" in process.cmdline():
                        process.send_signal(signal.SIGUSR2)
                        warned.append(process.pid)

    ended = run_jobs([one], Slurm(cluster="local"), 1, Needs(), when_ready)
    assert len(warned) == 1
    assert [(outcome.code, outcome.message) for outcome in ended] == [(0, "")]
    assert (tmp_path / "state").read_text() == "saved"


def test_a_host_that_sees_other_folders_is_named(tmp_path: Path) -> None:
    remote = RemoteJob(Job("one", ("-c", "pass"), tmp_path / "gone" / "log.txt"))
    with pytest.raises(InputError, match=f"has no folder {tmp_path / 'gone'}: all hosts"):
        remote()


@pytest.mark.usefixtures("runs_here")
def test_begun_by_slurm_it_survives_a_lost_node(tiny: Path, tmp_path: Path, cluster: Any) -> None:
    study, whole, out = find("keynorm"), tmp_path / "whole", tmp_path / "moved"
    steps = {"training.steps": 1500}
    request = Request(str(tiny), ("KNA-logn",), ("unmodified",), changes=steps, out=out)
    assert reproduce(study, replace(request, out=whole)) == []

    with ThreadPoolExecutor() as beside:
        stopping = beside.submit(interrupt_once_training, out)
        with pytest.raises(Interrupted, match="SIGINT with 1 of 1 jobs unfinished"):
            reproduce(study, replace(request, launcher=Slurm(cluster="local")))
        stopping.result()

        (lock,) = out.glob("jobs/*/*/.lock")
        before = lock.read_text()
        # Of two cores: the job has no room on the first node.
        losing = beside.submit(lose, cluster, [node(cluster, cpus=2) for _ in "ab"], lock, before)
        ray = Ray(address=cluster.address, cpus=2)
        assert reproduce(study, replace(request, launcher=ray)) == []
    # The cell was begun again, elsewhere, by another process than the one that lost its node.
    assert len({before, losing.result(), lock.read_text()}) == 3
    assert result(out) == result(whole)
    metrics = "cells/KNA-logn/seed0/metrics.jsonl"
    assert (out / metrics).read_bytes() == (whole / metrics).read_bytes()


def interrupt_once_training(out: Path) -> None:
    """As Ctrl-C does, in the middle of a cell, which is held still until it is told to save."""
    wait_for_training(out, steps=5)
    (cell,) = (path.read_text().split()[0] for path in out.glob("jobs/*/*/.lock"))
    psutil.Process(int(cell)).suspend()
    os.kill(os.getpid(), signal.SIGINT)

    def told() -> bool:
        status = Path(f"/proc/{cell}/status").read_text().split("ShdPnd:")[1].split()[0]
        return bool(int(status, 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(told)
    psutil.Process(int(cell)).resume()


def lose(cluster: Any, nodes: list[Any], lock: Path, before: str) -> str:
    """Take away the node of a cell in its middle; who held its lock."""

    def started() -> str:
        said = lock.read_text()  # This process holds it too, for a moment.
        return "" if said == before or said.startswith(f"{os.getpid()} ") else said

    holder: str = wait_until(started)
    cell = psutil.Process(int(holder.split()[0]))
    cell.suspend()  # So that it cannot end before its node does.
    above = {process.pid for process in cell.parents()}
    (lost,) = (each for each in nodes if each.all_processes["raylet"][0].process.pid in above)
    cluster.remove_node(lost, allow_graceful=False)
    cell.resume()
    return holder


@pytest.mark.parametrize(
    ("kind", "missing", "said"),
    [
        (Slurm(), "submitit", r"slurm needs submitit: pip install 'normattn\[slurm\]'"),
        (Ray(), "ray", r"ray needs ray: pip install 'normattn\[ray\]'"),
        (Ray(address="127.0.0.1:9"), "", r"no Ray cluster answers at 127\.0\.0\.1:9"),
        (Slurm(), "", "Slurm is not available here"),
    ],
)
def test_a_launcher_that_cannot_serve_is_one_sentence(
    kind: Launcher, missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=said):
        run_jobs([job(tmp_path, "one", "pass")], kind, 1)


def test_the_settings_of_a_launcher_and_what_it_asks_for() -> None:
    assert clusters.launcher("slurm", {"time": 5}).describe() == "slurm: time 5"
    assert clusters.launcher("local", {}) == Local()
    asked = Slurm(partition="gpu", memory=8).parameters(Needs(2, "cuda"))
    expected = {"cpus_per_task": 2, "gpus_per_node": 1, "slurm_partition": "gpu", "mem_gb": 8}
    assert expected.items() <= asked.items()
    assert "gpus_per_node" not in Slurm().parameters(Needs(2, "cpu"))
    assert Ray(cpus=3, gpus=0).resources(Needs(2, "cuda")) == (3, 0)
    with pytest.raises(InputError, match=r"launcher.gpus is 2"):
        Ray(gpus=2).resources(Needs(2, "cpu"))


# Child processes on this machine.
WATCHES = """
import os, subprocess, sys, time
from normattn.stopping import stop_with_parent
if len(sys.argv) == 2:
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1], str(os.getpid())])
stop_with_parent(int(sys.argv[2]))
print("ready", flush=True)
time.sleep(60)
"""


def test_children_of_a_killed_parent_stop_by_themselves() -> None:
    command = [sys.executable, "-c", WATCHES, WATCHES]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        killed = time.monotonic()
        assert process.stdout.read() == b""  # It ends when the last that could write has ended.
    assert time.monotonic() - killed < 30


SEES = """
import os, pathlib, time
pathlib.Path({path!r}).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
time.sleep(0.5)
"""


def seen(folder: Path, count: int, at_once: int, launcher: Local, device: str) -> list[str]:
    """What `count` cells saw of the GPUs, in their order."""
    paths = [folder / f"saw{n}" for n in range(count)]
    jobs = [job(folder, path.name, SEES.format(path=str(path))) for path in paths]
    run_jobs(jobs, launcher, at_once, Needs(1, device))
    return [path.read_text() for path in paths]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_a_cell_sees_its_gpu_or_all(
    gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen(tmp_path / "own", 2, 2, Local(devices=(4, "GPU-89")), "cuda") == ["4", "GPU-89"]
    shared = seen(tmp_path / "shared", 6, 4, Local(devices=(0, 1)), "auto")
    assert shared[:4] == ["0", "1", "0", "1"]
    assert sorted(shared[4:]) in (["0", "0"], ["0", "1"], ["1", "1"])
    # Who names a device or the CPU keeps what is visible.
    for device in ("cpu", "cuda:1"):
        assert seen(tmp_path / device, 1, 1, Local(), device) == ["all"]


@pytest.mark.parametrize(("device", "count"), [("cpu", 2), ("cuda:1", 2), ("auto", 0)])
def test_gpus_are_chosen_only_where_they_are_used(
    device: str, count: int, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    with pytest.raises(InputError, match=f"the device is {device}, and {count} GPUs are visible"):
        Local(devices=(0,)).slots(Needs(1, device))


def test_slots_are_gpus_or_shares_of_the_cores(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Local(devices=(4, "GPU-8932f937")).slots(Needs(1, "cuda")) == 2
    assert Local().slots(Needs(1, "cuda:1")) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launchers.visible_gpus() == ("0", "1", "2")
    assert Local().slots(Needs(4, "auto")) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7,2")
    assert launchers.visible_gpus() == ("5", "7", "2")
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
