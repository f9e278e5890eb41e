"""What a byte buys: DiLoCo under every codec, bits, ranks and feedback varied.

This config claims nothing: its figure shows loss against bytes. Cost: 20 runs
for every seed. One seed of 22 runs, two at once, took 22 minutes on two CPU
cores (measured).

    python -m experiments.sweep \
        --config=experiments/configs/ablate_compression.py \
        --workdir=runs/ablate_compression --config.seeds='(0, 1, 2)'
"""

from ml_collections import config_dict

from experiments.configs import diloco

FEEDBACK = {"exchange.feedback": 1.0}
ADAPTIVE = FEEDBACK | {"adaptive.mode": "rank", "adaptive.window_rounds": 3}


def _decay(value):
  return {"exchange.feedback": value}


def _int(bits):
  return {"exchange.codec": f"int(bits={bits})"}


def _low_rank(rank):
  return {"exchange.codec": f"low_rank(rank={rank})+int(bits=4)"}


def _top_k(fraction):
  return {"exchange.codec": f"top_k(fraction={fraction})+int(bits=2)"}


def _cocktail(mask_fraction, top_k_fraction):
  mask = f"random_mask(fraction={mask_fraction})"
  top_k = f"top_k(fraction={top_k_fraction})"
  return {"exchange.codec": f"{mask}+{top_k}+int(bits=4)"}


def get_config():
  """DiLoCo in fp32, and nineteen ways to send less."""
  config = config_dict.ConfigDict()
  config.base = diloco.get_config()
  config.base.total_steps = 450
  config.base.evaluation.interval_steps = 0
  config.grid = config_dict.ConfigDict()
  config.seeds = (0,)
  config.runs = [
    {"name": "float32"},
    {"name": "float16", "exchange.codec": "float16"},
    {"name": "int8", **_int(8)},
    {"name": "int4", **_int(4)},
    {"name": "int4 ef", **_int(4), **FEEDBACK},
    {"name": "int2", **_int(2)},
    {"name": "int2 ef", **_int(2), **FEEDBACK},
    {"name": "int1 ef", **_int(1), **FEEDBACK},
    {"name": "e3m0", "exchange.codec": "e3m0"},
    {"name": "e3m0 ef", "exchange.codec": "e3m0", **FEEDBACK},
    {"name": "rank 8 int4 ef", **_low_rank(8), **FEEDBACK},
    {"name": "rank 16 int4", **_low_rank(16)},
    {"name": "rank 16 int4 ef", **_low_rank(16), **FEEDBACK},
    {"name": "rank 16 int4 ef 0.9", **_low_rank(16), **_decay(0.9)},
    {"name": "rank 32 int4 ef", **_low_rank(32), **FEEDBACK},
    {"name": "adaptive int4 ef", **_low_rank(32), **ADAPTIVE},
    {"name": "top 1/16 int2 ef", **_top_k(1 / 16), **FEEDBACK},
    {"name": "top 1/16 int2 ef 0.95", **_top_k(1 / 16), **_decay(0.95)},
    {"name": "top 1/64 int2 ef", **_top_k(1 / 64), **FEEDBACK},
    {"name": "mask 0.4 top 0.5 int4 ef", **_cocktail(0.4, 0.5), **FEEDBACK},
  ]
  config.baseline = "float32"
  config.lock()
  return config
