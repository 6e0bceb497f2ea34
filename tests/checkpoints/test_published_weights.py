"""Published weights from packages of an index, compared with other implementations on the same files. Their sources
and licences are in docs/checkpoints.md; they are test data, and no part of the project."""

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
    """As the folder says, a vector is the mean of a text's last states, scaled to length 1; within 1e-6 in float32."""
    path = weights_path("all-MiniLM-L6-v2")
    embedder = headway.load(path)
    assert isinstance(embedder, Embedder)
    ours = embedder.embed(TEXTS)
    theirs, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    states, mask = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None]
    means = (states * mask).sum(1) / mask.sum(1)
    assert (torch.as_tensor(ours) - torch.nn.functional.normalize(means)).abs().max() < 1e-6


@pytest.mark.slow
@torch.no_grad()
def test_a_published_file_gives_the_text_and_logits_of_llama_cpp() -> None:
    """Greedy text is the same, and log-probabilities differ by what 8-bit activations cost: in the root mean square at
    most three times their cost in our kernels, which multiply the same codes by activations with a scale for every 32
    numbers; llama.cpp has one for 256. The 200 tokens that llama.cpp finds likeliest are compared at each of eight
    steps, and the steps count together: one wrong logit shifts all log-probabilities of its step in one direction."""
    path = weights_path("gemma-3-270m-q4_k_m.gguf")
    model, coded, tokenizer = load_model(path, dequantize=True), load_model(path), Tokenizer.load(path)
    vocab = model.spec.vocab
    with served(path, most=200) as log_probs:
        for text in BEGINNINGS:
            ids, squares = tokenizer.encode(text, eos=False), torch.zeros(2)
            for _ in range(8):
                logits, rounded = (network(torch.tensor([ids]))[0, -1].float() for network in (model, coded))
                theirs = log_probs(ids, vocab)
                known = ~theirs.isnan()
                cost, difference = (
                    (t - logits.log_softmax(-1))[known] for t in (rounded.log_softmax(-1), theirs)
                )
                allowed = 3 * cost.abs().max()
                assert known.sum() == 200
                squares += torch.stack([difference.square().mean(), cost.square().mean()])
                top = logits.topk(2).values
                if top[0] - top[1] > 2 * allowed:  # otherwise rounding may swap the two
                    assert int(theirs.nan_to_num(-torch.inf).argmax()) == int(logits.argmax())
                ids.append(int(logits.argmax()))
            assert squares[0] <= 3**2 * squares[1]
