import json
import math

from dilocox_jax.simulate.transfer import GLOO
from experiments.real_links import page
from experiments.real_links.bandwidths import BandwidthRow, Curve
from experiments.real_links.cases import Row
from experiments.real_links.overlap import OverlapRow
from experiments.real_links.ranking import RankedRow
from experiments.real_links.speedup import SpeedupRow


def test_the_page_shows_every_case_and_the_transport(tmp_path):
  rows = [
    Row("2 x 1 Gbit/s", "all_reduce", 2_000_000, 0.5, 0.4, 1000, 1050.0, 0.25)
  ]
  control = OverlapRow(
    "delayed", "round", 1e6, (12, 10), 2.0, 2.6, 1.3, 0.6, math.nan, 1.02
  )
  speedup = SpeedupRow(32, 15e6, 16, 0.06, 1.98, 2.0, 0.0625, 0.06, 1.07)
  ranked = [RankedRow("a", 16, 1.0, 2.0), RankedRow("b", 4, 3.0, 1.0)]
  bandwidths = [
    BandwidthRow("allreduce", 1, 5e7, 128, 0.1, 2.1, 2.0, 1.06),
    BandwidthRow("diloco", 20, 5e7, 128, 0.1, 0.21, 0.2, 1.05),
  ]
  curves = [Curve("diloco, H = 20", [2e7, 2e8], [0.2, 0.8])]
  found = page.Found(rows, [control], bandwidths, curves, [speedup], ranked)
  lines = page.report(found, GLOO, tmp_path)
  text = (tmp_path / "report.md").read_text()
  assert "| 0.5000 | 0.4000 | 1.250 | 1.050 | 25% |" in text
  assert "| 12 and 10 | 0.30 | 2.000 | 2.600 | 1.300 | 0.000 | - |" in text
  assert "all_gather 1.500 and 1.040" in text
  assert "| 1.980 | 1.010 | 0.0625 | 0.960 | 31.7 | 96.0% | 1.070 |" in text
  assert "has 0 of 1 pairs" in text
  assert "| a | 16 | 1.0000 | 2.0000 | 0.500 |" in text
  assert (
    "| diloco | 20 | 50 | 640 | 10.00 | 10.00 | 0.2100 | 0.2000 | 1.050 | 50.0%"
    in text
  )
  assert "figures/utilisation.png" in text
  assert (tmp_path / "figures" / "utilisation.png").stat().st_size > 10_000
  collective, overlap, _, _, third, *_ = json.loads(
    (tmp_path / "links.json").read_text()
  )
  assert (collective["ratio"], overlap["ratio"]) == (1.25, 1.3)
  assert (third["wanted"], third["method_s"]) == (32, 0.0625)
  assert lines and all(line in text for line in lines)


def test_only_what_was_run_has_a_table(tmp_path):
  page.report(page.Found(), GLOO, tmp_path)
  text = (tmp_path / "report.md").read_text()
  assert "throttled by the kernel" in text and "|" not in text
