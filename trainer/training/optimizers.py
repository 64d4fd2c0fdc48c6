"""Muon for weight matrices beside AdamW for everything else, as one optimizer that a Trainer can drive.

Muon: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the update is torch's
own (`torch.optim.Muon`). It is meant for the hidden layers' matrices; embeddings, the output head and norms are
left to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """Steps both optimizers; their parameter groups are shared, so a scheduler scales both learning rates."""

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float, weight_decay: float = 0.0) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if hidden else others).append(parameter)
        if not matrices or not others:
            raise ValueError("Muon beside AdamW needs hidden matrices and other parameters to train, so not LoRA alone")
        self._muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay, momentum=0.95)
        self._adamw = torch.optim.AdamW(others, lr=adamw_lr, weight_decay=weight_decay, betas=(0.9, 0.98))
        super().__init__([*matrices, *others], {})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of each."""
        loss = closure() if closure is not None else None
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Both optimizers' states."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both optimizers' states."""
        self._muon.load_state_dict(state_dict["muon"])
        self._adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]
