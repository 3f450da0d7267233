"""Text as word numbers, and its batches for language models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.files import existing

END_OF_LINE = "<eos>"


class Dictionary:
    """Words and their numbers, in the order of first appearance."""

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """The number of `word`, a new one for a new word."""
        number = self.word2idx.setdefault(word, len(self.idx2word))
        if number == len(self.idx2word):
            self.idx2word.append(word)
        return number

    def __len__(self) -> int:
        return len(self.idx2word)


class Corpus:
    """`train.txt` and `test.txt` of a folder as lists of word numbers: each line's words, then <eos>.

    max_lines: read so many lines of each file at most.
    """

    def __init__(self, base_dir: str | os.PathLike, max_lines: int | None = None) -> None:
        self.dictionary = Dictionary()
        self.train = self.tokenize(os.path.join(base_dir, "train.txt"), max_lines)
        self.test = self.tokenize(os.path.join(base_dir, "test.txt"), max_lines)

    def tokenize(self, path: str | os.PathLike, max_lines: int | None = None) -> list[int]:
        """The word numbers of a UTF-8 file; new words enter the dictionary."""
        name = existing("Corpus", path)
        numbers: list[int] = []
        with open(path, encoding="utf-8") as f:
            try:
                for i, line in enumerate(f):
                    if max_lines is not None and i >= max_lines:
                        break
                    numbers.extend(self.dictionary.add_word(w) for w in [*line.split(), END_OF_LINE])
            except UnicodeDecodeError as e:
                raise ValueError(f"[Corpus] {name} expects UTF-8 text, got {e.reason}.") from None
        return numbers


def batchify(
    data: Sequence[int] | np.ndarray, batch_size: int, device: Device | None = None, dtype: str | None = "float32"
) -> np.ndarray:
    """Tokens as an array (nbatch, batch_size): each column is a run of the text; tokens that do not fill a row are left out.

    The array stays with numpy; `device` is the course's argument, and `get_batch` is what moves tokens.
    """
    rows = len(data) // batch_size
    if rows == 0:
        raise ValueError(f"[batchify] a batch of {batch_size} expects as many tokens, got {len(data)}.")
    columns = np.asarray(data[: rows * batch_size], dtype=dtype).reshape(batch_size, rows)
    return np.ascontiguousarray(columns.T)


def get_batch(
    batches: np.ndarray, i: int, bptt: int, device: Device | None = None, dtype: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rows i to i + s of `batches` (nbatch, bs) and what follows each: (s, bs) and (s * bs,), s = min(bptt, nbatch - 1 - i)."""
    length = min(bptt, len(batches) - 1 - i)
    if i < 0 or length < 1:
        raise IndexError(f"[get_batch] i expects 0 to {len(batches) - 2}, got {i}.")
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    return (
        Tensor(batches[i : i + length], **options),
        Tensor(batches[i + 1 : i + 1 + length].reshape(-1), **options),
    )
