"""Streaming DiLoCo's Table 5 on a GPU: 35M and 100M, H = 30 and 100, M = 2, 4.

Source: arXiv 2501.18512, Tables 5 and 6 (on C4). Claim (published): DiLoCo and
Streaming DiLoCo end within 1 % of data parallel. As in the paper: three layers
in a fragment, tau = 1, z-loss 1e-4, sequences of 1024. Different: the text is a
local one, read as bytes, so only 256 of the 32,000 tokens occur, runs see fewer
tokens, and outer settings are tuned. So losses compare with each other only.
Give it a large text: --config.base.data.source=text_files
--config.base.data.glob='texts/**/*.txt'.
Cost: for every method 10 tuning runs of 1500 steps and 3 results of 3000. It is
meant to be done in slices (--max_minutes). The model and M follow the colon.

    python -m experiments.convergence --max_minutes=9 \
        --config=experiments/configs/convergence_gpu.py:chinchilla_35m,2 \
        --workdir=runs/convergence_gpu
"""

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from experiments.configs import convergence_small
from experiments.sweeps import method_list as methods

SHAPES = ("chinchilla_35m", "chinchilla_100m")
SYNC_INTERVALS = (30, 100)


def get_config(setting="chinchilla_35m,2"):
  """The paper's methods at both H, and DiLoCoX beside them.

  Args:
    setting: Model and number of replicas, e.g. "chinchilla_100m,4".
  """
  shape, _, replicas = setting.partition(",")
  if shape not in SHAPES or replicas not in ("2", "4"):
    raise ValueError(f"{setting!r} must be one of {SHAPES}, then ',2' or ',4'")
  config = convergence_small.get_config()
  base = config.base
  base.total_steps = 3000
  base.inner.warmup_steps = 150
  base.model.preset = shape
  base.model.z_loss = 1e-4
  base.model.compute_dtype = "bfloat16"
  base.model.scan_unroll = 1
  base.data.batch_size = 8
  base.data.sequence_length = 1024
  base.mesh.num_replicas = int(replicas)
  base.mesh.stacked_by = "vmap"
  base.checkpoint.interval_steps = 300
  config.methods = _methods(shape)
  config.tuning.total_steps = 1500
  config.tuning.inner_learning_rates = (3e-4, 6e-4, 1e-3, 1.75e-3, 3e-3)
  # Steps take what the cluster's devices would take, derived from operations.
  config.clusters = [
    {"name": "1gbit", "cluster": "1gbit"},
    convergence_small.CLOCK_107B,
  ]
  config.target_loss = 1.2
  names = tuple(each["name"] for each in config.methods)
  config.equal_time = [
    {"clock": clock, "reference": "dilocox_continue_h30", "methods": names}
    for clock in ("1gbit", "107b")
  ]
  others = names[1:-1]
  config.claims = [methods.claim("allreduce", others, "tokens", "all papers")]
  config.notes = (convergence_small.ON_RULES, convergence_small.ON_CURVES)
  config.gaps = {f"{name}_h30": 0.012 for name in ("diloco", "streaming_e3m0")}
  return config


def _methods(shape):
  found = [methods.of("allreduce")]
  # Three layers make a fragment, and what is no layer makes one more.
  fragments = 1 + MODEL_PRESETS[shape].num_layers // 3
  for interval in SYNC_INTERVALS:
    at = {"sync.sync_interval": interval}
    streaming = methods.streaming_methods(interval, 1)
    found += [
      method | {"name": f"{method['name']}_h{interval}"}
      for method in (
        methods.of("diloco", changed=at),
        *(method | {"sync.num_fragments": fragments} for method in streaming),
        *methods.dilocox_methods("", at),
      )
    ]
  return [*found, methods.ours("107b")]
