"""Hugging Face transformers: a tiny language model with random weights, trained."""

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

transformers = pytest.importorskip("transformers")

CONFIG = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "num_labels": 2,
}


TWO_LAYERS = ["model.classifier", "model.bert.pooler"]


class Bert(nn.Module):
    """Logits of a sequence classifier."""

    def __init__(self):
        super().__init__()
        config = transformers.BertConfig(**CONFIG)
        self.model = transformers.BertForSequenceClassification(config)

    def forward(self, **tokens):
        return self.model(**tokens).logits


@pytest.fixture(scope="module")
def texts():
    """Sequences of tokens, of which some are padding; the class: whether 5 occurs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(6, 30, size=(160, 8))
    y = np.arange(160) % 2
    ids[np.arange(160), rng.integers(0, 5, size=160)] = np.where(y, 5, 6)
    mask = (np.arange(8) < rng.integers(5, 9, size=(160, 1))).astype(np.int64)
    tokens = {"input_ids": ids * mask, "attention_mask": mask}
    halves = slice(0, 80), slice(80, 160)
    return [({k: v[half] for k, v in tokens.items()}, y[half]) for half in halves]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"subset_of_weights": TWO_LAYERS, "hessian_structure": "full"},
        {"subset_of_weights": "all", "hessian_structure": "diag"},
    ],
    ids=["last_layer", "two_layers", "all"],
)
def test_dicts_of_tokens(settings, texts, figure):
    (rows, y), (rows_test, y_test) = texts
    net = NeuralNetClassifier(
        Bert,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=1e-2,
        max_epochs=15,
        batch_size=20,
        train_split=None,
        verbose=0,
    )
    model = LaplaceClassifier(net, random_state=0, prior_precision=1.0, **settings)
    score = model.fit(rows, y).score(rows_test, y_test)
    assert score > 0.9
    module = model.estimator_.module_.eval()
    with torch.no_grad():
        logits = module(**{name: torch.tensor(v) for name, v in rows_test.items()})
    mean, variance = model.latent_mean_and_variance(rows_test)
    np.testing.assert_allclose(mean, logits, atol=1e-4)
    assert (variance > 0).all()
    figure(accuracy=score)
