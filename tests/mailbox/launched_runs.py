"""Runs of two replicas that mpirun or Slurm starts, with a kill at random.

  python -m tests.mailbox.launched_runs FOLDER --launcher=mpirun --runs=3

Each replica has two processes, and is started by one `mpirun` or is one job of
Slurm with two tasks. At a random time a random process gets SIGKILL. Under
Slurm the job's script then asks for a new start, as in docs/clusters/slurm.md;
after `mpirun` this program gives the same command again. What counts as a good
run is said in `cluster_runs`, which has the checks.

With --member the program is one of these processes.
"""

import argparse
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time

from tests.mailbox import cluster_runs
from tests.mailbox.cluster_runs import NAMES

# A replica that starts again must come back before the other one has ended.
ROUND_S = 4.0
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=60 --requeue --open-mode=append
srun --distribution=block --kill-on-bad-exit=0 {command}
code=$?
echo "srun ended with $code"
case $code in
  75|134|137|143) scontrol requeue "$SLURM_JOB_ID";;
esac
exit $code
"""


class Launched(cluster_runs.World):
  """Two replicas whose processes a launcher starts."""

  def command(self, name):
    """The command that each process of a replica runs."""
    program = [sys.executable, "-m", "tests.mailbox.launched_runs"]
    flags = self.train_flags(name, self.secret)
    return [*program, self.folder, "--member", name, "--distributed", *flags]

  def pid(self, name, number):
    """Process id of a process that has started."""
    return int((self.folder / f"{name}.{number}.pid").read_text())

  def launched_log(self, name):
    """What a launcher and its processes have printed."""
    path = self.folder / f"{name}.log"
    return path.read_text() if path.exists() else ""


class Mpirun(Launched):
  """Each replica is one `mpirun`."""

  def start(self, name):
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    options += ["--mca", "oob_tcp_if_include", "lo"]
    with open(self.folder / f"{name}.log", "ab") as log:
      self.members[name] = subprocess.Popen(
        ["mpirun", *options, "-n", "2", *self.command(name)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
      )

  def restart(self, name):
    """Waits for the end of `mpirun`, starts it again, and returns its code."""
    code = self.members[name].wait(cluster_runs.DEADLINE_S)
    self.start(name)
    return code

  def wait(self, name):
    return self.members[name].wait(cluster_runs.DEADLINE_S)

  def is_running(self, name):
    return self.members[name].poll() is None

  def kill_all(self):
    for process in self.members.values():
      process.kill()
      process.wait()


class Slurm(Launched):
  """Each replica is a job of two tasks on two nodes."""

  def start(self, name):
    script = self.folder / f"{name}.sh"
    command = shlex.join(str(word) for word in self.command(name))
    script.write_text(_SCRIPT.format(command=command))
    log = self.folder / f"{name}.log"
    submit = ["sbatch", "--parsable", f"--job-name={name}", f"--output={log}"]
    self.members[name] = _output([*submit, str(script)]).strip()

  def restart(self, name):
    """Waits until Slurm has requeued the job, and returns the code of srun."""
    end = time.monotonic() + cluster_runs.DEADLINE_S
    while "JobState=PENDING Reason=BeginTime" not in self._job(name):
      if time.monotonic() > end:
        raise TimeoutError(f"the job {name} was not requeued")
      time.sleep(1)
    # Else Slurm would wait for two minutes.
    subprocess.run(
      ["scontrol", "update", f"jobid={self.members[name]}", "StartTime=now"],
      check=True,
    )
    return self._codes(name)[-1]

  def wait(self, name):
    end = time.monotonic() + cluster_runs.DEADLINE_S
    while self.is_running(name):
      if time.monotonic() > end:
        raise TimeoutError(f"the job {name} did not end")
      time.sleep(1)
    return self._codes(name)[-1]

  def is_running(self, name):
    states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    return not any(f"JobState={state}" in self._job(name) for state in states)

  def kill_all(self):
    for job in self.members.values():
      subprocess.run(["scancel", job], check=False)

  def _job(self, name):
    return _output(["scontrol", "show", "job", self.members[name]])

  def _codes(self, name):
    """The codes with which srun has ended so far."""
    lines = self.launched_log(name).splitlines()
    ends = [line for line in lines if line.startswith("srun ended with ")]
    return [int(line.split()[-1]) for line in ends]


LAUNCHERS = {"mpirun": Mpirun, "slurm": Slurm}


def _output(command):
  """What a command prints."""
  return subprocess.run(
    command, check=True, stdout=subprocess.PIPE, text=True
  ).stdout


def disturbed_run(folder, launcher, method, draw):
  """One run with a kill. See `cluster_runs.disturbed_run`."""
  flags = ("--config.mailbox.grace_s=30",)
  world = LAUNCHERS[launcher](folder, method, flags=flags)
  victim = draw.choice(NAMES)
  other = NAMES[1 - NAMES.index(victim)]
  number = draw.randrange(2)
  event = draw.randint(0, 3)
  delay_s = draw.uniform(0, 2)
  try:
    for name in NAMES:
      world.start(name)
    end = time.monotonic() + cluster_runs.DEADLINE_S
    while len(world.lists()) <= event:
      if time.monotonic() > end:
        raise TimeoutError("the run does not go on")
      time.sleep(0.2)
    time.sleep(delay_s)
    os.kill(world.pid(victim, number), signal.SIGKILL)
    start_s = time.monotonic()
    code = world.restart(victim)
    seconds = time.monotonic() - start_s
    num_settled = len(world.lists())
    while victim not in sum(world.lists()[num_settled + 1 :], []):
      if time.monotonic() > end or not world.is_running(other):
        break
      time.sleep(0.5)
    world.hurry.touch()
    happened = (
      f"{method}: process {number} of {victim} killed {delay_s:.2f} s after "
      f"event {event}, {launcher} ended with {code} after {seconds:.0f} s, "
      f"back after {num_settled} events"
    )
    codes = [world.wait(name) for name in (other, victim)]
  except (TimeoutError, subprocess.TimeoutExpired) as error:
    return f"{method}: {victim}", str(error)
  finally:
    world.kill_all()
  if codes != [0, 0]:
    return happened, f"{other} and {victim} ended with {codes}"
  text = world.launched_log(victim)
  if "Traceback" in text or "stack trace" in text:
    return happened, f"{victim} ended with a trace after the kill"
  return happened, cluster_runs.wrong_results(world, other)


def member(folder, name, flags):
  """Is one process of a replica."""
  number = next(os.environ[key] for key in _NUMBERS if key in os.environ)
  path = folder / f"{name}.{number}.pid"
  path.write_text(str(os.getpid()))
  cluster_runs.ROUND_S = ROUND_S
  cluster_runs.train(flags, folder / "hurry")


def main():
  """Runs what the flags ask for; the exit code is 1 if a run is bad."""
  parser = argparse.ArgumentParser(allow_abbrev=False)
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--launcher", choices=LAUNCHERS)
  parser.add_argument("--runs", type=int, default=3)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--member", metavar="REPLICA")
  given, flags = parser.parse_known_args()
  # Programs of a small model compile faster without optimization.
  os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
  if given.member:
    member(given.folder, given.member, flags)
    return
  methods = [*cluster_runs.METHODS]
  bad = 0
  for seed in range(given.seed, given.seed + given.runs):
    start_s = time.monotonic()
    happened, wrong = disturbed_run(
      given.folder / f"run{seed}",
      given.launcher,
      methods[seed % len(methods)],
      random.Random(seed),
    )
    seconds = time.monotonic() - start_s
    print(f"{seed}: {happened}, {seconds:.0f} s: {wrong or 'good'}", flush=True)
    bad += bool(wrong)
  sys.exit(bool(bad))


if __name__ == "__main__":
  main()
