"""Prune a segmentation network and judge it by a metric of your own: the mean intersection over union.

It is small, and trained first, for some seconds, on noisy pictures of a disc and a square."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import snows

STEPS, PICTURES = map(int, sys.argv[1:] or (200, 200))  # of training; to calibrate and to test with


def pictures(count, seed):
    """Pictures, and the class of every pixel: 0, 1 (disc) or 2 (square)."""
    random = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    disc, square = torch.randint(6, 26, (2, count, 2, 1, 1), generator=random)
    in_square = ((x - square[:, 0]).abs() < 5) & ((y - square[:, 1]).abs() < 5)
    classes = torch.where((x - disc[:, 0]) ** 2 + (y - disc[:, 1]) ** 2 < 25, 1, torch.where(in_square, 2, 0))
    return (classes > 0).float().unsqueeze(1) + 0.3 * torch.randn(count, 1, 32, 32, generator=random), classes


class UNet(nn.Module):
    def __init__(self):
        def block(inputs, outputs):
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        super().__init__()
        self.down, self.middle = nn.Sequential(block(1, 16), block(16, 16)), nn.Sequential(block(16, 32), block(32, 32))
        self.up, self.head = nn.Sequential(block(48, 16), block(16, 16)), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = F.interpolate(self.middle(F.max_pool2d(fine, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([fine, coarse], 1)))  # scores of the classes for every pixel


def miou(batches):
    """A metric gets pairs (outputs, labels), one for each batch."""
    guess, truth = map(torch.cat, zip(*((outputs.argmax(1), labels) for outputs, labels in batches), strict=True))
    return float(sum(((guess == c) & (truth == c)).sum() / ((guess == c) | (truth == c)).sum() for c in range(3)) / 3)


optimizer = torch.optim.Adam((model := UNet()).parameters(), 3e-3)
for step in range(STEPS):
    x, classes = pictures(16, seed=step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), classes).backward()
    optimizer.step()
model.eval()

calibration, (test, labels) = pictures(PICTURES, seed=-1)[0], pictures(PICTURES, seed=-2)
result = snows.prune(model, calibration, "1:4", effort="fast")
print("dense ", snows.evaluate(model, test, labels, metric=miou))
print("masked", snows.evaluate(snows.prune(model, calibration, "1:4", solver=None).model, test, labels, metric=miou))
print("sparse", snows.evaluate(result.model, test, labels, metric=miou))
result.save("pruned-unet")
