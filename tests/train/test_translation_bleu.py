"""Row 26: BLEU on Multi30K is that of three seeds, and a model without its positions or its source is far below."""

import gzip
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import headway
from headway.api.translator import bleu
from headway.nn.block import Block
from headway.positions import Sinusoidal
from headway.train import train
from headway.train.config_io import read_config
from tests.data import data_path

RECIPE = Path(__file__).parents[2] / "recipes" / "translation-small.yaml"
SEEDS = (20.79, 19.31, 21.30)
"""BLEU of seeds 0, 1 and 2, greedy, on test_2016_flickr, measured before this test was written: docs/translation.md."""


def without_positions(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Makes the model add zeros to embeddings instead of positions."""
    plain = Sinusoidal.embedding
    monkeypatch.setattr(Sinusoidal, "embedding", lambda *arguments: 0 * plain(*arguments))


def without_cross_attention(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Sets the outputs of cross-attention to zero, so that nothing comes from the encoder."""
    for block in model.modules():
        if isinstance(block, Block) and block.cross_attn is not None:
            for parameter in block.cross_attn.o_proj.parameters():
                monkeypatch.setattr(parameter, "data", torch.zeros_like(parameter.data))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_row_26_bleu_is_within_three_deviations_of_three_seeds_and_mutants_are_not(tmp_path: Path) -> None:
    """The mutants are the trained model with positions or the source lost on the way to the decoder."""
    names = ("train.en", "train.de", "test_2016_flickr.en", "test_2016_flickr.de")
    source, target, english, german = (data_path(f"multi30k/{name}.gz") for name in names)
    files = [f"source={source}", f"target={target}", f"out={tmp_path / 'run'}"]
    translator = headway.load(train(read_config(RECIPE, files), quiet=True).model, task="translation")
    texts, references = (
        gzip.decompress(path.read_bytes()).decode("utf-8").splitlines() for path in (english, german)
    )

    def score(count: int) -> float:
        translations = translator.translate(texts[:count], beams=1, max_new_tokens=60)
        return bleu([translation.text for translation in translations], references[:count]).score

    mean, allowed = statistics.fmean(SEEDS), 3 * statistics.stdev(SEEDS)
    whole = score(1000)
    mutant_scores = {}
    for mutant in (without_positions, without_cross_attention):
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch, translator.model)
            mutant_scores[mutant.__name__] = score(1000)
    print(whole, mutant_scores)
    assert abs(whole - mean) <= allowed
    assert all(bleu_score < mean - 2 * allowed for bleu_score in mutant_scores.values()), mutant_scores
