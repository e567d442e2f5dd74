"""How much of its registers a model uses."""

from __future__ import annotations

import torch
from torch import Tensor


def effective_number(tokens: Tensor) -> Tensor:
    """How many directions R tokens really use: (B, R, D) -> (B,), between 1 and R.

    The exponential of the entropy of the normalised squared singular values of the R x D
    matrix of unit-length tokens (effective rank, Roy and Vetterli 2007); R orthogonal registers give R,
    R equal ones give 1.
    """
    unit = torch.nn.functional.normalize(tokens.float(), dim=-1)
    energy = torch.linalg.svdvals(unit).square()
    share = energy / energy.sum(-1, keepdim=True).clamp(min=1e-12)
    entropy = -(share * share.clamp(min=1e-12).log()).sum(-1)
    number: Tensor = entropy.exp()
    return number
