"""Logs, functions and displays that observe a run and change nothing in it."""

import dataclasses
from collections.abc import Callable

from rich.console import Console

from dilocox_jax.metrics.run_logs import RunLog
from dilocox_jax.training.build import Programs
from dilocox_jax.training.evaluation import params_to_keep
from dilocox_jax.training.states import TrainingState
from dilocox_jax.trees import Tree


@dataclasses.dataclass(frozen=True)
class FinishedRound:
  """A dispatched round, the argument of the user's function `on_round`.

  In a phase without rounds, it stands for some data-parallel steps.

  If the function reads an array, it waits until the devices have computed the
  round, and the devices are then idle until the next round is dispatched. The
  next round reuses the memory of the arrays in `state`, so copy those that are
  needed later, for example by `jax.device_get`.

  Attributes:
    step: Finished inner steps of the run at the end of the round.
    total_steps: Inner steps of the run.
    state: State of this program's replicas (`rounds.states.RoundState`), or
      their shared state in a phase without rounds
      (`rounds.data_parallel.SharedState`).
  """

  step: int
  total_steps: int
  state: TrainingState
  _programs: Programs = dataclasses.field(repr=False)

  @property
  def outer_params(self) -> Tree:
    """Outer parameters, or their average if the run keeps one.

    If each replica has outer parameters of its own, their mean over the
    replicas is returned. In a phase without rounds, they are the parameters
    that all replicas share.
    """
    return params_to_keep(self._programs, self.state)


@dataclasses.dataclass(frozen=True)
class Watching:
  """Logs, functions and displays that observe a run.

  Attributes:
    log: Gets every row of metrics that the run writes into files; None: the
      rows go to the files alone.
    on_round: Function that every process calls after the dispatch of a round,
      or of some data-parallel steps; None: there is none.
    console: Terminal or notebook that shows a progress bar; None: the run logs
      lines.
  """

  log: RunLog | None = None
  on_round: Callable[[FinishedRound], None] | None = None
  console: Console | None = None


NOT_WATCHED = Watching()
