# pyright: reportAttributeAccessIssue=false
# The protocol buffers' classes are made at import, out of pyright's sight.
"""The bridge to TensorBoard, by its own writer: TensorFlow stays out.

An event file cannot be cut like a JSON-lines file, since a reader may hold it
open. A restart is announced instead, and the reader hides what it replaces.
"""

import math
import os
import time
from collections.abc import Mapping

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dilocox_jax.metrics import lines


class TensorBoardWriter:
  """Scalars for TensorBoard, by its own writer (no TensorFlow)."""

  def __init__(self, directory: lines.Directory, first_step: int = 0):
    """Starts an event file.

    Args:
      directory: Where event files go; created when missing.
      first_step: Older events of this step and later are hidden by the reader.
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
    """Adds one event; values that are not finite are left out."""
    summary = summary_pb2.Summary()
    for tag, value in values.items():
      if math.isfinite(value):
        summary.value.add(tag=tag, simple_value=value)
    self._add(event_pb2.Event(step=step, summary=summary))

  def close(self) -> None:
    """Writes what is queued and closes the file."""
    with lines.one_line(self._directory):
      self._writer.close()
