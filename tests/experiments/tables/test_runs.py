"""Runs in their steady state."""

import math

import pytest

from dilocox_jax.config import to_plan
from experiments.tables.runs import Rounds, config_of, equal_links, least

STREAMING = {"sync_interval": 12, "num_fragments": 4, "overlap_steps": 2}


def rounds(name="diloco", sync=None, *counts):
  config = config_of(name, sync=sync or {"sync_interval": 10})
  return config, Rounds.of(config, *counts)


def test_a_config_is_the_file_with_the_fields_changed():
  config = config_of(
    "dilocox", exchange={"codec": "low_rank"}, mesh={"num_replicas": 5}
  )
  assert config.sync.method == "dilocox"
  assert config.exchange.codec == "low_rank"
  assert config.exchange.feedback == 1 and config.mesh.num_replicas == 5


def test_a_round_that_waits_is_steps_codec_and_exchange():
  _, one = rounds()
  pace = one.on(equal_links(2, 1e7), 0.3, codec_s=2.0)
  assert 10 * pace.seconds == pytest.approx(10 * 0.3 + 2 + pace.exchange_s)
  assert pace.utilisation == pytest.approx(0.3 / pace.seconds)


def test_the_bytes_of_a_round_are_those_of_the_traffic():
  config, one = rounds()
  expected = to_plan.traffic(config).exchange_bytes(0)
  assert one.on(equal_links(2, 1e9), 1.0).sent_bytes == expected
  config = config_of("streaming_diloco", sync=STREAMING)
  traffic = to_plan.traffic(config)
  expected = sum(traffic.exchange_bytes(fragment) for fragment in range(4))
  pace = Rounds.of(config).on(equal_links(2, 1e9), 1.0)
  assert pace.sent_bytes == expected


@pytest.mark.parametrize("bps", [1e6, 1e7, 1e9])
@pytest.mark.parametrize(
  "name, sync",
  [
    ("streaming_diloco", STREAMING),
    ("dilocox", {"sync_interval": 12}),
    ("eager", {"sync_interval": 12}),
    ("allreduce", {"sync_interval": None}),
  ],
)
def test_later_rounds_take_as_long_as_those_counted(name, sync, bps):
  paces = [
    rounds(name, sync, skipped, counted)[1].on(equal_links(2, bps), 0.05)
    for skipped, counted in ((1, 2), (9, 5))
  ]
  assert paces[0].seconds == pytest.approx(paces[1].seconds, rel=1e-9)


def test_equal_links_have_the_attributes_that_are_given():
  cluster = equal_links(3, 5e8, rtt_s=0.5, loss=1e-4)
  assert cluster.num_replicas == 3
  assert cluster.route(0, 1).rtt_s == 0.5
  one = rounds()[1]
  far = one.on(equal_links(2, 1e9, rtt_s=0.5), 1.0)
  near = one.on(equal_links(2, 1e9, rtt_s=0.1), 1.0)
  assert near.exchange_s < far.exchange_s


def test_the_least_value_is_found_from_above():
  found = least(lambda value: value >= 7, 1.0, 1e6)
  assert 7 <= found < 7 * 1.001
  assert least(lambda value: False, 1.0, 1e6) == math.inf
