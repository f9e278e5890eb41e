"""What the README says in figures, computed from committed rows."""

from collections.abc import Iterator

from dilocox_jax.config import from_mapping
from dilocox_jax.report import units
from docs.figures import loss_by_bytes
from experiments.configs import quickstart
from tests.docs.committed_runs import equal
from tests.docs.results_claims import cost_over_diloco
from tests.docs.simulated import OF_107B, seconds, sent_bytes

# The methods of "Which method?", and when the page recommends each.
METHODS = {
  "diloco": "you begin, or your link is so fast that waits cost little",
  "overlap_loco": ("the link should cost no time, and you can train with Muon"),
  "muloco": "you train with Muon, and short waits are fine",
  "streaming_diloco": ("the link should cost little time, and you keep AdamW"),
  "sparse_loco": "every megabyte counts, and the run is long",
}


def from_rows() -> Iterator[str]:
  """Yields lines and phrases of the page with what the rows hold."""
  runs = equal()
  baseline = loss_by_bytes.SETTINGS["allreduce"][1]
  for method, use in METHODS.items():
    _, name = loss_by_bytes.SETTINGS[method]
    gap, _ = runs.gap_and_error(name, baseline)
    yield f"| `{method}` | {use} | {100 * gap:+.1f} % |"
  two, four, eight = (
    runs.gap_and_error(name)[0]
    for name in ("overlap_loco 2x4", "overlap_loco 4x2", "overlap_loco 8x1")
  )
  yield (
    f"two ended {100 * two:.2f} % above AllReduce, four"
    f" {100 * four:.2f} %, and eight {100 * eight:.2f} %."
  )
  (average, its_error), (newest, newest_error) = cost_over_diloco(
    "overlap_loco"
  )
  yield (
    f"ends {100 * average:.1f} ± {100 * its_error:.1f} % above `diloco` in fp32"
    " on the average of the parameters, and"
    f" {100 * newest:.1f} ± {100 * newest_error:.1f} % on the newest."
  )
  own, diloco, allreduce = (
    runs.setting(name).loss
    for name in (
      "overlap_loco 4x4",
      "diloco, 1,550 steps, 4x4",
      "allreduce, 449 steps, 4x4",
    )
  )
  yield (
    f"four replicas of `overlap_loco` ended at {own:.3f}, those of `diloco` at"
    f" {diloco:.3f}, and AllReduce at {allreduce:.3f}"
  )
  millions = runs.parameters("overlap_loco 2x4") / 1e6
  yield f"those of a model with {millions:.2f} million parameters."


def simulated() -> Iterator[str]:
  """Yields times of the simulator, which take seconds to compute."""
  configs = {
    name: from_mapping(quickstart.get_config(name).to_dict())
    for name in quickstart.METHODS
  }
  sent = {name: sent_bytes(config) for name, config in configs.items()}
  for name, config in configs.items():
    fewer = units.human_ratio(sent["allreduce"] / sent[name])
    yield f"{units.human_bytes(sent[name])} {fewer} 800"
    yield f"{units.human_time(seconds(OF_107B, config))}"
  steps_h = seconds(OF_107B, configs["overlap_loco"]) / 3600 / 800
  allreduce_h = seconds(OF_107B, configs["allreduce"]) / 3600 / 800
  assert round(allreduce_h) == 1
  yield (
    "A step of a model with 107 billion parameters computes for"
    f" {3600 * steps_h:.0f} seconds, but with averaging over 1 Gbit/s it takes"
    " an hour (simulated)."
  )


# The reason why no committed row has a figure, and the phrases with it. The
# slow tier computes what is simulated.
REASONS = {
  "simulated; the losses are printed by `make quickstart` (measured)": (
    "A step of a model with 107 billion parameters computes for 9 seconds, but"
    " with averaging over 1 Gbit/s it takes an hour (simulated).",
    "overlap_loco 1.60 +3.7 % 6.24 MB 439x 800",
    "dilocox 1.97 +28 % 3.50 MB 784x 800",
    "allreduce 1.54 - 2.74 GB 1.00x 800",
    "run time 2.04 h",
    "overlap_loco 2.04 h 1.60",
    "dilocox 2.04 h 1.97",
    "allreduce 809 h 2 steps",
  ),
  "how the runs were set up": (
    "(after 2,000 steps it is smaller)",
    "On 1 Gbit/s and 40 ms,",
    "![Loss against simulated time over 1 Gbit/s]",
    "simulated for 107 billion parameters on two clusters that are joined by 1"
    " Gbit/s.",
  ),
  "a claim that the test of docs/results/links.md holds": (
    "are within 5 % of the simulator's.",
  ),
  "what a program needs, or the name of a thing": (
    "You need Python 3.11 or newer.",
    "https://arxiv.org/abs/2311.08105",
    "| one NVIDIA H200 |",
    "(H100)",
    "[Apache 2.0]",
  ),
}


def without_rows() -> Iterator[str]:
  """Yields phrases whose figures no committed row holds."""
  for phrases in REASONS.values():
    yield from phrases
