import dataclasses

import numpy as np

from dilocox_jax.report import load_run
from dilocox_jax.report.figures import rank_figure


def with_ranks(run, values):
  """The run with low-rank updates in every round that has a drift."""
  rounds, left = [], iter(values)
  for row in run.rounds:
    drift = [
      dataclasses.replace(
        entry, rank=rank, energy_rank=rank - 1, stable_rank=2.0
      )
      for entry, rank in zip(row.drift, left, strict=False)
    ]
    rounds.append(dataclasses.replace(row, drift=drift))
  return dataclasses.replace(run, rounds=rounds)


def test_the_figure_shows_what_was_measured_and_what_was_sent(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  count = sum(len(row.drift) for row in run.rounds)
  values = np.linspace(16, 4, count).tolist()
  figure = rank_figure(with_ranks(run, values))
  assert figure
  left, right = figure.axes
  lines = {
    line.get_label(): np.asarray(line.get_ydata()) for line in left.get_lines()
  }
  np.testing.assert_allclose(lines["sent"], values)
  energy = [value - 1 for value in values]
  np.testing.assert_allclose(lines["measured, by energy"], energy)
  assert np.all(np.asarray(lines["measured, stable rank"]) == 2)
  assert figure.get_suptitle() == "The rank went from 16 to 4"
  (steps,) = right.get_lines()
  lengths = np.diff([0, *(row.step for row in run.rounds)])
  np.testing.assert_array_equal(steps.get_ydata(), lengths)


def test_a_run_without_low_rank_has_no_figure_of_ranks(write_run, tmp_path):
  assert rank_figure(load_run(write_run(tmp_path))) is None
