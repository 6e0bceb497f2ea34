"""Losses of a better and a worse answer to the same prompt.

Legend: P pairs. Each argument is [P]: the sum of log p over the tokens of an answer, given the prompt and the preceding
tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo_margin(chosen: Tensor, rejected: Tensor, reference: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Returns by how much more than the reference the model prefers the chosen answer, times beta [P]:

        beta (log pi(c) / pi_ref(c) - log pi(r) / pi_ref(r))

    `reference`: log p of chosen and rejected under the initial model. (Rafailov et al. 2023, section 4.)"""
    return beta * ((chosen - reference[0]) - (rejected - reference[1]))


def dpo_loss(chosen: Tensor, rejected: Tensor, reference: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Returns -log sigmoid(`dpo_margin`) [P]. (Rafailov et al. 2023, equation 7.)"""
    return -F.logsigmoid(dpo_margin(chosen, rejected, reference, beta))


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Returns log (odds(c) / odds(r)), odds(y) = p / (1 - p), of mean log p per token [P]. (Hong et al. 2024,
    section 4.2.)"""
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def orpo_loss(chosen: Tensor, rejected: Tensor, tokens: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Returns -log p(c) per token - beta log sigmoid(`log_odds_ratio`) [P]; `tokens`: the numbers of tokens of the
    answers. (Hong et al. 2024, equation 6, where beta is lambda.)"""
    mean_chosen, mean_rejected = chosen / tokens[0], rejected / tokens[1]
    return -mean_chosen - beta * F.logsigmoid(log_odds_ratio(mean_chosen, mean_rejected))


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x), x < 0, without loss of digits at either end (Mächler 2012)."""
    x = x.clamp_max(-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
