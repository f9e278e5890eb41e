"""One to eight replicas, both sides alike, judged by a text that chose nothing.

Every run has 2,000 steps where nothing else is said, a warm-up of 50, an
average of power 14 and a last rate of a fifth. Rounds of `overlap_loco` are the
shortest whose bytes all hide on the clock of 107B parameters (simulated). The
text is divided into three: settings were chosen by `loss`, results are
`judge_loss`, which only the evaluation after the last step reads.
docs/notes/log.md ("What will be compared in slices", "What one GPU will be
asked") says what was fixed before the runs.

`main`: five or three seeds at the chosen rates. "4x2" stands for four replicas
of two sequences each; AllReduce with two replicas of four is the baseline of
each of the same eight sequences. `one`: one replica with an outer step, and its
inner optimizer on the same batches, twenty seeds. `long`: 17,000 steps. `tune`:
the runs on seed 1000 that chose the rates. These ran on one NVIDIA H200, many
runs as one program, with products in TF32. On a CPU: `sizes`, three smaller
models with 20 tokens a parameter, and `way_back`, what rounding a mean costs a
small model.

    python -m experiments.sweep --workdir=runs/replicas --report_only \
        --config=experiments/configs/replicas.py:main
"""

from ml_collections import config_dict

# Baselines, and the settings that are held against each of them.
_HELD = {
  "allreduce 1x8": ("one replica, H = 16", "one replica, H = 30"),
  "allreduce 2x4": tuple(f"overlap_loco {n}" for n in ("2x4", "4x2", "8x1")),
  "allreduce 4x4": (
    *("overlap_loco 4x4", "overlap_loco in fp32, 4x4"),
    *("muloco 4x4", "diloco 4x4", "dilocox 4x4"),
  ),
  "allreduce 8x4": ("overlap_loco 8x4", "overlap_loco in fp32, 8x4"),
  "allreduce, AdamW, 2x4": (
    *("one replica, AdamW, H = 16", "one replica, AdamW, H = 30"),
    "overlap_loco, AdamW, 2x4",
  ),
  "allreduce, AdamW, 4x4": ("overlap_loco, AdamW, 4x4",),
  "allreduce, AdamW, 8x4": ("overlap_loco, AdamW, 8x4",),
  **{f"allreduce {n}": (f"overlap_loco {n}",) for n in ("29k", "82k", "131k")},
}
_JUDGED = {
  "judged": True,
  "baselines": {each: base for base, held in _HELD.items() for each in held},
}
SWEEPS = {
  **dict.fromkeys(("main", "one", "long", "sizes"), _JUDGED),
  "tune": {},
  "way_back": {"baseline": "fp32"},
}


def get_config(name: str = "main"):
  """Returns a sweep, whose runs are those of its committed rows.

  Args:
    name: One of `SWEEPS`.
  """
  rows = f"docs/results/replicas_{name}.csv"
  return config_dict.ConfigDict({"rows": rows, **SWEEPS[name]})
