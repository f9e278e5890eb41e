import json

import numpy as np
import pytest

from dilocox_jax.data import corpus, tokenizers
from tests import damage

TEXTS = [
  b"the cat sat on the mat\n" * 20,
  "größer als ein Häuschen\n".encode() * 20,
  b"the mat sat on the cat\n" * 20,
]
FILES = {f"{n}.txt": TEXTS[n % 3] + str(n).encode() for n in range(40)}


def words(vocab, **options):
  """A tokenizer.json that knows whole words."""
  unused = ("truncation", "padding", "normalizer", "post_processor", "decoder")
  model = {"type": "WordLevel", "vocab": vocab, "unk_token": next(iter(vocab))}
  described = {
    **{"version": "1.0", "added_tokens": [], "model": model},
    **dict.fromkeys(unused),
    "pre_tokenizer": {"type": "Whitespace"},
  }
  return json.dumps(described | options)


def from_file(tmp_path, content, *options):
  (tmp_path / "own.json").write_text(content)
  return tokenizers.from_file(str(tmp_path / "own.json"), *options)


def test_a_trained_vocabulary_gives_every_text_back():
  made = tokenizers.choose("bpe", 300)(TEXTS)
  # It has learned whatever pairs there are to learn, and stops there.
  assert 257 < made.vocab_size <= 300 and made.dtype == np.uint16
  unseen = "\ufeffZwölf Boxkämpfer,\r\n\0 日本<|endoftext|>".encode()
  for text in (*TEXTS, unseen, b""):
    (tokens,) = made.encode([text])
    assert tokens.dtype == made.dtype
    assert made.decode(tokens) == text.decode()
    assert made.end_of_text not in tokens
  assert len(made.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2
  for size in (256, tokenizers.MOST_TOKENS + 1):  # Else memory is reserved.
    with pytest.raises(ValueError, match=f"vocab_size={size} must be at least"):
      tokenizers.choose("bpe", size)(TEXTS)
  assert tokenizers.choose("bpe", 257)(TEXTS).vocab_size == 257
  assert tokenizers.choose("bpe", 300)(TEXTS).digest == made.digest
  assert tokenizers.choose("bpe", 280)(TEXTS).digest != made.digest


def test_tokens_of_a_larger_model_are_shown_and_not_left_out():
  made = tokenizers.choose("bpe", 300)(TEXTS)
  (tokens,) = made.encode([TEXTS[0]])
  text = TEXTS[0].decode()
  beyond = [made.vocab_size, 2**31 - 1]
  assert made.decode([*tokens.tolist(), *beyond]) == text + "\ufffd\ufffd"
  assert made.decode([beyond[0], *tokens.tolist()]) == "\ufffd" + text
  assert made.decode(beyond[:1]) == tokenizers.byte_tokenizer().decode([256])


def test_documents_are_joined_by_the_end_of_a_text():
  made = tokenizers.choose("bpe", 280)(TEXTS)
  joined = tokenizers.join(made, TEXTS)
  parts = np.split(joined, np.flatnonzero(joined == made.end_of_text))
  texts = [made.decode(part[part != made.end_of_text]) for part in parts]
  assert texts == [text.decode() for text in TEXTS]
  plain = tokenizers.byte_tokenizer()
  assert tokenizers.join(plain, TEXTS).tobytes() == b"\n".join(TEXTS)
  assert plain.decode(plain.encode([TEXTS[1]])[0]) == TEXTS[1].decode()


def test_a_corpus_knows_the_bytes_of_a_token_and_learns_from_training_alone():
  seen = []

  def spy(documents):
    seen.extend(documents)
    return tokenizers.choose("bpe", 300)(documents)

  plain = corpus.from_files("t", FILES, 0.3)
  made = corpus.from_files("t", FILES, 0.3, spy)
  assert made.tokenizer and made.vocab_size == made.tokenizer.vocab_size
  assert made.bytes_per_token and made.bytes_per_token > 2
  num_bytes = made.bytes_per_token * made.validation.size
  assert round(num_bytes) == plain.validation.size
  assert made.digest != plain.digest
  held_out = {FILES[p] for p in FILES if corpus.is_held_out(p, 0.3)}
  assert seen and held_out and not held_out & set(seen)


def test_a_file_is_taken_without_its_lengths_and_with_its_gaps(tmp_path):
  cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst"}
  fill = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_token": "<eos>"}
  fill |= {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
  lengths = {"truncation": cut | {"stride": 0}, "padding": fill}
  for highest in (40, 255, 300):
    content = words({"<eos>": 0, "a": 1, "b": highest}, **lengths)
    long, short = from_file(tmp_path, content).encode([b"a " * 16, b"a b"])
    assert len(long) == 16 and short.tolist() == [1, highest]
    assert long.dtype == np.min_scalar_type(highest)  # The narrowest.
    assert from_file(tmp_path, content).vocab_size == highest + 1


@pytest.mark.parametrize(
  ("vocab", "said"),
  [
    ({"<eos>": 0, "a": 1, "b": 10**6}, "has 3 tokens, but 'b' has the number"),
    ({"<eos>": 0, "a": 1, "b": 1}, "the tokens 'a' and 'b' have one number, 1"),
    ({"<eos>": 0, "a": 0, "b": 0}, "'<eos>' and 'a' have one number, 0"),
  ],
)
def test_numbers_that_are_not_those_of_the_tokens_are_damage(
  tmp_path, vocab, said
):
  with pytest.raises(ValueError, match=said) as error:
    from_file(tmp_path, words(vocab))
  assert "\n" not in str(error.value)


def splitting(pattern):
  """A tokenizer.json that splits texts by a regular expression."""
  split = {"type": "Split", "pattern": {"Regex": pattern}}
  split |= {"behavior": "Isolated", "invert": False}
  return words({"<eos>": 0, "a": 1}, pre_tokenizer=split)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x|xx)+y", r"(\s+)+$"])
def test_a_pattern_that_would_take_for_ever_is_refused(tmp_path, pattern):
  with pytest.raises(ValueError, match="takes too long for") as error:
    from_file(tmp_path, splitting(pattern))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "pattern",
  [
    # Of GPT-2, of Llama 3 and of GPT-4o.
    r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{M}]+(?i:'s)?| ?[^\s]+",
  ],
)
def test_patterns_of_published_tokenizers_are_taken(tmp_path, pattern):
  assert from_file(tmp_path, splitting(pattern)).vocab_size == 2


def test_a_damaged_tokenizer_is_one_line_or_gives_tokens(tmp_path):
  split = {"type": "Split", "pattern": {"Regex": r"\s+"}}
  replace = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}
  content = words(
    {"<eos>": 0, "a": 1, "b": 2},
    normalizer=replace,
    decoder=replace,
    pre_tokenizer=split | {"behavior": "Isolated", "invert": False},
  )

  def read(text):
    made = from_file(tmp_path, text)
    (tokens,) = made.encode([b"a b aa <eos>"])
    assert (tokens < made.vocab_size).all()
    return made.decode(tokens)

  # Half of the values are enough: the library checks most fields.
  for what, text in damage.in_fields(json.loads(content), damage.VALUES[::2]):
    damage.outcome(what, lambda text=text: read(text))
  for what, damaged in damage.in_bytes(content.encode(), flips=30):
    text = damaged.decode("latin-1")
    damage.outcome(what, lambda text=text: read(text))


def test_the_token_between_documents_can_be_named(tmp_path):
  content = words({"<eos>": 0, "a": 1, "<stop>": 2})
  usual = from_file(tmp_path, content)
  named = from_file(tmp_path, content, "<stop>")
  assert tokenizers.join(named, [b"a", b"a"]).tolist() == [1, 2, 1]
  assert usual.digest != named.digest and usual.end_of_text == 0
  with pytest.raises(ValueError, match="data.end_of_text='<end>' is no token"):
    from_file(tmp_path, content, "<end>")


@pytest.mark.parametrize("make", ["bpe", "words"])
def test_no_text_is_changed_in_silence(make, tmp_path, caplog):
  path = tmp_path / "words.json"
  path.write_text(words({"<eos>": 0, "cat": 1}))
  name = {"bpe": "bpe", "words": str(path)}[make]
  corpus.from_files("t", FILES, 0.3, tokenizers.choose(name, 300))
  assert ("documents back changed" in caplog.text) == (make != "bpe")
  with pytest.raises(ValueError, match="no text in UTF-8"):
    tokenizers.choose(name, 300)(TEXTS).encode(["größer".encode("latin-1")])


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    ("nowhere.json", None, "no such file"),
    ("bad.json", b"{}", "data.tokenizer="),
    ("binary.json", b"\xff\xfe", "binary.json: 'utf-8' codec can't decode"),
    ("endless.json", words({"a": 0}).encode(), "(none that are special) with"),
  ],
)
def test_a_bad_tokenizer_is_one_line(name, content, said, tmp_path):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match="data.tokenizer") as error:
    tokenizers.choose(str(tmp_path / name))([])
  assert said in str(error.value) and "\n" not in str(error.value)
