"""Sequences of their own lengths: packed, run through recurrent layers, and padded again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def packed(x: Tensor, lengths: Tensor) -> PackedSequence:
    """An input that is packed already, as collate functions give it."""
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


class SentenceClassifier(nn.Module):
    """The last states of both directions of the upper layer of an LSTM. Ids (N, L) and their lengths in any order."""

    def __init__(self, words: int = 30, dim: int = 8, hidden: int = 10, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, dim, padding_idx=0)
        self.rnn = nn.LSTM(dim, hidden, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.fc, self.dropout = nn.Linear(2 * hidden, classes), nn.Dropout(0.3)

    def forward(self, text: Tensor, text_lengths: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(text))
        rows = pack_padded_sequence(embedded, text_lengths.to("cpu"), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(rows)
        hidden = self.dropout(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1))
        return self.fc(hidden)


class Tagger(nn.Module):
    """A score for each word, padded to the length of the input. Ids (N, L), lengths."""

    def __init__(self, words: int = 30, dim: int = 8, hidden: int = 6, tags: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, tags)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        total = ids.size(1)
        x = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.lstm(x)
        y, seen = pad_packed_sequence(y, batch_first=True, total_length=total, padding_value=-1.0)
        return F.log_softmax(self.out(y), dim=-1), seen


class SortedEncoder(nn.Module):
    """The encoder of the usual seq2seq tutorial: time first, lengths sorted by the loader, directions summed. (L, N)."""

    def __init__(self, words: int = 25, hidden: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.embedding = nn.Embedding(words, hidden)
        self.gru = nn.GRU(hidden, hidden, layers, bidirectional=True)

    def forward(self, input_seq: Tensor, input_lengths: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(input_seq)
        rows = nn.utils.rnn.pack_padded_sequence(embedded, input_lengths)
        outputs, hidden = self.gru(rows, hidden)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs)
        outputs = outputs[:, :, : self.hidden_size] + outputs[:, :, self.hidden_size :]
        return outputs, hidden


class HandSorted(nn.Module):
    """Sorts the batch by length itself, runs, and puts the rows back, as before enforce_sorted. (N, L, 5), lengths."""

    def __init__(self, dim: int = 5, hidden: int = 7) -> None:
        super().__init__()
        self.rnn = nn.LSTM(dim, hidden, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths, order = lengths.sort(0, descending=True)
        _, back = order.sort(0)
        y, (h, _) = self.rnn(pack_padded_sequence(x[order], lengths, batch_first=True))
        y, _ = pad_packed_sequence(y, batch_first=True)
        return y[back], h[-1].index_select(0, back)


class AttentivePooling(nn.Module):
    """Hierarchical attention's sentence encoder (Yang et al. 2016): scores of padding are masked. (N, L, 6), lengths."""

    def __init__(self, dim: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.gru = nn.GRU(dim, hidden, bidirectional=True, batch_first=True)
        self.attention, self.context = nn.Linear(2 * hidden, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        y, lens = pad_packed_sequence(y, batch_first=True)
        score = self.context(torch.tanh(self.attention(y))).squeeze(2)
        mask = torch.arange(y.size(1))[None, :] >= lens[:, None]
        weight = score.masked_fill(mask, float("-inf")).softmax(dim=1)
        return (y * weight.unsqueeze(2)).sum(1), weight


class PackedInput(nn.Module):
    """Takes the PackedSequence of a collate function and gives one back, with the state."""

    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(dim, hidden, 2, batch_first=True)

    def forward(self, rows: PackedSequence) -> tuple[PackedSequence, Tensor]:
        return self.rnn(rows)


class PackedHead(nn.Module):
    """A dense layer on the data of packed rows, between two recurrent layers, as TimeDistributed wrappers do."""

    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(dim, hidden), nn.RNN(hidden, 5, nonlinearity="relu", bidirectional=True)
        self.dense = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        rows = pack_padded_sequence(x, lengths, enforce_sorted=False)
        rows, _ = self.first(rows)
        rows = PackedSequence(self.dense(rows.data), rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices)
        rows, h = self.second(rows)
        return pad_packed_sequence(rows)[0], h


class GivenState(nn.Module):
    """Rows packed with a state that another network made of what is known of the speaker. (N, L, 4), (N, 3), lengths."""

    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.start_h, self.start_c = nn.Linear(3, 2 * hidden), nn.Linear(3, 2 * hidden)
        self.rnn, self.hidden = nn.LSTM(dim, hidden, num_layers=2, batch_first=True), hidden

    def forward(self, x: Tensor, speaker: Tensor, lengths: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = self.start_h(speaker).view(-1, 2, self.hidden).transpose(0, 1).contiguous()
        c = self.start_c(speaker).view(-1, 2, self.hidden).transpose(0, 1).contiguous()
        rows, state = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), (h, c))
        return pad_packed_sequence(rows, batch_first=True)[0], state


class Listener(nn.Module):
    """Listen, attend and spell (Chan et al. 2016): a pyramid that halves time between layers, lengths halved with it."""

    def __init__(self, dim: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.bottom = nn.LSTM(dim, hidden, bidirectional=True, batch_first=True)
        self.top = nn.LSTM(4 * hidden, hidden, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.bottom(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        y, lengths = pad_packed_sequence(y, batch_first=True, total_length=x.size(1))
        y = y.contiguous().view(y.size(0), y.size(1) // 2, 2 * y.size(2))
        lengths = torch.div(lengths, 2, rounding_mode="floor").clamp(min=1)
        y, _ = self.top(pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(y, batch_first=True)


class LastRelevant(nn.Module):
    """The last step of each row gathered from an unpacked run, as models without packing do. (N, L, 4), lengths."""

    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(dim, hidden, batch_first=True), nn.Linear(hidden, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        index = (lengths - 1).view(-1, 1, 1).expand(-1, 1, y.size(2))
        return self.head(y.gather(1, index).squeeze(1))


class Captioner(nn.Module):
    """Show, attend and tell (Xu et al. 2015): rows leave the batch when their caption ends. Features, ids, lengths sorted."""

    def __init__(self, words: int = 20, dim: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(words, dim), nn.LSTMCell(2 * dim, hidden)
        self.init_h, self.init_c = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.score, self.fc, self.words = nn.Linear(dim + hidden, 1), nn.Linear(hidden, words), words

    def forward(self, features: Tensor, captions: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(captions)
        h, c = (f(features.mean(dim=1)) for f in (self.init_h, self.init_c))
        decode_lengths = (lengths - 1).tolist()
        predictions = torch.zeros(features.size(0), max(decode_lengths), self.words)
        for t in range(max(decode_lengths)):
            n = sum([length > t for length in decode_lengths])
            state = h[:n].unsqueeze(1).expand(-1, features.size(1), -1)
            alpha = self.score(torch.cat([features[:n], state], dim=2)).softmax(dim=1)
            seen = (features[:n] * alpha).sum(dim=1)
            h, c = self.cell(torch.cat([embedded[:n, t], seen], dim=1), (h[:n], c[:n]))
            predictions[:n, t] = self.fc(h)
        return predictions
