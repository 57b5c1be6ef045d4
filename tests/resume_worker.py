"""Trains one run an optimizer until it is killed, having saved checkpoints.

Arguments: a folder, a device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

import lct
from training import TiedTransformer, make, token_loss

# cuBLAS is deterministic with a workspace of its own for each stream; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
KINDS = ("SGD", "AdamW", "Muon")
STEPS = 12
SAVED_STEP = 4


def generators() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state of the CPU's generator, and of each CUDA device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


class Training:
    """A run with everything that has a state: weights, moments, a schedule, dropout."""

    def __init__(self, kind: str, with_lct: bool, seed: int = 0, device: str = "cpu") -> None:
        self.device = device
        self.model = make(TiedTransformer, False, seed).to(device)
        if with_lct:
            lct.compress_(self.model)
        source = lct.optim if with_lct else torch.optim
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        options = {
            "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
            "AdamW": {"lr": 1e-3, "betas": (0.8, 0.99), "amsgrad": True},
            "Muon": {"lr": 0.01},
        }[kind]
        self.optimizer = getattr(source, kind)(matrices, **options)
        self.rest = source.AdamW(others, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
        self.schedulers = [scheduler(o, STEPS) for o in (self.optimizer, self.rest)]
        self.step = 0
        self.losses: list[torch.Tensor] = []
        torch.manual_seed(1)
        self.rng = generators()

    def train(self, steps: int) -> None:
        torch.set_rng_state(self.rng[0])
        torch.cuda.set_rng_state_all(self.rng[1])
        for _ in range(steps):
            tokens = torch.randint(0, 64, (2, 17)).to(self.device)
            loss = token_loss(self.model, (tokens,))
            loss.backward()
            for optimizer, scheduler in zip(
                (self.optimizer, self.rest), self.schedulers, strict=True
            ):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            self.losses.append(loss.detach().cpu())
            self.step += 1
        self.rng = generators()

    def parts(self) -> dict[str, Any]:
        """What has a state of its own, by name."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "rest": self.rest,
            "schedule": self.schedulers[0],
            "schedule_rest": self.schedulers[1],
        }

    def values(self) -> dict[str, Any]:
        return {"step": self.step, "rng": self.rng, "losses": self.losses}

    def restore(self, values: dict[str, Any]) -> None:
        self.step, self.rng, self.losses = values["step"], values["rng"], values["losses"]

    def save_with_torch(self, path: Path) -> None:
        states = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**states, **self.values()}, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load_with_torch(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.restore(saved)

    def save_with_lct(self, path: Path) -> None:
        lct.save_checkpoint(path, **self.parts(), **self.values())

    def load_with_lct(self, path: Path) -> None:
        self.restore(lct.load_checkpoint(path, **self.parts()))


if __name__ == "__main__":
    folder, device = Path(sys.argv[1]), sys.argv[2]
    torch.use_deterministic_algorithms(device == "cuda")
    runs = {kind: Training(kind, with_lct=True, device=device) for kind in KINDS}
    while True:
        for kind, run in runs.items():
            run.train(1)
            if run.step == SAVED_STEP:
                run.save_with_torch(folder / f"{kind}.pt")
                run.save_with_lct(folder / f"{kind}.lct")
        print(run.step, flush=True)
