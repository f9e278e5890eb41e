"""Predicts for which share of the time the runs of three papers computed.

OpenDiLoCo (arXiv 2407.07852): nothing is fitted. The slowest link sets the pace
of the ring.

INTELLECT-1 (arXiv 2412.01152): the paper states no bandwidth, so the rate of
the links is fitted four times: to the lowest published utilization, and to the
published time of an all-reduce in the USA, in the USA and Europe, and globally.

Covenant-72B (arXiv 2603.08163): sparse 2-bit exchanges. Each peer uploads its
payload once, to object storage. Only the upload takes time: downloads are
assumed to be hidden.
"""

from typing import NamedTuple

from dilocox_jax.aggregators.sizes import message_bytes
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.plan.schedule import methods
from dilocox_jax.simulate.cluster_file import load_cluster
from dilocox_jax.simulate.steps import SteadyState
from experiments.tables.runs import (
  GOODPUT,
  equal_links,
  flat_traffic,
  least,
  pace,
)
from experiments.tables.table import (
  Figures,
  Fit,
  Prediction,
  Table,
  beside,
  load_published,
)

_SETTINGS = ("USA", "USA and Europe", "global")  # Of INTELLECT-1.
_RTT_S = 0.1  # Round trip that is assumed where the paper states none.
# Covenant-72B sends the 64 largest of every 4096 values.
_NUM_SENT = 64
_BLOCK = 4096


class _StatedRun(NamedTuple):
  """A run of a paper, as the paper describes it.

  Attributes:
    figures: Published numbers of the paper, by name.
    num_replicas: Number of replicas, M.
    interval: Inner steps of a round, H.
    step_s: Duration of an inner step (seconds).
  """

  figures: Figures
  num_replicas: int
  interval: int
  step_s: float


def _stated_run(paper: str, replicas: str) -> _StatedRun:
  """Reads the run of a paper from its published numbers.

  `replicas` is the name of the number that says how many replicas there are.
  """
  figures = load_published(paper)
  interval = int(figures["sync interval"].value)
  round_s = figures["compute of a round"].value * 60
  return _StatedRun(
    figures=figures,
    num_replicas=int(figures[replicas].value),
    interval=interval,
    step_s=round_s / interval,
  )


def open_diloco() -> list[Table]:
  """Builds the table of OpenDiLoCo: predicted and published numbers.

  The predicted utilization is compared with the lowest and with the highest
  published value. The last row is only predicted: the lowest rate of links at
  which replicas compute for 90 % of the time.
  """
  run = _stated_run("open_diloco", "replicas")
  figures = run.figures
  traffic = flat_traffic(
    method=methods.open_diloco(run.interval),
    num_parameters=figures["parameters"].value,
    num_replicas=run.num_replicas,
    codec=Float("float16"),
  )
  cluster = load_cluster("opendiloco", run.num_replicas)
  run_pace = pace(traffic, cluster, run.step_s)

  def keeps_90_percent(mbps: float) -> bool:
    links = equal_links(run.num_replicas, mbps * 1e6, rtt_s=_RTT_S)
    return pace(traffic, links, run.step_s).utilization >= 0.9

  slowest_mbps = least(keeps_90_percent, low=1.0, high=1000.0)
  percent = 100 * run_pace.utilization
  exchange_s = run.interval * run_pace.exchange_s
  basis = "H steps in 67.5 min, 1.1 B values in fp16, 127 Mbit/s"
  rows = [
    beside(figures, "utilization, lowest", percent, kind=Fit.NONE, basis=basis),
    beside(
      figures, "utilization, highest", percent, kind=Fit.NONE, basis=basis
    ),
    beside(figures, "all-reduce", exchange_s, kind=Fit.NONE, basis=basis),
    Prediction(
      name="slowest link for 90 %",
      predicted=slowest_mbps,
      unit="Mbit/s",
      kind=Fit.NONE,
      basis="as above",
    ),
  ]
  compute_s = run.step_s * run.interval
  # The notes of the table (notes.md) have these names in braces. "slower" is
  # the utilization with the published time of the all-reduce, which is longer
  # than the simulated time.
  numbers = {
    "share": run_pace.utilization,
    "slower": compute_s / (compute_s + figures["all-reduce"].value),
    "mbps": slowest_mbps,
  }
  return [Table("open_diloco", rows, numbers)]


def intellect_1() -> list[Table]:
  """Builds the table of INTELLECT-1: its utilizations and all-reduces.

  The simulated rows are of a ring with the largest number of nodes that took
  part at once. The rate of its links is fitted four times: on the lowest
  utilization (the cluster preset "intellect_1" has this rate), and on the time
  of an all-reduce in the USA, in the USA and Europe, and globally. The last two
  rows use no fit.
  """
  run = _stated_run("intellect_1", "most concurrent nodes")
  figures = run.figures
  bits = int(figures["bits of a parameter in the all-reduce"].value)
  traffic = flat_traffic(
    method=methods.diloco(run.interval),
    num_parameters=figures["parameters"].value,
    num_replicas=run.num_replicas,
    codec=Int(bits),
  )

  def pace_at(mbps: float) -> SteadyState:
    cluster = equal_links(run.num_replicas, mbps * 1e6, rtt_s=_RTT_S)
    return pace(traffic, cluster, run.step_s)

  def rate_for(all_reduce_s: float) -> float:
    """Returns the rate (Mbit/s) at which an all-reduce takes this long."""

    def is_fast_enough(mbps: float) -> bool:
      # The pace has averages over inner steps, and a round has one all-reduce.
      return run.interval * pace_at(mbps).exchange_s <= all_reduce_s

    return least(is_fast_enough, low=10.0, high=1e5, precision=1e-4)

  # The links of the preset have the rate that was fitted on the lowest
  # utilization, and their exchange is compared with two published times.
  preset = load_cluster("intellect_1", run.num_replicas)
  preset_pace = pace(traffic, preset, run.step_s)
  preset_exchange_s = run.interval * preset_pace.exchange_s
  basis = "14 nodes, int8 ring, 340 Mbit/s fitted on the lowest utilization"
  rows = [
    beside(
      figures,
      "utilization, lowest",
      100 * preset_pace.utilization,
      kind=Fit.HERE,
      basis=basis,
    ),
    beside(
      figures,
      "global, all-reduce",
      preset_exchange_s,
      kind=Fit.ELSEWHERE,
      basis=basis,
    ),
    beside(
      figures,
      "sync as quoted by Covenant-72B",
      preset_exchange_s / 60,
      kind=Fit.ELSEWHERE,
      basis=basis,
    ),
  ]
  rates_mbps = {}
  for setting in _SETTINGS:
    exchange_s = figures[f"{setting}, all-reduce"].value
    mbps = rate_for(exchange_s)
    rates_mbps[setting] = mbps
    percent = 100 * pace_at(mbps).utilization
    basis = f"{mbps:.0f} Mbit/s, fitted on {exchange_s:.0f} s"
    names = [f"{setting}, utilization"]
    # The highest utilization of the abstract is that of nodes in the USA.
    if setting == "USA":
      names.append("utilization, highest")
    for name in names:
      row = beside(figures, name, percent, kind=Fit.ELSEWHERE, basis=basis)
      rows.append(row)
  data_parallel = flat_traffic(
    method=methods.allreduce(),
    num_parameters=figures["parameters"].value,
    num_replicas=run.num_replicas,
    codec=Float(),
  )
  # Bytes of H data-parallel steps over the bytes of an exchange.
  round_bytes = run.interval * data_parallel.gradient_bytes()
  rows.append(
    beside(
      figures,
      "bandwidth reduction",
      round_bytes / traffic.exchange_bytes(0),
      kind=Fit.NONE,
      basis="H = 100, int8 with a scale for every 128 values",
    )
  )
  # If the settings differ in waiting alone, the utilization of the devices'
  # peak falls by the same factor as the share of the time that is computed.
  utilization_ratio = (
    figures["utilization, lowest"].value / figures["utilization, highest"].value
  )
  highest_of_peak = figures["model FLOPS utilization, highest"].value
  rows.append(
    beside(
      figures,
      "model FLOPS utilization, lowest",
      highest_of_peak * utilization_ratio,
      kind=Fit.NONE,
      basis="the highest times the ratio of both utilizations",
    )
  )
  # The notes of the table (notes.md) have "rates" in braces.
  rates = ", ".join(
    f"{mbps:.0f} ({setting})" for setting, mbps in rates_mbps.items()
  )
  return [Table("intellect_1", rows, {"rates": rates})]


def covenant_72b() -> list[Table]:
  """Builds the table of Covenant-72B: utilization, communication, compression.

  The last row has the utilization that a ring of the peers would reach.
  """
  run = _stated_run("covenant_72b", "most contributing peers")
  figures = run.figures
  up_bps = figures["uplink"].value * 1e6
  down_bps = figures["downlink"].value * 1e6
  num_parameters = int(figures["parameters"].value)
  bits = int(figures["bits of a value"].value)
  codec = TopK(_NUM_SENT / _BLOCK, _BLOCK, then=Int(bits, "tensor"))
  payload_bytes = message_bytes(codec, {"parameters": (num_parameters,)})

  def ring_pace(num_replicas: int, share: float = 1.0) -> SteadyState:
    """Simulates the run with its replicas in a ring.

    Only `share` of the payload's bytes is sent.
    """
    # Links that are 1 / share times as fast have the same effect.
    cluster = equal_links(
      num_replicas, up_bps / share, down_bps / share, rtt_s=_RTT_S
    )
    traffic = flat_traffic(
      method=methods.sparse_loco(run.interval),
      num_parameters=num_parameters,
      num_replicas=num_replicas,
      codec=codec,
    )
    return pace(traffic, cluster, run.step_s)

  # In a ring of two each replica sends its payload once, as it does when it
  # uploads the payload to storage.
  upload = ring_pace(2)
  half_upload = ring_pace(2, share=0.5)
  ring = ring_pace(run.num_replicas)
  upload_s = run.interval * upload.exchange_s
  storage_basis = "each peer uploads its payload once; downloads are hidden"
  rows = [
    beside(
      figures,
      "utilization",
      100 * upload.utilization,
      kind=Fit.NONE,
      basis=storage_basis,
    ),
    beside(
      figures,
      "communication of a round",
      upload_s,
      kind=Fit.NONE,
      basis=storage_basis,
    ),
    beside(
      figures,
      "compression",
      4 * num_parameters / payload_bytes,
      kind=Fit.NONE,
      basis="64 of 4096 values, 12 bits of index and 2 of value",
    ),
    Prediction(
      name="utilization of a ring",
      predicted=100 * ring.utilization,
      unit="percent",
      kind=Fit.NONE,
      basis=f"{run.num_replicas} peers gather all payloads over the same "
      "uplinks",
    ),
  ]
  num_others = run.num_replicas - 1
  download_s = num_others * payload_bytes * 8 / (down_bps * GOODPUT)
  # The notes of the table (notes.md) have these names in braces.
  numbers = {
    "half": half_upload,
    "ring": ring,
    "others": num_others,
    "upload_s": upload_s,
    "half_s": run.interval * half_upload.exchange_s,
    "ring_s": run.interval * ring.exchange_s,
    "gigabytes": payload_bytes / 1e9,
    "others_s": download_s,
  }
  return [Table("covenant_72b", rows, numbers)]
