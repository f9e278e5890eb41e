import dataclasses
import re

import pytest

from dilocox_jax.checks import changed_fields, check_path
from dilocox_jax.config import FREE_ON_RESUME, RunConfig, from_mapping
from dilocox_jax.plan.schedule.fragments import Fragments

EVERYTHING = {
  "seed": 3,
  "total_steps": 90,
  "data": {"source": "text_files", "glob": "*.txt", "batch_size": 6},
  "model": {"preset": "nano", "num_layers": 5, "qk_norm": True},
  "inner": {"optimizer": "sgd", "warmup_steps": 9, "accumulate_steps": 3},
  "sync": {
    "method": "streaming_diloco",
    "sync_interval": 12,
    "num_fragments": 4,
    "overlap_steps": 5,
    "mixing_alpha": 0.25,
    "fragment_order": "sequential",
    "warm_start": "single",
    "warm_start_steps": 10,
  },
  "exchange": {
    "codec": "low_rank(rank=2)+int(bits=8)",
    "collective": "reduce_scatter",
    "feedback": 0.5,
    "against": "mean",
    "residual_dtype": "int8",
  },
  "outer": {"learning_rate": 1.0, "nesterov": False},
  "mesh": {"num_replicas": 4, "layout": "mesh"},
  "evaluation": {"interval_steps": 0},
  "checkpoint": {"keep": 5},
}


def refusal(values):
  """The one line that a config is refused with."""
  with pytest.raises(ValueError) as caught:
    from_mapping(values)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_an_empty_mapping_is_the_default_run():
  assert from_mapping({}) == RunConfig()


def test_a_config_comes_back_from_its_own_mapping():
  built = from_mapping(EVERYTHING)
  assert from_mapping(built.to_mapping()) == built
  for name, section in EVERYTHING.items():
    if isinstance(section, dict):
      kept = dataclasses.asdict(getattr(built, name))
      assert section.items() <= kept.items()
    else:
      assert getattr(built, name) == section


def test_derived_values_follow_from_the_fields():
  built = from_mapping(EVERYTHING)
  assert built.fragments == Fragments(4, 5, "sequential")
  assert built.tokens_per_replica_step == 6 * built.data.sequence_length


def test_fields_that_are_free_on_resume_exist():
  for path in FREE_ON_RESUME:
    check_path(RunConfig, path)


def test_a_resumed_run_may_be_evaluated_otherwise_but_not_trained_otherwise():
  old = RunConfig().to_mapping()
  values = {
    "seed": 1,
    "evaluation": {"interval_steps": 7, "num_sequences": 9},
    "checkpoint": {"keep": 9, "init_from": "elsewhere"},
  }
  new = from_mapping(values).to_mapping()
  assert changed_fields(old, new, FREE_ON_RESUME) == [
    "checkpoint.init_from: '' -> 'elsewhere'",
    "evaluation.num_sequences: 128 -> 9",
    "seed: 0 -> 1",
  ]


def test_a_misspelt_field_is_answered_with_the_nearest():
  assert refusal({"sync": {"sync_intervall": 3}}) == (
    "unknown config field 'sync.sync_intervall': did you mean 'sync_interval'?"
  )


@pytest.mark.parametrize(
  ("values", "parts"),
  [
    (
      {
        "total_steps": 60,
        "sync": {"warm_start": "single", "warm_start_steps": 60},
      },
      ["total_steps=60", "sync.warm_start_steps=60"],
    ),
    (
      {"total_steps": 30, "inner": {"warmup_steps": 30}},
      ["inner.warmup_steps=30", "total_steps=30"],
    ),
    ({"inner": {"warmup_steps": -1}}, ["inner.warmup_steps=-1"]),
    ({"total_steps": 0}, ["total_steps=0"]),
    ({"seed": -1}, ["seed=-1", "from 0 to 4294967295"]),
    ({"seed": 2**32}, ["seed=4294967296", "from 0 to 4294967295"]),
    ({"seed": 2**63}, ["seed=9223372036854775808", "32 bits"]),
    (
      {"exchange": {"codec": "low_rank(rank=129)+int"}},
      ["exchange.codec=", "rank=129 exceeds", "take at most 128"],
    ),
    (
      {
        "exchange": {"codec": "low_rank(rank=17)"},
        "model": {"preset": "nano"},
      },
      ["exchange.codec=", "rank=17 exceeds", "take at most 16"],
    ),
    (
      {"model": {"positions": "learned", "num_positions": 100}},
      ["data.sequence_length=128", "at most model.num_positions=100"],
    ),
    (
      {"data": {"batch_size": 8}, "inner": {"accumulate_steps": 3}},
      ["data.batch_size=8", "inner.accumulate_steps=3"],
    ),
    (
      {"sync": {"method": "streaming_diloco", "num_fragments": 6}},
      ["num_fragments=6", "num_layers=4", "sync.num_fragments"],
    ),
    (
      {"model": {"model_dim": 30}},
      ["model_dim=30", "num_heads=4"],
    ),
    ({"model": {"num_layers": 0}}, ["model", "num_layers=0"]),
    (
      {"exchange": {"codec": "e3m0", "collective": "all_reduce"}},
      ["exchange.collective='all_reduce'", "add up codes", "all_gather"],
    ),
    (
      {"exchange": {"codec": "top_k+int", "collective": "reduce_scatter"}},
      ["exchange.collective='reduce_scatter'", "selects", "all_gather"],
    ),
    # What a projection carries is encoded, so that is what must fit.
    (
      {"exchange": {"codec": "low_rank+int", "collective": "all_reduce"}},
      ["exchange.collective='all_reduce'", "add up codes"],
    ),
    ({"exchange": {"codec": "int(rank=3)"}}, ["int has no setting rank"]),
    ({"exchange": {"feedback": 2}}, ["exchange.feedback=2"]),
    (
      {"model": {"activation": "selu"}},
      ["model", "activation='selu'", "swiglu", "gelu"],
    ),
  ],
)
def test_values_that_clash_are_named_in_one_line(values, parts):
  message = refusal(values)
  for part in parts:
    assert part in message


@pytest.mark.parametrize(
  ("codec", "collective"),
  [
    ("float16", "all_reduce"),
    ("low_rank", "all_reduce"),
    ("low_rank+int", "reduce_scatter"),
    ("random_mask+e3m0", "reduce_scatter"),
    ("top_k+int", "all_gather"),
  ],
)
def test_a_codec_may_travel_by_any_collective_that_can_carry_it(
  codec, collective
):
  built = from_mapping({"exchange": {"codec": codec, "collective": collective}})
  assert built.exchange.collective == collective


@pytest.mark.parametrize(
  ("changes", "hint"),
  [
    ({"sync": {"method": "allreduce"}}, "sync.method='allreduce'"),
    ({"sync": {"method": "eager", "sync_interval": 4}}, "sync.rule='eager'"),
    (
      {"mesh": {"layout": "mesh", "num_stages": 2}},
      "mesh.num_stages=2: take 1",
    ),
    ({"mesh": {"outer_memory": "pinned_host"}}, "take device"),
    ({"mesh": {"num_replicas": 1}}, "absences leave no replica in round 2"),
  ],
)
def test_absences_where_no_rule_covers_them_are_refused(changes, hint):
  absent = {"membership": {"absences": "0:2"}}
  with pytest.raises(ValueError, match=re.escape(hint)):
    from_mapping(changes | absent)
