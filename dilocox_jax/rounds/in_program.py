"""The runtime that leaves exchanges to the compiled programs of windows.

A window is some inner steps. After them, a mean may be applied, and a new
pseudo-gradient may be measured. An exchange computes the mean that a window
applies.
"""

import dataclasses
from collections.abc import Callable

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.rounds.runtime import Waits, WindowWork
from dilocox_jax.rounds.window import InnerProgress


@dataclasses.dataclass(frozen=True, eq=False)
class InProgram:
  """Leaves each exchange to the compiled program that applies its mean.

  If `splits_windows` is False, that program also takes inner steps. On TPUs and
  GPUs, XLA overlaps these steps with the transfers.

  Attributes:
    replicas: Number of replicas, and their devices.
    reuses_states: True: programs may reuse the memory of the states.
    waits_for_exchanges: False: only the devices wait, not the host.
  """

  replicas: Replicas
  reuses_states: bool = True
  waits_for_exchanges: bool = False

  @property
  def splits_windows(self) -> bool:
    """Whether a window's inner steps, apply and send are separate programs.

    An apply applies a mean, and a send measures a pseudo-gradient. The programs
    are separate if all replicas are on one device, or if there is only one
    replica: then no transfer between replicas could overlap with the steps.
    """
    has_links = (
      self.replicas.layout == "mesh" and self.replicas.num_replicas > 1
    )
    return not has_links

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Accepts every outer step, as all replicas are in this JAX runtime."""

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs nothing: compiled programs run the inner steps and the exchange.

    Returns:
      The replicas as they were, and None, as no exchange has run yet.
    """
    return work.given.progress, None

  def new_waits(self) -> Waits | None:
    """Returns None, as the host cannot see waits inside a compiled program."""
