"""Decoders of `transformers` with a static cache of keys and values that compiled plans write in place."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from needle.autograd import Unsupported

from ..capture.guard import patched
from ..convert import compile as compiled

PROMPT = 7  # tokens of the example: no other size of a model


class WrittenLayer(CacheLayerMixin):
    """Keys and values of one layer, buffers of a `CachedStep`, written from a position on that is an input."""

    is_compileable = False
    is_sliding = False  # which keys a window leaves out, the mask says
    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor  # the numbers of the tokens that the step is called with

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.is_initialized = length, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> Any:
        return self.position

    def get_max_length(self) -> int:
        return self.length


class CachedStep(nn.Module):
    """The model's logits for its last token, after `position` tokens whose keys and values are buffers."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.zeros(batch, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
                raise Unsupported(
                    f"[Decoder] {type(model).__name__} expects to keep keys and values alone, got a {type(layer).__name__}."
                )
        self.layers: list[Any] = [WrittenLayer(length) for _ in cache.layers]
        for i, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                t = getattr(layer, name)
                self.register_buffer(f"{name}_{i}", t.new_zeros(*t.shape[:2], length, t.shape[3]))
        known = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in known
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, start: torch.Tensor) -> Any:
        place = torch.arange(ids.shape[1]) + start
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
            layer.position, layer.place = start, place
        options = self.options | ({"position_ids": positions} if self.takes_positions else {})
        cache = Cache(layers=self.layers)
        result = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        return result.logits[:, -1]


class Seen(Cache):
    """What `generate` asks of a cache that lies in a plan: how many tokens it holds."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(layers=[])
        self.decoder = decoder

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.decoder.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.decoder.length

    def reset(self) -> None:
        self.decoder.reset()

    def crop(self, max_length: int) -> None:
        self.decoder.seen = min(self.decoder.seen, max_length if max_length >= 0 else self.decoder.seen + max_length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise Unsupported("[Decoder] generate expects greedy search or sampling, got a search over beams.")


class Decoder:
    """A causal language model of `transformers`, compiled with a cache for `length` tokens of `batch` texts.

    decoder(ids): logits (batch, vocabulary) of the token after `ids` (batch, n) and what it has seen before, in the same kind
    of arrays; `reset()` forgets that. `generate(ids, ...)` is transformers' own. The prompt's length and the single token have
    a plan each; both write keys and values where they are. `net`: the converted step, (ids, mask of all keys, positions,
    tokens seen) -> logits; `exe`: compiled. options: of `torch2needle.compile`.
    """

    def __init__(self, model: Any, length: int, batch: int = 1, **options: Any) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise Unsupported("[Decoder] expects a decoder alone, got a model with an encoder.")
        if length < PROMPT:
            raise ValueError(f"[Decoder] length expects at least {PROMPT} tokens, got {length}.")
        self.model, self.length, self.batch, self.seen = model, length, batch, 0
        self._mask = np.zeros((batch, length), "int64")
        step = CachedStep(model, batch, length).eval()
        ids, mask = torch.zeros(batch, PROMPT, dtype=torch.long), torch.zeros(batch, length, dtype=torch.long)
        mask[:, :PROMPT] = 1
        example = (ids, mask, torch.arange(PROMPT).expand(batch, -1), torch.tensor(0))
        self.exe = compiled(step, example, **options)
        self.net = self.exe.model

    def reset(self) -> None:
        self.seen = 0

    def __call__(self, ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        """attention_mask: (batch, tokens seen and new), 0 for padding; position_ids: (batch, n), by default as they come."""
        tokens, before = np.asarray(ids), self.seen
        if tokens.ndim != 2 or len(tokens) != self.batch or not tokens.size:
            raise ValueError(f"[Decoder] ids expect shape ({self.batch}, n > 0), got {tuple(tokens.shape)}.")
        after = before + tokens.shape[1]
        if after > self.length:
            raise ValueError(f"[Decoder] expects at most {self.length} tokens, got {after}.")
        self._mask[:, before:after] = 1
        self._mask[:, after:] = 0
        if attention_mask is not None:
            mask = np.asarray(attention_mask)
            if mask.shape != (self.batch, after):
                raise ValueError(f"[Decoder] attention_mask expects shape {(self.batch, after)}, got {mask.shape}.")
            self._mask[:, :after] = mask
        places = np.arange(before, after) if position_ids is None else np.asarray(position_ids)
        positions = np.ascontiguousarray(np.broadcast_to(places, tokens.shape), "int64")
        logits = self.exe(tokens.astype("int64", copy=False), self._mask, positions, np.asarray(before, "int64"))
        self.seen = after
        return torch.from_numpy(logits) if isinstance(ids, torch.Tensor) else logits

    def generate(self, inputs: torch.Tensor, **options: Any) -> Any:
        """As `model.generate`, on the compiled step; what was seen before is forgotten."""
        self.reset()
        forward = functools.wraps(self.model.forward)(functools.partial(self._forward))
        with patched([(vars(self.model), "forward", forward)]):
            return self.model.generate(inputs, past_key_values=Seen(self), **options)

    def _forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        wanted = [
            k
            for k in ("inputs_embeds", "output_attentions", "output_hidden_states")
            if options.get(k) not in (None, False)
        ]
        if wanted or input_ids is None:
            raise Unsupported(
                f"[Decoder] generate expects ids and gives logits alone, got {', '.join(wanted) or 'no ids'}."
            )
        logits = self(input_ids, attention_mask, position_ids)
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=past_key_values)
