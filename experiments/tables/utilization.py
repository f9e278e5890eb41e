"""Three papers that report how much of the time their runs computed.

OpenDiLoCo (arXiv 2407.07852): the inputs that the paper states give its range
of utilizations, and nothing is fitted. A ring moves at the rate of its slowest
link, and a round is long.

INTELLECT-1 (arXiv 2412.01152): the paper gives times of rounds and of
all-reduces but no bandwidth, so a rate is fitted for each of three settings.
The notes say how little follows from that.

Covenant-72B (arXiv 2603.08163): sparse 2-bit exchanges. Its peers do not form a
ring. Each peer puts its payload into object storage and reads the payloads of
the others from there, so a slow uplink costs less.
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

_SETTINGS = ("USA", "USA and Europe", "global")
_RTT_S = 0.1
# Values of a block that Covenant-72B sends, and values of a block.
_NUM_SENT = 64
_BLOCK = 4096


class _StatedRun(NamedTuple):
  """Inputs that a paper states.

  Attributes:
    figures: Figures of the paper, by name.
    num_replicas: M.
    interval: H (inner steps).
    step_s: Duration of an inner step (seconds).
  """

  figures: Figures
  num_replicas: int
  interval: int
  step_s: float


def _stated_run(paper: str, replicas: str) -> _StatedRun:
  """Returns the inputs that a paper states.

  Args:
    paper: Name of the paper in the file of published figures.
    replicas: Name of the figure with the number of replicas.
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
  """Returns the run's utilization and the published range."""
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

  def is_enough(mbps: float) -> bool:
    links = equal_links(run.num_replicas, mbps * 1e6, rtt_s=_RTT_S)
    return pace(traffic, links, run.step_s).utilization >= 0.9

  slowest_mbps = least(is_enough, low=1.0, high=1000.0)
  percent = 100 * run_pace.utilization
  exchange_s = run.interval * run_pace.exchange_s
  basis = "H steps in 67.5 min, 1.1 B values in fp16, 127 Mbit/s"
  rows = [
    beside(figures, "utilization, lowest", percent, Fit.NONE, basis=basis),
    beside(figures, "utilization, highest", percent, Fit.NONE, basis=basis),
    beside(figures, "all-reduce", exchange_s, Fit.NONE, basis=basis),
    Prediction(
      name="slowest link for 90 %",
      predicted=slowest_mbps,
      unit="Mbit/s",
      kind=Fit.NONE,
      basis="as above",
    ),
  ]
  compute_s = run.step_s * run.interval
  numbers = {
    "share": run_pace.utilization,
    "slower": compute_s / (compute_s + figures["all-reduce"].value),
    "mbps": slowest_mbps,
  }
  return [Table("open_diloco", rows, numbers)]


def intellect_1() -> list[Table]:
  """Returns the run's utilization, its exchange, and what both imply.

  All follow from one ring of the most nodes that participated at a time.
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

  def at(mbps: float) -> SteadyState:
    cluster = equal_links(run.num_replicas, mbps * 1e6, rtt_s=_RTT_S)
    return pace(traffic, cluster, run.step_s)

  def rate_for(exchange_s: float) -> float:
    """Returns the rate (Mbit/s) at which an exchange takes `exchange_s`."""

    def is_fast_enough(mbps: float) -> bool:
      return at(mbps).exchange_s <= exchange_s / run.interval

    return least(is_fast_enough, low=10.0, high=1e5, precision=1e-4)

  preset = load_cluster("intellect_1", run.num_replicas)
  slow = pace(traffic, preset, run.step_s)
  slow_s = run.interval * slow.exchange_s
  basis = "14 nodes, int8 ring, 340 Mbit/s fitted on the lowest utilization"
  rows = [
    beside(
      figures,
      "utilization, lowest",
      100 * slow.utilization,
      Fit.HERE,
      basis=basis,
    ),
    beside(figures, "global, all-reduce", slow_s, Fit.ELSEWHERE, basis=basis),
    beside(
      figures,
      "sync as quoted by Covenant-72B",
      slow_s / 60,
      Fit.ELSEWHERE,
      basis=basis,
    ),
  ]
  rates_mbps = {}
  for setting in _SETTINGS:
    exchange_s = figures[f"{setting}, all-reduce"].value
    mbps = rate_for(exchange_s)
    rates_mbps[setting] = mbps
    percent = 100 * at(mbps).utilization
    basis = f"{mbps:.0f} Mbit/s, fitted on {exchange_s:.0f} s"
    names = [f"{setting}, utilization"]
    if setting == "USA":
      names.append("utilization, highest")
    for name in names:
      rows.append(beside(figures, name, percent, Fit.ELSEWHERE, basis=basis))
  dense = flat_traffic(
    method=methods.allreduce(),
    num_parameters=figures["parameters"].value,
    num_replicas=run.num_replicas,
    codec=Float(),
  )
  # Bytes of H data-parallel steps over the bytes of an exchange.
  reduction = dense.gradient_bytes() * run.interval / traffic.exchange_bytes(0)
  rows.append(
    beside(
      figures,
      "bandwidth reduction",
      reduction,
      Fit.NONE,
      basis="H = 100, int8 with a scale for every 128 values",
    )
  )
  # The share of the peak is predicted as if only the waiting differed.
  waiting = (
    figures["utilization, lowest"].value / figures["utilization, highest"].value
  )
  rows.append(
    beside(
      figures,
      "model FLOPS utilization, lowest",
      figures["model FLOPS utilization, highest"].value * waiting,
      Fit.NONE,
      basis="the highest times the ratio of both utilizations",
    )
  )
  rates = ", ".join(
    f"{mbps:.0f} ({setting})" for setting, mbps in rates_mbps.items()
  )
  return [Table("intellect_1", rows, {"rates": rates})]


def covenant_72b() -> list[Table]:
  """Returns the run's utilization, communication and compression."""
  run = _stated_run("covenant_72b", "most contributing peers")
  figures = run.figures
  up_bps = figures["uplink"].value * 1e6
  down_bps = figures["downlink"].value * 1e6
  num_parameters = int(figures["parameters"].value)
  bits = int(figures["bits of a value"].value)
  codec = TopK(_NUM_SENT / _BLOCK, _BLOCK, then=Int(bits, "tensor"))
  payload_bytes = message_bytes(codec, {"parameters": (num_parameters,)})

  def among(num_replicas: int, share: float = 1.0) -> SteadyState:
    """Returns the pace of a ring in which a share of the bytes is sent."""
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

  upload = among(2)  # A ring of two is an upload to storage.
  half = among(2, share=0.5)
  ring = among(run.num_replicas)
  upload_s = run.interval * upload.exchange_s
  storage = "each peer uploads its payload once; downloads are hidden"
  rows = [
    beside(
      figures,
      "utilization",
      100 * upload.utilization,
      Fit.NONE,
      basis=storage,
    ),
    beside(
      figures, "communication of a round", upload_s, Fit.NONE, basis=storage
    ),
    beside(
      figures,
      "compression",
      4 * num_parameters / payload_bytes,
      Fit.NONE,
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
  numbers = {
    "half": half,
    "ring": ring,
    "others": num_others,
    "upload_s": upload_s,
    "half_s": run.interval * half.exchange_s,
    "ring_s": run.interval * ring.exchange_s,
    "gigabytes": payload_bytes / 1e9,
    "others_s": download_s,
  }
  return [Table("covenant_72b", rows, numbers)]
