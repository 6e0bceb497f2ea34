"""Published weights that packages of an index bring, beside their peers on the same files. Where they come from and
under which licence is in docs/checkpoints.md; they are test data, and no part of the project."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import headway
from headway.api import Embedder
from headway.checkpoints import load_model
from headway.text import Tokenizer
from tests.checkpoints.llama_cpp import served
from tests.data import weights_path

TEXTS = [
    "A man is eating food.",
    "The girl is carrying a baby, and the baby is asleep on her shoulder while the rain goes on.",
    "How do I reset my password?",
    "注意",
    "attention",
]
BEGINNINGS = ["The capital of France is", "def fibonacci(n):\n", "Der Hund läuft über die"]


@pytest.mark.slow
@torch.no_grad()
def test_vectors_of_a_published_embedder_are_those_of_transformers() -> None:
    """The mean of the last states over a text's tokens, of length 1, as its folder says; in float32, to 1e-6."""
    path = weights_path("all-MiniLM-L6-v2")
    embedder = headway.load(path)
    assert isinstance(embedder, Embedder)
    ours = embedder.embed(TEXTS)
    theirs, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    states, known = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None]
    means = (states * known).sum(1) / known.sum(1)
    assert (torch.as_tensor(ours) - torch.nn.functional.normalize(means)).abs().max() < 1e-6


@pytest.mark.slow
@torch.no_grad()
def test_a_published_file_gives_the_text_and_logits_of_llama_cpp() -> None:
    """Greedy text is the same, and log-probabilities differ by what activations of 8 bits cost: in the root mean square
    at most three times what they cost in our kernels, which multiply the same codes by activations of one scale for 32
    numbers; llama.cpp has one for 256. The 200 likeliest of its tokens are compared at each of eight steps, which
    count together: one token whose logit is off moves the log-probabilities of a step all one way."""
    path = weights_path("gemma-3-270m-q4_k_m.gguf")
    model, coded, tokenizer = load_model(path, dequantize=True), load_model(path), Tokenizer.load(path)
    vocab = model.spec.vocab
    with served(path, most=200) as log_probs:
        for text in BEGINNINGS:
            ids, squares = tokenizer.encode(text, eos=False), torch.zeros(2)
            for _ in range(8):
                logits, rounded = (one(torch.tensor([ids]))[0, -1].float() for one in (model, coded))
                theirs = log_probs(ids, vocab)
                there = ~theirs.isnan()
                cost, off = ((t - logits.log_softmax(-1))[there] for t in (rounded.log_softmax(-1), theirs))
                allowed = 3 * cost.abs().max()
                assert there.sum() == 200
                squares += torch.stack([off.square().mean(), cost.square().mean()])
                top = logits.topk(2).values
                if top[0] - top[1] > 2 * allowed:  # else the rounding may turn them
                    assert int(theirs.nan_to_num(-torch.inf).argmax()) == int(logits.argmax())
                ids.append(int(logits.argmax()))
            assert squares[0] <= 3**2 * squares[1]
