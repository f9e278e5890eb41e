"""Draws loss against bytes for every method, for `docs/results.md`.

  python -m docs.figures.loss_by_bytes

The points are committed runs: four replicas of four sequences each, 2,000
steps. All methods have Muon and the same average of their parameters. The
script trains nothing and takes seconds.
"""

import dataclasses
import pathlib

import pandas as pd

from dilocox_jax.report import panels, style, units
from experiments.sweeps.tables import COMMITTED

PICTURE = pathlib.Path(__file__).with_suffix(".png")
# Study and name of the setting, by method.
SETTINGS = {
  "allreduce": ("replicas_main", "allreduce, momentum of nine tenths, 4x4"),
  "overlap_loco": ("replicas_main", "overlap_loco 4x4"),
  "diloco": ("replicas_main", "diloco 4x4"),
  "muloco": ("replicas_main", "muloco 4x4"),
  "streaming_diloco": ("replicas_main", "streaming_diloco 4x4"),
  "eager": ("replicas_cpu", "eager, 4x4"),
  "sparse_loco": ("replicas_main", "sparse_loco 4x4"),
  "dilocox": ("replicas_main", "dilocox 4x4"),
  "open_diloco": ("replicas_main", "open_diloco 4x4"),
  "cocktail_sgd": ("replicas_main", "cocktail_sgd 4x4"),
}


@dataclasses.dataclass(frozen=True)
class MethodPoint:
  """One point of the figure.

  Attributes:
    method: Name of the method.
    sent_bytes: Bytes that a replica sends in the whole run.
    loss: Mean loss of the seeds on the text that chose no setting (nats a
      token).
  """

  method: str
  sent_bytes: int
  loss: float


def read() -> list[MethodPoint]:
  """Returns the points from the committed rows."""
  runs = pd.read_csv(COMMITTED).groupby(["study", "setting"])
  means = runs[["sent_bytes", "judge_loss"]].mean()
  return [
    MethodPoint(
      method=method,
      sent_bytes=int(means.loc[setting, "sent_bytes"]),
      loss=float(means.loc[setting, "judge_loss"]),
    )
    for method, setting in SETTINGS.items()
  ]


def draw(points: list[MethodPoint]) -> None:
  """Writes the figure beside this file."""
  title = (
    "overlap_loco and MuLoCo end where DiLoCo ends, with less than a tenth of"
    " its bytes"
  )
  figure, (ax,) = style.frame(1, title, size=(8.0, 4.6))
  looks = style.looks([point.method for point in points])
  for point in points:
    look = looks[point.method]
    ax.plot(
      [point.sent_bytes],
      [point.loss],
      color=look["color"],
      marker=look["marker"],
      markersize=9,
      linestyle="none",
    )
  style.cost_axis(
    ax,
    [point.sent_bytes for point in points],
    "bytes that a replica sends in 2,000 steps",
    text_of=units.human_bytes,
    is_log=True,
  )
  ax.set_xlim(2e6, 3e10)
  ax.set_ylabel("loss (nats a token)")
  style.caption(
    ax,
    "loss measured: 0.86 M parameters, four replicas of four sequences, mean of"
    " three or five seeds; bytes derived",
  )
  panels.name_points(
    figure,
    ax,
    [
      (style.proper(point.method), point.sent_bytes, point.loss)
      for point in points
    ],
  )
  figure.savefig(PICTURE, dpi=110)


def main() -> None:
  """Draws the figure, and prints its points."""
  points = read()
  draw(points)
  for point in points:
    sent = units.human_bytes(point.sent_bytes)
    print(f"{point.method}: loss {point.loss:.4f}, {sent}")


if __name__ == "__main__":
  main()
