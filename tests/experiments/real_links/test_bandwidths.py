import ast
import contextlib
import dataclasses
import importlib
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.metrics import Timing
from dilocox_jax.simulate.transfer import GLOO
from experiments.real_links import bandwidths, timed_runs
from experiments.real_links.changing_link import OPEN_BIT_PER_S
from experiments.runtime import command_line

CONFIG = {
  "sync": {"method": "diloco", "sync_interval": 20},
  "data": {"batch_size": 2, "sequence_length": 32},
}


def run_of(walls_s) -> Any:
  timings = [
    Timing(20 * n, "round", wall_s, link_bytes=105)
    for n, wall_s in enumerate(walls_s, 1)
  ]
  rounds = [
    SimpleNamespace(step=20 * n, sent_bytes=100)
    for n in range(1, len(walls_s) + 1)
  ]
  return SimpleNamespace(timings=timings, rounds=rounds, config=CONFIG)


def test_the_link_becomes_slower_in_the_order_of_the_table():
  rates = [bandwidths.rate_of([1.0] * number) for number in range(24)]
  assert rates[:7] == [OPEN_BIT_PER_S] * 7  # Three that compile.
  assert rates[7:19] == [1e9] * 4 + [200e6] * 4 + [50e6] * 4
  assert rates[19:] == [50e6] * 5  # The run ends there.


def test_a_method_is_compared_with_the_simulator_over_each_link():
  # 20 steps of 0.05 s, and 3.4 MB a round over the link. Over an open link
  # the machine makes collectives nine times slower than their bytes.
  config: Any = from_mapping(CONFIG)
  slow = dataclasses.replace(GLOO, factors=(("all_reduce", 9.0, 9.0),))

  def walls_s(rate_bps):
    transport = slow if rate_bps == OPEN_BIT_PER_S else GLOO
    seconds = 20 * bandwidths._predicted(config, rate_bps, transport, 0.05)
    return [9.0, seconds, seconds, seconds]  # The link changes in the first.

  rates = (OPEN_BIT_PER_S, *bandwidths.RATES_BPS)
  walls = [wall_s for rate in rates for wall_s in walls_s(rate)]
  rows = bandwidths.measured(run_of([99.0] * 3 + walls), "diloco", GLOO, slow)
  assert [row.rate_bps for row in rows] == list(bandwidths.RATES_BPS)
  for row in rows:
    assert row.alone_s == pytest.approx(0.05)
    assert row.predicted_s == pytest.approx(row.measured_s)
    assert (row.sync_interval, row.tokens_per_step) == (20, 128)
    assert row.bytes_ratio == pytest.approx(1.05)
  # 28 ms over 1 Gbit/s and 0.57 s over 50 Mbit/s, behind a second of steps.
  assert rows[0].utilisation > 0.95 > 0.7 > rows[-1].utilisation > 0.6
  curve = bandwidths._curve(rows[0], config, GLOO)
  assert list(curve.utilisation) == sorted(curve.utilisation)


@pytest.mark.parametrize("name, interval, changes", bandwidths.SETTINGS)
def test_every_setting_sends_so_much_at_once_that_headers_are_few(
  name, interval, changes
):
  """Gloo's own messages are about 1 kB an exchange (docs/log.md)."""
  model = importlib.import_module(f"experiments.configs.{name}").get_config()
  flags = timed_runs.flags_of(
    name,
    interval,
    1,
    pathlib.Path("run"),
    (*timed_runs.LARGER_CHANGES, *changes),
  )
  for flag in flags:
    if match := re.fullmatch(r"--config\.(\w+)\.(\w+)=(.*)", flag):
      section, field, text = match.groups()
      with contextlib.suppress(ValueError, SyntaxError):
        text = ast.literal_eval(text)
      model[section][field] = text
  traffic = to_plan.traffic(command_line.run_config(model))
  for each in traffic.exchange(traffic.method.schedule.num_fragments - 1):
    assert each.operand_bytes > 60_000
