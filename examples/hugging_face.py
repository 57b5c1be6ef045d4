"""A transformers model trained with LCT: a tiny Qwen3 with random weights, on real text.

    pip install '.[hf]'
    python examples/hugging_face.py --device cuda --steps 200 --output tiny-qwen3

--output takes the folder that save_pretrained writes: plain BF16 safetensors for any other program.
"""

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import lct

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: 50)")
parser.add_argument("--output", type=Path, help="folder to save the model to")
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
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)
# Or a trained one: AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
model = Qwen3ForCausalLM(config).to(args.device, torch.bfloat16)

lct.compress_(model)  # weights; the tied embedding once
optimizer = lct.optim.AdamW(model.parameters(), lr=2e-3)  # its moments
lct.optim.step_in_backward(optimizer)  # and not all gradients at once

for step in range(1, args.steps + 1):
    tokens = batch()
    with lct.compress_activations():  # what autograd saves for backward
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    print(f"step {step}: loss {loss.item():.4f}")

print(lct.memory_report(model, optimizer))
if args.output:
    model.save_pretrained(args.output)
