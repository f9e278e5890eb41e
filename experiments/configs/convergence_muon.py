"""The methods of `convergence_small` that were trained with AdamW, with Muon.

Muon is an inner optimizer and no exchange of its own, so a fair comparison
gives it to every method. `convergence_small` trains most methods with AdamW, as
they were published. Here eleven have Muon: AllReduce (with an average and
without), MuLoCo and `overlap_loco` with the runs that they have there, and
seven that lack it there. Model, text, clocks, seeds and rounds are the same, so
the losses of the two sweeps compare.

A method has seven tuning runs, for 11 there. Inner rates below 0.002 were far
worse for MuLoCo and `overlap_loco`, so none is tried. Of the outer settings two
are left out, (0.7, 0.9) and (0.7, 0.0): neither was best for these two methods.
What was best for these and for AllReduce is still tried. (0.4, 0.0) was worst
for most methods, and best for DiLoCoX with `reset`.

This config claims nothing itself: its report says what holds. Cost: 5 minutes
for a tuning run and 11 for a run of 2000 steps, on a core (measured, other work
beside it). The runs are in docs/results.

    python -m experiments.convergence \
        --config=experiments/configs/convergence_muon.py \
        --workdir=runs/convergence_muon --processes=2
"""

from experiments.configs import convergence_small
from experiments.sweeps import method_list as methods

# Methods that have Muon in `convergence_small` as well.
AVERAGE = "allreduce_muon_average"  # It has no runs at equal time.
SAME = ("allreduce_muon", AVERAGE, "muloco", "overlap_loco")
# Outer rates and momenta, in the order in which a method tries those that it
# does not start with.
OUTER = ((0.7, 0.3), (0.4, 0.0), (1.0, 0.0), (0.7, 0.6))
NUM_TRIED = 3


def _others():
  """Names of the methods that have AdamW there, and their names here."""
  clocks = convergence_small.CLOCKS
  found = {n: f"{n}_muon" for n in ("streaming_e3m0", "eager", "sparse_loco")}
  return found | {
    f"dilocox_{rule}_{clock}": f"dilocox_{rule}_muon_{clock}"
    for clock in clocks
    for rule in methods.DILOCOX_RULES
  }


def _tries_less(method):
  """Returns a method with `NUM_TRIED` of the settings that it would try."""
  tried = list(method["refine"])
  pairs = [tuple(setting.values()) for setting in tried]
  outer = [tried[pairs.index(pair)] for pair in OUTER if pair in pairs]
  return method | {"refine": (outer or tried)[:NUM_TRIED]}


def _methods():
  of = {method["name"]: method for method in convergence_small.every_method()}
  return [
    *(_tries_less(of[name]) for name in SAME),
    *(
      _tries_less(of[name] | methods.MUON | {"name": here})
      for name, here in _others().items()
    ),
  ]


def get_config():
  """Eleven methods on two replicas of `tiny`, all with Muon."""
  config = convergence_small.get_config()
  with config.unlocked():
    config.methods = _methods()
    config.tuning.inner_learning_rates = (2e-3, 3.5e-3, 6e-3, 1e-2)
    names = [m["name"] for m in config.methods if m["name"] != AVERAGE]
    config.equal_time = [
      {
        "clock": clock,
        "reference": f"dilocox_continue_muon_{clock}",
        "methods": [n for n in names if not n.endswith(_other(clock))],
      }
      for clock in convergence_small.CLOCKS
    ]
    config.claims = [
      methods.claim(
        "overlap_loco",
        [n for n in contest["methods"] if n != "overlap_loco"],
        contest["clock"],
        "ours",
      )
      for contest in config.equal_time
    ]
    config.gaps = {"overlap_loco": 0.005}
    config.notes = (
      convergence_small.ON_READINGS,
      convergence_small.ON_NAMES,
      convergence_small.ON_MESSAGES,
      convergence_small.ON_CURVES,
      convergence_small.ON_SEED_0,
      convergence_small.ON_AVERAGE,
    )
  return config


def _other(clock):
  return next(c for c in convergence_small.CLOCKS if c != clock)
