"""Parts of `experiments.gap`: rates, smaller models, offers."""

import math

import pytest

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.gap.law import Estimate
from dilocox_jax.plan.model.shapes import parameter_count
from experiments.gaps import offers, smaller_models, tuned_pairs
from experiments.runtime.command_line import StoppedError

GAIN = Estimate(0.1, 0.08, 0.12)
GROWING = {
  "sync.sync_interval": 64,
  "sync.first_interval": 4,
  "sync.steps_per_doubling": 50,
}


def planned(**changes):
  values = {
    "sync.method": "overlap_loco",
    "model.preset": "tiny",
    "total_steps": 800,
    "data.batch_size": 4,
    "mesh.num_replicas": 4,
  }
  return from_mapping(values | changes)


def test_the_best_rate_is_refined_by_a_parabola():
  # 1 + (x - 0.25)^2 at x = -1, 0 and 1 has its vertex at 1.
  losses = {0.5: 1 + 1.25**2, 1.0: 1 + 0.25**2, 2.0: 1 + 0.75**2}
  found = tuned_pairs.tuned_batch(8, losses)
  assert (found.rate, found.is_inner) == (1.0, True)
  assert found.refined == pytest.approx(1.0)
  assert found.loss == pytest.approx(1.0625)


def test_a_best_rate_at_an_end_is_not_inner_and_not_refined():
  found = tuned_pairs.tuned_batch(8, {0.5: 1.2, 1.0: 1.1, 2.0: math.nan})
  assert found.is_inner and found.refined == 1.1  # The next one diverged.
  found = tuned_pairs.tuned_batch(8, {0.5: 1.2, 1.0: 1.1, 2.0: 1.0})
  assert not found.is_inner and found.refined == 1.0
  with pytest.raises(StoppedError, match="all rates diverged with 8 sequen"):
    tuned_pairs.tuned_batch(8, {0.5: math.nan})


def test_allreduce_has_the_model_the_steps_and_all_sequences():
  config = planned(**{"inner.learning_rate": 0.005})
  found = tuned_pairs.allreduce_config(config)
  assert found.sync.method == "allreduce"
  assert (found.mesh.num_replicas, found.data.batch_size) == (1, 16)
  assert found.inner == config.inner and config.inner.optimizer == "muon"
  assert found.model == config.model and found.total_steps == 800
  half = tuned_pairs.halved(found)
  assert tuned_pairs.global_batch(half) == 8
  assert half.inner.learning_rate == 0.005
  # Replicas on several devices stay where they are.
  apart = tuned_pairs.allreduce_config(planned(**{"mesh.layout": "mesh"}))
  assert (apart.mesh.num_replicas, apart.data.batch_size) == (4, 4)
  odd = tuned_pairs.allreduce_config(
    planned(**{"data.batch_size": 1, "mesh.num_replicas": 3})
  )
  with pytest.raises(ValueError, match="3 sequences in a step, which cannot"):
    tuned_pairs.halved(odd)


def test_smaller_models_have_the_same_tokens_for_each_parameter():
  own = tuned_pairs.allreduce_config(planned())
  most = smaller_models.pair_flops(own) / 4
  found = smaller_models.smaller_configs(own, most)
  assert len(found) == smaller_models.NUM_SIZES
  sizes = [parameter_count(one.model.shape) for one in found]
  assert sizes == sorted(sizes) and sizes[-1] == 131_904
  assert sum(map(smaller_models.pair_flops, found)) <= most

  def tokens(config):
    return config.total_steps * tuned_pairs.global_batch(config)

  share = sizes[-1] / parameter_count(own.model.shape)
  assert tokens(found[-1]) / tokens(own) == pytest.approx(share, rel=0.01)
  assert all(tuned_pairs.global_batch(one) % 2 == 0 for one in found)
  # A smaller model has a higher rate.
  rates = [one.inner.learning_rate for one in [*found, own]]
  assert rates == sorted(rates, reverse=True)
  assert not smaller_models.smaller_configs(own, most_flops=1.0)


def test_an_offer_divides_the_sequences_and_has_the_expected_gap():
  config = planned()
  one = offers.offer(config, "overlap_loco", 8, GAIN)
  assert one is not None
  assert (one.config.mesh.num_replicas, one.config.data.batch_size) == (8, 2)
  assert one.expected.gain == GAIN and one.sent_bytes > 0
  fewer = offers.offer(config, "overlap_loco", 2, GAIN)
  assert fewer is not None and fewer.expected.gap < one.expected.gap
  assert offers.offer(config, "overlap_loco", 32, GAIN) is None
  assert offers.offer(config, "allreduce", 4, GAIN) is None
  # Another method has its own recipe.
  diloco = offers.offer(config, "diloco", 4, GAIN)
  assert diloco is not None
  assert diloco.config.exchange.codec == "float32"


@pytest.mark.parametrize(
  "changes",
  [
    {"sync.method": "overlap_loco"},
    {"sync.method": "dilocox", "sync.warm_start_steps": 20},
    {"sync.method": "diloco"},
    {"sync.method": "diloco", **GROWING},
    {"sync.method": "overlap_loco", **GROWING, "sync.warm_start_steps": 7},
    {"sync.method": "diloco", "membership.absence_rate": 0.3},
    {"sync.method": "overlap_loco", "membership.absences": "1:2-4;3:9"},
  ],
)
def test_the_bytes_of_a_run_are_those_of_its_rounds(changes):
  config = planned(**changes, total_steps=403)
  plan = to_plan.run_plan(config)
  traffic = to_plan.traffic(config)
  last = plan.schedule_step(plan.total_steps)
  counted = sum(map(traffic.segment_bytes, plan.segments()))
  counted += traffic.flush_bytes(last, plan.flush_participation())
  assert offers.sent_bytes(config) == counted


def test_growing_rounds_send_all_their_bytes():
  slower = GROWING | {"sync.method": "diloco", "sync.steps_per_doubling": 500}
  config = planned(**slower, total_steps=4000)
  # 125 rounds of 4 steps, 63 of 8, 31 of 16, 16 of 32 and 31 of 64. The last 4
  # steps are sent after them.
  per_exchange = to_plan.traffic(config).exchange_bytes(0)
  assert offers.sent_bytes(config) == 267 * per_exchange


def test_the_bytes_of_a_million_steps_are_counted_at_once(monkeypatch):
  segment_bytes = Traffic.segment_bytes
  counted = []

  def counting(traffic, segment):
    counted.append(segment)
    return segment_bytes(traffic, segment)

  monkeypatch.setattr(Traffic, "segment_bytes", counting)
  assert offers.sent_bytes(planned(**GROWING, total_steps=10**6)) > 0
  assert len(counted) < 20


def test_hours_say_whether_other_clusters_are_worth_it():
  one = offers.offer(planned(), "overlap_loco", 4, GAIN)
  assert one is not None
  slow = offers.with_hours(one, "1gbit", step_s=1.0, loss=2.0).hours
  assert slow is not None
  # All is hidden: the time is that of the steps, a quarter of one cluster's.
  assert slow.time_s == pytest.approx(800, rel=0.03)
  assert slow.alone_share == pytest.approx(0.25, rel=0.03)
  assert slow.loss.value == pytest.approx(2 * (1 + one.expected.gap))
  # Two doublings fewer sequences, or a quarter of the steps.
  steps = 2 * 0.25**-0.0989
  assert slow.alone_loss == pytest.approx(min(steps, 2 * 0.9**-2), rel=0.01)
  assert slow.allreduce_s > slow.time_s


@pytest.mark.parametrize(
  ("loss", "verdict"),
  [
    (Estimate(1.8, 1.7, 1.9), "yes"),
    (Estimate(2.2, 2.1, 2.3), "no"),
    (Estimate(1.9, 1.8, 2.1), "not known"),
  ],
)
def test_the_verdict_needs_the_whole_range(loss, verdict):
  hours = offers.Hours(
    time_s=1.0, allreduce_s=1.0, alone_share=0.5, loss=loss, alone_loss=2.0
  )
  assert hours.verdict == verdict


def test_a_cluster_file_has_a_fixed_number_of_sites(tmp_path):
  assert offers.sites_of("1gbit") is None
  assert offers.sites_of("experiments/clusters/example.json") == 4
  with pytest.raises(ValueError, match="unknown cluster preset"):
    offers.sites_of("nowhere")
