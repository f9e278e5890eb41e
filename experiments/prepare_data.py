r"""Turns text into tokens on disk, for text that is larger than memory.

  python -m experiments.prepare_data --glob='texts/**/*.jsonl.zst' \
    --tokenizer=bpe --vocab_size=8192 --workdir=tokens

Reads plain text and JSON lines, also compressed. A run then trains on it
with --config.data.source=shards --config.data.glob=tokens, and maps the files
instead of reading them. The same command again goes on where it was stopped.
"""

import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags
from rich import progress
from rich.console import Console

from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.corpus import VALIDATION_FRACTION
from dilocox_jax.data.documents import (
  DAMAGED,
  TEXT_FIELD,
  Document,
  in_parts,
  matching_files,
  read_documents,
  sampled,
  split_globs,
)
from dilocox_jax.data.huggingface import TRAIN_SPLIT, read_dataset
from experiments.runtime import command_line, file_lock

_MB = 10**6


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  text = "Pattern of the files, e.g. 'texts/**/*.jsonl.gz'; several with ;."
  flags.DEFINE_string("glob", None, text, required=True)
  text = "text_files, or huggingface, whose --glob may be a data set's name."
  kinds = ["text_files", "huggingface"]
  flags.DEFINE_enum("source", kinds[0], kinds, text)
  text = "Split of a data set of --source=huggingface."
  flags.DEFINE_string("split", TRAIN_SPLIT, text)
  text = "Documents from which each next one is drawn; 0 keeps the order."
  flags.DEFINE_integer("shuffle_buffer", 0, text, lower_bound=0)
  text = "Documents to write at most of each glob; 0 writes all."
  flags.DEFINE_integer("max_documents", 0, text, lower_bound=0)
  text = "Seed of --shuffle_buffer."
  flags.DEFINE_integer("seed", 0, text, lower_bound=0)
  text = "Field of a JSON line or a row that has the text."
  flags.DEFINE_string("text_field", TEXT_FIELD, text)
  text = (
    "bytes, bpe (trained here), a tokenizer.json, or SentencePiece's .model."
  )
  flags.DEFINE_string("tokenizer", tokenizers.BYTES, text)
  text = "Token between documents of a --tokenizer file whose own is not known."
  flags.DEFINE_string("end_of_text", "", text)
  text = "Number of tokens of --tokenizer=bpe."
  flags.DEFINE_integer("vocab_size", 8192, text, lower_bound=257)
  text = "Text from which --tokenizer=bpe is trained (MB, the first documents)."
  flags.DEFINE_float("bpe_mb", 64.0, text, lower_bound=0.001)
  text = "Share of the documents that is held out for validation."
  flags.DEFINE_float("validation_fraction", VALIDATION_FRACTION, text)
  text = "What to do with a damaged line or file: stop, or skip and count it."
  flags.DEFINE_enum("damaged", "error", DAMAGED, text)


def main(values: flags.FlagValues) -> None:
  """Writes the tokens and prints what a run needs to read them."""
  is_bpe = values.tokenizer == "bpe"
  is_file = values.tokenizer not in (tokenizers.BYTES, tokenizers.BPE)
  command_line.refuse_unused(
    values,
    [
      ("vocab_size", is_bpe, "--tokenizer=bpe"),
      ("bpe_mb", is_bpe, "--tokenizer=bpe"),
      ("end_of_text", is_file, "--tokenizer of a file"),
      ("split", values.source == "huggingface", "--source=huggingface"),
      ("seed", values.shuffle_buffer > 0, "--shuffle_buffer"),
    ],
  )
  workdir = command_line.writable(values.workdir, "prepare_data")
  refusal = f"another prepare_data writes to --workdir={workdir}: wait for it"
  with (
    file_lock.held(workdir / ".prepare.lock", refusal),
    command_line.usage_errors(kinds=(ValueError, OSError)),
  ):
    _prepare(values, workdir)


def _prepare(values: flags.FlagValues, workdir: pathlib.Path) -> None:
  is_dataset = values.source == "huggingface"
  globs = [] if is_dataset else split_globs(values.glob)
  files = {glob: matching_files(glob) for glob in globs}
  skipped: list[ValueError] = []
  on_damage = skipped.append if values.damaged == "skip" else None

  def of_glob(glob: str, done: Callable[[int], None]) -> Iterator[Document]:
    field = values.text_field
    if is_dataset:
      yield from read_dataset(glob, field, values.split, on_damage)
    for name, path in files.get(glob, ()):
      yield from read_documents(name, path, field, on_damage)
      done(path.stat().st_size)

  def documents(done: Callable[[int], None]) -> Iterator[Document]:
    def drawn(glob: str) -> Iterator[Document]:
      sizes = values.shuffle_buffer, values.max_documents
      return sampled(of_glob(glob, done), *sizes, values.seed)

    return in_parts(values.glob, drawn)

  first = _first(documents(lambda size: None), values)
  make = tokenizers.choose(
    values.tokenizer, values.vocab_size, values.end_of_text
  )
  tokenizer = make(first)
  skipped.clear()  # What was read for the tokenizer is read once more.
  console = Console(stderr=True)
  with progress.Progress(
    progress.TextColumn("[bold]{task.description}"),
    progress.BarColumn(),
    progress.DownloadColumn(),
    progress.TimeElapsedColumn(),
    progress.TimeRemainingColumn(),
    progress.TextColumn("left"),
    console=console,
    disable=not console.is_terminal,
  ) as bar:
    found = itertools.chain(*files.values())
    total = sum(path.stat().st_size for _, path in found) or None
    task = bar.add_task("reading", total=total)
    read = documents(lambda size: bar.update(task, advance=size))
    fraction = values.validation_fraction
    source = _source(values, files)
    for written in shards.write(workdir, read, tokenizer, fraction, source):
      bar.update(task, description=f"{sum(written.tokens.values()):,} tokens")
  for error in skipped:
    print(f"skipped: {error}")
  _report(shards.map_corpus(str(workdir)), workdir, len(skipped))


def _source(values: flags.FlagValues, files: dict) -> dict[str, Any]:
  """Returns which documents are read, and in which order."""
  names = "glob source split shuffle_buffer max_documents seed text_field"
  return {
    **{name: getattr(values, name) for name in names.split()},
    "files": [name for found in files.values() for name, _ in found],
  }


def _first(documents: Iterator[Document], values) -> list[bytes]:
  """Returns the documents from which a tokenizer is trained, if it is."""
  found: list[bytes] = []
  if values.tokenizer != tokenizers.BPE:
    return found
  left = values.bpe_mb * _MB
  for document in documents:
    if not shards.is_validation(document, values.validation_fraction):
      found.append(document.content)
      left -= len(document.content)
    if left <= 0:
      break
  return found


def _report(corpus, workdir: pathlib.Path, num_skipped: int) -> None:
  print(
    f"{corpus.num_files:,} documents, {num_skipped:,} skipped: "
    f"{len(corpus.train):,} training and {len(corpus.validation):,} validation "
    f"tokens of {corpus.vocab_size:,}, {corpus.bytes_per_token:.2f} bytes each"
  )
  print(
    f"train on it: --config.data.source=shards --config.data.glob={workdir} "
    f"--config.model.vocab_size={corpus.vocab_size}"
  )


if __name__ == "__main__":
  command_line.main(main, define_flags)
