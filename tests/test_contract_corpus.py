"""Corpus, batchify and get_batch to the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle import data


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text("the cat sat \n on the mat\n\nthe end\n")
    (tmp_path / "test.txt").write_text("a cat ran\n")
    return tmp_path


def test_corpus(corpus: Path) -> None:
    c = data.Corpus(corpus)
    words = ["the", "cat", "sat", "<eos>", "on", "mat", "end", "a", "ran"]
    assert c.dictionary.idx2word == words and len(c.dictionary) == 9
    assert c.dictionary.word2idx == {w: i for i, w in enumerate(words)}
    assert c.train == [0, 1, 2, 3, 4, 0, 5, 3, 3, 0, 6, 3]
    assert c.test == [7, 1, 8, 3]
    assert c.dictionary.add_word("cat") == 1 and c.dictionary.add_word("new") == 9


def test_max_lines(corpus: Path) -> None:
    c = data.Corpus(corpus, max_lines=1)
    assert c.train == [0, 1, 2, 3] and len(c.dictionary) == 6
    assert data.Corpus(corpus, max_lines=3).train[-1] == 3


def test_a_file_of_other_bytes_is_one_sentence(corpus: Path) -> None:
    (corpus / "test.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"^\[Corpus\] .*test.txt expects UTF-8 text, got .*\.$"):
        data.Corpus(corpus)


def test_batchify_puts_runs_of_the_text_in_columns() -> None:
    batches = data.batchify(list(range(26)), 4, device=ndl.default_device(), dtype="float32")
    assert batches.shape == (6, 4) and batches.dtype == np.float32
    for column in range(4):
        assert batches[:, column].tolist() == list(range(6 * column, 6 * column + 6))
    with pytest.raises(ValueError, match=r"^\[batchify\] a batch of 4 expects as many tokens, got 3\.$"):
        data.batchify([1, 2, 3], 4)


@pytest.mark.parametrize("bptt", [1, 3, 5, 40])
def test_get_batch(bptt: int) -> None:
    batches = data.batchify(list(range(40)), 5, dtype="float32")
    for i in range(len(batches) - 1):
        s = min(bptt, len(batches) - 1 - i)
        x, y = data.get_batch(batches, i, bptt, device=ndl.default_device())
        assert x.shape == (s, 5) and y.shape == (s * 5,)
        assert x.dtype == "float32" and x.device == ndl.default_device()
        np.testing.assert_array_equal(x.numpy(), batches[i : i + s])
        np.testing.assert_array_equal(y.numpy(), batches[i + 1 : i + 1 + s].flatten())
    for i in (-1, len(batches) - 1):
        with pytest.raises(IndexError, match=rf"^\[get_batch\] i expects 0 to 6, got {i}\.$"):
            data.get_batch(batches, i, bptt)
