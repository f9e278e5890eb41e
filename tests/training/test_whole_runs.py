"""Whole runs that adapt, keep an average, or change replicas and devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.config import from_mapping
from dilocox_jax.config.sections import MeshConfig
from dilocox_jax.training import build, evaluation, resume
from dilocox_jax.training.checkpoint import Checkpoints
from dilocox_jax.training.trainer import Trainer
from tests import runs
from tests.mailbox.apart import broken
from tests.tiers import slow

# Where the model does not matter.
train = functools.partial(runs.train, overrides=runs.TINY)

# Rank and H follow what is measured.


# Half the energy is in a few directions of any matrix: the rank must fall.
@pytest.mark.slow
def test_a_killed_run_adapts_as_one_that_was_not(tmp_path):
  config = runs.settings(
    total_steps=24,
    model={"model_dim": 32, "ff_dim": 48},
    exchange={"codec": "low_rank(rank=8)+int", "feedback": 1.0},
    adaptive={"mode": "rank_and_interval", "window_rounds": 2, "energy": 0.5},
  )
  runs.train(config, tmp_path / "whole")
  runs.train(config, tmp_path / "killed", until=12)
  runs.train(config, tmp_path / "killed")
  (whole, _), (resumed, _) = (
    runs.saved(tmp_path / name) for name in ("whole", "killed")
  )
  runs.assert_same_bits(resumed, whole)
  assert runs.metrics_text(tmp_path / "killed") == runs.metrics_text(
    tmp_path / "whole"
  )
  rows = runs.rows(tmp_path / "whole", "round")
  ranks = [entry["rank"] for row in rows for entry in row["drift"]]
  assert ranks[0] == 8 and ranks[-1] < 8
  sent = [row["sent_bytes"] for row in rows if row["drift"]]
  assert sent[-1] < sent[0]
  lengths = np.diff([0, *(row["step"] for row in rows)])
  assert lengths[-2] < lengths[0]  # The last may be cut short.


# A run that keeps an average trains as before, and hands on the average.

AVERAGED = {
  "allreduce": {
    "method": "allreduce",
    "sync_interval": None,
    "steps_per_dispatch": 3,
  },
  "slices": {
    "method": "delayed",
    "rule": "continue",
    "num_fragments": 3,
    "overlap_steps": 1,
    "fragment_order": "interleaved",
  },
  "per_replica": {"method": "eager"},
}


def averaged(name, power):
  rates = {"learning_rate": 1.0, "momentum": 0.0}
  outer = {"average_power": power, **(rates if name != "allreduce" else {})}
  return runs.settings(outer=outer, **AVERAGED[name])


def without_outer(workdir):
  rows = runs.rows(workdir, "round")
  return [(row["loss"], row["grad_norm"], row["drift"]) for row in rows]


@pytest.mark.parametrize("name", AVERAGED)
def test_an_average_changes_what_is_kept_alone_and_survives_a_kill(
  name, tmp_path
):
  made = train(averaged(name, 3.0), tmp_path / "mean")
  train(averaged(name, 0.0), tmp_path / "newest")
  assert without_outer(tmp_path / "mean") == without_outer(tmp_path / "newest")
  (mean,) = runs.rows(tmp_path / "mean", "final")
  (newest,) = runs.rows(tmp_path / "newest", "final")
  assert mean["outer_loss"] != newest["outer_loss"]
  state, _ = runs.saved(tmp_path / "mean")
  kept = evaluation.params_to_keep(made.programs, state)
  runs.assert_same_bits(
    kept, dx.load(tmp_path / "mean", model=runs.TINY.model).params
  )
  seen, _ = evaluation.losses(made.programs, state, made.data.validation)
  assert seen["outer_loss"] == mean["outer_loss"]
  train(averaged(name, 3.0), tmp_path / "killed", until=12)
  train(averaged(name, 3.0), tmp_path / "killed")
  runs.assert_same_bits(runs.saved(tmp_path / "killed")[0], state)


# Replicas are away, or slow.

APART = {"absences": "1:1-2;0:4", "inner_steps": "3,2"}


def apart(membership, **changes):
  values = runs.settings(total_steps=18, **changes).to_mapping()
  return from_mapping(values | {"membership": membership})


@pytest.mark.parametrize("method", ["diloco", *slow("dilocox")])
def test_replicas_that_come_and_go_are_counted_and_continue(tmp_path, method):
  config = apart(APART, method=method)
  whole = tmp_path / "whole"
  cut = tmp_path / "cut"
  train(config, whole)
  train(config, cut, until=12)  # Saved while replica 1 is back.
  train(config, cut)
  assert runs.metrics_text(cut) == runs.metrics_text(whole)

  rows = runs.rows(whole, "round")
  a_step = runs.BATCH_SIZE * runs.SEQUENCE_LENGTH
  tokens = np.diff([0, *(row["tokens"] for row in rows)]) / a_step
  assert tokens.tolist() == [5, 3, 3, 5, 2, 5]
  away = [[x is None for x in row["loss_per_replica"]] for row in rows]
  both = [False, False]
  first = [False, True]
  second = [True, False]
  assert away == [both, first, first, both, second, both]
  first_loss, second_loss = rows[0]["loss_per_replica"]
  mean = (3 * first_loss + 2 * second_loss) / 5
  assert rows[0]["loss"] == pytest.approx(mean)

  # Alone, a replica sends nothing; one that comes back is sent the state.
  outer = runs.saved(whole)[0].fragments[0].params
  params = sum(x.size for x in jax.tree.leaves(outer))
  all_reduce = 4 * (params + 1)  # M = 2: 2 (M - 1) / M of it.
  optimizer = 4 * (2 * params + 2)  # AdamW's moments, two counters.
  copy = 4 * params + optimizer
  sent = [row["sent_bytes"] for row in rows]
  in_time = [all_reduce, 0, 0, all_reduce + copy, 0, all_reduce + copy]
  late = [0, 0, 0, all_reduce + copy, 0, all_reduce + copy]
  assert sent == (in_time if method == "diloco" else late)


def test_the_flush_of_a_replica_that_is_away_stops_no_run(tmp_path):
  train(apart({"absences": "1:5-9"}), tmp_path)
  assert runs.rows(tmp_path, "final")[-1]["step"] == 18


@pytest.mark.slow
def test_wrong_values_are_left_out_and_reported(tmp_path, monkeypatch, caplog):
  config = runs.settings(num_replicas=3, exchange={"max_norm_ratio": 5})
  right = build.norm_filter
  factors = jnp.float32([1, -10, 1])
  factor = lambda: factors[jax.lax.axis_index("replica")]  # noqa: E731
  monkeypatch.setattr(
    build, "norm_filter", lambda *given: broken(right(*given), factor)
  )
  runs.run(Trainer(config, tmp_path))
  assert caplog.text.count("replica 1 is left out") == 7


# A run goes on, or another starts, on devices that are divided otherwise.

SAVED_AT = 12
SAME_LOSS = 1e-6  # fp32; sums run in another order
LAYERS = {"num_layers": 4}

ONE_DEVICE = MeshConfig()
MESHES = {
  "one stage": MeshConfig(layout="mesh"),
  "two data shards": MeshConfig(layout="mesh", num_data_shards=2),
  "four stages": MeshConfig(layout="mesh", num_stages=4),
  "tensor shards": MeshConfig(
    layout="mesh", num_data_shards=2, num_tensor_shards=2
  ),
  "gpipe": MeshConfig(layout="mesh", num_stages=2, pipeline="gpipe"),
  "stacked": ONE_DEVICE,
}


def config_on(mesh, **changes):
  """A run with everything that a checkpoint can hold."""
  config = runs.settings(
    model=LAYERS,
    inner={"accumulate_steps": 2},
    data={"batch_size": 4},
    exchange={"codec": "low_rank(rank=2)+int", "feedback": 1.0},
    **changes,
  )
  return dataclasses.replace(config, mesh=mesh)


@pytest.fixture(scope="module", name="source")
def source_fixture(tmp_path_factory):
  """A run of two replicas, two stages each, that was killed after a save."""
  workdir = tmp_path_factory.mktemp("source")
  config = config_on(MeshConfig(layout="mesh", num_stages=2))
  runs.train(config, workdir, until=SAVED_AT)
  return workdir


def losses_before(source):
  (row,) = [
    row for row in runs.rows(source, "evaluation") if row["step"] == SAVED_AT
  ]
  return row


def resumed(config, workdir):
  made = runs.trainer(config, workdir)
  checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
  try:
    found = resume.resumed_state(
      config.to_mapping(), made.programs, checkpoints, made.data.digest
    )
  finally:
    checkpoints.close()
  assert found
  return made, found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_run_goes_on_with_the_same_losses_on_other_devices(source, name):
  """Every saved bit arrives, whatever devices hold it."""
  made, state = resumed(config_on(MESHES[name]), source)
  runs.assert_same_bits(state, runs.saved(source)[0])
  seen, _ = evaluation.losses(made.programs, state, made.data.validation)
  before = losses_before(source)
  for view in ("outer_loss", "mean_loss", "replica_loss"):
    np.testing.assert_allclose(seen[view], before[view], atol=SAME_LOSS, rtol=0)


EIGHT_DATA_SHARDS = MeshConfig(num_replicas=1, layout="mesh", num_data_shards=8)
TWO_BY_FOUR = MeshConfig(
  num_replicas=1, layout="mesh", num_data_shards=2, num_tensor_shards=4
)


@pytest.mark.slow
def test_a_run_trains_on_with_the_same_losses_on_another_division(tmp_path):
  """A replica of 8 data shards becomes one of 2 data and 4 tensor shards."""

  def config_on(mesh):
    config = runs.settings(
      total_steps=12,
      method="diloco",
      model={"num_heads": 4, "model_dim": 32},
      data={"batch_size": 8},
      evaluation={"num_sequences": 8},
    )
    return dataclasses.replace(config, mesh=mesh)

  runs.train(config_on(EIGHT_DATA_SHARDS), tmp_path / "whole")
  runs.train(config_on(EIGHT_DATA_SHARDS), tmp_path / "changed", until=6)
  runs.train(config_on(TWO_BY_FOUR), tmp_path / "changed")
  whole, changed = (
    [
      value
      for row in runs.rows(tmp_path / name)
      for key, value in sorted(row.items())
      if key.endswith("loss") and value is not None
    ]
    for name in ("whole", "changed")
  )
  assert len(whole) == 10
  np.testing.assert_allclose(changed, whole, rtol=0, atol=1e-5)
  # The devices add in another order, so some bits differ.
  assert changed != whole
