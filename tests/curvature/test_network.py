"""Inspection of networks: output conventions, and errors before training."""

import pytest
import torch
from nets import (
    MLP,
    CompilingClassifier,
    FunctionalSoftmaxMLP,
    SharpSoftmaxMLP,
    SigmoidMLP,
    SoftmaxMLP,
    SqueezedMLP,
    TanhMLP,
    binary_classifier,
    blobs,
    classifier,
    initialised,
    regressor,
)
from torch import nn

from sklaplace.curvature.network import infer_network_spec
from sklaplace.likelihoods import Bernoulli, Categorical, Gaussian
from sklaplace.networks.outputs import as_forward, unwrapped

EVERY = (Categorical, Bernoulli, Gaussian)
ROWS = torch.tensor(blobs()[0][:3])


def network_spec(net, n_targets=3, x=ROWS, subset="last_layer"):
    return infer_network_spec(net, x, subset, EVERY, n_targets, is_trained=True)


def outputs(net, found, x=ROWS):
    """Return the outputs that the Laplace approximation differentiates."""
    forward = as_forward(net, found)
    with forward.frozen(), torch.no_grad():
        return forward(x)


class TestLikelihood:
    @pytest.mark.parametrize(
        ("net", "n_targets", "kind"),
        [
            (classifier(), 3, Categorical),
            (classifier(SoftmaxMLP, criterion=nn.NLLLoss), 3, Categorical),
            (binary_classifier(), 2, Bernoulli),
            (binary_classifier(SigmoidMLP, criterion=nn.BCELoss), 2, Bernoulli),
            (regressor(), 1, Gaussian),
        ],
    )
    def test_follows_the_criterion(self, net, n_targets, kind):
        found = network_spec(initialised(net), n_targets)
        assert type(found.likelihood) is kind
        assert found.n_outputs == (3 if kind is Categorical else 1)

    def test_weights_of_rows_are_refused(self):
        net = initialised(binary_classifier(criterion__weight=torch.ones(1)))
        with pytest.raises(ValueError, match="criterion__weight"):
            network_spec(net, 2)

    def test_options_that_are_understood(self):
        w = torch.tensor([1.0, 2.0, 0.5])
        options = {"criterion__weight": w, "criterion__label_smoothing": 0.2}
        found = network_spec(initialised(classifier(**options))).likelihood
        assert found == Categorical((1.0, 2.0, 0.5), 0.2)
        net = initialised(binary_classifier(criterion__pos_weight=torch.tensor([3.0])))
        assert network_spec(net, 2).likelihood == Bernoulli(3.0)


class TestReading:
    """How logits are extracted from the output of the module."""

    @pytest.mark.parametrize("module", [SoftmaxMLP, FunctionalSoftmaxMLP])
    def test_input_of_a_softmax(self, module):
        net = initialised(classifier(module, criterion=nn.NLLLoss))
        found = network_spec(net)
        assert (found.output_map, found.logit_layer) == ("identity", "head")
        with torch.no_grad():
            expected = MLP.forward(net.module_, ROWS)
        torch.testing.assert_close(outputs(net, found), expected, rtol=0, atol=0)

    def test_logarithm_where_there_is_none(self):
        net = initialised(classifier(SharpSoftmaxMLP, criterion=nn.NLLLoss))
        found = network_spec(net)
        assert (found.output_map, found.logit_layer) == ("log", None)
        with torch.no_grad():
            expected = net.module_(ROWS).log()
        torch.testing.assert_close(outputs(net, found), expected)

    @pytest.mark.parametrize("scale", [1.0, 30.0, 3000.0])
    def test_certain_rows_do_not_mislead(self, scale):
        params = {"criterion": nn.NLLLoss, "module__dtype": torch.float64}
        net = initialised(classifier(SharpSoftmaxMLP, **params))
        with torch.no_grad():
            net.module_.head.weight.mul_(scale)
            net.module_.head.bias.zero_()
            net.module_.hidden.bias.zero_()
        X = ROWS.double()
        # at these rows both are certain; in between they are not
        for rows in (X, X * 1e-3):
            found = outputs(net, network_spec(net, x=X), rows)
            expected = net.module_(rows).detach()
            torch.testing.assert_close(found.softmax(-1), expected)


class TestProbabilitiesExpected:
    @pytest.mark.parametrize("scale", [1.0, 1e-3])
    def test_logits_are_refused(self, scale):
        net = initialised(classifier(criterion=nn.NLLLoss))
        with torch.no_grad():
            net.module_.head.weight.mul_(scale)
            net.module_.head.bias.mul_(scale)
        with pytest.raises(ValueError, match=r"End it with a softmax"):
            network_spec(net)


class TestWidth:
    def test_squeezed_counts_as_one(self):
        assert network_spec(initialised(regressor(SqueezedMLP)), 1).n_outputs == 1

    def test_outputs_per_pixel_are_refused(self):
        net = initialised(classifier(nn.Conv1d(1, 3, 1)))
        with pytest.raises(ValueError, match="one vector per row"):
            network_spec(net, x=torch.ones(3, 1, 5))


def test_head_map_is_the_identity_for_a_plain_head():
    found = network_spec(initialised(classifier())).head_map
    torch.testing.assert_close(found, torch.eye(3).double())


def test_head_map_is_missing_where_outputs_bend_and_for_all_weights():
    assert network_spec(initialised(regressor(TanhMLP)), 1).head_map is None
    assert network_spec(initialised(classifier()), subset="all").head_map is None


class TestNetworks:
    def test_compiled_module_is_unwrapped(self):
        net = initialised(CompilingClassifier(MLP, criterion=nn.CrossEntropyLoss))
        assert unwrapped(net.module_) is net.module_._orig_mod
        module = net.module_
        assert network_spec(net).layout.layers == ["head"]
        assert net.module_ is module

    def test_infinite_outputs_are_refused(self):
        net = initialised(classifier())
        with torch.no_grad():
            net.module_.head.bias[0] = torch.inf
        with pytest.raises(ValueError, match=r"not finite.*diverged"):
            network_spec(net)

    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    def test_batch_size_follows_the_memory_budget(self, monkeypatch, subset):
        found = network_spec(initialised(classifier()), subset=subset)
        large = found.batch_size()
        assert 1 <= found.batch_size(with_covariance=True) < large
        monkeypatch.setattr("sklaplace.core.budget.CACHE", 2**12)
        assert 1 <= found.batch_size() < large
        monkeypatch.setattr("sklaplace.core.budget.BUDGET", 1)
        assert found.batch_size() == 1

    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    def test_inputs_by_name_take_as_much_memory(self, subset):
        net = initialised(classifier())
        alone, named = (
            network_spec(net, x=x, subset=subset) for x in (ROWS, {"X": ROWS})
        )
        assert named.row_bytes == alone.row_bytes

    def test_dtype_of_the_net_is_kept(self):
        net = initialised(classifier(module__dtype=torch.float64))
        X = ROWS.double()
        assert outputs(net, network_spec(net, x=X), X).dtype == torch.float64
