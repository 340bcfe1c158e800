"""Models and data that the command line builds by name: `net.py:model` and the like."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )


def images():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )


def sparse():
    made = model()
    with torch.no_grad():
        made[2].weight[:, ::2] = 0
    return made


def x():
    return torch.randn(96, 8, generator=torch.Generator().manual_seed(1))


def labelled():
    with torch.no_grad():
        return x()[:48], x()[48:], model()(x()[48:]).argmax(1)


def unlabelled():
    return x()[:48], x()[48:]


def calibration():
    return x()[:48]


def pixels():
    return 255 * torch.rand(40, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def gray():
    return TensorDataset(torch.rand(16, 1, 28, 28), torch.zeros(16))


def loader():
    return DataLoader(TensorDataset(x(), torch.zeros(96)), batch_size=20)


def dataset():
    return TensorDataset(x(), torch.zeros(96))


def batches():
    return {"input": x()}


def nothing_between():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))


def bracketed():
    made = nn.Sequential()
    for name in ("first", "[/red]", "last"):
        made.add_module(name, nn.Linear(8, 8))
    return made


def raises():
    raise RuntimeError("no such luck\nand a second line")


def text():
    return "resnet"


def generator():
    return (row for row in x())


def lists():
    return x()[:48], x()[48:].tolist()


def list_labels():
    return x()[:48], x()[48:], [0] * 48


def pairs():
    return DataLoader(TensorDataset(x()[:48]), 16), DataLoader(TensorDataset(x()[48:], model()(x()[48:]).detach()), 20)


def error(batches):
    """The mean squared error."""
    parts = [(outputs - labels).square().flatten() for outputs, labels in batches]
    return torch.cat(parts).mean()


def of_two(outputs, labels):
    return 0.0


def metric_that_fails(batches):
    return 1 / 0


def segmenter():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 4, 1, bias=False),
        )


def scenes():
    pixels = torch.randn(40, 3, 10, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        classes = segmenter()(pixels).argmax(1)
    return pixels[:20], DataLoader(TensorDataset(pixels[20:], classes[20:]), batch_size=8, shuffle=True)


def pixel_accuracy(batches):
    right = total = 0
    for outputs, labels in batches:
        right += int((outputs.argmax(1) == labels).sum())
        total += labels.numel()
    return {"pixels": right / total, "images of 120": total / 120}


def wrong_labels():
    return x()[:48], x()[48:], torch.full((48,), 9)


def wrong_test():
    return x()[:48], torch.randn(5, 7)


number = 3


def pairs_of_classes():
    return TensorDataset(x()[:48], model()(x()[:48]).argmax(1))


def class_loader():
    return DataLoader(pairs_of_classes(), batch_size=16)


def long_names():
    made = nn.Sequential()
    made.add_module("backbone_of_the_vision_transformer_encoder_layers", model())
    return made
