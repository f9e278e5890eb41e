"""Loss against bytes: DiLoCo with several codecs, numbers of bits and ranks.

Claim: none; the figure shows loss against bytes. Cost: 20 runs for every
seed. One seed of an earlier sweep of 22 runs took 22 minutes on two CPU cores,
with two runs at a time (measured).

    python -m experiments.sweep --workdir=runs/compression \
        --config=experiments/configs/compression.py \
        --config.seeds='(0, 1, 2)'
"""

from typing import Any

from ml_collections import config_dict

from experiments.configs import default

FEEDBACK = {"exchange.feedback": 1.0}
ADAPTIVE = FEEDBACK | {"adaptive.mode": "rank", "adaptive.window_rounds": 3}


def get_config():
  """Returns the config of a sweep: DiLoCo in fp32, and 19 ways to send less."""
  # The last number is the feedback: how much of the codec's error is added to
  # the next message ("ef").
  runs = [
    {"name": "float32"},
    _codec("float16", "float16"),
    _codec("int8", "int(bits=8)"),
    _codec("int4", "int(bits=4)"),
    _codec("int4 ef", "int(bits=4)", 1.0),
    _codec("int2", "int(bits=2)"),
    _codec("int2 ef", "int(bits=2)", 1.0),
    _codec("int1 ef", "int(bits=1)", 1.0),
    _codec("e3m0", "e3m0"),
    _codec("e3m0 ef", "e3m0", 1.0),
    _codec("rank 8 int4 ef", _low_rank(8), 1.0),
    _codec("rank 16 int4", _low_rank(16)),
    _codec("rank 16 int4 ef", _low_rank(16), 1.0),
    _codec("rank 16 int4 ef 0.9", _low_rank(16), 0.9),
    _codec("rank 32 int4 ef", _low_rank(32), 1.0),
    _codec("adaptive int4 ef", _low_rank(32)) | ADAPTIVE,
    _codec("top 1/16 int2 ef", _top_k(1 / 16), 1.0),
    _codec("top 1/16 int2 ef 0.95", _top_k(1 / 16), 0.95),
    _codec("top 1/64 int2 ef", _top_k(1 / 64), 1.0),
    _codec(
      "mask 0.4 top 0.5 int4 ef",
      "random_mask(fraction=0.4)+top_k(fraction=0.5)+int(bits=4)",
      1.0,
    ),
  ]
  config = config_dict.ConfigDict({"seeds": (0,), "runs": runs, "grid": {}})
  config.base = default.get_config()
  config.base.total_steps = 450
  config.base.evaluation.interval_steps = 0
  config.baseline = "float32"
  config.lock()
  return config


def _codec(name: str, codec: str, feedback: float = 0.0) -> dict:
  """Returns a run of the sweep with a codec for its messages.

  `feedback` is the fraction of the codec's error that is added to the next
  message; 0 means none.
  """
  run: dict[str, Any] = {"name": name, "exchange.codec": codec}
  if feedback:
    run["exchange.feedback"] = feedback
  return run


def _low_rank(rank: int) -> str:
  """Returns the name of the codec that sends low-rank factors in 4 bits."""
  return f"low_rank(rank={rank})+int(bits=4)"


def _top_k(fraction: float) -> str:
  """Returns the name of the codec that sends the largest values in 2 bits.

  `fraction` is the fraction of the values that is sent.
  """
  return f"top_k(fraction={fraction})+int(bits=2)"
