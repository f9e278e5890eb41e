import sys

import pytest

from dilocox_jax.data import tokenizers
from dilocox_jax.data.text_extra import text_package


def test_a_package_that_is_there_is_imported():
  assert text_package("tokenizers", "this test").Tokenizer


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  monkeypatch.setenv("DILOCOX_JAX_CACHE", "")
  said = "data.tokenizer needs the package tokenizers: pip install"
  with pytest.raises(ValueError, match=said):
    tokenizers.trained_bpe([b"text"], 300)
