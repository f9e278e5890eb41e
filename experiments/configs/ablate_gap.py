"""What separates a hidden, compressed exchange from AllReduce, piece by piece.

Every setting differs from a first form of `overlap_loco` (4 fragments, tau = 4)
in the fields that its name says, at half the length of the small sweep and on
the seed that the sweep tunes on. The fragments are slices here; docs/log.md has
the losses of fragments of whole layers, which are not offered any more. So
AllReduce with Muon to compare with is among the tuning runs of that sweep
(docs/results). With H = 16 one bit a value fills the line of the 107B clock (1
Gbit/s); settings that send more a step are here to show what the bytes cost.
This config claims nothing: docs/log.md says what was learnt. Cost: about three
minutes a run on a core.

    python -m experiments.ablate --config=experiments/configs/ablate_gap.py \
        --workdir=runs/ablate_gap --processes=2
"""

from ml_collections import config_dict

from experiments.configs import convergence_small

FLOAT = {"codec.name": "float32", "exchange.error_feedback": False}
NESTEROV = {"outer.learning_rate": 0.7, "outer.momentum": 0.6}


def _rounds(interval, overlap, fragments=4):
  return {
    "sync.sync_interval": interval,
    "sync.overlap_steps": overlap,
    "sync.num_fragments": fragments,
  }


INNER_008 = {"inner.learning_rate": 0.008}
SLICED = {"sync.fragment_order": "sliced", **_rounds(16, 1, 16)}
HALF = SLICED | {
  "codec.name": "random_mask(fraction=0.5)+int(bits=1)",
  **_rounds(8, 1, 8),
}
TWO_BITS = SLICED | {"codec.name": "int(bits=2)", **_rounds(32, 2, 16)}


def _base():
  """The first form of `overlap_loco`, as `delayed`, so that all may change."""
  base = convergence_small.get_config().base
  base.total_steps = 1000
  base.seed = 1000
  base.evaluation.interval_steps = 0
  base.inner.optimizer = "muon"
  base.inner.learning_rate = 0.005
  base.inner.warmup_steps = 50
  base.sync.method = "delayed"
  base.sync.rule = "continue"
  base.sync.fragment_order = "sliced"
  base.codec.name = "int(bits=1)"
  base.exchange.error_feedback = True
  base.outer.learning_rate = 1.0
  base.outer.momentum = 0.0
  base.update_from_flattened_dict(_rounds(16, 4))
  return base


RUNS = (
  {"name": "overlap_loco"},
  {"name": "float", **FLOAT},
  {"name": "float, tau = 1", **FLOAT, **_rounds(16, 1)},
  {"name": "float, H = 4", **FLOAT, **_rounds(4, 1)},
  {"name": "float, no delay", **FLOAT, **_rounds(16, 0, 1)},
  {"name": "outer rate 1.25", "outer.learning_rate": 1.25},
  {"name": "outer 0.7, 0.6", **NESTEROV},
  {"name": "outer momentum 0.3", "outer.momentum": 0.3},
  {"name": "16 slices", **SLICED},
  {"name": "16 slices, float", **FLOAT, **SLICED},
  {"name": "16 slices, inner rate 0.008", **SLICED, **INNER_008},
  {"name": "8 slices of half the values, H = 8", **HALF},
  {"name": "16 slices, outer 0.7, 0.6", **SLICED, **NESTEROV},
  {"name": "16 slices, warm-up 200", **SLICED, "inner.warmup_steps": 200},
  {"name": "16 slices, 2 bits, H = 32", **TWO_BITS},
  {"name": "inner rate 0.0035", "inner.learning_rate": 0.0035},
  {"name": "inner rate 0.008", **INNER_008},
  {"name": "2 bits, H = 32", "codec.name": "int(bits=2)", **_rounds(32, 8)},
  {"name": "2 bits", "codec.name": "int(bits=2)"},
  {
    "name": "keep unsent",
    "exchange.error_feedback": False,
    "exchange.keep_unsent": True,
  },
  {"name": "decay 0.95", "exchange.feedback_decay": 0.95},
  {"name": "rows", "codec.name": "int(bits=1,scale=row)"},
  {"name": "blocks of 32", "codec.name": "int(bits=1,block_size=32)"},
)


def get_config():
  """Returns all settings about `overlap_loco`."""
  config = config_dict.ConfigDict()
  config.base = _base()
  config.grid = config_dict.ConfigDict()
  config.seeds = (1000,)
  config.runs = [dict(run) for run in RUNS]
  config.lock()
  return config
