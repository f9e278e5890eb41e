"""Three papers that report how much of the time their runs computed.

OpenDiLoCo (arXiv 2407.07852): the inputs that the paper states give its range
of utilisations, and nothing is fitted. A ring moves at the rate of its slowest
link, and a round is long.

INTELLECT-1 (arXiv 2412.01152): the paper gives times of rounds and of
all-reduces but no bandwidth, so a rate is fitted for each of three settings.
The notes say how little follows from that.

Covenant-72B (arXiv 2603.08163): sparse 2-bit exchanges. Its peers do not form a
ring. Each puts its payload into object storage and takes those of the others
from there, so a slow uplink costs less.
"""

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
_BLOCK, _KEPT = 4096, 64


def _stated(paper: str, replicas: str) -> tuple[Figures, int, int, float]:
  """Returns the figures of a paper, M, H and the seconds of a step in them."""
  figures = load_published(paper)
  count, interval = (int(figures[k].value) for k in (replicas, "sync interval"))
  round_s = figures["compute of a round"].value * 60
  return figures, count, interval, round_s / interval


def open_diloco() -> list[Table]:
  """Returns the run's utilisation and the published range."""
  figures, count, interval, step_s = _stated("open_diloco", "replicas")
  basis = "H steps in 67.5 min, 1.1 B values in fp16, 127 Mbit/s"
  method, size = methods.open_diloco(interval), figures["parameters"].value
  traffic = flat_traffic(method, size, count, Float("float16"))
  found = pace(traffic, load_cluster("opendiloco", count), step_s)

  def is_enough(mbps: float) -> bool:
    cluster = equal_links(count, mbps * 1e6, rtt_s=_RTT_S)
    return pace(traffic, cluster, step_s).utilisation >= 0.9

  mbps = least(is_enough, 1.0, 1000.0)
  percent, exchange_s = 100 * found.utilisation, interval * found.exchange_s
  rows = [
    beside(figures, "utilisation, lowest", percent, Fit.NONE, basis),
    beside(figures, "utilisation, highest", percent, Fit.NONE, basis),
    beside(figures, "all-reduce", exchange_s, Fit.NONE, basis),
    Prediction("slowest link for 90 %", mbps, "Mbit/s", Fit.NONE, "as above"),
  ]
  compute_s = step_s * interval
  slower = compute_s / (compute_s + figures["all-reduce"].value)
  notes = {"share": found.utilisation, "slower": slower, "mbps": mbps}
  return [Table("open_diloco", rows, notes)]


def intellect_1() -> list[Table]:
  """Returns the run's utilisation, its exchange, and what both imply.

  All follow from one ring of the most nodes that participated at a time.
  """
  nodes = "most concurrent nodes"
  figures, count, interval, step_s = _stated("intellect_1", nodes)
  bits = int(figures["bits of a parameter in the all-reduce"].value)
  size = figures["parameters"].value, count
  traffic = flat_traffic(methods.diloco(interval), *size, Int(bits))
  dense = flat_traffic(methods.allreduce(), *size, Float())
  # Bytes of H data-parallel steps over those of an exchange.
  reduction = dense.gradient_bytes() * interval / traffic.exchange_bytes(0)

  def at(mbps: float) -> SteadyState:
    cluster = equal_links(count, mbps * 1e6, rtt_s=_RTT_S)
    return pace(traffic, cluster, step_s)

  def rate_for(exchange_s: float) -> float:
    """Returns the rate (Mbit/s) at which the exchange takes so long."""
    step_s = exchange_s / interval
    return least(lambda x: at(x).exchange_s <= step_s, 10.0, 1e5, 1e-4)

  slow = pace(traffic, load_cluster("intellect_1", count), step_s)
  preset = "14 nodes, int8 ring, 340 Mbit/s fitted on the lowest utilisation"
  slow_s, quoted = interval * slow.exchange_s, "sync as quoted by Covenant-72B"
  rows = [
    ("utilisation, lowest", 100 * slow.utilisation, Fit.HERE, preset),
    ("global, all-reduce", slow_s, Fit.ELSEWHERE, preset),
    (quoted, slow_s / 60, Fit.ELSEWHERE, preset),
  ]
  rates = {}
  for name in _SETTINGS:
    exchange_s = figures[f"{name}, all-reduce"].value
    rates[name] = rate_for(exchange_s)
    percent = 100 * at(rates[name]).utilisation
    basis = f"{rates[name]:.0f} Mbit/s, fitted on {exchange_s:.0f} s"
    rows.append((f"{name}, utilisation", percent, Fit.ELSEWHERE, basis))
    if name == "USA":
      rows.append(("utilisation, highest", percent, Fit.ELSEWHERE, basis))
  scales = "H = 100, int8 with a scale for every 128 values"
  # The share of the peak is predicted as if only the waiting differed.
  waiting = figures["utilisation, lowest"].value
  waiting /= figures["utilisation, highest"].value
  mfu = figures["model FLOPS utilisation, highest"].value * waiting
  both = "the highest times the ratio of both utilisations"
  rows += [
    ("bandwidth reduction", reduction, Fit.NONE, scales),
    ("model FLOPS utilisation, lowest", mfu, Fit.NONE, both),
  ]
  mbps = ", ".join(f"{rate:.0f} ({name})" for name, rate in rates.items())
  found = [beside(figures, *row) for row in rows]
  return [Table("intellect_1", found, {"rates": mbps})]


def covenant_72b() -> list[Table]:
  """Returns the run's utilisation, communication and compression."""
  peers = "most contributing peers"
  figures, count, interval, step_s = _stated("covenant_72b", peers)
  up_bps, down_bps = (figures[x].value * 1e6 for x in ("uplink", "downlink"))
  num_parameters = int(figures["parameters"].value)
  bits = int(figures["bits of a value"].value)
  codec = TopK(_KEPT / _BLOCK, _BLOCK, then=Int(bits, "tensor"))
  payload_bytes = message_bytes(codec, {"parameters": (num_parameters,)})
  method = methods.sparse_loco(interval)

  def among(num_replicas: int, share: float = 1.0) -> SteadyState:
    """Returns the pace of a ring in which a share of the bytes is sent."""
    rates = up_bps / share, down_bps / share
    cluster = equal_links(num_replicas, *rates, rtt_s=_RTT_S)
    sent = flat_traffic(method, num_parameters, num_replicas, codec)
    return pace(sent, cluster, step_s)

  # A ring of two is an upload to storage.
  upload, half, ring = among(2), among(2, share=0.5), among(count)
  through = "each peer uploads its payload once; downloads are hidden"
  sparse = "64 of 4096 values, 12 bits of index and 2 of value"
  gathered = f"{count} peers gather all payloads over the same uplinks"
  compression = 4 * num_parameters / payload_bytes
  percent, ring_percent = 100 * upload.utilisation, 100 * ring.utilisation
  took_s, of_ring = interval * upload.exchange_s, "utilisation of a ring"
  rows = [
    beside(figures, "utilisation", percent, Fit.NONE, through),
    beside(figures, "communication of a round", took_s, Fit.NONE, through),
    beside(figures, "compression", compression, Fit.NONE, sparse),
    Prediction(of_ring, ring_percent, "percent", Fit.NONE, gathered),
  ]
  notes = {"half": half, "ring": ring, "others": count - 1, "upload_s": took_s}
  notes["half_s"] = interval * half.exchange_s
  notes["ring_s"] = interval * ring.exchange_s
  notes["gigabytes"] = payload_bytes / 1e9
  notes["others_s"] = (count - 1) * payload_bytes * 8 / (down_bps * GOODPUT)
  return [Table("covenant_72b", rows, notes)]
