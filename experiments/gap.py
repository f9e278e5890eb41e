r"""Predicts how much loss M replicas will cost, from runs of AllReduce alone.

  python -m experiments.gap --workdir=runs/gap \
    --config=experiments/configs/quickstart.py

This trains AllReduce with B and with B / 2 sequences in a step, each at the
best of a few rates. B counts the sequences of all replicas of the planned run
(--config) together. The planned run itself is not trained. The *gap*, how far
the loss of replicas ends above AllReduce's, follows from s: the share by which
the larger batch lowers AllReduce's loss. The program prints the expected gap of
each method for 2 to 64 replicas and, for the planned method, its range. If you
have the two losses already, nothing is trained:

  python -m experiments.gap --workdir=runs/gap --losses=1.69,1.59 \
    --config.sync.method=overlap_loco --config.total_steps=2000 \
    --config.data.batch_size=8 --cluster=1gbit --step_s=0.05

With --cluster the program also prints hours, and the loss of one cluster alone
after the same time. They say whether a second cluster is worth it. If the
training would take longer than --minutes, smaller models of the same shape are
trained, and s is extrapolated to the planned size. The same command goes on
after an interruption.
"""

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from experiments.runtime import (
  command_line,
  config_flag,
  losses_flag,
  parts_flag,
  run_configs,
  workdir_flag,
)
from experiments.runtime.command_line import StoppedError, UsageError

if TYPE_CHECKING:
  import pathlib

  from dilocox_jax.config import RunConfig
  from experiments.gaps.measured_gain import MeasuredGain

flags.adopt_module_key_flags(config_flag)
flags.adopt_module_key_flags(losses_flag)
flags.adopt_module_key_flags(workdir_flag)
_CLUSTER = flags.DEFINE_string(
  "cluster", None, "Preset or JSON file; adds hours (simulated)."
)
_STEP_S = flags.DEFINE_float(
  "step_s",
  None,
  "With --cluster: seconds of an inner step of the planned run; by default its"
  " operations over what the cluster's devices achieve.",
  lower_bound=0.0,
)
_MINUTES = flags.DEFINE_float(
  "minutes",
  5.0,
  "How long the training may take on this machine (estimated). A model that"
  " takes longer is replaced by smaller ones of the same shape.",
  lower_bound=0.1,
)
_RATES = flags.DEFINE_integer(
  "rates",
  5,
  "Most inner rates for each batch. The first three are half the config's rate,"
  " the rate and twice the rate; more follow while the best one is at an end.",
  lower_bound=3,
)
_SEEDS = flags.DEFINE_integer(
  "seeds",
  1,
  "Seeds of s. More seeds narrow the range, and each adds two runs.",
  lower_bound=1,
)
_PROCESSES = flags.DEFINE_integer(
  "processes",
  None,
  "How many runs at once; by default one for each core, or one on a GPU or a"
  " TPU.",
  lower_bound=1,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Measures what AllReduce gains from a larger batch; prints expected gaps.

  With --losses nothing is measured.
  """
  command_line.refuse_arguments(argv)
  command_line.refuse_unused(
    _STEP_S, is_used=_CLUSTER.value is not None, needs="--cluster"
  )
  command_line.refuse_unused(
    *(_MINUTES, _RATES, _SEEDS, _PROCESSES),
    is_used=losses_flag.LOSSES.value is None,
    needs="runs to train, so no --losses",
  )
  parts_flag.register()
  config = run_configs.run_config(config_flag.CONFIG.value)
  _check(config)
  from experiments.gaps import gap_page

  losses = losses_flag.losses()
  if _CLUSTER.value is not None:
    from experiments.gaps.offers import sites_of

    # A wrong cluster is found before anything is trained.
    with command_line.usage_errors(kinds=(ValueError, OSError)):
      sites_of(_CLUSTER.value)
  if losses is None:
    run_configs.check_files(config)
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "gap")
  if losses is None:
    gain = _measured(config, workdir)
  else:
    from experiments.gaps.measured_gain import gain_of_user

    gain = gain_of_user(losses)
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    answer = gap_page.answer(
      config, gain, cluster=_CLUSTER.value, step_s=_STEP_S.value
    )
  gap_page.report(answer, workdir, command_line.typed_command())


def _check(config: "RunConfig") -> None:
  """Raises UsageError if the planned method averages the gradients of steps."""
  if config.sync.named.exchanged == "gradient":
    raise UsageError(
      f"--config: sync.method={config.sync.method} exchanges gradients at every"
      " step, so local steps cost nothing: name the method that you plan, such"
      " as diloco or overlap_loco"
    )


def _measured(config: "RunConfig", workdir: "pathlib.Path") -> "MeasuredGain":
  """Trains the runs of AllReduce that are missing, and computes s from them.

  s is the share by which AllReduce's loss falls when its batch doubles. Raises
  the errors of `measured_gain.measured`, but UsageError in place of ValueError,
  and StoppedError if the program is interrupted.
  """
  from experiments.gaps import measured_gain
  from experiments.gaps.tuned_pairs import PairTraining
  from experiments.sweeps.finished import Rows
  from experiments.sweeps.training import Training

  num_processes = _PROCESSES.value or measured_gain.usual_processes()
  config_file, _ = config_flag.file_and_argument()
  parts = [os.fspath(path) for path in parts_flag.PARTS.value]
  training = Training(
    workdir,
    Rows(workdir / "runs.csv", study="gap"),
    parts_files=[*parts, config_file],
  )
  pairs = PairTraining(
    training,
    num_processes=num_processes,
    most_rates=_RATES.value,
    num_seeds=_SEEDS.value,
  )
  # SIGTERM acts as Ctrl-C does.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    with command_line.usage_errors():
      return measured_gain.measured(config, pairs, minutes=_MINUTES.value)
  except KeyboardInterrupt:
    raise StoppedError(
      "interrupted: the same command goes on from here",
      command_line.INTERRUPTED,
    ) from None


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse_flags)
