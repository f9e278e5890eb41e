"""Whether the devices of several processes are what a run needs."""

import socket

import pytest
from absl import flags

from dilocox_jax.config import from_mapping
from experiments.runtime import distributed_flags
from experiments.runtime.command_line import UsageError
from experiments.sweeps.runs import nested

CONFIG = from_mapping({"mesh": {"layout": "mesh", "num_replicas": 4}})


def test_as_many_devices_of_each_process_are_enough():
  distributed_flags.check_devices(CONFIG, [0, 0, 1, 1])
  distributed_flags.check_devices(CONFIG, [3, 1, 2, 0])


@pytest.mark.parametrize(
  "owners, reason",
  [
    ([0, 0, 0, 1], "processes have 1 to 3 devices"),
    ([0, 0, 1], "processes have 1 to 2 devices"),
    ([0, 1], "have 2 devices together, and the run needs 4"),
    ([0, 0, 0, 1, 1, 1], "have 6 devices together, and the run needs 4"),
  ],
)
def test_others_are_refused(owners, reason):
  with pytest.raises(UsageError, match=reason):
    distributed_flags.check_devices(CONFIG, owners)


def given(*arguments):
  values = flags.FlagValues()
  for name in (*distributed_flags.NAMES, "distributed", "cluster"):
    flags.DEFINE_string(name, None, "", flag_values=values)
  values(["train", *arguments])
  return values


@pytest.mark.parametrize(
  "name", ["coordinator", "num_processes", "distributed"]
)
def test_flags_that_another_one_sets_are_refused(name):
  values = given(f"--{name}=1")
  with pytest.raises(UsageError, match=f"--{name} is set by --elastic: leave"):
    distributed_flags.check_elastic(values, CONFIG)


def test_what_no_rule_of_absences_covers_is_not_elastic():
  values = given()
  distributed_flags.check_elastic(values, CONFIG)
  gradients = from_mapping({"sync": {"method": "allreduce"}})
  with pytest.raises(UsageError, match="--elastic does not go with sync.meth"):
    distributed_flags.check_elastic(values, gradients)


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("membership.absences", "1:2-3"),
    ("membership.inner_steps", "30,15,30,30"),
    ("data.mix", "0.9,0.1;0.1,0.9;1,0;0,1"),
    ("data.mix", "own"),
  ],
)
def test_what_numbers_replicas_is_not_elastic(name, text):
  fields = {
    "mesh.layout": "mesh",
    "mesh.num_replicas": 4,
    "sync.method": "diloco",
    "data.source": "text_files",
    "data.glob": "a;b",
    name: text,
  }
  with pytest.raises(UsageError, match=f"{name}=.*numbers replicas"):
    distributed_flags.check_elastic(given(), from_mapping(nested(fields)))


def test_a_simulated_clock_is_not_elastic():
  with pytest.raises(UsageError, match="--cluster='1gbit'.*numbers replicas"):
    distributed_flags.check_elastic(given("--cluster=1gbit"), CONFIG)


def test_nobody_else_gets_a_port_that_is_reserved():
  with distributed_flags.reserved_port() as port, socket.socket() as other:
    with pytest.raises(OSError):
      other.bind(("", port))
  with socket.socket() as other:
    other.bind(("", port))
