# pyright: reportAttributeAccessIssue=false
# Classes of protocol buffers are made at import, so pyright cannot see them.
"""Writes TensorBoard event files without TensorFlow.

An event file cannot be cut like a JSON-lines file, because a reader may have it
open. A restarted run begins a new file that says from which step on it
replaces older events. TensorBoard then hides those.
"""

import math
import os
import time
from collections.abc import Mapping

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dilocox_jax.metrics import lines


class TensorBoardWriter:
  """Writes scalars with TensorBoard's own writer."""

  def __init__(self, directory: lines.Directory, first_step: int = 0):
    """Starts an event file.

    Args:
      directory: Directory of event files; created if missing.
      first_step: TensorBoard hides older events of this step and later steps.
    """
    self._directory = os.fspath(directory)
    with lines.one_line(directory):
      self._writer = EventFileWriter(self._directory, flush_secs=10)
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(event_pb2.Event(step=first_step, session_log=log))

  def _add(self, event: event_pb2.Event) -> None:
    event.wall_time = time.time()
    with lines.one_line(self._directory):
      self._writer.add_event(event)

  def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
    """Adds one event of a step, without values that are not finite."""
    summary = summary_pb2.Summary()
    for tag, value in values.items():
      if math.isfinite(value):
        summary.value.add(tag=tag, simple_value=value)
    self._add(event_pb2.Event(step=step, summary=summary))

  def close(self) -> None:
    """Writes queued events and closes the file."""
    with lines.one_line(self._directory):
      self._writer.close()
