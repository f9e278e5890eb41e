"""The window's own program exchanges, and XLA runs inner steps meanwhile."""

import dataclasses
from collections.abc import Callable

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.rounds.runtime import Waits, WindowWork
from dilocox_jax.rounds.window import InnerProgress


@dataclasses.dataclass(frozen=True, eq=False)
class InProgram:
  """Leaves the exchange to the program of the window.

  XLA overlaps transfers with inner steps on TPUs and GPUs. On one device
  nothing is sent over a link, so there is nothing to overlap.

  Attributes:
    replicas: Number of replicas, and their devices.
    reuses_states: True: nothing else reads the states.
    waits_for_exchanges: False: the devices wait, the host does not.
  """

  replicas: Replicas
  reuses_states: bool = True
  waits_for_exchanges: bool = False

  @property
  def splits_windows(self) -> bool:
    """Whether the steps, sends and applies of a window are separate programs.

    They are separate if there is no link between the replicas: all replicas are
    on the same device, or there is only one replica.
    """
    has_links = (
      self.replicas.layout == "mesh" and self.replicas.num_replicas > 1
    )
    return not has_links

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Accepts every outer step, because all replicas are in this JAX runtime.

    Args:
      trace_outer_step: Not used.
    """

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Leaves the exchange and the inner steps to the window's program.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      The progress before the window, and None instead of a result.
    """
    return work.given.progress, None

  def new_waits(self) -> Waits | None:
    """Returns None: the host cannot see waits inside a compiled program."""
