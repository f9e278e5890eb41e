"""Several processes of one run: what they tell each other, and who is lost.

`member` is what each of two real processes does, with two devices and without
a compiled program.
"""

import base64
import io
import math
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.distributed import (
  channel,
  coordinator_store,
  link_counter,
  processes,
)
from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.mailbox_protocol.agreement import StoppedError
from dilocox_jax.mailbox_protocol.mailbox import Exchanged
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.plan.model.division import Division
from dilocox_jax.rounds.cluster_processes import ClusterProcesses

VALUES = np.arange(48.0).reshape(2, 4, 6) - 3
SPECS = ((), ("replica",), (None, ("replica", "stage")), (None, "stage"))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.bool_)
GLOO = "UNKNOWN: Gloo all-reduce failed: Connection reset by peer"


def trees():
  """Arrays on all devices, and what they hold."""
  mesh = Replicas(2, "mesh", Division(1, 2)).mesh
  arrays: dict[str, Any] = {"own": VALUES}
  values: dict[str, Any] = dict(arrays)
  for spec in SPECS:
    for dtype in DTYPES:
      name = f"{spec} {jnp.dtype(dtype)}"
      value = VALUES.astype(dtype)
      where = NamedSharding(mesh, PartitionSpec(*spec))
      arrays[name] = jax.make_array_from_callback(
        value.shape, where, value.__getitem__
      )
      values[name] = value
  return arrays, values


def assert_gathered():
  arrays, values = trees()
  programs = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: programs.append(event)
  )
  found = arrays_to_host(arrays)
  assert not programs, "a program was made, which would wait for the devices"
  for name, value in values.items():
    assert found[name].dtype == value.dtype, name
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  turns = coordinator_store._turns
  coordinator_store._turns = None  # pyright: ignore
  try:  # What all hold is not sent: whoever takes a turn fails.
    arrays_to_host({n: a for n, a in arrays.items() if n[:2] in ("ow", "()")})
  finally:
    coordinator_store._turns = turns


def assert_told_by_process_0():
  """Both get the mailbox's answers, and process 0 gets parts of arrays."""
  arrays, values = trees()
  divided = [array for name, array in arrays.items() if name != "own"]
  whole = [value for name, value in values.items() if name != "own"]
  replica = ClusterProcesses()
  assert not replica.is_stop_requested
  large = np.arange(channel.PIECE_BYTES // 2 + 3, dtype=np.int32)
  few = [np.zeros((0, 2)), np.array([[-0.0]]).astype(jnp.bfloat16), large]

  def answer():
    found = [np.array(each) for each in replica.collected(divided)]
    for own, wanted in zip(found, whole, strict=True):
      np.testing.assert_array_equal(own, wanted)
    return Exchanged(
      messages=[("oslo", 0.1, few)],
      is_own_listed=True,
      left_out={"rome": "é"},
      mean=[large],
    )

  def stop():
    raise StoppedError("no store")

  programs = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: programs.append(event)
  )
  told = replica.from_main(answer, shared=lambda: divided)
  assert isinstance(told, Exchanged) and told.is_own_listed
  assert told.left_out == {"rome": "é"} and not told.is_superseded
  np.testing.assert_array_equal(told.mean, [large])
  ((name, weight, contents),) = told.messages
  assert (name, weight) == ("oslo", 0.1)
  for array, wanted in zip(contents, few, strict=True):
    assert array.dtype == wanted.dtype and array.tobytes() == wanted.tobytes()
  store = distributed.global_state.client
  assert store
  if replica.is_main:
    left = store.key_value_dir_get_bytes("dilocox_jax/channel0")
    assert not left, "what was read stays in the store"
  with pytest.raises(StoppedError, match="no store"):
    replica.from_main(stop)
  assert not programs, "a program was made, which would wait for the devices"
  coordinator_store.allgather("")
  assert not replica.is_stop_requested
  coordinator_store.allgather("")
  replica.request_stop()
  coordinator_store.allgather("")
  assert replica.is_stop_requested


def assert_that_nobody_else_can_connect():
  """Neither to the coordinator nor to gloo, from beyond this machine."""
  links = pathlib.Path("/proc/self/fd").glob("*")
  own = {os.readlink(link) for link in links if os.path.islink(link)}
  places = []
  for table in ("tcp", "tcp6"):
    lines = pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()
    for _, place, _, state, *_, inode in (line.split()[:10] for line in lines):
      if state == "0A" and f"socket:[{inode}]" in own:
        places.append(place)
  assert places and all("0100007F:" in place for place in places), places


def member(port, number, directory):
  """What each of two processes does."""
  processes.start(f"127.0.0.1:{port}", 2, number)
  assert_that_nobody_else_can_connect()
  assert_gathered()
  assert_told_by_process_0()
  own = "a" * (3 + number)
  assert coordinator_store.allgather(own) == ["aaa", "aaaa"]
  assert processes.from_main([number, "é"]) == [0, "é"]
  own_directory = directory / str(number)
  own_directory.mkdir()
  assert processes.share_directory(directory)
  assert not processes.share_directory(own_directory)
  processes.check_equal(config={"a": (1, 2.5)})
  # It ends in both processes, so neither waits for the other.
  with pytest.raises(ValueError, match="process 1 has another text"):
    processes.check_equal(config={"a": 1}, text=f"text {number}")
  store = distributed.global_state.client
  assert store
  names = [name for name, _ in store.key_value_dir_get_bytes("dilocox_jax")]
  heard = [name for name in names if name.endswith("all")]
  assert number or len(heard) == 1, names  # Older turns are deleted.
  coordinator_store.allgather("")  # So that neither is too far ahead.


def end_together(number):
  """Process 1 hears last what ends both, and still ends as process 0."""
  store = distributed.global_state.client
  assert store
  if number:
    time.sleep(1)
    assert store.key_value_dir_get_bytes("dilocox_jax")
  coordinator_store.wait_for_end()
  processes.exit_now(7)


def test_processes_put_their_parts_together_without_a_program(tmp_path):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  flag = "--xla_force_host_platform_device_count=2"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
  command = [sys.executable, "-m", "tests.distributed.test_processes"]
  members = [
    subprocess.Popen(
      [*command, str(port), str(number), str(tmp_path)],
      env=environment,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(2)
  ]
  errors = [each.communicate(timeout=600)[1] for each in members]
  assert [each.returncode for each in members] == [7, 7], "\n".join(errors)


@pytest.fixture(name="several")
def several_fixture(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)


def test_what_a_stranger_writes_into_the_store_is_never_executed(
  several, monkeypatch
):
  class Stranger:
    """What runs code when it is unpickled."""

    def __reduce__(self):
      return pytest.fail, ("a message was executed",)

  message = pickle.dumps(Stranger())
  store = SimpleNamespace(blocking_key_value_get_bytes=lambda *_: message)
  monkeypatch.setattr(coordinator_store, "key_value_store", lambda: store)
  with pytest.raises(ValueError):
    coordinator_store.allgather("own")
  file = io.BytesIO()
  np.save(file, np.array([Stranger()]), allow_pickle=True)
  objects = base64.b64encode(file.getvalue()).decode()
  with pytest.raises(ValueError, match="Object arrays"):
    coordinator_store._from_message(0, [[0, 1]], objects)


# Who can be named before JAX's runtime starts: tests/distributed/
# test_rendezvous.py. Here is what may still go wrong after that.


@pytest.fixture(name="started")
def started_fixture(monkeypatch):
  """What JAX's runtime would be started with; no process is waited for."""
  given = {}

  def initialize(coordinator, num_processes, process_id, **named):
    given.update(place=(coordinator, num_processes, process_id), **named)
    raise RuntimeError(given.get("fails", "no"))

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  monkeypatch.setattr(jax.config, "update", lambda *args: None)
  monkeypatch.setattr(
    processes.rendezvous, "wait_for_processes", lambda *args, **named: {}
  )
  monkeypatch.setattr(
    processes.Lifelines, "relay", lambda lifelines, coordinator: coordinator
  )
  return given


@pytest.mark.parametrize(
  ("reason", "kind", "says"),
  [
    ("Failed\n RPC", ValueError, "Failed RPC"),
    (
      "DEADLINE_EXCEEDED: Barrier",
      processes.LostProcessError,
      "one of 2 processes came and has gone .* tries again",
    ),
  ],
)
def test_what_keeps_a_run_from_starting_is_one_line(
  started, reason, kind, says
):
  started["fails"] = reason
  with pytest.raises(kind, match=says) as found:
    processes.start("10.0.0.1:9876", 2, 0)
  assert "\n" not in str(found.value)


SLURM = {
  "SLURM_JOB_ID": "4097",
  "SLURM_STEP_NODELIST": "node[007-009,012]",
  "SLURM_NTASKS": "4",
  "SLURM_PROCID": "2",
  "SLURM_LOCALID": "1",
}
OPEN_MPI = {
  "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.96.0.1,10.148.0.1:34911",
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "2",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
  ("variables", "flags", "place", "devices"),
  [
    (SLURM, (None, None, None), ("node007:61441", 4, 2), [1]),
    (OPEN_MPI, (None, None, None), ("10.96.0.1:61441", 4, 2), [1]),
    (OPEN_MPI, ("head:9876", None, None), ("head:9876", 4, 2), [1]),
    (SLURM, ("head:9876", 8, 6), ("head:9876", 8, 6), None),
    (
      {**SLURM, "JAX_COORDINATOR_ADDRESS": "head:1"},
      (None, None, None),
      ("head:1", 4, 2),
      [1],
    ),
    (
      {**SLURM, "JAX_COORDINATOR_PORT": "9", "JAX_LOCAL_DEVICE_IDS": "0,1"},
      (None, None, None),
      ("node007:9", 4, 2),
      None,
    ),
  ],
)
def test_what_is_not_given_comes_from_the_cluster(
  variables, flags, place, devices, started, monkeypatch
):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ValueError, match="no"):
    processes.start(*flags)
  assert started["place"] == place
  assert started["local_device_ids"] == devices
  is_given = flags[0] or "JAX_COORDINATOR_ADDRESS" in variables
  listening = place[0] if is_given else None
  assert started["coordinator_bind_address"] == listening


@pytest.mark.parametrize(
  ("variables", "flags", "says"),
  [
    ({}, (None, None, None), "no cluster says .* Give --coordinator=HOST:PORT"),
    ({}, ("head:9876", None, None), "no cluster says"),
    ({}, ("head:9876", 2, 2), "process_id=2 must be at least 0 and less than"),
    (
      {"OMPI_MCA_orte_hnp_uri": "nonsense"},
      (None, None, None),
      "invalid literal .* Give --coordinator=HOST:PORT",
    ),
  ],
)
def test_a_place_that_nobody_knows_is_refused(
  variables, flags, says, started, monkeypatch
):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ValueError, match=says) as error:
    processes.start(*flags)
  assert "place" not in started and "\n" not in str(error.value)


def test_a_lost_peer_is_recognized_and_nobody_else_is_blamed(several):
  with pytest.raises(processes.LostProcessError, match="the same command"):
    with processes.detect_lost_process():
      raise RuntimeError("does not fit") from ValueError(GLOO)
  for error in (
    RecordError("cannot write runs/gloo/metrics.jsonl: no space"),
    OSError(5, "coordination"),
    ValueError("no file matches the glob '/data/nccl-logs/*.txt'"),
  ):
    with pytest.raises(type(error)) as found, processes.detect_lost_process():
      raise error
    assert found.value is error


def test_connections_are_opened_along_every_set_of_axes(monkeypatch, capfd):
  opened = []
  psum = jax.lax.psum

  def noted(x, axes):
    opened.append(axes)
    os.write(1, b"[Gloo] Rank 0 is connected")
    return psum(x, axes)

  monkeypatch.setattr(jax.lax, "psum", noted)
  processes.open_connections(Replicas(2, "mesh", Division(2, 2)).mesh)
  sets = {frozenset(axes) for axes in opened}
  assert len(sets) == 7  # All sets of the three axes with several devices.
  os.write(1, b"model nano")
  assert capfd.readouterr().out == "model nano"


def test_bytes_that_left_a_link_are_counted(tmp_path, monkeypatch):
  path = tmp_path / "dev"
  real = link_counter.sent_bytes
  monkeypatch.setattr(
    link_counter, "sent_bytes", lambda interface: real(interface, str(path))
  )

  def write(sent):
    path.write_text(f"a\nb\n lo: 1 {'0 ' * 7}2 1\nwan: 7 {'0 ' * 7}{sent} 8\n")

  monkeypatch.setenv(link_counter.LINK_VARIABLE, "wan")
  write(1000)
  counter = link_counter.LinkCounter()
  write(1250)
  assert [counter.new_bytes(), counter.new_bytes()] == [250, 0]
  monkeypatch.setenv(link_counter.LINK_VARIABLE, "eth7")
  with pytest.raises(ValueError, match="eth7 is no network interface"):
    link_counter.LinkCounter()
  monkeypatch.delenv(link_counter.LINK_VARIABLE)
  assert math.isnan(link_counter.LinkCounter().new_bytes())


if __name__ == "__main__":
  try:
    member(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
    end_together(int(sys.argv[2]))
  except BaseException:  # The other would be waited for.
    traceback.print_exc()
    processes.exit_now(1)
