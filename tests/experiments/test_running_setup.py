"""What JAX is told before it starts: devices, and where programs are kept."""

import pathlib

import jax
import pytest

from experiments.runtime import running


@pytest.fixture
def told(monkeypatch):
  """What JAX is told, by the name of the setting."""
  found = {}
  monkeypatch.setattr(jax.config, "update", found.__setitem__)
  monkeypatch.setattr(running, "_keep_memory", lambda: None)
  monkeypatch.setattr(running, "_set_xla_flags", lambda: None)
  monkeypatch.delenv(running.CACHE_VARIABLE, raising=False)
  return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cpu_stands_for_as_many_devices_as_are_needed(told, count):
  running.set_up_jax(count)
  assert told.get("jax_num_cpu_devices", 1) == count


@pytest.mark.parametrize(
  ("folder", "expected"),
  [
    (None, str(pathlib.Path("~/.cache/dilocox_jax").expanduser())),
    ("/tmp/programs", "/tmp/programs"),
    ("", None),
  ],
)
def test_compiled_programs_are_kept_unless_the_user_says_no(
  told, monkeypatch, folder, expected
):
  if folder is not None:
    monkeypatch.setenv(running.CACHE_VARIABLE, folder)
  running.set_up_jax()
  assert told.get("jax_compilation_cache_dir") == expected
