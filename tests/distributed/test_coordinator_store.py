"""Real processes with two devices each, which compile nothing."""

import base64
import io
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.model.division import Division

VALUES = np.arange(48.0).reshape(2, 4, 6) - 3
SPECS = (
  *((), ("replica",), (None, "stage"), (None, None, "stage")),
  *(("replica", "stage"), (None, ("replica", "stage")), (None, "replica")),
)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.uint8, jnp.bool_)


def trees():
  """Arrays on all devices, and what they hold."""
  mesh = Replicas(2, "mesh", Division(1, 2)).mesh
  arrays, values = {}, {}
  for spec in SPECS:
    for dtype in DTYPES:
      name, value = f"{spec} {jnp.dtype(dtype)}", VALUES.astype(dtype)
      where = NamedSharding(mesh, PartitionSpec(*spec))
      arrays[name] = jax.make_array_from_callback(
        value.shape, where, value.__getitem__
      )
      values[name] = value
  everywhere = NamedSharding(mesh, PartitionSpec())
  arrays["scalar"] = jax.make_array_from_callback(
    (), everywhere, lambda index: np.float32(7)
  )
  values["scalar"] = np.float32(7)
  arrays["own"] = values["own"] = VALUES
  return arrays, values


def assert_gathered():
  arrays, values = trees()
  programs = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: programs.append(event)
  )
  found = arrays_to_host(arrays)
  assert not programs, "a program was made, which would wait for the devices"
  assert found.keys() == values.keys()
  for name, value in values.items():
    assert found[name].dtype == value.dtype, name
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_that_what_all_hold_is_not_sent():
  """Not even when each holds it in parts."""
  arrays, values = trees()
  of_all = [name for name in values if "replica" not in name]
  turns = coordinator_store._turns
  coordinator_store._turns = None  # Whoever takes a turn fails.
  try:
    found = arrays_to_host({name: arrays[name] for name in of_all})
  finally:
    coordinator_store._turns = turns
  assert len(found) == 3 * len(DTYPES) + 2


def assert_that_nobody_else_can_connect():
  """Neither to the coordinator nor to gloo, from beyond this machine."""
  links = pathlib.Path("/proc/self/fd").glob("*")
  own = {os.readlink(link) for link in links if os.path.islink(link)}
  places = []
  for table in ("tcp", "tcp6"):
    for line in (
      pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()
    ):
      _, place, _, state, *_, inode = line.split()[:10]
      if state == "0A" and f"socket:[{inode}]" in own:
        places.append(place)
  assert places and all("0100007F:" in place for place in places), places


def member(port, number, directory):
  """What each of two processes does."""
  processes.start(f"127.0.0.1:{port}", 2, number)
  assert len(jax.local_devices()) == 2
  assert_that_nobody_else_can_connect()
  assert_gathered()
  assert_that_what_all_hold_is_not_sent()
  own = "a" * (3 + number)
  assert coordinator_store.allgather(own) == ["aaa", "aaaa"]
  assert coordinator_store.allgather("" if number else "x") == ["x", ""]
  assert processes.from_main([number, "é"], tuple) == (0, "é")
  assert processes.from_all((number, None), tuple) == [(0, None), (1, None)]
  own_directory = directory / str(number)
  own_directory.mkdir()
  assert processes.share_directory(directory)
  assert not processes.share_directory(own_directory)
  assert number or not list(directory.rglob(".*"))  # 0 cleans up after it.
  processes.check_equal(config={"a": (1, 2.5)})
  try:
    processes.check_equal(config={"a": 1}, text=f"text {number}")
  except ValueError as error:
    assert "process 1 has another text" in str(error)
  else:
    assert number == 0
  store = distributed.global_state.client
  assert store
  entries = store.key_value_dir_get_bytes("dilocox_jax")
  names = [name for name, _ in entries]
  first = min(int(name.split("/")[1]) for name in names)
  heard = [int(name.split("/")[1]) for name in names if name.endswith("all")]
  assert number or [first] == heard, names  # The other may be ahead.
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
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
  }
  members = [
    subprocess.Popen(
      [
        *(sys.executable, "-m", "tests.distributed.test_coordinator_store"),
        *(str(port), str(number), str(tmp_path)),
      ],
      env=environment,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(2)
  ]
  errors = [each.communicate(timeout=600)[1] for each in members]
  assert [each.returncode for each in members] == [7, 7], "\n".join(errors)


def test_a_process_that_is_alone_hears_itself():
  assert coordinator_store.allgather("own") == ["own"]


class Stranger:
  """What runs code when it is unpickled."""

  def __reduce__(self):
    return pytest.fail, ("a message was executed",)


class Store:
  """A store in which a stranger has written every message."""

  def __init__(self, message):
    self.blocking_key_value_get_bytes = lambda *_: message

  def key_value_set_bytes(self, key, message):
    raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} of gloo")


@pytest.fixture(name="written")
def written_fixture(monkeypatch):
  """A function that has a process read what a stranger wrote."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)

  def write(message, process_index):
    monkeypatch.setattr(jax, "process_index", lambda: process_index)
    monkeypatch.setattr(coordinator_store, "_store", lambda: Store(message))

  return write


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize(
  "message",
  [
    *(pickle.dumps(Stranger()), b"", b"\xff", b"[" * 100_000, b"9" * 5_000),
    *(b"5", b"[]", b'{"a": 1}', b"[1, 2, 3]"),
  ],
  ids=lambda message: str(message[:9]),
)
def test_what_a_stranger_writes_is_refused_in_a_line(written, message, reader):
  written(message, reader)
  with pytest.raises(coordinator_store.MessageError) as found:
    with processes.detect_lost_process():
      coordinator_store.allgather("own")
  line = str(found.value)
  assert re.match("the message of process [01] is none of this run", line)
  assert "\n" not in line and len(line) < 400


def test_a_message_of_another_form_is_refused(written):
  """Parts of arrays are among them, and Python objects in numpy's format."""
  written(b"", 0)
  file = io.BytesIO()
  np.save(file, np.array([Stranger()]), allow_pickle=True)
  objects = base64.b64encode(file.getvalue()).decode()
  for message, reason in (
    ([0, [[0, 1]], objects], "Object arrays"),
    ([0, [[0, 1]], "no base64"], "base64"),
    ([0, [[0, 1]], ""], "magic"),
    ([0], "argument"),
    ("", "argument"),
  ):
    with pytest.raises(coordinator_store.MessageError, match=reason):
      coordinator_store.understood(
        lambda sent: coordinator_store._from_message(*sent), message, 1
      )


def test_who_parts_alone_waits_for_nobody():
  coordinator_store.wait_for_end()


def test_alone_everything_is_at_hand():
  where = NamedSharding(Replicas(2, "mesh").mesh, PartitionSpec("replica"))
  found = arrays_to_host(
    {"placed": jax.device_put(VALUES, where), "own": VALUES}
  )
  np.testing.assert_array_equal(found["placed"], VALUES)
  assert isinstance(found["placed"], np.ndarray)


if __name__ == "__main__":
  try:
    member(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
    end_together(int(sys.argv[2]))
  except BaseException:  # The other would be waited for.
    traceback.print_exc()
    processes.exit_now(1)
