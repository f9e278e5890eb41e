import os
import subprocess
import sys

import pytest

from experiments.runtime import xla_flags
from experiments.runtime.xla_flags import GPU_FLAGS, set_flags, with_flags


def test_flags_of_the_user_stay_as_they_are():
  ours = (("--a", "1"), ("--bc", "2"))
  assert with_flags("", ours) == "--a=1 --bc=2"
  assert with_flags("--b  --a=3", ours) == "--b --a=3 --bc=2"
  assert with_flags("--bc --a", ours) == "--bc --a"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_flags_are_set_where_jax_can_use_a_gpu(monkeypatch, has_gpu):
  monkeypatch.setenv("XLA_FLAGS", "--a=1")
  plugins = ("json",) if has_gpu else ("no_such_plugin",)
  monkeypatch.setattr(xla_flags, "_PLUGINS", plugins)
  set_flags()
  flags = os.environ["XLA_FLAGS"].split()
  assert flags[0] == "--a=1" and len(flags) == 1 + has_gpu * len(GPU_FLAGS)


def test_the_installed_xla_knows_every_flag():
  environment = os.environ | {"XLA_FLAGS": with_flags("", GPU_FLAGS.items())}
  command = [sys.executable, "-c", "import jax; jax.devices()"]
  done = subprocess.run(command, env=environment, capture_output=True)
  assert done.returncode == 0, done.stderr.decode()[-500:]
  environment["XLA_FLAGS"] += " --xla_gpu_no_such_flag=true"
  refused = subprocess.run(command, env=environment, capture_output=True)
  assert refused.returncode != 0
