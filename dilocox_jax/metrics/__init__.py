"""Files that a run writes: rows, timing, run record.

Each module writes one kind of file of the run directory. The names below are
those that other packages use most.
"""

from dilocox_jax.metrics.lines import RecordError as RecordError
from dilocox_jax.metrics.lines import read_rows as read_rows
from dilocox_jax.metrics.lines import write_json as write_json
from dilocox_jax.metrics.recorder import Evaluation as Evaluation
from dilocox_jax.metrics.recorder import Recorder as Recorder
from dilocox_jax.metrics.recorder import RoundRow as RoundRow
from dilocox_jax.metrics.recorder import Timing as Timing
from dilocox_jax.metrics.recorder import from_json as from_json
from dilocox_jax.metrics.work_directory import (
  write_run_record as write_run_record,
)
