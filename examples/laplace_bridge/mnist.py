"""MNIST, notMNIST and Fashion-MNIST from a folder of IDX files, and a LeNet."""

import gzip
from pathlib import Path

import numpy as np
import torch
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

# "mnist" occurs in the names of other sets, so it is last
SETS = {
    "notmnist": "notMNIST",
    "fashion": "Fashion",
    "kmnist": "KMNIST",
    "emnist": "EMNIST",
    "mnist": "MNIST",
}
UNKNOWN = "notMNIST", "Fashion", "KMNIST"
TRAIN = 8000  # of the test images, if there are no training images


def read_idx(path):
    """Return the bytes of an IDX file, compressed with gzip or not, as an array."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes. Pass another folder.")
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def find(folder):
    """Return the path of each (set, "train" or "test", "images" or "labels").

    The name of the set is in the name of the file, or of a folder around it.
    """
    folder, paths = Path(folder).resolve(), {}
    for kind in ("images", "labels"):
        for path in sorted(folder.rglob(f"*{kind}*idx*")):  # the plain file before .gz
            name = path.relative_to(folder.parent).as_posix().lower()
            title = next((SETS[part] for part in SETS if part in name), None)
            split = "train" if "train" in path.name else "test"
            paths.setdefault((title, split, kind), path)
    return paths


def read_split(folder, title, split, kinds=("images", "labels")):
    """Return the images and labels of a split as float32 and int64, or None."""
    paths = find(folder)
    if (title, split, "images") not in paths:
        return None
    for kind in kinds:
        if (title, split, kind) not in paths:
            raise FileNotFoundError(
                f"{folder} has {split} images of {title}, but no {kind}. Add the file "
                "of labels, such as MNIST/raw/t10k-labels-idx1-ubyte."
            )
    values = [read_idx(paths[title, split, kind]) for kind in kinds]
    values[0] = values[0][:, None].astype(np.float32) / 255
    return [values[0], *(labels.astype(np.int64) for labels in values[1:])]


def load(folder, most=None, seed=0):
    """Return training samples, test samples, and unknown images by set.

    Without training images of MNIST, the first 8,000 test images are for training, and
    the others for testing. The test images and the unknown images are shuffled, and at
    most ``most`` images of each set are returned.
    """
    test = read_split(folder, "MNIST", "test")
    if test is None:
        raise FileNotFoundError(
            f"{folder} has no test images of MNIST. Needed are IDX files, such as "
            "MNIST/raw/t10k-images-idx3-ubyte, which torchvision.datasets.MNIST("
            f"{str(folder)!r}, download=True) writes."
        )
    train = read_split(folder, "MNIST", "train")
    if train is None:
        if len(test[0]) <= TRAIN:
            raise ValueError(
                f"{folder} has no training images of MNIST, and {len(test[0])} test "
                f"images. Without training images, more than {TRAIN} are needed."
            )
        train, test = [part[:TRAIN] for part in test], [part[TRAIN:] for part in test]
    unknown = {}
    for title in UNKNOWN:
        parts = [read_split(folder, title, s, ("images",)) for s in ("test", "train")]
        if any(parts):
            unknown[title] = next(filter(None, parts))[0]
    if not unknown:
        raise FileNotFoundError(
            f"{folder} has no unknown images. Add IDX files of notMNIST or "
            "Fashion-MNIST, such as FashionMNIST/raw/t10k-images-idx3-ubyte."
        )
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(test[0]))[:most]
    unknown = {title: X[rng.permutation(len(X))[:most]] for title, X in unknown.items()}
    return train, [part[rows] for part in test], unknown


def lenet():
    """Return an untrained LeNet for ten classes of 28 by 28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def gaussians_of_images(folder, epochs=6, most=1000):
    """Return a Gaussian over three logits for one image of each set.

    The image is the one for which the confidence of the network is closest to 0.7, and
    the logits are those of its three most probable classes. The softmax of these logits
    is the distribution over the three classes, given that no other class is true.
    """
    train, test, unknown = load(folder, most)
    torch.manual_seed(0)
    net = NeuralNetClassifier(
        lenet,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        batch_size=32,
        max_epochs=epochs,
        train_split=None,
        verbose=0,
    ).fit(*train)
    model = LaplaceClassifier(
        FrozenEstimator(net),
        prior_precision="marglik",
        residual="none",
        random_state=0,
    )
    model.fit(*train)
    found = {}
    for title, X in {"MNIST": test[0], **unknown}.items():
        proba = net.predict_proba(X)
        row = abs(proba.max(1) - 0.7).argmin()
        top = proba[row].argsort()[:-4:-1]
        mean, cov = model.latent_mean_and_variance(X[[row]], full_cov=True)
        found[title] = mean[0, top], cov[0][np.ix_(top, top)]
    return found
