"""IDX files of images and labels, as tests write them."""

import gzip

import numpy as np


def write_idx(path, values):
    """Write an array of bytes as an IDX file, compressed if the name ends in gz."""
    values = np.asarray(values, np.uint8)
    shape = np.array(values.shape, ">i4").tobytes()
    content = bytes([0, 0, 8, values.ndim]) + shape + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_set(folder, split, n, seed, labelled=True, suffix=""):
    """Write images of ten noisy patterns and their labels; return both."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 200, (10, 28, 28))
    labels = np.arange(n) % 10
    images = patterns[labels] + rng.integers(0, 56, (n, 28, 28))
    write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", images)
    if labelled:
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", labels)
    return images, labels
