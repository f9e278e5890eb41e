import pytest

from tests import runs


@pytest.fixture(scope="module", name="stopped")
def stopped_fixture(tmp_path_factory):
  """A run that was killed after its checkpoint of step 12."""
  workdir = tmp_path_factory.mktemp("stopped")
  return runs.train(runs.settings(), workdir, until=12)
