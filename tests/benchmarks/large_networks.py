"""Cost of the uncertainty of networks of the size that people use.

    python tests/benchmarks/large_networks.py [cuda]

For ViT-B/16 and ResNet-50 (random weights, 1,000 classes, 224 x 224 pixels, the last
layer) and for adapters of rank 8 in BERT-base (110 million weights, 128 tokens;
``subset_of_weights="trainable"``, Kronecker factors of ``"ggn_mc"`` with one draw).
Each network runs in a process of its own, which prints a line of a Markdown table. The
networks are those of ``transformers``, which the extra ``clients`` installs.

``fit`` and ``predict`` are times of the estimator around the frozen network, in units
of what plain torch needs for the same samples in the same batches: forward passes (f),
or forward and backward passes (fb) of the adapters. They are CPU times of one thread;
with ``cuda`` they are wall-clock times, after a fit and a prediction that warm up. A
fit inspects the network on a few samples first. Its cost per sample and its constant
cost, in passes of one sample, come from fits to two numbers of samples. Memory is the
peak beyond that of the network and a plain pass, in MiB: that of the process, or that
of the tensors on the GPU.
"""

import subprocess
import sys
import warnings
from pathlib import Path
from time import perf_counter, process_time

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.compare import resident, say
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
ON_GPU = DEVICE == "cuda"
BATCH, FEW, MANY, N_PREDICTED = (64, 256, 1024, 512) if ON_GPU else (8, 16, 48, 32)
RANK = 8
HEADERS = (
    "network, weights selected",
    "fit, each sample",
    "fit, once",
    f"fit of {MANY}",
    "fit of 10,000",
    "MiB",
    f"predict {N_PREDICTED}",
    "MiB",
)


class Logits(nn.Module):
    """A network of ``transformers`` that returns its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (b, K)."""
        return self.network(x).logits


class Adapter(nn.Module):
    """A frozen Linear layer plus a trained product of two narrow ones (Hu 2022)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the layer and of the adapter."""
        return self.layer(x) + self.up(self.down(x))


def images(n: int) -> np.ndarray:
    """Return random images."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, 3, 224, 224), dtype=np.float32)


def texts(n: int) -> np.ndarray:
    """Return random tokens."""
    return np.random.default_rng(0).integers(1000, 20_000, (n, 128))


def vit() -> nn.Module:
    """Return ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000))


def resnet() -> nn.Module:
    """Return ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def bert() -> nn.Module:
    """Return BERT-base with adapters of queries and values."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=2, attn_implementation="eager")
    network = BertForSequenceClassification(config).requires_grad_(requires_grad=False)
    for layer in network.bert.encoder.layer:
        own = layer.attention.self
        own.query, own.value = Adapter(own.query), Adapter(own.value)
    return network


LAST = {"link_approx": "probit"}
ADAPTERS = {
    "subset_of_weights": "trainable",
    "curvature": "ggn_mc",
    "curvature_params": {"n_draws": 1},
}
# name -> network, samples, classes, options
NETWORKS = {
    "ViT-B/16, last layer": (vit, images, 1000, LAST),
    "ResNet-50, last layer": (resnet, images, 1000, LAST),
    "BERT-base, adapters of rank 8": (bert, texts, 2, ADAPTERS),
}


def now() -> float:
    """Return CPU seconds, or wall-clock seconds once the GPU has done its work."""
    if not ON_GPU:
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


def peak() -> float:
    """Return the largest memory so far in MiB."""
    if ON_GPU:
        return torch.cuda.max_memory_allocated() / 2**20
    return resident("VmHWM")


def plain(net: NeuralNetClassifier, X: np.ndarray, *, backward: bool) -> float:
    """Return seconds of plain passes over all samples."""
    module, start = net.module_.eval(), now()
    with torch.set_grad_enabled(backward):
        for some in torch.as_tensor(X).split(BATCH):
            f = module(some.to(DEVICE))
            if backward:
                f.logsumexp(1).sum().backward()
    module.zero_grad()
    return now() - start


def measure(name: str) -> None:
    """Print one line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, samples, n_classes, options = NETWORKS[name]
    backward = options is ADAPTERS
    module = Logits(make())
    net = NeuralNetClassifier(
        module, criterion=nn.CrossEntropyLoss, device=DEVICE, verbose=0
    )
    net.initialize().module_.eval()
    net.classes = np.arange(n_classes)
    X = samples(MANY)
    y = np.resize(np.arange(n_classes), MANY)
    plain(net, X[:BATCH], backward=backward)
    of_network = peak()

    def fitted(n: int) -> tuple[LaplaceClassifier, float]:
        model = LaplaceClassifier(
            FrozenEstimator(net),
            prior_precision=1.0,
            refine=False,
            batch_size=BATCH,
            random_state=0,
            **options,
        )
        start = now()
        return model.fit(X[:n], y[:n]), now() - start

    if ON_GPU:
        fitted(FEW)[0].predict_proba(X[:N_PREDICTED])
        torch.cuda.reset_peak_memory_stats()
    unit = plain(net, X, backward=backward) / MANY
    of_few, (model, of_many) = fitted(FEW)[1], fitted(MANY)
    of_fit = peak()
    unit = (unit + plain(net, X, backward=backward) / MANY) / 2
    each = (of_many - of_few) / (MANY - FEW) / unit
    once = of_few / unit - each * FEW
    start = now()
    model.predict_proba(X[:N_PREDICTED])
    seconds = now() - start
    passes = seconds / plain(net, X[:N_PREDICTED], backward=False)
    n_weights, kind = model.posterior_.layout.n_parameters, "fb" if backward else "f"
    shown = [
        f"{name} ({n_weights:,})",
        f"{each:.2f} {kind}",
        f"{once:.0f} {kind}",
        f"{of_many / unit / MANY:.2f} {kind}",
        f"{each + once / 10_000:.2f} {kind}",
        f"{of_fit - of_network:.0f}",
        f"{passes:.2f} f",
        f"{peak() - of_network:.0f}",
    ]
    say("| " + " | ".join(shown) + " |")


def main() -> None:
    """Print the table, or one line in a process of its own."""
    if sys.argv[1:] not in ([], ["cuda"]):
        warnings.simplefilter("ignore")
        return measure(sys.argv[1])
    say("| " + " | ".join(HEADERS) + " |")
    say("|" + " --- |" * len(HEADERS))
    for name in NETWORKS:
        subprocess.run([sys.executable, __file__, name, *sys.argv[1:]], check=True)
    return None


if __name__ == "__main__":
    main()
