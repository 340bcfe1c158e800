"""The names of the mask methods, from which messages, help texts and the exports of `snows` are made.

Each name is also that of the module which holds the class. Nothing here loads torch, so that the command line can print
its help at once.
"""

# Chosen for all layers together, before a sweep.
NETWORK_METHODS = {
    "magnitude": "Magnitude",
    "random": "Random",
    "woodfisher": "WoodFisher",
    "cbs": "CBS",
    "chita": "CHITA",
    "falcon": "FALCON",
    "cap": "CAP",
}
# Chosen for one layer at a time, from the inputs it has in the network pruned so far.
LAYER_METHODS = {
    "wanda": "Wanda",
    "sparsegpt": "SparseGPT",
    "obc": "OBC",
    "alps": "ALPS",
    "exchange": "Exchange",
}
CLASSES = NETWORK_METHODS | LAYER_METHODS
NAMES = tuple(CLASSES)
# Those that ask for no gradients of a loss, so that they suit every network; without the random one.
WITHOUT_LOSS = ("magnitude", *LAYER_METHODS)
