"""The window's own program exchanges, and the compiler overlaps the steps."""

import dataclasses
from collections.abc import Callable

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.rounds.runtime import Waits, WindowWork
from dilocox_jax.rounds.window import InnerProgress


@dataclasses.dataclass(frozen=True, eq=False)
class InProgram:
  """Leaves all to the program of the window.

  XLA overlaps transfers with inner steps on TPUs and GPUs. On one device
  nothing travels that steps could hide.

  Attributes:
    replicas: Number of replicas, and their devices.
    reuses_states: True.
    waits_for_exchanges: False, as only the devices wait.
  """

  replicas: Replicas
  reuses_states: bool = True
  waits_for_exchanges: bool = False

  @property
  def splits_windows(self) -> bool:
    """Whether there is no link between the replicas."""
    has_links = (
      self.replicas.layout == "mesh" and self.replicas.num_replicas > 1
    )
    return not has_links

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses nothing: the replicas of one runtime share an axis."""

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Returns the progress as it is, and nothing that has arrived."""
    return work.given.progress, None

  def new_waits(self) -> Waits | None:
    """Returns None: what waits in a compiled program is not known."""
