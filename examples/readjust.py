"""Re-adjust a checkpoint that somebody else pruned: their zeros are the mask, the dense weights say what to preserve.

    python examples/readjust.py --model torchvision:resnet50 --dense dense.pt --pruned theirs.pt --data folder:images/

Without arguments: the embedded network, pruned by torch.nn.utils.prune.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.utils import prune

import snows
from snows.data.models import build_model
from snows.data.sources import load_data

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet20-fashion")
parser.add_argument("--dense", type=Path, help="the dense weights; default: those that the model comes with")
parser.add_argument("--pruned", type=Path, help="a .safetensors or .pt file of pruned weights")
parser.add_argument("--data", default="fashion", help="as of `snows prune`")
parser.add_argument("--samples", type=int, default=512)
args = parser.parse_args()


def pruned_by_torch(file):
    """What you might have been given: a state dict with zeros, from a tool that re-adjusts nothing."""
    theirs = build_model("resnet20-fashion")
    layers = [(m, "weight") for n, m in theirs.named_modules() if n.endswith(("conv1", "conv2")) and "layer" in n]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.75)
    for module, name in layers:
        prune.remove(module, name)
    torch.save(theirs.state_dict(), file)
    return file


dense = build_model(args.model, args.dense)
file = args.pruned or pruned_by_torch(Path("theirs.pt"))
data = load_data(args.data, args.samples)
test, labels = data.test[:500], data.test_labels[:500]

theirs = snows.prune(dense, data.calibration, mask=file, solver=None)  # as it came
result = snows.prune(dense, data.calibration, mask=file, effort="fast")
for name, network in {"dense": dense, "as it came": theirs.model, "re-adjusted": result.model}.items():
    print(f"{name:12}", snows.evaluate(network, test, labels, dense=dense))
print("the same zeros:", all(torch.equal(result.masks[name], mask) for name, mask in theirs.masks.items()))
result.save("re-adjusted")
