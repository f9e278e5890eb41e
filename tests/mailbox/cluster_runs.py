"""Runs of two replicas, each of two processes, that are killed at random.

  python -m tests.mailbox.cluster_runs FOLDER --runs=40 --seed=0

Each run trains two replicas of two processes. At a random time a random process
gets SIGKILL, perhaps while its replica starts, compiles or saves. One run in
seven has its kill within the first seconds, before any exchange. When the rest
of its replica has ended, with one line and the exit code that says "start
again", the replica is started again with the same command. A run is counted as
good if then all processes end with code 0, the other replica has every step,
and both have the same outer parameters bit for bit.

Importing JAX and the trainer takes longer than a small run. So this process
imports them once, does not start JAX, and forks all training processes. They
train a tiny model, and share one cache of compiled programs.
"""

import argparse
import collections
import gc
import json
import os
import pathlib
import random
import resource
import secrets
import shutil
import signal
import socket
import sys
import time
import traceback
from unittest import mock

from absl import app

from dilocox_jax import report
from dilocox_jax.data.streams import ReplicaStreams
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.training import start, trainer  # noqa: F401
from experiments.runtime import config_flag, running  # noqa: F401
from experiments.runtime.command_line import TRY_AGAIN
from tests import runs

NAMES = ("oslo", "rome")
STEPS = 30
H = 3
DEADLINE_S = 900
START_S = 10.0  # A kill before the first event comes within this time.
ROUND_S = 1.0  # A round takes this much longer until all are to hurry.
METHODS = {
  "diloco": ("--config.sync.method=diloco",),
  # Delayed, with error feedback, and one bit a value.
  "overlap_loco": ("--config.sync.method=overlap_loco",),
  # Delayed, and two messages for each exchange.
  "dilocox": (
    "--config.sync.method=dilocox",
    "--config.exchange.codec=low_rank(rank=4)+int(bits=4)",
    "--config.adaptive.mode=off",
    "--config.sync.warm_start_steps=0",
  ),
}


class World:
  """Two replicas that meet in a folder."""

  def __init__(self, folder, method, num_processes=2, flags=()):
    """Starts nothing yet.

    Args:
      folder: Folder of the store, the secret and the work directories.
      method: One of `METHODS`.
      num_processes: Processes of each replica, which has two devices.
      flags: More flags of `experiments.train`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    self.folder = folder
    self.hurry = folder / "hurry"
    self.num_processes = num_processes
    self.secret = folder / "secret"
    if not self.secret.exists():
      self.secret.write_text(secrets.token_hex(32))
      self.secret.chmod(0o600)
    self.flags = (*METHODS[method], *flags)
    self.members = {}

  def train_flags(self, name, secret):
    """Flags of `experiments.train` for all processes of a replica."""
    return [
      *runs.SMALL_FLAGS,
      f"--config.total_steps={STEPS}",
      f"--config.sync.sync_interval={H}",
      "--config.data.batch_size=4",
      "--config.evaluation.interval_steps=0",
      f"--config.checkpoint.interval_steps={2 * H}",
      "--config.mesh.layout=mesh",
      "--config.mesh.num_replicas=2",
      "--config.mesh.num_data_shards=2",
      "--sample_tokens=0",
      "--nocheck_memory",
      *self.flags,
      f"--mailbox={self.folder / 'store'}",
      f"--secret={secret}",
      f"--replica={name}",
      f"--workdir={self.folder / name}",
    ]

  def start(self, name, secret_of=None):
    """Starts all processes of a replica.

    Args:
      name: Name of the replica.
      secret_of: Files of the secret, by number of the process, if they differ.
    """
    place = free_address()
    self.members[name] = []
    for number in range(self.num_processes):
      secret = (secret_of or {}).get(number, self.secret)
      flags = self.train_flags(name, secret)
      if self.num_processes > 1:
        flags += [
          "--distributed",
          f"--coordinator={place}",
          f"--num_processes={self.num_processes}",
          f"--process_id={number}",
          "--start_timeout_s=300",
        ]
      log = self.log(name, number)
      pid = fork(lambda flags=flags: train(flags, self.hurry), log)
      self.members[name].append(pid)

  def wait(self, name):
    """Returns the exit codes of a replica's processes.

    Raises:
      TimeoutError: If one of them does not end.
    """
    end = time.monotonic() + DEADLINE_S
    codes = []
    for number, pid in enumerate(self.members[name]):
      code = ended(pid)
      while code is None:
        if time.monotonic() > end:
          raise TimeoutError(f"process {number} of {name} did not end")
        time.sleep(0.1)
        code = ended(pid)
      codes.append(code)
    self.members[name] = []
    return codes

  def kill_all(self):
    """Ends what is left."""
    for pids in self.members.values():
      for pid in pids:
        if ended(pid) is None:
          os.kill(pid, signal.SIGKILL)
          os.waitpid(pid, 0)

  def log(self, name, number):
    """The log of a process."""
    return self.folder / f"{name}.{number}.log"

  def lists(self):
    """The names of the messages that each event averages."""
    paths = sorted((self.folder / "store" / "manifest").glob("*.0"))
    records = [json.loads(path.read_text())["is"] for path in paths]
    return [[each[0] for each in record["listed"]] for record in records]

  def round_steps(self, name):
    """The steps after which a replica has recorded a round."""
    rows = read_rows(self.folder / name / "metrics.jsonl")
    return [row["step"] for row in rows if row["kind"] == "round"]


def ended(pid):
  """The exit code of a fork; None if it still runs."""
  try:
    found, status = os.waitpid(pid, os.WNOHANG)
  except ChildProcessError:
    return 0  # Somebody has waited for it before.
  return os.waitstatus_to_exitcode(status) if found else None


def cpu_seconds():
  """CPU time of all forks that have ended."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def free_address():
  """An address of this machine with a port that nobody listens on."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


def fork(function, log):
  """Calls a function in a fork, and returns the process id of the fork.

  Args:
    function: The function. If it raises, the exit code is not 0.
    log: File to which the output is appended.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  gc.freeze()  # Else a fork would copy pages that it only searches.
  pid = os.fork()
  if pid:
    return pid
  # A small run leaves little garbage, and each search for it takes time.
  gc.disable()
  code = 1
  try:
    with open(log, "ab", buffering=0) as file:
      os.dup2(file.fileno(), 1)
      os.dup2(file.fileno(), 2)
    function()
    code = 0
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(bool(end.code))
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def train(flags, hurry):
  """Runs `experiments.train` with a tiny model, slowly until there is a file.

  Args:
    flags: Flags of the program.
    hurry: The file.
  """
  from experiments import train as program

  take = ReplicaStreams.take

  def slowly(*args):
    if not hurry.exists():
      time.sleep(ROUND_S)
    return take(*args)

  _keep_all_programs()
  # Its programs are traced and compiled in half the time of a transformer's.
  mock.patch.object(start, "with_trainable", lambda config: runs.TINY).start()
  mock.patch.object(ReplicaStreams, "take", slowly).start()
  mock.patch.object(report, "write_report", lambda workdir: workdir).start()
  sys.argv = ["train", *flags]
  app.run(program.main, flags_parser=config_flag.parse_flags)


def _keep_all_programs():
  """Lets every process write all that it compiles into the cache.

  Otherwise only process 0 would write, and only programs that took long.
  """
  import jax
  from jax._src import compiler, distributed

  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  write = compiler._cache_write
  state = distributed.global_state

  def write_as_process_0(*args):
    number = state.process_id
    state.process_id = 0
    try:
      write(*args)
    finally:
      state.process_id = number

  mock.patch.object(compiler, "_cache_write", write_as_process_0).start()


def outer_params(workdir):
  """The outer parameters at the end of a replica, leaf by leaf."""
  import jax

  jax.config.update("jax_num_cpu_devices", 2)
  state, record = runs.saved(workdir)
  assert record["position"]["is_finished"]
  params = [fragment.params for fragment in state.fragments]
  return jax.tree.leaves(jax.device_get(params))


def assert_equal_ends(workdirs):
  """Asserts that replicas have the same outer parameters, bit for bit."""
  first, *others = [outer_params(workdir) for workdir in workdirs]
  for other in others:
    for own, wanted in zip(other, first, strict=True):
      assert own.tobytes() == wanted.tobytes(), "the ends differ"


def check_equal_ends(folder, workdirs):
  """Does the same in a fork, and returns what is wrong."""
  log = folder / "compare.log"
  pid = fork(lambda: assert_equal_ends(workdirs), log)
  _, status = os.waitpid(pid, 0)
  return f"see {log}" if status else ""


def wrong_end(world, name, killed, codes):
  """Says how the end of a replica was wrong; "" if it was not.

  Args:
    world: The world.
    name: Name of the replica.
    killed: Number of the process that was killed.
    codes: Exit codes of both processes.
  """
  if codes[killed] != -signal.SIGKILL:
    return f"{name} had ended before the kill"
  if codes[1 - killed] != TRY_AGAIN:
    return f"{name} ended with {codes} after the kill"
  text = world.log(name, 1 - killed).read_text()
  if "Traceback" in text or "stack trace" in text:
    return f"{name} ended with a trace after the kill"
  return ""


def disturbed_run(folder, method, draw):
  """One run with a kill.

  Args:
    folder: A new folder.
    method: One of `METHODS`.
    draw: Draws the replica, the process and the time.

  Returns:
    What happened, and what was wrong; "" if nothing was.
  """
  # A replica that compiles on a busy machine must not be missed.
  world = World(folder, method, flags=("--config.mailbox.grace_s=30",))
  victim = draw.choice(NAMES)
  other = NAMES[1 - NAMES.index(victim)]
  number = draw.randrange(2)
  event = draw.randint(-1, 5)
  delay_s = draw.uniform(0, START_S if event < 0 else 2)
  try:
    for name in NAMES:
      world.start(name)
    end = time.monotonic() + DEADLINE_S
    while len(world.lists()) <= event:
      if time.monotonic() > end:
        raise TimeoutError("the run does not go on")
      time.sleep(0.05)
    time.sleep(delay_s)
    os.kill(world.members[victim][number], signal.SIGKILL)
    codes = world.wait(victim)
    wrong = wrong_end(world, victim, number, codes)
    num_settled = len(world.lists())
    world.start(victim)
    while victim not in sum(world.lists()[num_settled + 1 :], []):
      if time.monotonic() > end or ended(world.members[other][0]) is not None:
        break
      time.sleep(0.1)
    world.hurry.touch()
    moment = "the start" if event < 0 else f"event {event}"
    happened = (
      f"{method}: process {number} of {victim} killed {delay_s:.2f} s after "
      f"{moment}, codes {codes}, back after {num_settled} events"
    )
    for name in (other, victim):
      codes = world.wait(name)
      if codes != [0, 0]:
        return happened, f"{name} ended with {codes}"
  except TimeoutError as error:
    return f"{method}: {victim}", str(error)
  finally:
    world.kill_all()
  return happened, wrong or wrong_results(world, other)


def wrong_results(world, other):
  """Says what is wrong with the results of a run; "" if nothing is.

  Args:
    world: The world.
    other: Name of the replica without a kill.
  """
  steps = world.round_steps(other)
  if steps != list(range(H, STEPS + 1, H)):
    return f"{other} lost a step: {steps}"
  workdirs = [world.folder / name for name in NAMES]
  return check_equal_ends(world.folder, workdirs)


def undisturbed_runs(folder, method):
  """Two replicas of two processes, and two of one, which end alike."""
  workdirs = []
  for num_processes in (2, 1):
    world = World(
      folder / str(num_processes),
      method,
      num_processes=num_processes,
      flags=("--config.mailbox.grace_s=600",),
    )
    world.hurry.touch()
    try:
      for name in NAMES:
        world.start(name)
      for name in NAMES:
        codes = world.wait(name)
        if any(codes):
          return f"{name} of {num_processes} processes ended with {codes}"
    finally:
      world.kill_all()
    workdirs += [world.folder / name for name in NAMES]
  return check_equal_ends(folder, workdirs)


def two_secrets(folder):
  """A replica whose processes differ in the secret."""
  world = World(folder, "diloco")
  other = folder / "other_secret"
  other.write_text(secrets.token_hex(32))
  other.chmod(0o600)
  world.start("oslo", secret_of={1: other})
  try:
    codes = world.wait("oslo")
  finally:
    world.kill_all()
  lines = [
    line
    for number in range(2)
    for line in world.log("oslo", number).read_text().splitlines()
  ]
  if codes != [2, 2]:
    return f"ended with {codes}: {lines}"
  if len(lines) != 2 or not all("another secret" in line for line in lines):
    return f"said {lines}"
  # The mark of the program's own directory says nothing of a run.
  written = {path.name for path in (folder / "oslo").iterdir()}
  if (folder / "store").exists() or written - {"made_by.json"}:
    return f"{written} was written"
  return ""


def main():
  """Runs what the flags ask for; the exit code is 1 if a run is bad."""
  parser = argparse.ArgumentParser()
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--runs", type=int, default=0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--method",
    default="diloco",
    choices=[*METHODS, "all"],
    help="Method of all runs; all: one after the other.",
  )
  parser.add_argument("--undisturbed", action="store_true")
  parser.add_argument("--secrets", action="store_true")
  given = parser.parse_args()
  # Programs of a small model compile faster without optimization.
  os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
  methods = [*METHODS] if given.method == "all" else [given.method]
  bad = 0
  if given.secrets:
    wrong = two_secrets(given.folder / "secrets")
    print(f"two secrets: {wrong or 'refused'}", flush=True)
    bad += bool(wrong)
  if given.undisturbed:
    for method in methods:
      wrong = undisturbed_runs(given.folder / f"undisturbed_{method}", method)
      print(f"{method}, undisturbed: {wrong or 'equal ends'}", flush=True)
      bad += bool(wrong)
  num_good = collections.Counter()
  num_runs = collections.Counter()
  for seed in range(given.seed, given.seed + given.runs):
    method = methods[seed % len(methods)]
    folder = given.folder / f"run{seed}"
    start_s, start_cpu_s = time.monotonic(), cpu_seconds()
    happened, wrong = disturbed_run(folder, method, random.Random(seed))
    seconds = time.monotonic() - start_s
    cpu_s = cpu_seconds() - start_cpu_s
    print(
      f"{seed}: {happened}, {seconds:.0f} s, CPU {cpu_s:.0f} s: "
      f"{wrong or 'good'}",
      flush=True,
    )
    num_runs[method] += 1
    if wrong:
      bad += 1
    else:
      num_good[method] += 1
      shutil.rmtree(folder)
  for method, count in num_runs.items():
    print(f"{method}: {num_good[method]} of {count} runs good", flush=True)
  sys.exit(bool(bad))


if __name__ == "__main__":
  main()
