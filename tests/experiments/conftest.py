import pytest

from experiments.runtime.cluster_links import cluster_links
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_network import throttled_network
from experiments.tools.link_cases import equal_cluster


@pytest.fixture(scope="session")
def namespaces():
  """Skips where no namespace may be made."""
  try:
    with throttled_network(cluster_links(equal_cluster("100 Mbit/s", 2))):
      pass
  except UsageError as error:
    pytest.skip(str(error))
