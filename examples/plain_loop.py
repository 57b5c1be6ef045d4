"""A plain PyTorch loop with LCT: a small GPT learns a source file of Python's standard library.

    python examples/plain_loop.py --device cuda --steps 200 --checkpoint run.lct

With --checkpoint the run is saved every 50 steps and at its end. Killed and started again, it goes
on from there with the bits that it would have had (on CUDA: if the kernels are deterministic).
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lct

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: 50)")
parser.add_argument("--checkpoint", type=Path, help="file to go on from and to save to (.lct)")
args = parser.parse_args()

LENGTH, WIDTH = 64, 128
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def batch() -> torch.Tensor:
    """Two random pieces of the text, a token a byte."""
    starts = torch.randint(len(text) - LENGTH, (2, 1))
    return text[starts + torch.arange(LENGTH + 1)].long().to(args.device)


class Gpt(nn.Module):
    """Tokens (batch, LENGTH) to logits of the next one (batch, LENGTH, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


torch.manual_seed(0)
model = Gpt().to(args.device, torch.bfloat16)

lct.compress_(model)  # weights
optimizer = lct.optim.AdamW(model.parameters(), lr=1e-3)  # its moments

schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
step = 0
if args.checkpoint and args.checkpoint.exists():
    values = lct.load_checkpoint(args.checkpoint, **parts)
    step = values["step"]
    torch.set_rng_state(values["rng"])
    torch.cuda.set_rng_state_all(values["cuda_rng"])

while step < args.steps:
    tokens = batch()
    with lct.compress_activations():  # what autograd saves for backward
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    step += 1
    print(f"step {step}: loss {loss.item():.4f}")
    if args.checkpoint and (step % 50 == 0 or step == args.steps):
        values = {"rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state_all()}
        lct.save_checkpoint(args.checkpoint, **parts, step=step, **values)

print(lct.memory_report(model, optimizer))
