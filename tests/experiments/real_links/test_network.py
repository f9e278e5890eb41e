import os
from typing import Any

import pytest

from experiments.real_links import network
from experiments.runtime.cluster_links import cluster_links
from experiments.runtime.command_line import StoppedError
from experiments.runtime.throttled_network import Links, NodeLink


class Local:
  """Stands for a network; runs every command on this machine."""

  addresses = ("127.0.0.1", "127.0.0.1")

  def command(self, node, command):
    return ["env", f"NODE={node}", *command]


def test_equal_nodes_have_links_without_delay():
  links = cluster_links(network.equal_cluster("10 Mbit/s", 3, up="5 Mbit/s"))
  assert links == Links([NodeLink(5e6, 10e6)] * 3, [])


def test_a_process_that_fails_ends_all_and_is_an_error():
  local: Any = Local()
  network.run_together(local, "os", [[], []])  # A module that does nothing.
  with pytest.raises(StoppedError, match="process . failed with exit code"):
    network.run_together(local, "no_such_module", [[], []])
  assert network.coordinator_of(local).startswith("127.0.0.1:")
  assert "NODE" not in os.environ
