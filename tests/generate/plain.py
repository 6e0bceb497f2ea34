"""A small model, prompts, and the plain greedy loop as the oracle."""

import torch

from headway.generate import Sampling
from headway.models import Decoder
from tests.generate.conftest import MIXED, small
from tests.text.conftest import byte_level

MODEL, TOKENIZER = small(MIXED), byte_level()
PROMPTS = [[0, 5, 9], [0], [0, *range(20, 39)], [0, 7, 7, 7, 7, 7, 7]]
HOT = Sampling(temperature=1.2, top_k=50, top_p=0.95, repetition_penalty=1.1)


def greedy_by_hand(model: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
