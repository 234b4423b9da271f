"""Jobs of a Slurm cluster, by stand-ins for its commands that run each job on this machine."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest

from normattn.errors import Interrupted
from normattn.lab.sweep.clusters import Slurm
from normattn.lab.sweep.launchers import Job, Needs, run_jobs
from studies.test_jobs import SAVES

pytest.importorskip("submitit")

# A job's place in the queue is a file that holds its name and its process.
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
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, and where their stand-ins keep the queue."""
    folder = tmp_path / "slurm"
    (folder / "queue").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, text in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text("#!/bin/bash\n" + textwrap.dedent(text))
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM", str(folder))
    return folder


def _job(out: Path, script: str) -> Job:
    return Job("one", ("-c", script), out / "jobs" / "one" / "seed0" / "log.txt")


def test_results_that_lie_in_the_folder_are_not_read(cluster: Path, tmp_path: Path) -> None:
    """They are pickles, and reading one runs what it says."""
    planted = tmp_path / "out" / ".submitit"
    planted.mkdir(parents=True)
    for number in range(95, 120):
        (planted / f"{number}_0_result.pkl").write_bytes(b"cos\nabort\n(tR.")
    one = _job(tmp_path / "out", "pass")
    two = Job("two", ("-c", "raise SystemExit(3)"), one.log.parents[2] / "two" / "seed0" / "log")
    ended = run_jobs([one, two], Slurm(), 2, Needs())
    assert {outcome.job.name: outcome.code for outcome in ended} == {"one": 0, "two": 3}, ended


def test_a_signal_cancels_the_jobs(cluster: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    job = _job(tmp_path / "out", SAVES.format(path=str(state)))

    def when_ready(running: object, ended: object) -> None:
        if job.log.exists() and "ready" in job.log.read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run_jobs([job], Slurm(), 1, Needs(), when_ready)
    assert state.read_text() == "saved"
