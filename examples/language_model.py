"""Prune a causal language model of Hugging Face, measure its perplexity, and save it for `from_pretrained`.

    python examples/language_model.py --model HuggingFaceTB/SmolLM2-135M --text book.txt

Without arguments: a tiny Llama that is trained first, for some seconds, on the bytes of the documentation.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import snows

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a name of the hub, or a folder")
parser.add_argument("--text", type=Path, help="a text file to calibrate with and to measure on")
parser.add_argument("--length", type=int, help="tokens of a window [default: 512, or 64 for the tiny model]")
parser.add_argument("--steps", type=int, default=300, help="of training the tiny model")
args = parser.parse_args()


def tiny_llama(tokens, steps):
    """Every byte is a token."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, tie_word_embeddings=False, **size))
    optimizer, windows = torch.optim.AdamW(model.parameters(), 3e-3), snows.token_windows(tokens, 64)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (16,))]
        model(batch, labels=batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    return model.eval()


text = args.text or Path(__file__).parents[1] / "docs" / "appendix" / "masks.md"
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokens = AutoTokenizer.from_pretrained(args.model)(text.read_text(), return_tensors="pt").input_ids[0]
else:
    tokens = torch.tensor(list(text.read_bytes()))
    model = tiny_llama(tokens, args.steps)

windows = snows.token_windows(tokens, args.length or (512 if args.model else 64))
calibration, test = windows[::2], windows[1::2]
masked = snows.prune(model, calibration, "2:4", mask="wanda", solver=None)
result = snows.prune(model, calibration, "2:4", mask="wanda")
for name, network in {"dense": model, "mask only": masked.model, "sparse": result.model}.items():
    print(f"{name:10} perplexity {snows.perplexity(network, test):.2f}")
result.model.save_pretrained("pruned-language-model")
