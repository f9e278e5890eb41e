import pathlib

from dilocox_jax.simulate.transfer import GLOO
from experiments.real_links import ranking, timed_runs
from experiments.real_links.network import equal_cluster
from experiments.real_links.ranking import RankedRow
from tests.experiments.real_links.test_timed_runs import planned

CONFIGS = pathlib.Path(ranking.__file__).parents[1] / "configs"


def test_pairs_agree_if_both_orders_are_the_same():
  rows = [
    RankedRow("a", 1, 3.0, 30.0),
    RankedRow("b", 4, 2.0, 15.0),
    RankedRow("c", 16, 1.0, 20.0),
  ]
  assert ranking.agreeing_pairs(rows) == (2, 3)
  assert ranking.agreeing_pairs(rows[:2]) == (1, 1)


def test_eight_settings_differ_by_more_than_a_tenth_in_the_simulator():
  """Otherwise noise would decide about a pair."""
  assert len(ranking.SETTINGS) == 8
  rate_bps = timed_runs.rate_for(32 * 0.05, GLOO)
  cluster = equal_cluster(f"{rate_bps / 1e6:.4f} Mbit/s", 2)
  seconds = sorted(
    timed_runs.predicted_step_s(planned(*setting), cluster, GLOO, 0.05)
    for setting in ranking.SETTINGS
  )
  for faster, slower in zip(seconds, seconds[1:], strict=False):
    assert slower > 1.1 * faster
  for name, _, _ in ranking.SETTINGS:
    assert (CONFIGS / f"{name}.py").exists()
