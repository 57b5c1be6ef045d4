"""LoRA on a frozen base that LCT keeps compressed: adapters of PEFT on a tiny Qwen3, on real text.

    pip install '.[hf]'
    python examples/lora.py --device cuda --steps 200 --output adapters

The base takes its compressed bytes only and is not changed; adapters, gradients and moments are as
small as they are without LCT.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

import lct

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: 50)")
parser.add_argument("--output", type=Path, help="folder to save the adapters to")
args = parser.parse_args()

LENGTH = 64
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def batch() -> torch.Tensor:
    """Two random pieces of the text, a token a byte."""
    starts = torch.randint(len(text) - LENGTH + 1, (2, 1))
    return text[starts + torch.arange(LENGTH)].long().to(args.device)


torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    bos_token_id=0,
    eos_token_id=0,
)
# Or a trained one: AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
base = Qwen3ForCausalLM(config).to(args.device, torch.bfloat16)

lct.compress_(base)  # before the adapters are added: they are to stay plain
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

for step in range(1, args.steps + 1):
    tokens = batch()
    with lct.compress_activations():  # what autograd saves for backward
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print(lct.memory_report(model, optimizer))
if args.output:
    model.save_pretrained(args.output)
