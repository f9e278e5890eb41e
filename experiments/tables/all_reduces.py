"""Compares all-reduces that others measured over slow links with predictions.

The repository tc_cluster_setting of Binhang Yuan has times of gloo and of NCCL
among 4 to 32 machines of AWS, with links made slower by netem. Nothing in the
predictions is fitted on these times.
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
# Rate (Gbit/s), and delay that netem adds in each direction (ms).
LINKS = ((5, 1), (2, 5), (1, 10))
_OPERAND_BYTES = 128 * 2**20  # Of every all-reduce in the repository.
# Payload over bytes on the line. A frame between AWS machines carries up to
# 9001 bytes (recalled; the repository does not say it), of which TCP and IP
# need 52. Ethernet adds 14.
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
  """Returns one table: all-reduces by link, number of machines and library.

  The table's `numbers` are the largest error of each library ("gloo", "nccl"),
  as a fraction without sign.
  """
  rows = []
  cells = []
  for gbps, delay_ms in LINKS:
    for num_machines in MACHINES:
      line = [f"{gbps} Gbit/s, {delay_ms} ms", str(num_machines)]
      for transport in TRANSPORTS:
        row = _predicted_row(
          transport,
          num_machines=num_machines,
          gbps=gbps,
          delay_ms=delay_ms,
        )
        rows.append(row)
        _name, published, predicted, error, _kind, _basis = row.cells()
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


def _predicted_row(
  transport: str, num_machines: int, gbps: float, delay_ms: float
) -> Prediction:
  """Returns the predicted and the published time of an all-reduce (ms).

  `transport` is one of `TRANSPORTS`. `gbps` is the rate of each machine's link,
  and `delay_ms` its delay in each direction.
  """
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
