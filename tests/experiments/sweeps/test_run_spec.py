import ast
import json
import pathlib
import re

import pytest

from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.mapping import flat
from experiments.configs import convergence_small, default
from experiments.sweeps import grid
from experiments.sweeps.run_spec import RequiredRun, nested, run_digest
from experiments.sweeps.sweep_spec import sweep

FIELDS = frozenset(flat(RunConfig().to_mapping()))


def digest(counted=None, **changed):
  return run_digest(from_mapping(changed), counted)


def test_a_digest_tells_runs_apart_and_ignores_what_changes_no_number():
  plain = digest()
  assert re.fullmatch("[0-9a-f]{12}", plain)
  assert digest(mesh={"layout": "mesh"}) == plain
  assert digest(checkpoint={"keep": 9}) == plain
  assert digest(seed=1) != plain
  assert digest(total_steps=61) != plain
  assert digest(inner={"b2": 0.96}) != plain
  assert digest(evaluation={"num_sequences": 7}) != plain
  assert digest(evaluation={"interval_steps": 7}) != plain


def test_a_field_that_came_later_counts_only_where_it_is_set():
  before = FIELDS - {"model.z_loss"}
  assert digest(before) != digest(FIELDS) == digest()
  changed = digest(before, model={"z_loss": 0.1})
  assert changed != digest(before)
  assert changed == digest(FIELDS, model={"z_loss": 0.1})


def test_the_digest_of_a_line_that_is_committed_is_still_that_of_its_run():
  """The first line of the small sweep, whose fields are in the file beside."""
  results = pathlib.Path(__file__).parents[3] / "docs/results"
  counted = json.loads((results / "convergence_small_base.json").read_text())
  config = from_mapping(
    {
      "total_steps": 1000,
      "seed": 1000,
      "sync": {"method": "allreduce"},
      "data": {"batch_size": 4},
      "inner": {"learning_rate": 0.002, "warmup_steps": 100},
      "evaluation": {"interval_steps": 0, "num_sequences": 512},
      # What a sweep does not leave to the devices.
      "model": {"compute_dtype": "float32", "scan_unroll": 0},
      "mesh": {"stacked_by": "map"},
    }
  )
  assert run_digest(config, counted) == "a515ee49362b"


def test_a_label_is_one_name_whatever_the_setting():
  run = RequiredRun("t", "data.glob=" + "a/**/*.txt" * 40, {}, RunConfig())
  assert re.fullmatch(r"[\w.,=+-]{20,200}", run.label)


@pytest.mark.parametrize(
  "path, hint",
  [
    ("bass.total_steps", "did you mean 'base'?"),
    ("base.total_stepz", "did you mean 'total_steps'?"),
    ("grid.codec.rnk", "did you mean 'rank'?"),
  ],
)
def test_a_field_that_is_not_there_is_answered_with_the_nearest(path, hint):
  with pytest.raises(ValueError) as caught:
    grid.check_ablation_field(path)
  assert hint in str(caught.value)


def run_by_flags(trial):
  """The config of the default run with a trial's flags."""
  values = flat(default.get_config().to_dict())
  for flag in trial.arguments:
    path, text = flag.removeprefix("--config.").split("=", 1)
    try:
      values[path] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      values[path] = text
  return from_mapping(nested(values))


RUNS = [
  {"sync.method": "muloco"},
  {"sync.method": "muloco", "codec.name": "int"},
  {"sync.method": "muloco", "codec.name": "float32"},
  {"sync.method": "muloco", "codec.bits": 8, "total_steps": 100},
  {"sync.method": "muloco", "exchange.error_feedback": False},
  {"sync.method": "dilocox", "adaptive.mode": "off"},
  {"sync.method": "dilocox", "codec.name": "int"},
  {"sync.method": "sparse_loco", "outer.optimizer": "adam"},
  {"sync.method": "open_diloco", "outer.momentum": 0.6},
  {"sync.method": "delayed", "codec.name": "int"},
  {"total_steps": 100, "inner.warmup_steps": 50},
  {"total_steps": 100},
]


@pytest.mark.parametrize("changed", RUNS, ids=str)
def test_flags_bring_back_what_the_method_would_set_otherwise(changed):
  (trial,) = grid.trials({"base": {}, "runs": [changed]})
  assert run_by_flags(trial) == trial.config


def test_flags_bring_back_every_method_of_a_sweep():
  small = sweep(convergence_small.get_config().to_dict())
  for method in small.methods:
    config = small.config(method.changed)
    trial = RequiredRun("results", method.name, method.changed, config)
    assert run_by_flags(trial) == config
