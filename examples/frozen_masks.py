"""Train a pruned network further with its mask frozen: any loop, any torch optimizer, no weight grows back.

    python examples/frozen_masks.py

The embedded network, 90 % of its weights removed, then some epochs of AdamW with labels.
"""

import argparse

import torch
import torch.nn.functional as F

import snows
from snows.data import embedded

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--sparsity", type=float, default=0.9)
args = parser.parse_args()

model = embedded.model()
images, labels, test, test_labels = embedded.images()
images, labels, test, test_labels = images[: args.samples], labels[: args.samples], test[:500], test_labels[:500]

result = snows.prune(model, images, args.sparsity, effort="fast")
print("re-adjusted", snows.evaluate(result.model, test, test_labels, dense=model))

network = snows.freeze(result.model, result.masks)
optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.01)
network.train()
for epoch in range(args.epochs):
    for batch in torch.randperm(len(images)).split(100):
        loss = F.cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
network.eval()

regrown = sum(int((network.get_parameter(name)[~kept] != 0).sum()) for name, kept in result.masks.items())
print("weights that grew back:", regrown)
print("trained    ", snows.evaluate(network, test, test_labels, dense=model))
snows.unfreeze(network)  # plain parameters again
torch.save(network.state_dict(), "trained.pt")  # with zeros; snows.retrain is such a loop, and saves with a report
