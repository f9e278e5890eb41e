"""The sums and the verdict that `fits` prints."""

import re

import pytest

from dilocox_jax.config import device_memory
from dilocox_jax.config.device_memory import DeviceMemory
from tests.experiments.programs import run

ONE = DeviceMemory(state=3_000_000, step=1_000_000, frozen=500_000)


@pytest.fixture(autouse=True)
def known_memory(monkeypatch):
  monkeypatch.setattr(device_memory, "device_memory", lambda *args: ONE)


def fits(*flags):
  """Prints the memory of a run of `tiny`; returns how it ended and the rows."""
  done = run("fits", *flags)
  rows = re.findall(r"^ (\S.*?)  +([\d.]+ \w+) *$", done.stdout, re.MULTILINE)
  return done, dict(rows)


@pytest.mark.parametrize(
  ("flags", "kept", "step", "needed"),
  [
    (["--config.mesh.num_replicas=1"], "3.00 MB", "1.00 MB", "4.50 MB"),
    # Replicas that are stacked have a state and a step each, and one frozen
    # model.
    (["--config.mesh.num_replicas=2"], "6.00 MB", "2.00 MB", "8.50 MB"),
    (["--config.mesh.num_replicas=4"], "12.0 MB", "4.00 MB", "16.5 MB"),
    # On a mesh each replica has a device of its own.
    (
      ["--config.mesh.num_replicas=2", "--config.mesh.layout=mesh"],
      "3.00 MB",
      "1.00 MB",
      "4.50 MB",
    ),
  ],
)
def test_stacked_replicas_need_as_many_states_and_steps(
  flags, kept, step, needed
):
  done, found = fits(*flags)
  assert done.returncode == 0, done.stderr
  assert found["frozen, for all replicas (derived)"] == "500 kB"
  assert found["kept between steps (derived)"] == kept
  (estimated,) = [x for name, x in found.items() if name.startswith("a step")]
  assert estimated == step
  assert found["needed"] == needed
  assert "--memory='80 GB' would say whether it fits" in done.stdout


def test_what_is_left_is_a_share_of_the_memory():
  done, _ = fits("--config.mesh.num_replicas=2", "--memory=10 MB")
  assert done.returncode == 0
  assert "fits with 15.0 % of 10.0 MB to spare" in done.stdout


def test_what_is_lacking_is_a_share_of_the_memory():
  done, _ = fits("--config.mesh.num_replicas=2", "--memory=5 MB")
  assert done.returncode == 1
  assert "does not fit: it lacks 70.0 % of 5.00 MB" in done.stderr


def test_memory_that_is_just_enough_is_enough():
  done, _ = fits("--config.mesh.num_replicas=2", "--memory=8.5 MB")
  assert done.returncode == 0 and "fits with 0.0 %" in done.stdout


def test_all_parameters_are_counted_and_those_that_are_trained():
  done, _ = fits("--config.lora.rank=4", "--config.mesh.num_replicas=1")
  counts = {
    name: int(count.replace(",", ""))
    for name, count in re.findall(
      r"^ (all|trained) +([\d,]+)", done.stdout, re.M
    )
  }
  assert 0 < counts["trained"] < counts["all"] / 5
