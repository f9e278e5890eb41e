"""Passes the rows of a run to other places than its files, e.g. TensorBoard.

A `RunLog` gets each row that the run writes to `metrics.jsonl`, `timing.jsonl`
or `mailbox.jsonl`. The argument `log` of `dilocox_jax.train` takes such a log,
the name of one, or a function of a row. The flag `--log` takes a name.
`register_log` adds a name.
"""

import contextlib
import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import did_you_mean, in_front, require
from dilocox_jax.plan.choices import (
  Lazy,
  Registry,
  check_lazy,
  loaded,
  parts_of,
)

Row = Mapping[str, Any]  # A row of a run by field, as JSON values.


@dataclasses.dataclass(frozen=True)
class LogStart:
  """Facts about a run that its log gets before the first row.

  Attributes:
    workdir: The run directory. A log may make a folder of its own there.
    config: All fields of the config, nested by section.
    resume_step: Inner step of the checkpoint from which the run continues; None
      for a new run. A continued run writes the rows of later steps again.
  """

  workdir: pathlib.Path
  config: Mapping[str, Any]
  resume_step: int | None


class RunLog:
  """Receives every row that a run writes; base class of all logs.

  Only the process that writes the files calls the methods. The devices may work
  on the next round meanwhile. An error of a method ends the run, which can
  continue from its last checkpoint.
  """

  def open(self, start: LogStart) -> None:
    """Prepares the log for rows. A run calls this before the first row.

    If it raises an error, `close` is not called.
    """

  def write(self, row: Row) -> None:
    """Receives a row. A run calls this once for each row, in order.

    Args:
      row: A line of metrics.jsonl, timing.jsonl or mailbox.jsonl as a mapping.
        Its "kind" is "round", "evaluation", "final", "timing" or "mailbox", and
        its "step" is the number of finished inner steps. A number that is not
        finite is None.
    """
    raise NotImplementedError

  def close(self, error: BaseException | None) -> None:
    """Ends the log, after the last row or after an error.

    Args:
      error: The error that ends the run; None after the last row.
    """


class FunctionLog(RunLog):
  """Passes each row to a function."""

  def __init__(self, function: Callable[[Row], Any]):
    """Stores the function, which takes a row."""
    self._function = function

  def write(self, row: Row) -> None:
    """Calls the function with a row."""
    self._function(row)


class SeveralLogs(RunLog):
  """Passes each row to several logs, in order."""

  def __init__(self, logs: list[RunLog]):
    """Stores the logs."""
    self._logs = logs

  def open(self, start: LogStart) -> None:
    """Opens all logs. If this fails, those that are open are closed."""
    are_open: list[RunLog] = []
    try:
      for log in self._logs:
        log.open(start)
        are_open.append(log)
    except BaseException as error:
      SeveralLogs(are_open).close(error)
      raise

  def write(self, row: Row) -> None:
    """Passes a row to all logs."""
    for log in self._logs:
      log.write(row)

  def close(self, error: BaseException | None) -> None:
    """Closes all logs, in order, also if some of them raise errors.

    The last of these errors is raised, with the others as its context.
    """
    with contextlib.ExitStack() as stack:
      # A stack calls first what was added last.
      for log in reversed(self._logs):
        stack.callback(log.close, error)


# The class of each log, or where to import it from, by name of the log.
LOGS: Registry[Lazy] = Registry("log")


def register_log(name: str, log: Lazy) -> None:
  """Registers a log under a name.

  The argument `log` of `dilocox_jax.train` and the flag `--log` take the name.

  Args:
    name: The name, e.g. "tensorboard".
    log: A class that is derived from `RunLog`, or a function that returns a
      `RunLog`. A text "module:name" stands for either, and is imported when the
      log is used. The arguments of the class or function are the log's
      settings.

  Raises:
    ValueError: If the name is taken or is no identifier, or if `log` is none of
      these.
  """
  check_lazy(f"log {name!r}", log)
  if isinstance(log, type):
    require(
      issubclass(log, RunLog),
      f"log {name!r}: {log.__name__} must be derived from dilocox_jax.RunLog",
    )
  LOGS.add(name, log)


def as_log(log: Any) -> RunLog:
  """Returns the log that a user asks for.

  Args:
    log: A `RunLog`; a function that takes a row; an object with a method
      `write` that takes a row; or names of logs, joined by "+", e.g.
      "tensorboard+wandb(project=links)".

  Raises:
    TypeError: If the value is none of these, or is a class.
    ValueError: One line, if a text has another form, if a name or a setting is
      unknown, or if the package of a log is not installed.
  """
  if isinstance(log, RunLog):
    return log
  if isinstance(log, str):
    return named_logs(log)
  if isinstance(log, type):
    raise TypeError(
      f"log={log.__name__} is a class: pass an object of it, {log.__name__}()"
    )
  if callable(getattr(log, "write", None)):
    return FunctionLog(log.write)
  if callable(log):
    return FunctionLog(log)
  raise TypeError(
    f"log={log!r} must be a function of a row, an object with a method "
    f"write(row), or one of the names {', '.join(LOGS)}"
  )


def named_logs(text: str) -> RunLog:
  """Builds the logs that a text names, e.g. "tensorboard+wandb(project=links)".

  Raises:
    ValueError: One line, if the text has another form, if a name or a setting
      is unknown, or if the package of a log is not installed.
  """
  try:
    parts = parts_of(text)
  except ValueError as error:
    raise ValueError(
      f"log={text!r} must be written like 'tensorboard' or "
      "'tensorboard+wandb(project=links)'"
    ) from error
  logs = [_named_log(name, settings) for name, settings in parts]
  if len(logs) == 1:
    return logs[0]
  return SeveralLogs(logs)


def _named_log(name: str, settings: Mapping[str, Any]) -> RunLog:
  """Builds a log; raises ValueError for an unknown name or setting."""
  message = f"log={name!r} must be one of {', '.join(LOGS)}"
  # The suggestion is "did you mean ...", or "have: ..." with all names. The
  # message already lists all names, so it needs only the first kind.
  suggestion = did_you_mean(name, LOGS)
  if suggestion.startswith("did"):
    message += f": {suggestion}"
  require(name in LOGS, message)
  with in_front(f"log {name}: "):
    build = loaded(LOGS[name])
    known_settings = list(inspect.signature(build).parameters)
    for setting in settings:
      require(
        setting in known_settings,
        f"it has no setting {setting} (it has: "
        f"{', '.join(known_settings) or 'none'})",
      )
    return build(**settings)


@contextlib.contextmanager
def opened(log: RunLog | None, start: LogStart) -> Iterator[None]:
  """Opens a log, and closes it after the block, even if the block raises.

  If the log is None, nothing is done.
  """
  if log is None:
    yield
    return
  log.open(start)
  try:
    yield
  except BaseException as error:
    log.close(error)
    raise
  log.close(None)


def scalars(row: Row) -> dict[str, float]:
  """Returns the numbers of a row, by name of the curve to which each belongs.

  Examples of names: "round/loss", "round/loss_per_replica/0",
  "round/drift/fragment_3/cosine", "evaluation/outer_loss" (also of the final
  evaluation), "timing/compile/wall_s". Texts, bools, None and the row's step
  are left out.
  """
  kind = row["kind"]
  prefix = "evaluation" if kind == "final" else kind
  if kind == "timing":
    prefix += f"/{row['event']}"
  fields = {name: value for name, value in row.items() if name != "step"}
  return dict(_numbers(prefix, fields))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
  """Yields the numbers inside a JSON value, each with its name.

  `name` is the name of the whole value. The names of the numbers begin with it.
  The name of an entry of a list has the entry's index, or "fragment_3" if the
  entry is a mapping with the key "fragment".
  """
  if isinstance(value, Mapping):
    for key, item in value.items():
      yield from _numbers(f"{name}/{key}", item)
  elif isinstance(value, list):
    for index, item in enumerate(value):
      if isinstance(item, Mapping) and "fragment" in item:
        fields = dict(item)
        fragment = fields.pop("fragment")
        yield from _numbers(f"{name}/fragment_{fragment}", fields)
      else:
        yield from _numbers(f"{name}/{index}", item)
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield name, value


for _name, _import_path in {
  "tensorboard": "dilocox_jax.metrics.tensorboard_log:TensorBoardLog",
  "wandb": "dilocox_jax.metrics.wandb_log:WandbLog",
}.items():
  register_log(_name, _import_path)
