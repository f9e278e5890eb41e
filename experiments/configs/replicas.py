"""Sweeps of 1 to 16 replicas and AllReduce; the name follows the colon.

Replicas are compared with AllReduce of the same settings. Unless its name says
otherwise, a run has a warm-up of 50 steps, an average of power 14, a last rate
of a fifth and, with Muon, an inner momentum of 0.95. A run with a last rate of
a tenth has an average of power 10. A round of `overlap_loco` has the fewest
steps that hide all of its bytes in the simulation of a model of 107B
parameters.

The text is divided into three parts: training, validation and judge files.
Settings were chosen by the validation loss (`loss`). Results are losses on the
judge files (`judge_loss`), which only the evaluation after the last step reads.
docs/results/predictions.md ("Earlier runs") lists the choices that were made in
advance.

Unless another device is named, these sweeps ran on one NVIDIA H200, many runs
as one program, with matrix products in TF32:

- `main`: 2,000 steps, two to five seeds at the chosen rates. "4x2" stands for
  four replicas of two sequences each. All divisions of the same eight sequences
  have one baseline, AllReduce with two replicas of four. With Muon this
  baseline has a momentum of 0.9, which suits AllReduce better. Seven settings
  of OpenDiLoCo, SparseLoCo, DiLoCo and MuLoCo ran on a CPU in fp32.
- `one`: one replica with an outer step, compared with its inner optimizer alone
  on the same batches; twenty seeds.
- `long`: 17,000 steps.
- `sizes`: other models with 20 tokens a parameter; two or five seeds.

These sweeps ran on a CPU in fp32:

- `way_back`: how much loss the rounding of a mean costs a small model.
- `cpu`: `eager`, CocktailSGD and DiLoCoX with the settings of their authors,
  and older runs at equal time with four replicas.
- `equal_time`: equal time with two and with four replicas.
- `equal_rounds`: DiLoCo, MuLoCo and `overlap_loco` with the same H.

`tune` has the runs on seed 1000 that chose the rates, on the H200 or a CPU.

    python -m experiments.sweep --workdir=runs/replicas --report_only \
        --config=experiments/configs/replicas.py:main
"""

from ml_collections import config_dict

from dilocox_jax.plan.schedule.methods import METHODS

# Suffixes of the names of settings. A method is compared with the AllReduce
# that has the same suffix, or with a better one (`_baselines_of_main`).
_SUFFIXES = (
  " 2x4",
  " 4x4",
  " 8x4",
  " 29k",
  " 82k",
  " 131k",
  " 380k",
  " 2300k",
  ", AdamW, 2x4",
  ", AdamW, 4x4",
  ", AdamW, 8x4",
  ", momentum of nine tenths, 2x4",
  ", momentum of nine tenths, 4x4",
  ", last rate a tenth, 2x4",
  ", last rate zero, no average, 2x4",
)


def _baselines() -> dict[str, str]:
  """Returns the name of each setting's baseline, by name of the setting."""
  baselines = {}
  # Names of settings are "overlap_loco 2x4" or "overlap_loco in fp32, 2x4".
  for method in (*METHODS, "overlap_loco in fp32,"):
    if method != "allreduce":
      for suffix in _SUFFIXES:
        baselines[f"{method}{suffix}"] = f"allreduce{suffix}"
  return baselines | {
    # Other divisions of the same sequences among replicas.
    "overlap_loco 4x2": "allreduce 2x4",
    "overlap_loco 8x1": "allreduce 2x4",
    "diloco 8x1": "allreduce 2x4",
    "muloco 8x1": "allreduce 2x4",
    "sparse_loco, half the outer rate, 4x4": "allreduce 4x4",
    "open_diloco, a lower inner rate, 4x4": "allreduce 4x4",
    "muloco, a higher inner rate, 2x4": "allreduce 2x4",
    "overlap_loco 16x1": "allreduce 4x4",
    # One replica takes all eight sequences.
    "one replica, H = 16": "allreduce 1x8",
    "one replica, H = 30": "allreduce 1x8",
    "one replica, AdamW, H = 16": "allreduce, AdamW, 2x4",
    "one replica, AdamW, H = 30": "allreduce, AdamW, 2x4",
  }


def _baselines_of_main() -> dict[str, str]:
  """Returns what each setting of the sweep `main` is compared with.

  Where AllReduce was trained with momenta 0.95 and 0.9, the setting with 0.9,
  which has the lower loss, replaces the other as the baseline.
  """
  better = {
    "allreduce 2x4": "allreduce, momentum of nine tenths, 2x4",
    "allreduce 4x4": "allreduce, momentum of nine tenths, 4x4",
  }
  baselines = {
    name: better.get(baseline, baseline)
    for name, baseline in _baselines().items()
  }
  return baselines | better


_JUDGED = {"judged": True, "baselines": _baselines()}
SWEEPS = {
  "main": {"judged": True, "baselines": _baselines_of_main()},
  "one": _JUDGED,
  "long": _JUDGED,
  "sizes": _JUDGED,
  "tune": {},
  "cpu": {"judged": True},
  "equal_rounds": {"judged": True, "baseline": "diloco, H = 18, 4x4"},
  "equal_time": {"judged": True},
  "way_back": {"baseline": "fp32"},
}


def get_config(name: str = "main"):
  """Returns the config of one of `SWEEPS`, whose runs are in docs/results."""
  rows = "docs/results/runs.csv"
  return config_dict.ConfigDict({"rows": rows, **SWEEPS[name]})
