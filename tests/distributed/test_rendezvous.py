"""Processes that wait for each other before JAX's runtime starts.

Each process is a thread. A plain listener stands for JAX's service, which takes
the port of process 0 afterwards.
"""

import contextlib
import socket
import threading
import time

import pytest

from dilocox_jax.distributed import addresses, rendezvous
from dilocox_jax.distributed.rendezvous import Process
from dilocox_jax.threads import in_thread

PATIENT_S = 120.0  # What must happen may take long on a busy machine.
SHORT_S = 0.5  # What is to be given up.


@pytest.fixture(name="port")
def port_fixture():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


class Clock:
  """Time that passes as it does, until it is over for everybody."""

  def __init__(self):
    self._is_over = False

  def monotonic(self):
    return time.monotonic() + 1e6 * self._is_over

  def sleep(self, seconds):
    time.sleep(seconds)

  def end(self):
    self._is_over = True


@pytest.fixture(name="clock")
def clock_fixture(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(rendezvous, "time", clock)
  return clock


def come(port, count, number, run="ab", timeout_s=PATIENT_S, service=None):
  """One process, whose thread ends as the call does."""

  def wait():
    address = f"127.0.0.1:{port}"
    process = Process(run, count, number)
    kept = rendezvous.wait_for_processes(process, address, address, timeout_s)
    with contextlib.ExitStack() as stack:
      for connection in kept.values():
        stack.enter_context(connection)
      assert set(kept) == (set(range(1, count)) if number == 0 else {0})
      if number == 0:  # Where JAX's service would start.
        stack.enter_context(addresses.listen(address))
        assert (service or threading.Event()).wait(timeout=PATIENT_S)

  return in_thread(wait)


def meet(port, count, numbers, **given):
  """Processes come in an order; returns when all have gone on."""
  is_over = threading.Event()
  threads = [
    come(port, count, number, service=is_over, **given) for number in numbers
  ]
  for number, thread in zip(numbers, threads, strict=True):
    if number:
      assert thread.result(PATIENT_S) is None
  is_over.set()
  for thread in threads:
    assert thread.result(PATIENT_S) is None


def call(port):
  """Connects to process 0 as soon as it listens."""
  give_up_s = time.monotonic() + PATIENT_S
  while True:
    try:
      return socket.create_connection(("127.0.0.1", port), timeout=PATIENT_S)
    except OSError:
      assert time.monotonic() < give_up_s
      time.sleep(0.01)


@pytest.mark.parametrize("numbers", [[0], [0, 1], [3, 2, 1, 0], [1, 0, 2]])
def test_all_go_on_when_all_are_there(numbers, port):
  meet(port, len(numbers), numbers)
  meet(port, len(numbers), numbers)  # The port is free again at once.


def greet(port, number, count=4):
  """Greets process 0 by hand; returns the open connection."""
  connection = call(port)
  connection.sendall(f"dilocox_jax 1 ab {count} {number}\n".encode())
  return connection


def test_whoever_is_missing_is_named_everywhere(port, clock):
  first = come(port, 4, 0)
  with greet(port, 2) as second:
    with greet(port, 2) as third:  # So the second has been heard.
      assert third.recv(100) == b"taken\n"
    clock.end()
    assert second.recv(100) == b"missing 1,3\n"
  with pytest.raises(TimeoutError) as error:
    first.result(PATIENT_S)
  assert str(error.value) == (
    f"processes 1 and 3 of 4 did not come to 127.0.0.1:{port} within "
    f"{PATIENT_S:g} s: the same command tries again"
  )


def test_a_name_that_only_this_machine_reaches_is_named(port):
  """Debian gives a machine's name the address 127.0.1.1 on that machine."""
  address = f"localhost:{port}"
  listening = f"127.0.0.1:{port}"
  hint = r"come to localhost:\d+ \(here 127.0.0.1, which no other machine reach"
  with pytest.raises(TimeoutError, match=hint):
    rendezvous.wait_for_processes(
      Process("", 2, 0), address, listening, timeout_s=SHORT_S
    )


def test_who_hears_that_others_are_missing_gives_up_too(port):
  with socket.create_server(("127.0.0.1", port)) as server:
    second = come(port, 20, 1)
    connection, _ = server.accept()
    with connection:
      connection.sendall(
        f"missing {','.join(map(str, range(2, 20)))}\n".encode()
      )
      named = "processes 2, 3, 4, 5, 6, 7, 8 and 11 others of 20 did not come"
      with pytest.raises(TimeoutError, match=named):
        second.result(PATIENT_S)


def test_process_0_that_does_not_come_is_named(port):
  with pytest.raises(
    TimeoutError, match="process 0 does not answer at 127.0.0.1.*refused"
  ):
    come(port, 2, 1, timeout_s=SHORT_S).result(PATIENT_S)


def test_process_0_that_waits_longer_is_not_blamed(port, clock, monkeypatch):
  monkeypatch.setattr(rendezvous, "_NOTICE_S", SHORT_S)
  with socket.create_server(("127.0.0.1", port)) as server:
    second = come(port, 3, 1)
    connection, _ = server.accept()
    with connection:
      assert connection.recv(100) == b"dilocox_jax 1 ab 3 1\n"
      clock.end()
      with pytest.raises(
        TimeoutError, match="process 0 is at .* not all other"
      ):
        second.result(PATIENT_S)


def test_process_0_that_goes_before_its_service_listens_is_missed(
  port, monkeypatch
):
  monkeypatch.setattr(rendezvous, "_SERVICE_S", SHORT_S)
  address = f"127.0.0.1:{port}"
  zero = Process("ab", 2, 0)
  first = in_thread(rendezvous.wait_for_processes, zero, address, address)
  with pytest.raises(TimeoutError, match="was at .* and has gone"):
    come(port, 2, 1).result(PATIENT_S)
  for connection in first.result(PATIENT_S).values():
    connection.close()


@pytest.mark.parametrize(
  ("run", "count", "number", "says"),
  [
    ("cd", 2, 1, "has another config, or is of another run"),
    ("ab", 3, 1, "waits for 2 processes, and this is process 1 of 3"),
    ("ab", 2, 0, ""),  # It would have to listen at the same address.
  ],
)
def test_a_process_that_does_not_belong_is_refused(
  run, count, number, says, port
):
  is_over = threading.Event()
  first = come(port, 2, 0, service=is_over)
  call(port).close()
  with pytest.raises(ValueError, match=says or "cannot listen") as error:
    come(port, count, number, run=run).result(PATIENT_S)
  assert "\n" not in str(error.value)
  come(port, 2, 1).result(PATIENT_S)
  is_over.set()
  first.result(PATIENT_S)


def test_a_number_is_given_once(port):
  is_over = threading.Event()
  first = come(port, 3, 0, service=is_over)
  twins = [come(port, 3, 1), come(port, 3, 1)]
  refused = None
  while refused is None:
    refused = next((twin for twin in twins if twin.done()), None)
    time.sleep(0.01)
  with pytest.raises(ValueError, match="came to .* as process 1: give each"):
    refused.result()
  twins.remove(refused)
  come(port, 3, 2).result(PATIENT_S)
  twins[0].result(PATIENT_S)
  is_over.set()
  first.result(PATIENT_S)


def test_a_process_that_left_is_waited_for_again(port):
  is_over = threading.Event()
  first = come(port, 3, 0, service=is_over)
  greet(port, 1, count=3).close()
  second = come(port, 3, 2)
  time.sleep(SHORT_S)
  assert not second.done()
  come(port, 3, 1).result(PATIENT_S)
  second.result(PATIENT_S)
  is_over.set()
  first.result(PATIENT_S)


@pytest.mark.parametrize(
  "sent",
  [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\n",
    b"x" * 100_000,
    b"dilocox_jax 1 ab 2 -1\n",
    b"dilocox_jax 1 ab 2 1 1\n",
    b"dilocox_jax 1 ab 2 7\n",
    b"dilocox_jax 1 ab 2 1\n" + b"x" * 1000,
  ],
)
def test_strangers_are_sent_away_and_the_run_starts(sent, port, monkeypatch):
  monkeypatch.setattr(rendezvous, "_GREET_S", SHORT_S)
  is_over = threading.Event()
  first = come(port, 2, 0, service=is_over)
  with call(port) as stranger:
    stranger.sendall(sent)
    try:
      answer = stranger.recv(100)
    except ConnectionResetError:
      answer = b""
  assert answer in (b"", b"other count 2\n")
  come(port, 2, 1).result(PATIENT_S)
  is_over.set()
  first.result(PATIENT_S)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"\xff" * 100_000])
def test_another_program_at_the_address_is_not_process_0(answer, port):
  with socket.create_server(("127.0.0.1", port)) as server:

    def serve():
      while True:
        connection, _ = server.accept()
        with connection:
          connection.sendall(answer)

    in_thread(serve)
    with pytest.raises(TimeoutError, match="or another program listens there"):
      come(port, 2, 1, timeout_s=2 * SHORT_S).result(PATIENT_S)


# Addresses.


def wait_at(coordinator, number=1, listening=None):
  process = Process("", 2, number)
  rendezvous.wait_for_processes(process, coordinator, listening, SHORT_S)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".org"])
def test_a_name_that_is_not_known_is_wrong_input(number, host):
  with pytest.raises(ValueError, match=f"cannot resolve {host}") as error:
    wait_at(f"{host}:9876", number)
  assert "\n" not in str(error.value)


def test_a_pod_without_a_name_has_not_come_yet(monkeypatch):
  monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
  with pytest.raises(TimeoutError, match="the pod of process 0 was not there"):
    wait_at("no-such-host.invalid:9876")


@pytest.mark.parametrize(
  "address", ["host", "host:", ":1", "host:x", "h:70000"]
)
def test_an_address_without_a_port_is_refused(address):
  with pytest.raises(ValueError, match="is no address: give HOST:PORT"):
    wait_at(address)


def test_process_0_listens_at_an_address_of_its_own(port):
  with pytest.raises(ValueError, match="cannot listen at 192.0.2.1:0"):
    wait_at("192.0.2.1:0", 0, "192.0.2.1:0")
  with pytest.raises(ValueError, match="does not reach itself at 127.0.0.1:1"):
    wait_at("127.0.0.1:1", 0, f"127.0.0.1:{port}")


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_all_addresses_are_those_of_ipv4_too(has_ipv6, port, monkeypatch):
  if not socket.has_dualstack_ipv6():
    has_ipv6 = False
  monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
  with addresses.listen(f"[::]:{port}"):
    addresses.connect(addresses.look_up(f"127.0.0.1:{port}"), PATIENT_S).close()


def test_a_call_never_leads_back_to_itself(port, monkeypatch):
  """The system may call from the port that is called, if nobody listens."""

  class FromThatPort(socket.socket):
    def bind(self, address):
      super().bind(("127.0.0.1", port))

  places = addresses.look_up(f"127.0.0.1:{port}")
  with monkeypatch.context() as patch:
    patch.setattr(socket, "socket", FromThatPort)
    with pytest.raises(ConnectionRefusedError):
      addresses.connect(places, PATIENT_S)
  addresses.listen(f"127.0.0.1:{port}").close()
