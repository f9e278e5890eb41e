"""A real rendezvous and real agents; but for one test, no process trains."""

import asyncio
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.training import start
from experiments.rendezvous import serve
from experiments.runtime.distributed_flags import free_port
from experiments.runtime.rendezvous_rules import Rendezvous
from tests import runs
from tests.experiments import test_launch

AGENT = """
import sys
import time
from experiments.runtime import elastic_agent
address, script = sys.argv[1:]
def command(order):
  return [sys.executable, "-c", script, f"{order.rank} of {order.count}"]
try:
  elastic_agent.attend(address, command)
except Exception as error:
  print(f"error: {error}", file=sys.stderr)
  sys.exit(error.exit_code)
"""
# Stops like training when it is asked to.
SLEEP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(sys.argv[1], flush=True)
time.sleep(300)
"""
# Takes its time to save, and a second signal for an order to end at once.
SAVE = """
import signal, sys, time
def save(*_):
  signal.signal(signal.SIGTERM, lambda *_: print("not saved", flush=True))
  print("saving", flush=True)
  time.sleep(4)
  sys.exit(143)
signal.signal(signal.SIGTERM, save)
print(sys.argv[1], flush=True)
time.sleep(300)
"""
# Ends like training when another process is gone: here, when it was alone.
LOSE = SLEEP.replace("time.sleep(300)", "sys.exit(75)")


def open_process(*command):
  return subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )


def rendezvous(*flags):
  return open_process(sys.executable, "-m", "experiments.rendezvous", *flags)


@pytest.fixture(name="processes")
def processes_fixture():
  """A list of processes that are ended after the test."""
  processes = []
  yield processes
  for process in processes:
    process.kill()
    with process:  # Closes its pipes and waits.
      pass


class Place:
  """A rendezvous and its agents."""

  def __init__(self, processes, settle_s):
    port = free_port()
    self.processes, self.address = processes, f"127.0.0.1:{port}"
    self.rendezvous = rendezvous(f"--port={port}", f"--settle_s={settle_s}")
    processes.append(self.rendezvous)

  def agent(self, script, *before):
    command = (*before, sys.executable, "-c", AGENT, self.address, script)
    agent = open_process(*command)
    self.processes.append(agent)
    return agent

  def train(self, *flags):
    command = (sys.executable, "-m", "experiments.train")
    agent = open_process(*command, *flags, f"--elastic={self.address}")
    self.processes.append(agent)
    return agent


@pytest.fixture(name="place")
def place_fixture(processes):
  return Place(processes, settle_s=1)


def end(process, deadline_s=60):
  output, errors = process.communicate(timeout=deadline_s)
  return process.returncode, output, errors


def both(first, second):
  return {first.stdout.readline(), second.stdout.readline()}


def test_a_replica_comes_and_leaves_and_the_other_one_goes_on(place):
  first = place.agent(SLEEP)
  assert first.stdout.readline() == "0 of 1\n"
  second = place.agent(SLEEP)
  assert both(first, second) == {"0 of 2\n", "1 of 2\n"}
  second.terminate()
  code, _, errors = end(second)
  assert (code, errors) == (143, "error: this replica left the run\n")
  first.terminate()
  assert end(first)[0] == 143
  assert place.rendezvous.poll() is None
  place.rendezvous.terminate()
  assert end(place.rendezvous)[0] == 143


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["agent", "rendezvous"])
def test_a_process_that_saves_for_another_one_is_not_disturbed(place, stopped):
  agent = place.agent(SAVE)
  assert agent.stdout.readline() == "0 of 1\n"
  place.agent(SLEEP)
  assert agent.stdout.readline() == "saving\n"
  (agent if stopped == "agent" else place.rendezvous).terminate()
  code, output, _ = end(agent)
  assert (code, output) == (143, "")


def test_the_process_of_a_killed_agent_is_killed_too(place):
  first, second = place.agent(SLEEP), place.agent(SLEEP)
  assert both(first, second) == {"0 of 2\n", "1 of 2\n"}
  second.kill()
  # Its process held the same pipe: the end of the file comes with its end.
  assert second.stdout.read() == ""


def test_an_agent_may_be_the_first_process_of_a_container(place):
  contain = ("unshare", "-rpf", "--kill-child")
  if not shutil.which("unshare") or subprocess.call([*contain, "true"]):
    pytest.skip("this system has no process namespaces for this user")
  agent = place.agent(SLEEP, *contain)
  assert agent.stdout.readline() == "0 of 1\n"


def test_processes_that_lost_another_one_start_again_until_the_run_ends(place):
  agent = place.agent(LOSE)
  for _ in range(3):
    assert agent.stdout.readline() == "0 of 1\n"
  place.rendezvous.terminate()
  code, _, errors = end(agent)
  assert (code, errors) == (143, "error: the run was stopped\n")


@pytest.mark.parametrize("code", [0, 1])
def test_the_run_ends_when_a_process_ends_by_itself(place, code):
  agents = [
    place.agent(SLEEP.replace("time.sleep(300)", f"sys.exit({code})"))
    for _ in range(2)
  ]
  assert {end(agent)[0] for agent in agents} == {code}
  assert end(place.rendezvous)[0] == code


@pytest.mark.slow
def test_a_process_that_is_always_killed_ends_its_agent(place):
  kill = "import os; print(flush=True); os.kill(os.getpid(), 9)"
  code, output, errors = end(place.agent(kill))
  assert (code, len(output)) == (1, 5)
  assert errors == (
    "error: this replica's process was killed 5 times in a row: look for what "
    "did so, such as too little memory\n"
  )


def test_an_agent_says_that_the_rendezvous_is_gone(place):
  agent = place.agent(SLEEP)
  agent.stdout.readline()
  place.rendezvous.kill()
  os.kill(int(children(agent.pid)[0]), signal.SIGTERM)
  code, _, errors = end(agent)
  assert code == 75
  assert "is gone: start it again, then this command" in errors


def children(pid):
  return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_port_that_is_taken_is_one_line(place):
  agent = place.agent(SLEEP)  # So the first rendezvous is there.
  agent.stdout.readline()
  port = place.address.split(":")[1]
  with pytest.raises(OSError):  # It is reached at 127.0.0.1 alone.
    socket.create_connection(("127.0.0.2", int(port)), timeout=5).close()
  for bind in ("127.0.0.1", "192.0.2.1", "none.invalid"):
    code, _, errors = end(rendezvous(f"--port={port}", f"--bind={bind}"))
    assert code == 2
    assert errors.startswith(f"error: --bind={bind} --port={port} cannot be ")


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_who_listens_for_others_is_told_whom_that_trusts(bind, caplog):
  rules = Rendezvous(1, 1, 0.0)
  rules.stop(signal.SIGTERM)  # So it ends at once.
  asyncio.run(serve(rules, bind, free_port()))
  warned = [record.getMessage() for record in caplog.records]
  assert len(warned) == (bind == "0.0.0.0")
  assert all("is trusted" in each for each in warned)


def group_sizes(workdir):
  """Number of replicas and last step of each group, from the rounds' rows."""
  groups = []
  for row in runs.rows(workdir, "round"):
    count = len(row["loss_per_replica"])
    if groups and groups[-1][0] == count:
      groups.pop()
    groups.append((count, row["step"]))
  return groups


def is_at_groups(counts, workdir):
  return [count for count, _ in group_sizes(workdir)] == counts


# Long steps, few of them and a smooth optimizer: the programs of one process
# and of several round differently, and drift apart step by step.
RUN = (
  f"--config={test_launch.CONFIG.with_name('diloco.py')}",
  *runs.SMALL_FLAGS,
  "--config.total_steps=240",
  "--config.inner.optimizer=sgd",
  "--config.inner.learning_rate=0.1",
  "--config.data.batch_size=64",
  "--config.data.sequence_length=128",
  "--config.evaluation.num_sequences=64",
  "--config.checkpoint.interval_steps=15",
)


def assert_all_end(*processes):
  for process in processes:
    code, _, errors = end(process, deadline_s=test_launch.DEADLINE_S)
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("directories", ["one for all", "own", "own, deleted"])
def test_a_killed_replica_comes_back_and_the_run_is_the_planned_one(
  processes, tmp_path, directories
):
  """The bar is torchft's: the parameters of a run with the same membership."""
  lived, planned = tmp_path / "lived", tmp_path / "planned"
  other = lived if directories == "one for all" else tmp_path / "other"
  place = Place(processes, settle_s=5)
  first = place.train(*RUN, f"--workdir={lived}")
  second = place.train(*RUN, f"--workdir={other}")

  def why_ended():
    return test_launch.errors_if_ended(first)

  test_launch.wait_for(12, lived, why_ended)
  second.kill()
  test_launch.wait_until(
    lambda: is_at_groups([2, 1], lived), why_ended, "a group of one"
  )
  if directories == "own, deleted":
    shutil.rmtree(other)
  second = place.train(*RUN, f"--workdir={other}")
  assert_all_end(first, second, place.rendezvous)
  groups = group_sizes(lived)
  assert is_at_groups([2, 1, 2], lived)
  assert runs.metrics_text(other) == runs.metrics_text(lived)

  settings = json.loads((lived / "config.json").read_text())
  # A replica that comes back has the others save, at any boundary.
  settings["checkpoint"] = {"interval_steps": 3}
  for count, last_step in [*groups[:2], (2, None)]:
    settings["mesh"] |= {"num_replicas": count, "layout": "stacked"}
    runs.train(from_mapping(settings), planned, until=last_step)
  found, same, wanted = (
    jax.device_get(start.saved_outer_params(each))
    for each in (lived, other, planned)
  )
  runs.assert_same_bits(found, same)
  # Replicas that are wrong for three steps make 4e-3.
  chex.assert_trees_all_close(found, wanted, rtol=0, atol=1e-5)
  assert group_sizes(planned) == groups


@pytest.mark.slow
def test_all_are_killed_and_go_on_from_their_own_directories_to_the_same_bits(
  processes, tmp_path
):
  """A replica goes with its directory, whichever process comes first."""
  flags = (*RUN, "--config.inner.optimizer=adamw", "--config.total_steps=60")
  whole, cut = (
    [tmp_path / name / each for each in ("a", "b")] for name in ("whole", "cut")
  )

  def begin(workdirs):
    place = Place(processes, settle_s=60)
    agents = [place.train(*flags, f"--workdir={each}") for each in workdirs]
    return *agents, place.rendezvous

  assert_all_end(*begin(whole))
  group = begin(cut)
  test_launch.wait_for(8, cut[0], lambda: test_launch.errors_if_ended(group[0]))
  for process in group:
    process.kill()
  assert not runs.rows(cut[0], "final"), "it was killed too late"
  assert_all_end(*begin(cut[::-1]))
  assert runs.metrics_text(whole[0]) == runs.metrics_text(cut[0])
  assert runs.metrics_text(cut[1]) == runs.metrics_text(cut[0])
  found, wanted = (
    [saved_part(each) for each in group] for group in (cut, whole)
  )
  runs.assert_same_bits(dict(found), dict(wanted))
  with pytest.raises(AssertionError):  # The replicas differ.
    runs.assert_same_bits(wanted[0][1], wanted[1][1])


def saved_part(workdir):
  """Which replica a process has saved at the end, and its arrays."""
  folder = workdir / "checkpoints/61"
  record = json.loads((folder / "record/metadata").read_text())
  with np.load(folder / "arrays/arrays.npz") as file:
    return record["part"]["replica"], dict(file)


def test_a_connection_that_says_nothing_does_not_keep_it(place):
  agent = place.agent(SLEEP)  # So the rendezvous is there.
  agent.stdout.readline()
  host, port = place.address.split(":")
  with socket.create_connection((host, int(port))) as silent:
    time.sleep(0.2)
    agent.kill()
    place.rendezvous.send_signal(signal.SIGTERM)
    code, _, _ = end(place.rendezvous)
    assert code != -signal.SIGKILL
    assert silent.recv(1) == b""
