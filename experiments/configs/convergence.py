"""Sweeps that compare methods at one budget; the name follows the colon.

A *setting* is a method with its options. Most settings were trained for a fixed
number of steps, and also with as many steps as fit into the time that DiLoCoX
takes on a *clock*, which is a simulated cluster.

`small`: two replicas of `tiny` (0.86 million parameters), 2000 steps, three
seeds. Each setting was tuned before, with 11 runs of 1000 steps on seed 1000
(the study convergence_small_others of docs/results/runs.csv): six inner
learning rates, then five values of other fields at the best of these rates.
Only `allreduce_muon_average` had fewer runs. A run of 2000 steps took 4 to 14
minutes with two at once on two CPU cores (measured).

`muon`: Muon as inner optimizer of methods that have AdamW in `small`. Muon
changes nothing about the exchange, so a fair comparison gives it to every
method. The sweep has eleven settings, with the model, text, clocks, seeds and
rounds of `small`. Each was tuned with seven runs (the study
convergence_muon_others of docs/results/runs.csv), `allreduce_muon_average` with
four. One more run has AllReduce with Muon, an average, and a momentum of 0.9.

`long`: eight settings of five methods with up to 17,000 steps of 1,024 tokens,
which are 20 tokens a parameter. MuLoCo and DiLoCo only have runs with as many
steps as fit into the time of DiLoCoX on each clock. Few settings were tuned at
this length, all on seed 0, so the results leave seed 0 out:

- With Muon, AllReduce was tried at the inner rates 0.0028, 0.004 and 0.006, and
  `overlap_loco` at 0.0028, 0.004, 0.0055 and 0.008. For both, the two lowest
  rates were equally good.
- The last inner rate (`inner.final_fraction`) and the power of the average of
  the parameters (`outer.average_power`) were chosen.

The other rates were not tuned at this length. AllReduce with AdamW, MuLoCo,
DiLoCo and DiLoCoX have the rates that `small` chose; the rate of `overlap_loco`
with AdamW was set by hand. A run of 17,000 steps took 13 to 96 minutes on a
core (measured, with other work beside it).

    python -m experiments.sweep --workdir=runs/convergence_small \
        --config=experiments/configs/convergence.py:small --processes=2
"""

from ml_collections import config_dict

# The largest model of the papers, on links that are as slow as theirs.
CLOCK_107B = {
  "name": "107b",
  "cluster": "dilocox_107b",
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 8, "sequence_length": 2048},
  "exchange": {"codec": "low_rank(rank=2048)+int(bits=4)"},
}
# The duration of a step of `tiny` is given: a replica on two CPU cores takes
# 32 ms (measured).
CLOCKS = ({"name": "1gbit", "cluster": "1gbit", "step_s": 0.03}, CLOCK_107B)
FRONT = (
  "allreduce_muon_average",
  "overlap_loco",
  "muloco",
  "diloco_cold",
  "dilocox_continue_1gbit",
)
NOTES = (
  "Each method was tuned on one further seed, `small` with 11 runs and `muon`"
  " with seven (`allreduce_muon_average`: six and four). The batch size,"
  " DiLoCoX's rule for H, the target loss, and the"
  " average of `overlap_loco` were chosen after a look at seed 0. One text"
  " chose the settings, and the losses are those of the same text. The runs of"
  " docs/results.md have a text of their own for the losses.",
  "`overlap_loco` keeps an average of its parameters, and so do settings with"
  " `average` in their names. The other settings keep none.",
  "CocktailSGD keeps 2 % of the values; its authors' script for training from"
  " scratch keeps 20 %.",
  "DiLoCoX applies a pseudo-gradient late. `continue` and `reset` are the two"
  " readings of its rule: the late update is added to a replica's own progress,"
  " or it replaces that progress. `ours` is `continue` with a tau no longer"
  " than the transfer takes, and an H of about twice tau.",
  "A method whose name ends with a clock has the shortest H that divides the"
  " steps and hides an exchange of DiLoCoX on that clock. `diloco_cold` is"
  " DiLoCo without its warm start.",
  "Runs with other numbers of steps have as many as fit into the time that"
  " DiLoCoX takes on a clock, with a learning-rate schedule of their own, so"
  " they do not end where a curve crosses that time.",
  "A message on the clock `1gbit` waits for a round trip, as gloo's do. That"
  " decided H, tau and the steps of these runs.",
)
# If a method has another optimizer, or an average of its parameters, so has its
# baseline. The gap then measures the exchange alone.
SWEEPS = {
  "small": {
    "target_loss": 1.5,
    "baseline": "allreduce",
    "baselines": {
      "muloco": "allreduce_muon",
      "overlap_loco": "allreduce_muon_average",
    },
  },
  "muon": {
    "target_loss": 1.5,
    "baseline": "allreduce_muon",
    "baselines": {"overlap_loco": "allreduce_muon_average"},
  },
  "long": {
    "target_loss": 1.1,
    "baseline": "allreduce",
    "baselines": {
      "overlap_loco": "allreduce_muon",
      "overlap_loco_short": "allreduce_muon",
    },
  },
}


def get_config(name: str = "small"):
  """Returns the config of one of `SWEEPS`, whose runs are in docs/results."""
  rows = "docs/results/runs.csv"
  common = {"rows": rows, "clocks": CLOCKS, "front": FRONT, "notes": NOTES}
  return config_dict.ConfigDict(common | SWEEPS[name])
