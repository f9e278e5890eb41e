"""Writes the adviser's page, its figure, and its proposals as config files."""

import contextlib
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from rich.console import Console

from dilocox_jax.api.advice import Advice, Proposal
from dilocox_jax.api.expected_gap import MEASURED_WITH
from dilocox_jax.config import RunConfig
from dilocox_jax.mapping import flat
from dilocox_jax.metrics.lines import write_atomically, write_json
from dilocox_jax.report import style
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.text_tables import markdown_table, terminal_table
from dilocox_jax.report.units import human_bytes, human_share, tokens_unit
from experiments.runtime.command_line import UsageError, own_command

_NUMBERS = "advice.json"
_COLUMNS = (
  "method",
  "settings",
  "tokens/s",
  "busy",
  "sent a day",
  "hours",
  "memory",
  "gap",
)
_WIDE = 110  # Columns of a terminal that has room for all of these.
_WIDE_ONLY = ("busy", "hours")
# Fields that a config has from the user, from what was priced, or from neither.
_OF_USER = ("data.", "model.", "evaluation.", "checkpoint.")
_PRICED = ("mesh.", "membership.")
_OF_METHOD = ("inner.optimizer", "inner.momentum")
_CONFIG = '''"""{title}

Proposed by experiments.advise for the cluster {cluster}: {speed:,.0f} tokens a
second and {share} of the time computing (simulated), {gap}.

    python -m experiments.train --config={path} --workdir=runs/advised
"""

from experiments.configs import default


def get_config():
  """Returns the default with what was proposed."""
  config = default.get_config()
  config.update_from_flattened_dict({{
{fields}  }})
  return config
'''


def write_advice(
  advice: Advice,
  given: RunConfig,
  cluster: str,
  tokens: float,
  folder: pathlib.Path,
) -> list[pathlib.Path]:
  """Writes `report.md`, `advice.json`, the figure, and a config a method.

  Args:
    advice: What was found.
    given: The config that was asked about.
    cluster: Name of the cluster, or path of its file.
    tokens: Tokens of the whole run.
    folder: Existing directory.

  Returns:
    Paths of the page and of the config files.

  Raises:
    UsageError: If a file that a config would replace is not as it was written
      here before.
  """
  rows = [_row(p, tokens) for p in advice.by_method]
  taken = [p for p in advice.by_method if not p.against]
  earlier = [_config_path(p, folder) for p in advice.by_method]
  _check_unchanged(earlier, folder / _NUMBERS)
  for path in earlier:  # This answer may not have them.
    path.unlink(missing_ok=True)
  paths = [_write_config(p, given, cluster, folder) for p in taken]
  reasons = [_reason_row(advice, p) for p in advice.by_method]
  lines = [
    f"{advice.num_compared:,} pairs of a method and a division of a replica "
    "were compared. Nothing was measured on this cluster: speeds, bytes and "
    "hours are simulated, memory is estimated. The busy share is that in which "
    "replicas compute.",
    "",
    f"{_comparison(advice)}",
    "",
    *markdown_table(_COLUMNS, rows),
    "",
    f"Gaps were measured with {MEASURED_WITH}, and are to AllReduce with the "
    "same inner optimizer. For any other run they are an extrapolation.",
    "",
    "## Why the others lost, and where gaps come from",
    "",
    *markdown_table(("method", "why not", "gap"), reasons),
    "",
    "## Speed against gap",
    "",
    *picture(_figure(advice), folder, "pareto", "Tokens a second and gap"),
    "## Configs",
    "",
    *(f"- `{path}`" for path in paths),
  ]
  numbers = {"proposals": list(_numbers(advice)), "configs": _digests(paths)}
  write_json(folder / _NUMBERS, numbers)
  page = write_page(folder, f"Advice for {cluster}", lines, own_command())
  return [page, *paths]


def print_advice(advice: Advice, tokens: float, explains: bool) -> None:
  """Prints the best proposal of each method.

  Args:
    advice: What was found.
    tokens: Tokens of the whole run.
    explains: Whether to print why each was not taken.
  """
  console = Console()
  shown = advice.by_method
  if not explains:
    shown = [p for p in shown if not p.against] or shown
  rows = [_row(p, tokens) for p in shown]
  is_wide = console.width >= _WIDE
  kept = [i for i, c in enumerate(_COLUMNS) if is_wide or c not in _WIDE_ONLY]
  header, *cells = ([row[i] for i in kept] for row in (_COLUMNS, *rows))
  table = terminal_table(header, cells, (0, 1))
  table.columns[0].no_wrap = True
  console.print(table)
  console.print(_comparison(advice), highlight=False)
  if explains:
    columns = ("method", "why not", "gap")
    rows = [_reason_row(advice, p) for p in shown]
    console.print(terminal_table(columns, rows, (0, 1, 2)))


def _comparison(advice: Advice) -> str:
  """Says how much better the best proposal is than the config as given."""
  given, best = advice.given, advice.best
  name = f"the config as given ({given.config.sync.method} {_settings(given)})"
  speed = f"{given.tokens_per_s:,.0f} tokens/s"
  if best is None:
    return f"No setting keeps all limits; {name} would make {speed}."
  ratio = best.tokens_per_s / given.tokens_per_s
  return (
    f"{best.config.sync.method} is {ratio:.2f} times as fast as {name}, which "
    f"would make {speed}."
  )


def _settings(proposal: Proposal) -> str:
  """Returns the settings of a proposal, e.g. "H=16 bits=1"."""
  schedule = proposal.config.sync.named.schedule
  texts = [f"H={schedule.sync_interval}"] if schedule.sync_interval > 1 else []
  if schedule.num_fragments > 1:
    texts.append(f"P={schedule.num_fragments}")
  if schedule.overlap_steps:
    texts.append(f"tau={schedule.overlap_steps}")
  for path, value in proposal.changes.items():
    if path.startswith("codec.") and path != "codec.name":
      texts.append(f"{path.removeprefix('codec.')}={value}")
  mesh = proposal.config.mesh
  if mesh.is_divided:
    texts.append(f"mesh {mesh.num_stages}x{mesh.num_data_shards}")
  return " ".join(texts)


def _row(proposal: Proposal, tokens: float) -> tuple[str, ...]:
  gap = proposal.gap
  return (
    proposal.config.sync.method,
    _settings(proposal),
    f"{proposal.tokens_per_s:,.0f}",
    human_share(proposal.rounds.utilisation),
    human_bytes(proposal.bytes_per_day),
    f"{proposal.hours(tokens):,.0f}",
    human_bytes(proposal.memory.total),
    f"{gap.percent:.1f} %" if gap else "unknown",
  )


def _reason_row(advice: Advice, proposal: Proposal) -> tuple[str, str, str]:
  basis = proposal.gap.basis if proposal.gap else ""
  reason = advice.reason(proposal) or "the best"
  return proposal.config.sync.method, reason, basis


def _numbers(advice: Advice) -> Iterator[dict[str, object]]:
  for proposal in advice.proposals:
    yield {
      "changes": proposal.changes,
      "tokens_per_s": proposal.tokens_per_s,
      "utilisation": proposal.rounds.utilisation,
      "bytes_per_day": proposal.bytes_per_day,
      "memory_bytes": proposal.memory.total,
      "gap_percent": proposal.gap.percent if proposal.gap else None,
      "gap_basis": proposal.gap.basis if proposal.gap else "",
      "against": proposal.against,
    }


def _check_unchanged(
  paths: Sequence[pathlib.Path], numbers: pathlib.Path
) -> None:
  """Refuses to replace a config that a user wrote, or changed since."""
  written: dict[str, str] = {}
  with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
    written = json.loads(numbers.read_text())["configs"]
  found = _digests([path for path in paths if path.exists()])
  for name in found:
    if found[name] != written.get(name):
      raise UsageError(
        f"{numbers.with_name(name)} is not as advise wrote it: move it away, "
        "or choose another --workdir"
      )


def _digests(paths: Sequence[pathlib.Path]) -> dict[str, str]:
  return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def _config_path(proposal: Proposal, folder: pathlib.Path) -> pathlib.Path:
  return folder / f"{proposal.config.sync.method}.py"


def _write_config(
  proposal: Proposal, given: RunConfig, cluster: str, folder: pathlib.Path
) -> pathlib.Path:
  method = proposal.config.sync.method
  path = _config_path(proposal, folder)
  gap = proposal.gap
  defaults = flat(RunConfig().to_mapping())
  of_user = {
    field: value
    for field, value in flat(given.to_mapping()).items()
    if field.startswith(_OF_USER)
    or field in ("seed", "total_steps")
    or (field.startswith("inner.") and field not in _OF_METHOD)
    if value != defaults[field]
  }
  # What was priced may lie on another mesh than the given config.
  priced = {
    field: value
    for field, value in flat(proposal.config.to_mapping()).items()
    if field.startswith(_PRICED) and value != defaults[field]
  }
  fields = of_user | priced | proposal.changes
  text = _CONFIG.format(
    title=f"{method}: {_settings(proposal)}.",
    cluster=cluster,
    speed=proposal.tokens_per_s,
    share=human_share(proposal.rounds.utilisation),
    gap=f"an expected\ngap of {gap.percent:.1f} %" if gap else "gap unknown",
    path=path,
    fields="".join(f"    {k!r}: {v!r},\n" for k, v in fields.items()),
  )
  write_atomically(path, text)
  return path


def _figure(advice: Advice) -> Figure:
  """Draws all proposals, and the line of those that no other beats."""
  best = advice.best
  title = "No setting keeps the conditions"
  if best:
    title = f"{best.config.sync.method} is the fastest within the tolerance"
  figure, (ax,) = style.frame(1, title, (7.2, 4.8))
  known = [p for p in advice.proposals if p.gap]
  divisor, unit = tokens_unit(max((p.tokens_per_s for p in known), default=1))
  front = list(dict.fromkeys(p.config.sync.method for p in advice.by_method))
  for number, method in enumerate(front):
    own = [p for p in known if p.config.sync.method == method]
    look = {"color": style.PALE, "marker": ".", "s": 14}
    if number < len(style.COLOURS):
      colour, marker = style.COLOURS[number], style.MARKERS[number]
      look = {"color": colour, "marker": marker, "s": 20, "label": method}
    ax.scatter(*_points(own, divisor), linewidths=0, alpha=0.8, **look)
  ax.step(
    *_points(advice.pareto, divisor),
    where="post",
    color=style.GREY,
    linewidth=0.8,
  )
  style.label(
    ax,
    "speed: simulated; gap: expected, see the table",
    f"{unit} a second",
    "expected gap to AllReduce (%)",
  )
  style.cut_high(ax, [p.gap.percent for p in known if p.gap])
  style.legend(figure, ax, 3)
  return figure


def _points(
  proposals: Sequence[Proposal], divisor: float
) -> tuple[list[float], list[float]]:
  gaps = [p.gap.percent if p.gap else math.nan for p in proposals]
  return [p.tokens_per_s / divisor for p in proposals], gaps
