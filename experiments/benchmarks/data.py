"""The bench `data`: tokens a second that text and streams give by themselves.

Reading turns text into tokens once; streams then give batches again and again,
from memory or from shards on disk. A run is never held up by its data if its
stream is many times faster than its inner steps. Rates are absolute and belong
to the machine, and the pages of the shards are in its memory.
"""

import pathlib
import statistics
import tempfile
import time

from dilocox_jax.config import RunConfig
from dilocox_jax.data import shards, sources
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.documents import Document
from dilocox_jax.data.tokenizers import byte_tokenizer
from dilocox_jax.training import run_text
from experiments.benchmarks import inner
from experiments.benchmarks.record import keep_record, spread, spread_table

STEPS = 50  # Inner steps that are taken at once.
SHARDS_TOKENS_PER_S = 2e6
TIMES_THE_MODEL = 10


def _stream_rates(config: RunConfig, text: Corpus, repeats: int) -> list[float]:
  """Returns tokens a second of the batches of all replicas."""
  streams = run_text.streams(config, text)
  rates = []
  for number in range(repeats + 1):
    start_s = time.perf_counter()
    batches = streams.take(STEPS)
    if number:  # The first one warms up.
      rates.append(batches[..., 1:].size / (time.perf_counter() - start_s))
  return rates


def _shards_of(text: Corpus, folder: pathlib.Path) -> Corpus:
  """Writes the training tokens of a text, which are bytes, as shards."""
  size = len(text.train) // 200
  pieces = (
    Document(str(n), text.train[n * size : (n + 1) * size].tobytes())
    for n in range(200)
  )
  for _ in shards.write(folder, pieces, byte_tokenizer(), 0.05):
    pass
  return shards.map_corpus(str(folder))


def run_data(config: RunConfig, workdir: pathlib.Path, repeats: int) -> dict:
  """Measures, writes bench_data.json and prints a table.

  Args:
    config: Config of the run, for sizes, replicas and workers. The text is the
      embedded one, in bytes.
    workdir: Directory of the file.
    repeats: Measurements of each rate.

  Returns:
    The values of the file by name.
  """
  model_rate = inner.measure_steps(config, repeats)["tokens_per_s"]
  start_s = time.perf_counter()
  text = sources.load_corpus("stdlib")
  read_rate = len(text.train) / (time.perf_counter() - start_s)
  with tempfile.TemporaryDirectory() as folder:
    mapped = _shards_of(text, pathlib.Path(folder))
    rates = {
      "streams from memory": _stream_rates(config, text, repeats),
      "streams from shards": _stream_rates(config, mapped, repeats),
    }
  rows = {
    name: spread(values, SHARDS_TOKENS_PER_S, is_least=True)
    for name, values in rates.items()
  }
  shards_rate = statistics.median(rates["streams from shards"])
  times = shards_rate / model_rate
  rows["streams from shards, times the model"] = spread(
    [times], TIMES_THE_MODEL, is_least=True
  )
  title = (
    f"Tokens a second; {config.model.preset} trains {model_rate:,.0f}, and "
    f"text is read at {read_rate:,.0f}"
  )
  keep_record(
    workdir,
    "data",
    {
      "rates": rows,
      "model_tokens_per_s": model_rate,
      "read_text_tokens_per_s": read_rate,
      "num_workers": config.data.num_workers,
      "label": f"measured: median of {repeats} times {STEPS} inner steps",
    },
    spread_table(title, "at least", rows, ",.0f"),
  )
  return rows
