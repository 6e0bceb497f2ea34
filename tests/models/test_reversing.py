"""Row 25: a model learns to write a sequence backwards."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.generate import GenerationConfig
from headway.generate.translate import translate
from headway.models import EncoderDecoder, ModelSpec, build
from headway.tokens import Tokens

START, END = 0, 1


def reversals(rows: int, generator: torch.Generator, longest: int = 10, vocab: int = 16) -> tuple[Any, ...]:
    """Returns random sequences and their reversals: (sources [B, S], their tokens, targets [B, T], their lengths); a
    target ends with END."""
    lengths = torch.randint(2, longest + 1, (rows,), generator=generator)
    sources = torch.randint(2, vocab, (rows, longest), generator=generator)
    targets = torch.full((rows, longest + 1), END)
    for source, target, n in zip(sources, targets, lengths.tolist(), strict=True):
        target[:n] = source[:n].flip(0)
    return sources, Tokens.from_lengths(lengths.tolist(), longest), targets, lengths + 1


@pytest.mark.slow
def test_row_25_reversing_is_learned_and_greedy_decoding_is_the_repeated_full_forward() -> None:
    size = {"vocab": 16, "width": 64, "layers": 2, "heads": 4, "hidden": 128}
    spec = ModelSpec.of_pair("transformer", **size, tied=True, dropout=0.0, init_std=64**-0.5)
    model = build(spec, seed=0)
    assert isinstance(model, EncoderDecoder)
    steps, warmup, generator = 500, 100, torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, (steps - i) / (steps - warmup))
    )
    for _ in range(steps):
        sources, tokens, targets, lengths = reversals(48, generator)
        shifted = F.pad(targets[:, :-1], (1, 0), value=START)  # teacher forcing
        logits = model(sources, shifted, source_tokens=tokens)
        inside = torch.arange(targets.shape[1]) < lengths[:, None]
        loss = F.cross_entropy(logits[inside], targets[inside])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    sources, tokens, targets, lengths = reversals(200, torch.Generator().manual_seed(1))
    inputs = [row[: n - 1].tolist() for row, n in zip(sources, lengths.tolist(), strict=True)]
    expected = [row[:n].tolist() for row, n in zip(targets, lengths.tolist(), strict=True)]
    ids = {"decoder_start_token_id": START, "eos_token_id": END}
    outputs = [
        result.ids for result in translate(model, inputs, GenerationConfig(max_new_tokens=12), generation=ids)
    ]
    correct = sum(a == b for a, b in zip(outputs, expected, strict=True))
    assert correct >= 196, f"{correct} of 200 sequences are reversed"
    for source, output in zip(inputs[:20], outputs, strict=False):
        written = [START]
        while written[-1] != END and len(written) <= 12:
            with torch.no_grad():
                written.append(int(model(torch.tensor([source]), torch.tensor([written]))[0, -1].argmax()))
        assert written[1:] == output
