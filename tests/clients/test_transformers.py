"""Hugging Face transformers: tiny language models, trained from random weights.

The modules are unwrapped modules of transformers, with adapters from peft.
"""

import numpy as np
import pytest
import references
import torch
from nets import initialised
from sklearn.model_selection import GridSearchCV, cross_val_score
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier
from skorch.helper import SliceDict
from torch import nn

from sklaplace import (
    BradleyTerry,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
}
FIXED = {"prior_precision": 1.0, "random_state": 0}
TWO_LAYERS = ["classifier", "bert.pooler"]


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def bert(num_labels=2):
    config = transformers.BertConfig(num_labels=num_labels, **SIZES)
    return transformers.BertForSequenceClassification(config)


def gpt2(num_labels=2):
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(num_labels=num_labels, **SIZES | ends)
    return transformers.GPT2ForSequenceClassification(config)


def text_classifier(model):
    """Return a skorch net around a sequence classifier."""
    return NeuralNetClassifier(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=1e-2,
        max_epochs=50,
        batch_size=20,
        verbose=0,
    )


def reward_model(scorer):
    """Return a skorch net for pairs, around a sequence classifier with one label."""
    return NeuralNetBinaryClassifier(
        BradleyTerry,
        module__scorer=scorer,
        optimizer=torch.optim.AdamW,
        lr=1e-2,
        max_epochs=20,
        batch_size=20,
        verbose=0,
    )


def with_adapters(model):
    """Return the model with LoRA adapters; only adapters and head are trained."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(model, adapters)


def seeded(make, *args):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args)


@pytest.fixture(scope="module")
def texts():
    """Return padded sequences of tokens; the class is whether token 5 occurs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(6, 30, size=(160, 8))
    y = np.arange(160) % 2
    ids[np.arange(160), rng.integers(0, 5, size=160)] = np.where(y, 5, 6)
    mask = (np.arange(8) < rng.integers(5, 9, size=(160, 1))).astype(np.int64)
    tokens = {"input_ids": ids * mask, "attention_mask": mask}
    halves = slice(0, 80), slice(80, 160)
    return [(taken(tokens, half), y[half]) for half in halves]


def taken(tokens, rows):
    return {name: values[rows] for name, values in tokens.items()}


def tensors(tokens):
    return {name: torch.tensor(values) for name, values in tokens.items()}


def dense(model, tokens):
    """Return logits and their Jacobian (n, c, P) in the weights of the posterior."""
    module = model.estimator_.module_.eval()
    named = dict(module.named_parameters())
    weights = [named[block.name] for block in model.posterior_.layout.blocks]
    with torch.enable_grad():
        logits = module(**tensors(tokens)).logits
        rows = references.gradient_rows(logits, weights)
    return logits.detach().double(), rows.double()


@pytest.mark.parametrize("make", [bert, slow(gpt2)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        slow({"subset_of_weights": TWO_LAYERS, "hessian_structure": "full"}),
        slow({"subset_of_weights": "all", "hessian_structure": "diag"}),
        slow({"subset_of_weights": "all", "hessian_structure": "kron"}),
    ],
    ids=["last_layer", "two_layers", "all_diag", "all_kron"],
)
def test_dicts_of_tokens(make, settings, texts, figure):
    (rows, y), (rows_test, y_test) = texts
    if make is gpt2 and settings.get("subset_of_weights") == TWO_LAYERS:
        settings = settings | {"subset_of_weights": ["score", "transformer.ln_f"]}
    net = text_classifier(seeded(make))
    model = LaplaceClassifier(net, **FIXED, **settings)
    score = model.fit(rows, y).score(rows_test, y_test)
    assert score > 0.8
    logits, _ = dense(model, taken(rows_test, slice(1)))
    mean, variance = model.latent_mean_and_variance(rows_test)
    np.testing.assert_allclose(mean[:1], logits, atol=1e-4)
    assert (variance > 0).all()
    assert np.isfinite(model.score_samples(rows_test)).all()
    figure(accuracy=score)


@pytest.mark.parametrize("adapted", [slow(False), True])
def test_posterior_is_that_of_the_dense_formula(adapted, texts):
    """The posterior covers all weights, or with LoRA adapters the trainable weights."""
    if adapted:
        pytest.importorskip("peft")
    rows = taken(texts[0][0], slice(20))
    make = (lambda: with_adapters(bert())) if adapted else bert
    net = text_classifier(seeded(make)).set_params(max_epochs=3, train_split=None)
    subset = "trainable" if adapted else "all"
    options = {"subset_of_weights": subset, "hessian_structure": "full"}
    model = LaplaceClassifier(net, **FIXED, **options, residual="none")
    model.fit(rows, texts[0][1][:20])
    named = model.estimator_.module_.named_parameters()
    sizes = [p.numel() for _, p in named if p.requires_grad]
    assert model.posterior_.layout.n_parameters == sum(sizes)
    logits, J = dense(model, rows)
    p = logits.softmax(1)
    hessians = p.diag_embed() - p[:, :, None] * p[:, None]
    H = torch.einsum("ncp,ncd,ndq->pq", J, hessians, J)
    cov = torch.linalg.inv(H + torch.eye(len(H)).double())
    expected = torch.einsum("ncp,pq,ndq->ncd", J, cov, J)
    mean, found = model.latent_mean_and_variance(rows, full_cov=True)
    np.testing.assert_allclose(mean, logits, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-4 * float(expected.max()))


def test_batches_of_a_tokenizer(texts):
    """The batch is a mapping of lists or tensors, but not a dict."""
    from transformers import BatchEncoding

    rows, y = texts[0]
    net = text_classifier(seeded(bert)).set_params(max_epochs=2)
    model = LaplaceClassifier(net, **FIXED)
    expected = model.fit(rows, y).predict_proba(rows)
    lists = {name: values.tolist() for name, values in rows.items()}
    for given in (BatchEncoding(lists), BatchEncoding(tensors(rows))):
        found = model.fit(given, y).predict_proba(given)
        np.testing.assert_array_equal(found, expected)


def search(model, tokens, y):
    """Return a grid search over the prior for a dict of tokens."""
    grid = {"prior_precision": [0.1, 10.0]}
    return GridSearchCV(model, grid, cv=2).fit(SliceDict(**tokens), y)


def test_searches_and_scores_of_scikit_learn(texts, tmp_path):
    """scikit-learn counts the keys of a dict as samples, but not of a SliceDict."""
    (rows, y), (rows_test, _) = texts
    net = text_classifier(seeded(bert)).set_params(max_epochs=2)
    model = LaplaceClassifier(net, **FIXED, memory=str(tmp_path))
    found = search(model, rows, y)
    best = LaplaceClassifier(net, **FIXED | found.best_params_)
    expected = best.fit(rows, y).predict_proba(rows_test)
    for given in (SliceDict(**rows_test), rows_test):
        np.testing.assert_array_equal(found.predict_proba(given), expected)
    scores = cross_val_score(model, SliceDict(**rows), y, cv=2)
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()
    own = LaplaceClassifierCV(net, cv=2, prior_precisions=[0.1, 10.0], random_state=0)
    assert own.fit(rows, y).prior_precision_ in (0.1, 10.0)
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples: \[2, 80\]"):
        cross_val_score(model, rows, y, cv=2)


@pytest.mark.parametrize("make", [bert, slow(gpt2)])
@pytest.mark.parametrize(
    "settings",
    [
        {"subset_of_weights": "last_layer"},
        slow({}),
        slow({"hessian_structure": "kron"}),
    ],
    ids=["last_layer", "all_full", "all_kron"],
)
@pytest.mark.filterwarnings("ignore:The prior that maximises the evidence predicts")
def test_reward_models(make, settings, texts, figure):
    """The text with token 5 is preferred."""
    pairs, y = preferences(*texts[0])
    pairs_test, y_test = preferences(*texts[1])
    net = reward_model(seeded(make, 1))
    model = LaplaceRanker(net, random_state=0, **settings).fit(pairs, y)
    score = model.score(pairs_test, y_test)
    assert score > 0.8
    texts_test, is_good = texts[1]
    mean, std = model.predict_score(texts_test, return_std=True)
    scorer = model.estimator_.module_.scorer.eval()
    with torch.no_grad():
        expected = scorer(**tensors(texts_test)).logits.flatten()
    np.testing.assert_allclose(mean, expected, atol=1e-4)
    assert (std > 0).all()
    assert mean[is_good == 1].mean() > mean[is_good == 0].mean()
    figure(accuracy=score)


def preferences(tokens, y):
    """Return pairs of texts of the two classes, in either order."""
    order = np.argsort(y, kind="stable").reshape(2, -1).T
    swapped = np.arange(len(order)) % 2 == 0
    order[swapped] = order[swapped, ::-1]
    return taken(tokens, order), 1 - swapped


def test_a_model_without_a_head(texts):
    config = transformers.BertConfig(**SIZES)
    module = seeded(lambda: transformers.BertModel(config))
    model = LaplaceClassifier(text_classifier(module))
    with pytest.raises(TypeError, match=r"returns a BaseModelOutput.*logits"):
        model.fit(*texts[0])
    # nothing was trained
    assert initialised(text_classifier(module)).history == []
    assert not hasattr(model, "estimator_")


class ClassesFirst(nn.Module):
    """A token classifier whose logits (b, length, K) are returned as (b, K, length)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **tokens):
        return self.model(**tokens).logits.transpose(1, 2)


def test_token_classifiers(texts):
    X = texts[0][0]
    y = X["input_ids"] % 3
    config = transformers.BertConfig(num_labels=3, **SIZES)
    model = seeded(transformers.BertForTokenClassification, config)
    options = {"criterion": nn.CrossEntropyLoss, "max_epochs": 1, "train_split": None}
    last, first = (
        LaplaceClassifier(NeuralNet(module, **options, verbose=0), **FIXED)
        for module in (model, ClassesFirst(model))
    )
    with pytest.raises(ValueError, match=r"returns logits.transpose\(1, 2\)"):
        last.fit(X, y)
    assert first.fit(X, y).predict_proba(X).shape == (80, 3, 8)
