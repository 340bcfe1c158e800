"""Prune a ResNet with a folder of images (CLASS/image.png), evaluate it, and save it.

    python examples/image_folder.py --folder images/ --model torchvision:resnet50 --size 224

Without arguments: a ResNet20 for Fashion-MNIST, and a folder of its images, which is made first.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, random_split

import snows
from snows.data import embedded
from snows.data.models import build_model

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--model", default="resnet20-fashion", help="such as torchvision:resnet50, timm:NAME")
parser.add_argument("--size", type=int, default=28)
parser.add_argument("--images", type=int, default=1000, help="to make, if no folder is given")
args = parser.parse_args()


class ImageFolder(Dataset):
    """As torchvision.datasets.ImageFolder: pixels normalized as in training, and the number of the class."""

    def __init__(self, root, mode, mean, std):
        self.files, self.mode, self.mean, self.std = sorted(root.glob("*/*")), mode, mean, std
        self.classes = sorted({path.parent.name for path in self.files})

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert(self.mode).resize((args.size, args.size))
        x = (np.array(image).reshape(args.size, args.size, -1) / 255 - self.mean) / self.std
        return torch.from_numpy(x).permute(2, 0, 1).float(), self.classes.index(self.files[index].parent.name)


if args.folder:
    data = ImageFolder(args.folder, "RGB", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
else:
    images, labels, _, _ = embedded.images()
    for index in range(args.images):
        file = Path("fashion", str(int(labels[index])), f"{index}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(((images[index, 0] * 0.3530 + 0.2860) * 255).round().byte().numpy()).save(file)
    data = ImageFolder(Path("fashion"), "L", [0.2860], [0.3530])

calibration, test = (DataLoader(part, batch_size=100) for part in random_split(data, [0.5, 0.5]))
model = build_model(args.model)
result = snows.prune(model, calibration, "2:4", exclude="*downsample*", effort="fast")
print("dense ", snows.evaluate(model, test))
print("sparse", snows.evaluate(result.model, test, dense=model))
result.save("pruned-resnet")
