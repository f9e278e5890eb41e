r"""Turns text into tokens on disk, for text that is larger than memory.

  python -m experiments.prepare_data --glob='texts/**/*.jsonl.zst' \
    --tokenizer=bpe --vocab_size=8192 --workdir=tokens

The program reads plain text and JSON lines, also compressed. At its end it
prints the flags with which a run trains on the tokens. The run maps the files
into memory instead of reading them whole.
"""

import pathlib
import shlex
from collections.abc import Iterator, Sequence

from absl import app, flags
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
from experiments.runtime import command_line, workdir_flag

_MB = 10**6

flags.adopt_module_key_flags(workdir_flag)
_GLOB = flags.DEFINE_string(
  "glob",
  None,
  "Pattern of the files, e.g. 'texts/**/*.jsonl.gz'; several with ;.",
  required=True,
)
_TEXT_FIELD = flags.DEFINE_string(
  "text_field", TEXT_FIELD, "Field of a JSON line that has the text."
)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  tokenizers.BYTES,
  "bytes, bpe (trained here), or a tokenizer.json.",
)
_END_OF_TEXT = flags.DEFINE_string(
  "end_of_text",
  "",
  "Token between documents of a --tokenizer file whose own is not known.",
)
_VOCAB_SIZE = flags.DEFINE_integer(
  "vocab_size",
  8192,
  "Number of tokens of --tokenizer=bpe.",
  lower_bound=257,
  upper_bound=tokenizers.MOST_TOKENS,
)
_BPE_MB = flags.DEFINE_float(
  "bpe_mb",
  64.0,
  "Text from which --tokenizer=bpe is trained (MB, the first documents).",
  lower_bound=0.001,
)
_VALIDATION_FRACTION = flags.DEFINE_float(
  "validation_fraction",
  VALIDATION_FRACTION,
  "Share of the documents that is held out for validation.",
  lower_bound=0.0,
  upper_bound=1.0,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Writes the tokens of --glob, and prints flags with which to read them."""
  command_line.refuse_arguments(argv)
  command_line.refuse_unused(
    _VOCAB_SIZE,
    _BPE_MB,
    is_used=_TOKENIZER.value == tokenizers.BPE,
    needs="--tokenizer=bpe",
  )
  is_file = _TOKENIZER.value not in (tokenizers.BYTES, tokenizers.BPE)
  command_line.refuse_unused(
    _END_OF_TEXT, is_used=is_file, needs="--tokenizer of a file"
  )
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "prepare_data")
  refusal = f"another prepare_data writes to --workdir={workdir}: wait for it"
  with (
    work_directory.locked(workdir / ".prepare.lock", refusal),
    command_line.usage_errors(kinds=(ValueError, OSError)),
  ):
    files.remove_partial(workdir)
    _prepare(workdir)


def _prepare(workdir: pathlib.Path) -> None:
  """Writes the tokens of all files to `workdir`.

  On a terminal it shows a progress bar.
  """
  make_tokenizer = tokenizers.choose(
    _TOKENIZER.value, _VOCAB_SIZE.value, _END_OF_TEXT.value
  )
  # A new tokenizer is trained on some documents, which are read again below.
  tokenizer = make_tokenizer(_training_documents())
  total_bytes = 0
  for pattern in split_globs(_GLOB.value):
    for _, path in matching_files(pattern):
      total_bytes += path.stat().st_size
  console = Console(stderr=True)
  with progress.Progress(
    console=console, disable=not console.is_terminal
  ) as bar:
    task = bar.add_task("reading", total=total_bytes)

    def all_documents() -> Iterator[Document]:
      for path, documents in read_globs(_GLOB.value, _TEXT_FIELD.value):
        yield from documents
        bar.update(task, advance=path.stat().st_size)

    for index in shards.write(
      workdir, all_documents(), tokenizer, _VALIDATION_FRACTION.value
    ):
      num_tokens = sum(index.tokens.values())
      bar.update(task, description=f"{num_tokens:,} tokens")
  _report(shards.map_corpus(str(workdir)), workdir)


def _training_documents() -> list[bytes]:
  """Returns the documents from which --tokenizer=bpe is trained.

  They are the first ones that are not held out, up to about --bpe_mb megabytes
  in all. With another --tokenizer the list is empty.
  """
  contents: list[bytes] = []
  if _TOKENIZER.value != tokenizers.BPE:
    return contents
  bytes_left = _BPE_MB.value * _MB
  for _, documents in read_globs(_GLOB.value, _TEXT_FIELD.value):
    for document in documents:
      content = document.content
      if not content_is_held_out(content, _VALIDATION_FRACTION.value):
        contents.append(content)
        bytes_left -= len(content)
      if bytes_left <= 0:
        return contents
  return contents


def _report(corpus: Corpus, workdir: pathlib.Path) -> None:
  """Prints the sizes of the text, and the flags with which a run reads it."""
  print(
    f"{corpus.num_files:,} documents: "
    f"{len(corpus.train):,} training and {len(corpus.validation):,} validation "
    f"tokens of {corpus.vocab_size:,}, {corpus.bytes_per_token:.2f} bytes each"
  )
  glob = shlex.quote(f"--config.data.glob={workdir}")
  print(
    f"train on it: --config.data.source=shards {glob} "
    f"--config.model.vocab_size={corpus.vocab_size}"
  )


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
