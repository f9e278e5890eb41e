"""All-reduces that others measured between machines behind slow links.

The repository tc_cluster_setting of Binhang Yuan has times of gloo and of NCCL
among 4 to 32 machines of AWS, whose links the kernel's netem throttled and
delayed. Nothing is fitted here.
"""

from dilocox_jax.plan.operations import operation
from dilocox_jax.simulate.gloo import GLOO
from dilocox_jax.simulate.transfer import NCCL
from experiments.tables.runs import collective_s, equal_links
from experiments.tables.table import (
  Fit,
  Prediction,
  Table,
  beside,
  load_published,
)

TRANSPORTS = {"gloo": GLOO, "NCCL": NCCL}
MACHINES = (4, 8, 16, 32)
LINKS = ((5, 1), (2, 5), (1, 10))  # Gbit/s, and ms that netem adds one way.
_OPERAND_BYTES = 128 * 2**20
# Frames between AWS machines have up to 9001 bytes (recalled, it is not stated)
# and 14 bytes of Ethernet. TCP and IP need 52 of them.
_EFFICIENCY = (9001 - 52) / (9001 + 14)
_BASIS = "payload of frames of 9001 bytes; a round trip of two delays"
_HEADER = (
  "link",
  "machines",
  "gloo, published (ms)",
  "predicted",
  "error",
  "NCCL, published (ms)",
  "predicted",
  "error",
)


def build_tables() -> list[Table]:
  """Returns the table of all-reduces."""
  rows = []
  cells = []
  for gbps, delay_ms in LINKS:
    for num_machines in MACHINES:
      line = [f"{gbps} Gbit/s, {delay_ms} ms", str(num_machines)]
      for transport in TRANSPORTS:
        row = _row(
          transport,
          num_machines=num_machines,
          gbps=gbps,
          delay_ms=delay_ms,
        )
        rows.append(row)
        _, published, predicted, error, *_ = row.cells()
        line += [published, predicted, error]
      cells.append(line)
  worst_errors = {}
  for transport in TRANSPORTS:
    worst_errors[transport.lower()] = max(
      abs(row.relative_error) for row in rows if row.name.startswith(transport)
    )
  return [
    Table(
      name="all_reduces",
      rows=rows,
      numbers=worst_errors,
      header=_HEADER,
      cells=cells,
    )
  ]


def _row(
  transport: str, num_machines: int, gbps: float, delay_ms: float
) -> Prediction:
  cluster = equal_links(
    num_replicas=num_machines,
    up_bps=gbps * 1e9,
    rtt_s=2 * delay_ms / 1e3,
    efficiency=_EFFICIENCY,
  )
  predicted_s = collective_s(
    cluster=cluster,
    transport=TRANSPORTS[transport],
    collective=operation("all_reduce", _OPERAND_BYTES),
  )
  return beside(
    figures=load_published("tc_cluster_setting"),
    name=f"{transport}, {num_machines} machines, {gbps} Gbit/s, {delay_ms} ms",
    predicted=1e3 * predicted_s,
    kind=Fit.NONE,
    basis=_BASIS,
  )
