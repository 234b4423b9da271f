"""Launchers of other hosts: submitit's own executor, Slurm, and a Ray cluster of two nodes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from normattn.errors import InputError, Interrupted
from normattn.lab.studies import find
from normattn.lab.sweep import clusters, launchers
from normattn.lab.sweep.clusters import Ray, RemoteJob, Slurm
from normattn.lab.sweep.launchers import Job, Launcher, Local, Needs, run_jobs
from normattn.lab.sweep.run import Request
from normattn.lab.sweep.runner import reproduce
from studies.conftest import Start
from studies.test_jobs import SAVES
from studies.test_sweep import SECONDS, result, wait_for_training, wait_until
from undrawn import undraw

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
          [ -e $SLURM/queue/$word ] || continue
          read name process < $SLURM/queue/$word
          pkill -TERM -s $process
        done
    """,
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands, and where their stand-ins keep the queue.

    Results that lie in the folder are pickles: who reads one runs what it says.
    """
    folder, planted = tmp_path / "slurm", tmp_path / "jobs" / ".submitit"
    planted.mkdir(parents=True)
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


def job(folder: Path, name: str, script: str) -> Job:
    place = folder / "jobs" / name / "seed0"
    return Job(name, ("-c", script), place / "log.txt")


def test_outcomes_tell_finished_diverged_and_failed_apart(
    launcher: Launcher, tmp_path: Path
) -> None:
    say = "import sys; print('first'); print('normattn: why', file=sys.stderr); sys.exit({})"
    jobs = [job(tmp_path, str(code), say.format(code)) for code in (0, 2, 3)]
    seen: list[int] = []
    ended = run_jobs(jobs, launcher, 2, Needs(), lambda running, _: seen.append(len(running)))
    found = {outcome.job.name: outcome for outcome in ended}
    assert {name: outcome.code for name, outcome in found.items()} == {"0": 0, "2": 2, "3": 3}
    assert [found[name].message for name in ("0", "2")] == ["", "why"]
    assert found["2"].failed
    assert not found["3"].failed
    log = tmp_path / "jobs" / "0" / "seed0" / "log.txt"
    assert sorted(log.read_text().splitlines()) == ["first", "normattn: why"]
    assert max(seen) <= 2


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


def test_at_the_end_of_its_time_a_job_saves_and_is_requeued(tmp_path: Path) -> None:
    """By submitit's own signal: the job resumes from what it saved, under the same handle."""
    one = job(tmp_path, "long", SAVES.format(path=str(tmp_path / "state")))
    warned: list[int] = []

    def when_ready(running: Any, ended: Any) -> None:
        if not warned and one.log.exists() and one.log.read_text().startswith("ready"):
            for process in psutil.Process().children(recursive=True):
                if "submitit.core._submit" in command_line(process):
                    process.send_signal(signal.SIGUSR2)
                    warned.append(process.pid)

    ended = run_jobs([one], Slurm(cluster="local"), 1, Needs(), when_ready)
    assert len(warned) == 1
    assert [(outcome.code, outcome.message) for outcome in ended] == [(0, "")]
    assert (tmp_path / "state").read_text() == "saved"


def command_line(process: psutil.Process) -> list[str]:
    """Nothing for a process that has ended since it was listed."""
    said: list[str] = []
    with suppress(psutil.NoSuchProcess):
        said = process.cmdline()
    return said


def test_a_host_that_sees_other_folders_is_named(tmp_path: Path) -> None:
    remote = RemoteJob(Job("one", ("-c", "pass"), tmp_path / "gone" / "log.txt"))
    with pytest.raises(InputError, match=f"has no folder {tmp_path / 'gone'}: all hosts"):
        remote()


def test_begun_under_slurm_goes_on_under_ray_whose_node_is_lost(
    tiny: Path, tmp_path: Path, cluster: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, whole, out = find("keynorm"), tmp_path / "whole", tmp_path / "moved"
    undraw(monkeypatch)
    command = ("reproduce", "keynorm", "--preset", tiny, "--variants", "KNA-logn")
    rest = ("--methods", "unmodified", "--set", "training.steps=150", "--out", whole)
    assert start(*command, *rest, cells_here=True).end().code == 0
    request = Request(
        preset=str(tiny),
        variants=("KNA-logn",),
        methods=("unmodified",),
        out=out,
        changes={"training.steps": 150},
    )

    with ThreadPoolExecutor() as beside:
        stopping = beside.submit(interrupt_once_training, out)
        with pytest.raises(Interrupted, match="SIGINT with 1 of 1 jobs unfinished"):
            reproduce(study, replace(request, launcher=Slurm(cluster="local")))
        stopping.result()

        before = {path: path.read_text() for path in out.glob("jobs/*/*/.lock")}
        # Of two cores: the job has no room on the first node.
        losing = beside.submit(lose, cluster, [node(cluster, cpus=2) for _ in "ab"], out, before)
        assert (
            reproduce(study, replace(request, launcher=Ray(address=cluster.address, cpus=2))) == []
        )
        lock, holder = losing.result()
    # The cell was begun again, elsewhere, by another process than the one that lost its node.
    assert lock.read_text() != holder
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


def lose(cluster: Any, nodes: list[Any], out: Path, before: dict[Path, str]) -> tuple[Path, str]:
    """Take away the node of a cell in its middle; the cell's lock, and who held it."""
    lost, lock, holder = wait_until(lambda: cell_on(nodes, out, before))
    cell = psutil.Process(int(holder.split()[0]))
    cell.suspend()  # So that it cannot end before its node does.
    cluster.remove_node(lost, allow_graceful=False)
    cell.resume()
    return lock, holder


def cell_on(nodes: list[Any], out: Path, before: dict[Path, str]) -> tuple[Any, Path, str] | None:
    """A node that has a cell now, the cell's lock, and what that says."""
    raylets = {each.all_processes["raylet"][0].process.pid: each for each in nodes}
    for path in out.glob("jobs/*/*/.lock"):
        said = path.read_text()
        if not said or said == before.get(path):
            continue
        with suppress(psutil.NoSuchProcess):  # It ended meanwhile.
            above = {process.pid for process in psutil.Process(int(said.split()[0])).parents()}
            for raylet in above & raylets.keys():
                if path.with_name("progress.json").exists():
                    return raylets[raylet], path, said
    return None


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("slrum", {}, "no launcher is called 'slrum': did you mean slurm"),
        ("slurm", {"partitoin": "gpu"}, "unknown field partitoin; did you mean partition"),
        ("ray", {"gpus": -1}, "the ray launcher: gpus"),
    ],
)
def test_what_a_launcher_does_not_have_is_named(
    name: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        clusters.launcher(name, settings)


@pytest.mark.parametrize(("kind", "needs"), [(Slurm(), "submitit"), (Ray(), "ray")])
def test_a_missing_extra_is_one_sentence(
    kind: Launcher, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, needs, None)
    said = f"--launcher {kind.name} needs {needs}: pip install 'normattn\\[{kind.name}\\]'"
    with pytest.raises(InputError, match=said):
        run_jobs([job(tmp_path, "one", "pass")], kind, 1)


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
        run_jobs([job(tmp_path, "one", "pass")], Ray(address="127.0.0.1:9"), 1)


def test_without_slurm_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="Slurm is not available here"):
        run_jobs([job(tmp_path, "one", "pass")], Slurm(), 1)


def test_the_settings_of_a_launcher_and_what_it_asks_for() -> None:
    own, study = launchers.split_changes({"launcher.time": 5, "training.steps": 7, "launcherx": 1})
    assert own == {"time": 5}
    assert study == {"training.steps": 7, "launcherx": 1}
    assert clusters.launcher("slurm", own).describe() == "slurm: time 5"
    assert clusters.launcher("local", {}) == Local()
    asked = Slurm(partition="gpu", memory=8).parameters(Needs(2, "cuda"))
    expected = {"cpus_per_task": 2, "gpus_per_node": 1, "slurm_partition": "gpu", "mem_gb": 8}
    assert expected.items() <= asked.items()
    assert "gpus_per_node" not in Slurm().parameters(Needs(2, "cpu"))
    assert Ray(cpus=3, gpus=0).resources(Needs(2, "cuda")) == (3, 0)
