r"""Turns text into tokens on disk, for text that is larger than memory.

  python -m experiments.prepare_data --glob='texts/**/*.jsonl.zst' \
    --tokenizer=bpe --vocab_size=8192 --workdir=tokens

Reads plain text and JSON lines, also compressed. A run then trains on it
with --config.data.source=shards --config.data.glob=tokens, and maps the files
instead of reading them.
"""

import pathlib
from collections.abc import Iterator

from absl import flags
from rich import progress
from rich.console import Console

from dilocox_jax import files
from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.corpus import (
  VALIDATION_FRACTION,
  Corpus,
  content_is_held_out,
)
from dilocox_jax.data.documents import (
  TEXT_FIELD,
  Document,
  matching_files,
  read_globs,
  split_globs,
)
from dilocox_jax.metrics import work_directory
from experiments.runtime import command_line

_MB = 10**6


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  text = "Pattern of the files, e.g. 'texts/**/*.jsonl.gz'; several with ;."
  flags.DEFINE_string("glob", None, text, required=True)
  text = "Field of a JSON line that has the text."
  flags.DEFINE_string("text_field", TEXT_FIELD, text)
  text = "bytes, bpe (trained here), or a tokenizer.json."
  flags.DEFINE_string("tokenizer", tokenizers.BYTES, text)
  text = "Token between documents of a --tokenizer file whose own is not known."
  flags.DEFINE_string("end_of_text", "", text)
  text = "Number of tokens of --tokenizer=bpe."
  flags.DEFINE_integer("vocab_size", 8192, text, 257, tokenizers.MOST_TOKENS)
  text = "Text from which --tokenizer=bpe is trained (MB, the first documents)."
  flags.DEFINE_float("bpe_mb", 64.0, text, lower_bound=0.001)
  text = "Share of the documents that is held out for validation."
  share = VALIDATION_FRACTION
  flags.DEFINE_float("validation_fraction", share, text, 0.0, 1.0)


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
    ],
  )
  workdir = command_line.writable(values.workdir, "prepare_data")
  refusal = f"another prepare_data writes to --workdir={workdir}: wait for it"
  with (
    work_directory.locked(workdir / ".prepare.lock", refusal),
    command_line.usage_errors(kinds=(ValueError, OSError)),
  ):
    files.remove_partial(workdir)
    _prepare(values, workdir)


def _prepare(values: flags.FlagValues, workdir: pathlib.Path) -> None:
  make = tokenizers.choose(
    values.tokenizer, values.vocab_size, values.end_of_text
  )
  tokenizer = make(_first(values))
  found = [f for one in split_globs(values.glob) for f in matching_files(one)]
  err = Console(stderr=True)
  with progress.Progress(console=err, disable=not err.is_terminal) as bar:
    total = sum(path.stat().st_size for _, path in found)
    task = bar.add_task("reading", total=total)

    def documents() -> Iterator[Document]:
      for path, read in read_globs(values.glob, values.text_field):
        yield from read
        bar.update(task, advance=path.stat().st_size)

    fraction = values.validation_fraction
    for written in shards.write(workdir, documents(), tokenizer, fraction):
      bar.update(task, description=f"{sum(written.tokens.values()):,} tokens")
  _report(shards.map_corpus(str(workdir)), workdir)


def _first(values: flags.FlagValues) -> list[bytes]:
  """Returns the documents from which a tokenizer is trained, if it is."""
  found: list[bytes] = []
  if values.tokenizer != tokenizers.BPE:
    return found
  left = values.bpe_mb * _MB
  for _, documents in read_globs(values.glob, values.text_field):
    for document in documents:
      content, fraction = document.content, values.validation_fraction
      if not content_is_held_out(content, fraction):
        found.append(content)
        left -= len(content)
      if left <= 0:
        return found
  return found


def _report(corpus: Corpus, workdir: pathlib.Path) -> None:
  print(
    f"{corpus.num_files:,} documents: "
    f"{len(corpus.train):,} training and {len(corpus.validation):,} validation "
    f"tokens of {corpus.vocab_size:,}, {corpus.bytes_per_token:.2f} bytes each"
  )
  print(
    f"train on it: --config.data.source=shards --config.data.glob={workdir} "
    f"--config.model.vocab_size={corpus.vocab_size}"
  )


if __name__ == "__main__":
  command_line.main(main, define_flags)
