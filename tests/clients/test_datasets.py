"""Hugging Face datasets: columns as inputs and labels."""

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from torch import nn
from torch.utils.data import DataLoader

from sklaplace import LaplaceClassifier

datasets = pytest.importorskip("datasets")

COLUMNS = ["input_ids", "attention_mask"]
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 30, (60, 5))
LABELS = TOKENS[:, 0] % 2
DATASET = datasets.Dataset.from_dict(
    {
        "text": [" ".join(map(str, row)) for row in TOKENS],
        "input_ids": TOKENS.tolist(),
        "attention_mask": np.ones_like(TOKENS).tolist(),
        "label": LABELS.tolist(),
    }
)
INPUTS = DATASET.select_columns(COLUMNS)


class Tokens(nn.Module):
    """A classifier of the mean of embedded tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        return self.head(hidden.mean(1))


def model():
    torch.manual_seed(0)
    options = {"max_epochs": 2, "train_split": None, "verbose": 0}
    net = NeuralNetClassifier(Tokens, criterion=nn.CrossEntropyLoss, **options)
    return LaplaceClassifier(net, random_state=0)


def test_columns_are_inputs_and_labels(figure):
    arrays = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    expected = model().fit(arrays, LABELS).predict_proba(arrays)
    for form in ("numpy", "torch"):
        X = INPUTS.with_format(form)[:]
        found = model().fit(X, DATASET["label"]).predict_proba(X)
        np.testing.assert_array_equal(found, expected)
    figure(difference=np.abs(found - expected).max())


@pytest.mark.parametrize(
    "X",
    [DATASET, INPUTS.with_format("torch"), datasets.DatasetDict(train=DATASET)],
    ids=["dataset", "tensors", "splits"],
)
def test_conversion_is_named(X):
    for y in (None, LABELS):
        with pytest.raises(TypeError, match=r"a Hugging Face .*'numpy'\)\[:\]"):
            model().fit(X, y)


def test_predictions_name_the_conversion():
    fitted = model().fit(INPUTS.with_format("numpy")[:], LABELS)
    with pytest.raises(TypeError, match="a Hugging Face"):
        fitted.predict(INPUTS)
    stream = INPUTS.to_iterable_dataset().with_format("torch")
    batch = next(iter(DataLoader(stream, batch_size=len(TOKENS))))
    assert len(fitted.predict(batch)) == len(TOKENS)


def test_columns_of_strings():
    X = DATASET.remove_columns("label").with_format("numpy")[:]
    with pytest.raises(TypeError, match="Leave out columns of strings"):
        model().fit(X, LABELS)
    with pytest.raises(TypeError, match=r"IterableDataset must yield \(x, y\)"):
        model().fit(INPUTS.to_iterable_dataset(), LABELS)
