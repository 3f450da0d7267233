"""Decoders with a cache in the plan against torch's own: the same tokens, in few plans, without copies of the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from needle.autograd import Unsupported  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from zoo.build import allow_imports  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no executor")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ROTARY = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {
    "GPT2": SIZES | {"n_positions": 64},
    "Llama": ROTARY,
    "Qwen2": ROTARY,
    "Mistral": ROTARY | {"sliding_window": 8},
}


def model_of(name: str) -> Any:
    allow_imports()
    torch.manual_seed(3)
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    return kind(getattr(transformers, f"{name}Config")(**MODELS[name])).eval()


def decoder_of(model: Any, *args: Any) -> Any:
    from torch2needle.bridges.generation import Decoder

    return Decoder(model, *args)


def prompts(batch: int, length: int) -> tuple[Any, Any]:
    """Ids and their mask: all but the first have padding in front."""
    ids, mask = torch.randint(1, 100, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        mask[row, :row], ids[row, :row] = 0, 0
    return ids, mask


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, batch: int) -> None:
    model = model_of(name)
    decoder = decoder_of(model, 32, batch)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    for length in (12, 5, 12):
        ids, mask = prompts(batch, length)
        with torch.no_grad():
            want = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(decoder.generate(ids, attention_mask=mask, **options), want)
    plan = decoder.exe.plan  # of one token
    assert plan.names.count("scatter") == 2 * SIZES["num_hidden_layers"]
    assert not any(n == "copy" and s[-2:] == (32, 8) for n, s in zip(plan.names, plan.shapes, strict=True))
    assert len(decoder.exe._plans) <= 4  # of the example, two prompts and one token


def test_loop() -> None:
    """A plain loop over arrays, in pieces, gives the logits of the whole text."""
    model = model_of("Llama")
    decoder = decoder_of(model, 24)
    ids, _ = prompts(1, 17)
    with torch.no_grad():
        want = model(ids).logits[:, -1].numpy()
    for _ in range(2):
        for piece in np.split(ids.numpy(), [9, 10, 11, 15], axis=1):
            got = decoder(piece)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
        decoder.reset()
    assert isinstance(decoder(ids), torch.Tensor)


def test_sampling_and_cropping() -> None:
    model = model_of("GPT2")
    decoder = decoder_of(model, 40)
    ids, _ = prompts(1, 6)
    found = []
    for generate in (model.generate, decoder.generate):
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(generate(ids, max_new_tokens=10, do_sample=True, top_k=10, pad_token_id=0))
    assert torch.equal(*found)


def test_refusals() -> None:
    model = model_of("GPT2")
    decoder = decoder_of(model, 8)
    ids, _ = prompts(1, 6)
    decoder(ids)
    with pytest.raises(ValueError, match=r"\[Decoder\] expects at most 8 tokens, got 12"):
        decoder(ids)
    for wrong in (ids.expand(2, -1), ids[:, :0], ids[0]):
        with pytest.raises(ValueError, match=r"\[Decoder\] ids expect shape \(1, n > 0\), got"):
            decoder(wrong)
    with pytest.raises(ValueError, match="attention_mask expects shape"):
        decoder(ids[:, :1], ids[:, :3])
    with pytest.raises(Unsupported, match="a search over beams"):
        decoder_of(model, 8, 2).generate(ids[:, :2], max_new_tokens=3, num_beams=2, pad_token_id=0)
    with pytest.raises(ValueError, match="length expects at least"):
        decoder_of(model, 3)
    decoder.reset()
    assert decoder(ids).shape == (1, 100)
