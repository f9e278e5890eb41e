import pytest

from dilocox_jax.training import metrics_reader
from dilocox_jax.training.trainer import Trainer
from tests import runs


@pytest.fixture(scope="session", name="stopped")
def stopped_fixture(tmp_path_factory):
  """A run that was killed after its checkpoint of step 12."""
  workdir = tmp_path_factory.mktemp("stopped")
  return runs.train(runs.settings(), workdir, until=12, overrides=runs.TINY)


@pytest.fixture(scope="session", name="finished")
def finished_fixture(tmp_path_factory):
  """A run of five rounds in its directory, and the order of its calls."""
  workdir = tmp_path_factory.mktemp("finished")
  calls = []

  def spy_on(cls, name, at):
    plain = getattr(cls, name)

    def spy(self, *args):
      calls.append((name, at(*args)))
      return plain(self, *args)

    return spy

  with pytest.MonkeyPatch.context() as patch:
    dispatch = spy_on(Trainer, "_dispatch", lambda _, segment: segment.start)
    read = spy_on(
      metrics_reader.MetricsReader, "read", lambda done: done.segment.start
    )
    patch.setattr(Trainer, "_dispatch", dispatch)
    patch.setattr(metrics_reader.MetricsReader, "read", read)
    runs.trainer(runs.settings(), workdir, overrides=runs.TINY).run()
  return workdir, calls
