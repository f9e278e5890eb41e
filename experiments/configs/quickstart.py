"""The runs of experiments.quickstart; the name of the method follows the colon.

There are three runs, one for each method. Each has two replicas with Muon as
inner optimizer, and all runs read the same tokens of Python's own library. All
runs average their parameters in the same way, and the learning rate of each
ends at a fifth of its peak.

Source: this project (`overlap_loco`), DiLoCoX (arXiv 2506.21263) and AllReduce.
Claim: docs/quick_start.md. Cost: a few minutes on two CPU cores for the three.

    python -m experiments.train --workdir=runs/dilocox \
        --config=experiments/configs/quickstart.py:dilocox
"""

from ml_collections import config_dict

from experiments.configs import default
from experiments.configs.overlap_loco import AVERAGE

# On the slow link exchanges of DiLoCoX hide behind rounds of 20 steps, and
# those of `overlap_loco` behind rounds of 16 steps, its default. Rates were
# chosen on another seed: the best of eight for `overlap_loco`, the best of six
# for AllReduce.
METHODS = {
  "overlap_loco": {"outer.learning_rate": 1.5},
  "dilocox": {"sync.sync_interval": 20},
  "allreduce": {"inner.learning_rate": 0.0035},
}
_LEARNING_RATE = 0.005  # For Muon; AdamW's default is too small for it.


def get_config(
  method: str = "overlap_loco", num_steps: int = 800, pattern: str = ""
) -> config_dict.ConfigDict:
  """Returns the config of a run of one method.

  Args:
    method: One of `METHODS`.
    num_steps: Inner steps of the run.
    pattern: Glob of the text files; "" for Python's own library.
  """
  config = default.get_config()
  config.update_from_flattened_dict(
    {
      "sync.method": method,
      "total_steps": num_steps,
      "data.batch_size": 2,
      "inner.optimizer": "muon",
      "inner.learning_rate": _LEARNING_RATE,
      "evaluation.interval_steps": 200,
      "checkpoint.interval_steps": 400,
      # The simulated model has the same schedule, so H must not change.
      "adaptive.mode": "off",
      **AVERAGE,
      **METHODS[method],
    }
  )
  if pattern:
    config.data.source = "text_files"
    config.data.glob = pattern
  return config
