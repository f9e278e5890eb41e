"""Short runs of ten methods; the name of the method follows the colon.

A round has H = 30 inner steps. `allreduce` and `cocktail_sgd` have no rounds:
they average gradients in every step. The method `overlap_loco` has a config
file of its own. Cost: two minutes on two CPU cores, three for `muloco` and
`cocktail_sgd`.

    python -m experiments.train --config=experiments/configs/methods.py:muloco \
        --workdir=runs/muloco --config.sync.sync_interval=50

Each entry says what the method does, where it is described (Source), what its
authors or this project found (Claim), and how the run here differs from the
source (Differs).

allreduce: gradients of every step are averaged over the slow links. Source: all
  the papers use it as their baseline. Claim: the other methods try to reach its
  loss while they send fewer bytes.
diloco: replicas exchange every H steps and wait for each other. Source: arXiv
  2311.08105. Claim (published): matches data parallel training at 500 times
  fewer exchanges. Differs: H = 30, since a laptop's run is short; outer
  momentum 0.6 instead of 0.9 (measured better here).
open_diloco: the open reproduction of DiLoCo. Source: arXiv 2407.07852. Claim
  (recalled): perplexity 13.73 with 8 replicas against 13.68 for data parallel.
  Differs: H = 30 instead of 500.
streaming_diloco: fragments are exchanged in turn, and tau inner steps hide each
  exchange. Source: arXiv 2501.18512. Claim (published): the loss of DiLoCo at a
  fraction of its peak bandwidth. Differs: outer learning rate 0.7 and momentum
  0.6 instead of 0.4 and 0.9; tau = 4 instead of 1; E3M0 has a scale for each
  block.
eager: a replica applies its own progress at once, and the progress of the other
  replicas one round later. Source: arXiv 2502.12996. Claim (recalled): hours at
  1 Gbit/s equal hours at infinite bandwidth, loss close to data parallel.
  Differs: H = 30, outer momentum 0.6.
dilocox: the whole next round hides the exchange. Source: arXiv 2506.21263.
  Claim (published): 357 times the throughput of AllReduce for 107B parameters
  over 1 Gbit/s. Differs: replicas keep progress that is not averaged yet
  (sync.rule=continue). With rounds of four steps, runs that keep it end with a
  lower loss than runs that drop it; with rounds of twenty steps both end alike
  (measured, with AdamW as here). Error feedback adds to the next message what
  the codec lost of the replica's own message; in the paper, it adds the error
  of the mean (recalled).
delayed: any schedule, and any value of sync.rule that goes with the schedule.
  Here, sync.rule=continue. Source: the combination is this project's own; the
  rule "continue" is LOSCAR-SGD's (arXiv 2605.20866). Claim: with rounds of four
  steps "continue" ends with a lower loss than "reset", which drops progress
  that is not averaged yet; with rounds of twenty steps both end alike
  (measured, with AdamW as here).
sparse_loco: the largest values of a pseudo-gradient's blocks, in 2 bits.
  Source: Sarfi et al., 2025, arXiv 2508.15706. Claim (recalled): better loss
  than full-precision DiLoCo at 1 to 3 % of the values and 2 bits. As in the
  paper, the outer learning rate is 1, without momentum. Differs: H = 30.
muloco: Muon as inner optimizer, 2 bits a value between replicas. Source:
  Therien et al., 2025, arXiv 2505.23725. Claim (recalled): Muon's
  pseudo-gradients compress better than AdamW's; 2 bits with error feedback end
  at the loss of full-precision AdamW DiLoCo. Differs: H = 30; outer momentum
  0.6.
cocktail_sgd: the gradients of every step, by mask, top-k and 4 bits. Source:
  Wang et al., 2023, ICML. Claim (published): 117 times fewer bytes, 1.2 times
  slower over 500 Mbit/s than on a fast network. Differs: top-k by blocks; AdamW
  runs on the mean, and a step waits for it. The authors' code sends progress
  one step late instead of gradients. The runs `cocktail_params` of
  docs/results/runs.csv do so, and end with a far lower loss. Both kinds of
  runs send 2 % of the values (a fifth of a tenth), as in the authors' README.
  The authors' script for training from scratch sends 20 % (a half of 0.4).
"""

from dilocox_jax.checks import known
from experiments.configs import default

_ROUNDS = {"sync.sync_interval": 30}
METHODS = {
  "allreduce": {},
  "diloco": _ROUNDS,
  "open_diloco": _ROUNDS,
  "streaming_diloco": _ROUNDS
  | {
    "sync.num_fragments": 3,
    "sync.overlap_steps": 4,
    "sync.mixing_alpha": 0.5,
  },
  "eager": _ROUNDS,
  "dilocox": _ROUNDS | {"sync.rule": "continue"},
  "delayed": _ROUNDS | {"sync.overlap_steps": 4, "sync.rule": "continue"},
  "sparse_loco": _ROUNDS,
  "muloco": _ROUNDS,
  "cocktail_sgd": {},
}


def get_config(name: str = "diloco"):
  """Returns the default run, changed to one of `METHODS`."""
  known("method", name, METHODS)
  config = default.get_config()
  config.sync.method = name
  config.update_from_flattened_dict(METHODS[name])
  return config
