"""Prune the attention of a vision transformer of timm, and look at what it attends to.

    python examples/timm_vit.py --model vit_tiny_patch16_224 --pretrained --images images.npy

Without arguments: random weights and random images of 64 x 64 pixels, to see that it runs.
"""

import argparse

import numpy as np
import timm
import torch

import snows

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--pretrained", action="store_true")
parser.add_argument("--images", help="a .npy file: floats, images x 3 x height x width, normalized as in training")
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--count", type=int, default=64, help="of random images")
args = parser.parse_args()

if args.images:
    images = torch.from_numpy(np.load(args.images)).float()
    model = timm.create_model(args.model, pretrained=args.pretrained)
else:
    images = torch.randn(args.count, 3, args.size, args.size)
    model = timm.create_model(args.model, pretrained=args.pretrained, img_size=args.size)
model.eval()

calibration, test = images[: len(images) * 3 // 4], images[len(images) * 3 // 4 :]
print(snows.inspect(model, calibration, "2:4", layers="qkv"))
# Query, key and value of each block are solved together. The last stage then trains what is left, without labels.
result = snows.prune(model, calibration, "2:4", layers="qkv", effort="fast")
print(snows.evaluate(result.model, test, dense=model))

for name, network in {"dense": model, "sparse": result.model}.items():
    shares = snows.attention_map(network, test[0])
    print(name, "attends most to patch", shares.mean(0).argmax().item(), "of", shares[0].numel())
result.save("pruned-vit")
