"""Reports what runs would cost: briefly on the terminal, in full on a page."""

import dataclasses
import math
import pathlib
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console

from dilocox_jax.api.measured_gaps import measured_gaps
from dilocox_jax.api.method_plans import (
  LEAST_ROUNDS,
  MOST_STEPS_PER_ROUND,
  NARROW_ALLREDUCE,
  MethodPlan,
)
from dilocox_jax.checks import printable
from dilocox_jax.config.device_memory import LEAST_SPARE
from dilocox_jax.config.sections import InnerConfig
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.report import units
from dilocox_jax.report.escape import code, markdown
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import (
  header_and_cells,
  markdown_table,
  terminal_table,
)
from dilocox_jax.simulate.analytic import Outcome
from dilocox_jax.simulate.long_runs import simulate_run
from experiments.runtime.command_line import typed_command

Row = tuple[str, str, str]  # Cells of `_COLUMNS`.
NUMBERS = "simulation.json"  # Name of the file of numbers.
_COLUMNS = ("quantity", "value", "kind")


def _speed(speed: float) -> str:
  """Returns tokens a second or a speed-up: "9.02", "3,724" or "2.77 M"."""
  unit = ""
  if speed >= 1e6:
    speed /= 1e6
    unit = " M"
  # Three digits would give "1e+03" for 999.5 and more.
  number = f"{speed:,.0f}" if speed >= 999.5 else f"{speed:.3g}"
  return number + unit


def _answer(plan: MethodPlan) -> list[Row]:
  """Returns the costs of a run, as rows for both the terminal and the page."""
  allreduce_speed = _speed(plan.allreduce_tokens_per_s)
  speed_up = f"{_speed(plan.speed_up)} times (AllReduce: {allreduce_speed})"
  speed = _speed(plan.tokens_per_s)
  num_replicas = plan.config.mesh.num_replicas
  replicas = "1 replica"
  if num_replicas != 1:
    replicas = f"{num_replicas} replicas together"
  share = units.human_share(plan.rounds.utilization)
  interval = plan.config.sync.named.schedule.sync_interval
  period = f"{interval} steps" if interval > 1 else "step"
  # `plan.rounds` has averages per inner step.
  period_bytes = units.human_bytes(plan.rounds.sent_bytes * interval)
  day_bytes = units.human_bytes(plan.bytes_per_day)
  return [
    ("speed-up over AllReduce", speed_up, "simulated"),
    ("tokens a second", f"{speed}, {replicas}", "simulated"),
    ("time in inner steps", share, "simulated"),
    (
      "sent by a replica",
      f"{period_bytes} every {period}, {day_bytes} a day",
      "derived",
    ),
    ("memory of a device", _memory(plan), "estimated"),
  ]


def _memory(plan: MethodPlan) -> str:
  """Returns the memory that a planned run needs, and whether it fits."""
  needed = units.human_bytes(plan.memory.total)
  if not math.isfinite(plan.device_bytes):
    return needed
  if not plan.fits:
    verdict = "does not fit"
  elif not plan.has_room:
    verdict = "barely fits"
  else:
    verdict = "fits"
  return f"{verdict}: {needed} of {units.human_bytes(plan.device_bytes)}"


def report_plan(plan: MethodPlan, workdir: pathlib.Path) -> None:
  """Prints the costs of a run; writes the page and `simulation.json`.

  The files go to `workdir`. Configs of an earlier simulation there are removed.
  """
  _remove_earlier(workdir)
  setup = plan.setup
  whole_run = simulate_run(
    link_costs=setup.link_costs,
    work=setup.work,
    script=setup.script,
    plan=setup.plan,
  )
  title = f"{plan.config.sync.method} on {setup.link_costs.cluster.name}"
  rows = _answer(plan)
  lines = [
    "Everything on this page is computed; nothing was measured.",
    "",
    *markdown_table(_COLUMNS, [*rows, *_details(plan, whole_run)]),
    "",
    "## Assumptions",
    "",
    *(f"- {note}" for note in _notes(plan)),
  ]
  numbers = {
    "tokens_per_s": plan.tokens_per_s,
    "speed_up": plan.speed_up,
    "memory_bytes": plan.memory.total,
    "whole_run": dataclasses.asdict(whole_run),
    "a_step": dataclasses.asdict(plan.rounds),
  }
  write_json(workdir / NUMBERS, numbers)
  path = write_page(workdir, title, lines, typed_command())
  Console().print(terminal_table(_COLUMNS, rows, (0, 1, 2), title=title))
  print(textwrap.fill(" ".join(_assumptions(plan)), 80))
  if not plan.fits:
    print("--methods=all tries every division of a replica among devices")
  print(f"report: {path}")


def _details(plan: MethodPlan, whole_run: Outcome) -> Iterator[Row]:
  """Yields the costs of a planned run that only the page shows."""
  rounds = plan.rounds  # Averages per inner step.
  interval = plan.config.sync.named.schedule.sync_interval
  times_s = {
    "exchanges of a round": rounds.exchange_s * interval,
    "the whole run": whole_run.total_s,
    "its inner steps": np.mean(whole_run.compute_s),
    "its codec": np.mean(whole_run.codec_s),
    "its waiting for exchanges": np.mean(whole_run.exposed_s),
    "its exchanges behind steps": np.mean(whole_run.hidden_s),
  }
  # H inner steps take at least as long as the exchanges of a round.
  hiding_interval = f"{rounds.hiding_interval(interval):,}"
  yield "seconds a step", f"{rounds.step_s:.4g}", "simulated"
  yield "least H whose steps take as long", hiding_interval, "simulated"
  for name, time_s in times_s.items():
    yield f"time of {name}", units.human_time(float(time_s)), "simulated"
  yield "steps of the whole run", f"{whole_run.num_steps:,}", "counted"
  sent_bytes = units.human_bytes(whole_run.sent_bytes)
  yield "bytes of the whole run", sent_bytes, "derived"
  bubble = units.human_share(plan.setup.bubble_fraction)
  yield "idle share of a pipeline", bubble, "derived"


def _notes(plan: MethodPlan) -> Iterator[str]:
  """Yields the assumptions behind a planned run's costs, and some advice."""
  setup = plan.setup
  config = plan.config
  costs = setup.link_costs
  steps_s = setup.work.step_s
  rtts_ms = [1e3 * site.link.rtt_s for site in costs.cluster.sites]
  yield "docs/simulator.md says what is left out."
  yield from _assumptions(plan)
  yield (
    f"Round trips between sites take {min(rtts_ms):g} to {max(rtts_ms):g} ms,"
    f" an inner step {min(steps_s):.4g} to {max(steps_s):.4g} s, by replica."
  )
  # A message goes in four pieces, each sent on when it has arrived. So a delay
  # of up to three quarters of the time of a full buffer leaves no line idle.
  # The messages are those to the next replica (1) of a ring.
  # Without a delay nothing is under way, even if the rate is infinite.
  latencies_s = costs.latency_s(1)
  rates = np.where(latencies_s > 0, costs.rate_bytes_per_s(1), 0)
  bytes_under_way = float(max(rates * latencies_s))
  buffer_bytes = bytes_under_way * 4 / 3
  is_too_small = costs.transport.buffer_bytes < buffer_bytes < math.inf
  if is_too_small and not config.uses_mailbox:
    yield (
      "NCCL's default buffers are too small to keep this line busy: set "
      f"NCCL_BUFFSIZE to {math.ceil(buffer_bytes / 2**20) * 2**20:,} or more. "
      "The times here assume that."
    )
  schedule = setup.plan.method.schedule
  if schedule.hiding_steps < schedule.overlap_steps:
    yield (
      f"overlap_steps={schedule.overlap_steps} hides an exchange behind as few "
      f"as {schedule.hiding_steps} steps: it begins with the window in which "
      "it arrives, so more than sync_interval / num_fragments only delays it."
    )
  if config.adaptive.mode != "off":
    yield "The rank and H are those of the config; what adapts is not foreseen."


def report_methods(
  plans: Sequence[MethodPlan],
  refused: Mapping[str, str],
  workdir: pathlib.Path,
  is_gain_known: bool = False,
) -> None:
  """Prints the costs of all methods; writes the page, and configs to train.

  A config is written for each method whose run fits into the devices. Numbers
  and configs of an earlier simulation in `workdir` are removed.

  Args:
    plans: A planned run for each method, the best first
      (`method_plans.compare_methods`).
    refused: For each other method, by its name, why the config excludes it.
    workdir: Directory to write into.
    is_gain_known: Whether the expected gaps follow from --losses, and not from
      the size of the model.
  """
  _remove_earlier(workdir)
  best = plans[0]
  title = f"Every method on {best.setup.link_costs.cluster.name}"
  reasons = [f"{plan.name}: {plan.reason}" for plan in plans if plan.reason]
  reasons += [f"{name}: {reason}" for name, reason in refused.items()]
  config_paths = {
    plan.name: _write_config(plan, workdir) for plan in plans if plan.fits
  }
  advice = _advice(plans)
  assumptions = [
    *_assumptions(best),
    "If the config sets no H, each method has the H that is best on these"
    f" links: at most {MOST_STEPS_PER_ROUND}, and with at least {LEAST_ROUNDS}"
    " rounds in total_steps.",
  ]
  ranked_by = _ranked_by(plans, is_gain_known)
  header, cells = header_and_cells([_row(plan) for plan in plans])
  lines = [
    "Speeds and bytes are simulated, memory is estimated. Expected gaps follow "
    "from a fitted law, and losses at equal time from them (derived). Measured "
    "gaps are those of a small model.",
    "",
    advice,
    "",
    *markdown_table(header, cells),
    "",
    ranked_by,
    "",
    "## Assumptions",
    "",
    *(f"- {assumption}" for assumption in assumptions),
    "",
    "## Not recommended",
    "",
    *([f"- {markdown(reason)}" for reason in reasons] or ["Nothing."]),
    "",
    "## Configs",
    "",
    *(f"- {code(path)}" for path in config_paths.values()),
  ]
  page = write_page(workdir, title, lines, typed_command())
  # The terminal has no room for the last columns.
  header, cells = header_and_cells(
    [_row(plan, is_short=True) for plan in plans]
  )
  table = terminal_table(header, cells, title=title, collapse_padding=True)
  table.columns[0].no_wrap = True
  Console().print(table)
  for reason in reasons:
    print(
      textwrap.fill(
        f"not recommended: {printable(reason)}", 80, subsequent_indent="  "
      )
    )
  for text in (ranked_by, " ".join(assumptions), advice):
    print(f"\n{textwrap.fill(text, 80)}")
  if best.has_room:
    print(f"\n{_start(best, config_paths[best.name])}")
  print(f"report: {page}")


def _ranked_by(plans: Sequence[MethodPlan], is_gain_known: bool) -> str:
  """Returns sentences that say how the methods are ranked, and state s.

  s is the share by which AllReduce's loss falls when its batch doubles. The
  arguments are those of `report_methods`.
  """
  source = (
    "extrapolated from the size of the model; give --losses, or measure it with"
    " experiments.gap"
  )
  if is_gain_known:
    source = "from --losses"
  gain_text = "not known"
  # All plans with an expected gap have the same s.
  expected = next((plan.expected for plan in plans if plan.expected), None)
  if expected is not None:
    gain = expected.gain
    gain_text = (
      f"{100 * gain.value:.2g} % ({100 * gain.low:.2g} to"
      f" {100 * gain.high:.2g})"
    )
  return (
    "Ranked by the loss at equal time beside AllReduce's, at worst: the upper"
    " end of the expected gap, and what fewer steps in this time cost (half as"
    " many: 7 % more loss, derived), at the speed of the fastest. The gaps"
    " follow from s, by how much AllReduce's loss falls when its batch doubles:"
    f" {gain_text} ({source})."
  )


def _assumptions(plan: MethodPlan) -> list[str]:
  """Returns the assumptions that all runs on a plan's cluster share."""
  cluster = plan.setup.link_costs.cluster
  shares = sorted({site.achieved_fraction for site in cluster.sites})
  percent = " to ".join(f"{100 * share:.0f}" for share in shares)
  codec_s = float(np.max(plan.setup.work.codec_s))
  codec_time = units.human_time(codec_s) if codec_s else "no time"
  return [
    f"Assumed, unless --step_s states a step: inner steps reach {percent} % of"
    " a device's peak ('achieved' in the cluster file).",
    "AllReduce sends gradients in float32, and speed-ups are over that. In "
    "bfloat16 it sends half of the bytes.",
    f"Encoding and decoding an exchange takes {codec_time} (--codec_s).",
  ]


def _advice(plans: Sequence[MethodPlan]) -> str:
  """Returns a text that recommends the first plan, and states its gaps.

  If the first plan leaves no memory to spare, the text only says what would
  help.
  """
  best = plans[0]
  if not best.has_room:
    needed = units.human_bytes(best.memory.total)
    available = units.human_bytes(best.device_bytes)
    return (
      f"No method leaves {100 * LEAST_SPARE:.0f} % of a device's memory to "
      f"spare: {best.name} comes next with {needed} of {available}. Take more "
      "devices for a replica, a smaller batch (data.batch_size) or model, or "
      "mesh.outer_memory=pinned_host."
    )
  sentences = [f"Recommended: {best.name}{_settings(best)}."]
  if best.expected is not None:
    expected = best.expected
    sentences.append(
      f"Its expected gap: {100 * expected.gap:+.1f} %"
      f" ({100 * expected.low:+.1f} to {100 * expected.high:+.1f})."
    )
    sentences += expected.notes
  if best.gap is not None:
    gaps = measured_gaps(best.name, best.config.mesh.num_replicas)
    words = "; ".join(gap.words for gap in gaps)
    sentences.append(f"Its measured gaps: {words}.")
  elif not best.is_baseline:
    interval = best.config.sync.named.schedule.sync_interval
    sentences.append(f"No gap of {best.name} was measured with H = {interval}.")
  if not math.isfinite(best.device_bytes):
    sentences.append(
      "The memory of a device is not known: --memory would say it."
    )
  sentences.append(_hiding(best))
  likely = _best_expected(plans)
  if likely is not best:
    sentences.append(
      f"{likely.name}{_settings(likely)} has a lower expected loss at equal"
      f" time ({100 * likely.gap_at_equal_time:+.1f} % instead of"
      f" {100 * best.gap_at_equal_time:+.1f} %), but may end higher"
      f" ({100 * likely.worst_gap_at_equal_time:+.1f} % at worst instead of"
      f" {100 * best.worst_gap_at_equal_time:+.1f} %)."
    )
  return " ".join(filter(None, sentences))


def _best_expected(plans: Sequence[MethodPlan]) -> MethodPlan:
  """Returns the plan with the lowest expected loss at equal time.

  A plan counts if it leaves memory to spare and its method is AllReduce or was
  ever measured. If no plan counts, the result is the first plan. Losses are
  rounded to 0.1 %, and of plans with equal losses the first is returned.
  """
  ranked = [plan for plan in plans if plan.has_room and plan.is_measured]
  return min(
    ranked,
    key=lambda plan: round(plan.gap_at_equal_time, 3),
    default=plans[0],
  )


def _settings(plan: MethodPlan) -> str:
  """Returns a text such as " with H = 30"; "" if gradients are averaged."""
  schedule = plan.config.sync.named.schedule
  if plan.config.sync.named.exchanged == "gradient":
    return ""
  return f" with H = {schedule.sync_interval}"


def _hiding(plan: MethodPlan) -> str:
  """Returns a sentence that says whether exchanges hide behind inner steps.

  If they do not, the sentence may name an H with which they would. The text is
  "" for methods that average the gradients of every step.
  """
  schedule = plan.config.sync.named.schedule
  if plan.config.sync.named.exchanged == "gradient":
    return ""
  if plan.hides:
    return "Its exchanges hide behind inner steps."
  share = units.human_share(plan.rounds.utilization)
  finding = f"Inner steps take {share} of the time"
  if not schedule.overlap_steps:
    return f"{finding}, as the method waits for each exchange."
  interval = plan.rounds.hiding_interval(schedule.sync_interval)
  if interval <= schedule.sync_interval:
    return f"{finding}."
  return (
    f"{finding}. With H = {interval:,} its exchanges would hide behind inner"
    " steps, but its expected gap would be larger."
  )


def _remove_earlier(workdir: pathlib.Path) -> None:
  """Removes numbers and configs of an earlier simulation from a directory."""
  plan_names = (*METHODS, NARROW_ALLREDUCE)
  for name in (NUMBERS, *map(_config_file, plan_names)):
    (workdir / name).unlink(missing_ok=True)


def _config_file(plan_name: str) -> str:
  """Returns the file name of a planned run's config, e.g. "diloco.json"."""
  return f"{plan_name.replace(' ', '_')}.json"


def _write_config(plan: MethodPlan, workdir: pathlib.Path) -> str:
  """Writes the config of a planned run, and returns its value for --config.

  A default learning rate of AdamW is replaced by one for the size of the model.
  """
  config = plan.config
  values = config.to_mapping()
  is_unset = config.inner.learning_rate == InnerConfig.learning_rate
  if is_unset and config.inner.optimizer == "adamw":
    # A line through table 2.1 of Brown et al., 2020 (recalled).
    scale = (parameter_count(config.model.shape) / 125e6) ** (-1 / 3)
    values["inner"]["learning_rate"] = float(f"{6e-4 * scale:.2g}")
  path = workdir / _config_file(plan.name)
  write_json(path, values)
  return f"experiments/configs/default.py:{path}"


def _start(plan: MethodPlan, config: str) -> str:
  """Returns a text with the command that trains a planned run, explained."""
  cluster = plan.setup.link_costs.cluster
  sites = [cluster.site(rank).name for rank in range(cluster.num_replicas)]
  # E.g. "0 at Paris, 1 at Tokyo".
  replicas = ", ".join(f"{rank} at {name}" for rank, name in enumerate(sites))
  if plan.config.uses_mailbox:
    place = "PLACE a folder or bucket"
    needed_file = "run.secret (docs/mailbox/how_to.md)"
    flags = "--workdir=run --mailbox=PLACE --secret=run.secret --replica=N"
  else:
    place = f"HOST a machine at {sites[0]}"
    needed_file = "/shared (or docs/clusters/launch.md)"
    flags = (
      "--workdir=/shared/run --distributed --coordinator=HOST:9876 \\\n"
      f"    --num_processes={len(sites)} --process_id=N"
    )
  num_steps = plan.config.total_steps
  num_devices = plan.config.division.num_devices
  time = units.human_time(num_steps * plan.rounds.step_s)
  text = (
    f"{plan.name}, {num_steps:,} steps (--tokens) in {time}: N is {replicas}, "
    f"{place}, and every process sees {num_devices} devices and {needed_file}. "
    "Choose the text (data.glob) and a learning rate."
  )
  config_flag = shlex.quote(f"--config={config}")
  return (
    f"{textwrap.fill(text, 80)}\n\n"
    f"  python -m experiments.train \\\n    {config_flag} \\\n    {flags}\n"
  )


def _row(plan: MethodPlan, is_short: bool = False) -> dict[str, str]:
  """Returns the cells of a planned run in the table of methods, by column.

  With `is_short`, there are only the columns for which a terminal has room.
  """
  config = plan.config
  schedule = config.sync.named.schedule
  cluster = plan.setup.link_costs.cluster
  equal_time = ""
  at_worst = ""
  if plan.is_measured:
    equal_time = f"{100 * plan.gap_at_equal_time:+.1f} %"
    at_worst = f"{100 * plan.worst_gap_at_equal_time:+.1f} %"
  spare = "not known"
  if math.isfinite(plan.device_bytes):
    spare = units.human_share(plan.spare)
  row = {
    "method": plan.name,
    "expected gap": _expected_gap(plan, is_short),
    "equal time": equal_time,
    "at worst": at_worst,
    "H": f"{schedule.sync_interval}",
    "tokens a_second": _speed(plan.tokens_per_s),
    "speed up": f"{_speed(plan.speed_up)}x",
    "sent a_day": units.human_bytes(plan.bytes_per_day),
    "memory spare": spare,
  }
  if is_short:
    del row["tokens a_second"]  # The speed-up says as much.
  # A header may not break into two lines where it has an underscore.
  row = {
    name.replace("_", "\N{NO-BREAK SPACE}"): cell for name, cell in row.items()
  }
  if is_short:
    return row
  settings = (
    f"P={schedule.num_fragments}, tau={schedule.overlap_steps}, "
    f"{config.exchange.codec}, inner {config.inner.optimizer}, "
    f"outer rate {config.outer.learning_rate:g}, "
    f"stages {config.mesh.num_stages}"
  )
  return row | {
    "memory": units.human_bytes(plan.memory.total),
    "measured gap": _measured_gap(plan),
    "in steps": units.human_share(plan.rounds.utilization),
    "devices": f"{config.division.num_devices}/{cluster.num_devices(0)}",
    "settings": settings,
  }


def _expected_gap(plan: MethodPlan, is_short: bool) -> str:
  """Returns the expected gap to AllReduce's loss: "+1.9 % (-0.4 to +4.8)".

  The text is "baseline" for AllReduce. For other methods that average
  gradients, it is the measured gap, or "not known". The range is left out if
  `is_short`.
  """
  if plan.is_baseline:
    return "baseline"
  expected = plan.expected
  if expected is None:
    return "not known" if plan.gap is None else f"{100 * plan.gap.gap:+.1f} %"
  text = f"{100 * expected.gap:+.1f} %"
  if is_short:
    return text
  return f"{text} ({100 * expected.low:+.1f} to {100 * expected.high:+.1f})"


def _measured_gap(plan: MethodPlan) -> str:
  """Returns the measured gap and number of replicas: "+0.78 ± 0.07 % M=2".

  The text is "baseline" for AllReduce, or "not measured" if there is no gap.
  """
  if plan.is_baseline:
    return "baseline"
  if plan.gap is None:
    return "not measured"
  gap = units.human_gap(plan.gap.gap, plan.gap.error)
  return f"{gap} M={plan.gap.num_replicas}"
