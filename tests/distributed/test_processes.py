"""What one process can tell of several; the rest is in test_launch.py."""

import re

import jax
import pytest

from dilocox_jax.distributed import processes
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.metrics import RecordError
from dilocox_jax.plan.model.division import Division
from dilocox_jax.training.checkpoint import RefusedError

GLOO = "UNKNOWN: Gloo all-reduce failed: Connection reset by peer"


@pytest.fixture(name="several")
def several_fixture(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)


def test_alone_a_process_agrees_with_itself_and_has_everything():
  assert processes.is_main()
  value = object()
  assert processes.from_main(value, lambda same: same) is value
  processes.check_equal(config={"a": 1})


def test_another_config_or_text_is_named(several, monkeypatch):
  main = {"config": {"a": 1}, "text": "0123"}
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  monkeypatch.setattr(processes, "from_all", lambda own, _: [main, own])
  processes.check_equal(config={"a": 1}, text="0123")
  with pytest.raises(ValueError, match="has another text than process 0"):
    processes.check_equal(config={"a": 1}, text="4567")


@pytest.mark.parametrize(
  "given, hint", [(("[::1]:0", 2, 0), False), (("host:1", 2, None), True)]
)
def test_what_keeps_a_run_from_starting_is_one_line(monkeypatch, given, hint):
  def refuse(*args, **kwargs):
    raise RuntimeError("UNKNOWN: Failed to start\n  RPC server")

  monkeypatch.setattr(jax.distributed, "initialize", refuse)
  monkeypatch.setattr(jax.config, "update", lambda *args: None)
  with pytest.raises(ValueError) as found:
    processes.start(*given)
  assert str(found.value).startswith("UNKNOWN: Failed to start RPC server")
  assert ("give --coordinator=HOST:PORT" in str(found.value)) == hint


@pytest.mark.parametrize(
  "given, who", [(("[::1]:0", 2, 0), "2"), ((None, None, None), "the")]
)
def test_processes_that_do_not_come_are_waited_for_again(
  monkeypatch, given, who
):
  def refuse(*args, **kwargs):
    raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

  monkeypatch.setattr(jax.distributed, "initialize", refuse)
  monkeypatch.setattr(jax.config, "update", lambda *args: None)
  line = f"not all {who} .* tries again"
  with pytest.raises(processes.LostProcessError, match=line):
    processes.start(*given)


@pytest.mark.parametrize(
  "address", ["192.0.2.1:0", "none.invalid:0", "[::1]:x"]
)
def test_an_address_where_process_0_cannot_listen_is_named(address):
  with pytest.raises(
    ValueError, match=f"cannot listen at {re.escape(address)}"
  ):
    processes.start(address, 2, 0)


def test_a_lost_peer_is_recognised_below_other_errors(several):
  with pytest.raises(processes.LostProcessError) as found:
    with processes.detect_lost_process():
      raise RefusedError("does not fit") from ValueError(GLOO)
  assert "the same command continues the run" in str(found.value)
  assert "\n" not in str(found.value)


def test_what_a_process_did_itself_is_not_blamed_on_a_peer(several):
  for error in (
    RecordError("cannot write runs/gloo/metrics.jsonl: no space"),
    OSError(5, "coordination"),
    ValueError("sync_interval=0 must be at least 1"),
    ValueError("no file matches the glob '/data/nccl-logs/*.txt'"),
  ):
    with pytest.raises(type(error)) as found, processes.detect_lost_process():
      raise error
    assert found.value is error


def test_a_process_that_is_alone_has_no_peer_to_lose():
  with pytest.raises(ValueError), processes.detect_lost_process():
    raise ValueError(GLOO)


def test_connections_are_opened_along_every_set_of_axes(monkeypatch):
  opened, psum = [], jax.lax.psum
  monkeypatch.setattr(
    jax.lax, "psum", lambda x, axes: (opened.append(axes), psum(x, axes))[1]
  )
  processes.open_connections(Replicas(2, "mesh", Division(2, 2)).mesh)
  assert {frozenset(axes) for axes in opened} == {
    frozenset(axes)
    for axes in [
      *(["replica"], ["data"], ["stage"], ["replica", "data"]),
      *(["replica", "stage"], ["data", "stage"]),
      ["replica", "data", "stage"],
    ]
  }
