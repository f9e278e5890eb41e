"""A run that keeps an average trains as before, and hands on the average."""

import jax
import pytest

import dilocox_jax as dx
from dilocox_jax.training import evaluation
from tests import runs

METHODS = {
  "allreduce": {
    "method": "allreduce",
    "sync_interval": None,
    "steps_per_dispatch": 3,
  },
  "diloco": {"method": "diloco"},
  "slices": {
    "method": "delayed",
    "rule": "continue",
    "num_fragments": 3,
    "overlap_steps": 1,
    "fragment_order": "interleaved",
  },
  "per_replica": {"method": "eager"},
}


def config(name, power):
  return runs.settings(
    outer={"average_power": power, **rates(name)}, **METHODS[name]
  )


def rates(name):
  return {} if name == "allreduce" else {"learning_rate": 1.0, "momentum": 0.0}


def without_outer(workdir):
  rows = runs.rows(workdir, "round")
  return [(row["loss"], row["grad_norm"], row["drift"]) for row in rows]


@pytest.mark.parametrize("name", METHODS)
def test_only_what_is_kept_changes(name, tmp_path):
  made = runs.train(config(name, 3.0), tmp_path / "averaged")
  runs.train(config(name, 0.0), tmp_path / "newest")
  assert without_outer(tmp_path / "averaged") == without_outer(
    tmp_path / "newest"
  )
  (averaged,) = runs.rows(tmp_path / "averaged", "final")
  (newest,) = runs.rows(tmp_path / "newest", "final")
  assert averaged["outer_loss"] != newest["outer_loss"]
  state, _ = runs.saved(tmp_path / "averaged")
  kept = evaluation.params_to_keep(made.programs, state)
  runs.assert_same_bits(kept, dx.load(tmp_path / "averaged").params)
  seen = evaluation.losses(made.programs, state, made.data.validation)
  assert seen["outer_loss"] == averaged["outer_loss"]


@pytest.mark.parametrize("name", ["allreduce", "slices"])
def test_the_average_survives_a_kill(name, tmp_path):
  runs.train(config(name, 3.0), tmp_path / "whole")
  runs.train(config(name, 3.0), tmp_path / "killed", until=12)
  runs.train(config(name, 3.0), tmp_path / "killed")
  whole, _ = runs.saved(tmp_path / "whole")
  killed, _ = runs.saved(tmp_path / "killed")
  runs.assert_same_bits(whole, killed)
  assert jax.tree.leaves(whole)
