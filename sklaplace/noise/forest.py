"""QuantileForest: quantiles of residuals, averaged over randomised trees."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sklaplace.noise.interpolation import LEVELS, SCORES, empirical_distribution
from sklaplace.noise.residuals import N_GROUPS
from sklaplace.noise.standardisation import standardisation

Array = NDArray[np.float64]

# Numbers of residuals, in total and per leaf, at which the quantiles of residuals have
# the same weight as normal quantiles.
HALF, HALF_OF_LEAF = 100, 5
# Number of trees for each group of residuals, and of residuals in a leaf. Doubling or
# halving these numbers changed the mean interval score of six tables by less than one
# per cent.
TREES_PER_GROUP, LEAF = 5, 40
# For the splits of trees, residuals are clipped at this number of deviations.
OUTLYING = 3.0


@dataclass(frozen=True)
class QuantileForest:
    """Quantiles of residuals, averaged over trees.

    Attributes
    ----------
    roots : Tensor of shape (n_trees,)
        First node of each tree.
    below, above : Tensor of shape (n_nodes,)
        Next node for inputs up to the threshold, and next node for larger inputs. The
        next node of a leaf is the leaf itself.
    feature, threshold : Tensor of shape (n_nodes,)
        Index of the input that a node compares with its threshold, and this threshold.
    quantiles : Tensor of shape (n_nodes, n_levels)
        Quantiles at `LEVELS` for each leaf.
    depth : int
        Maximum number of comparisons per sample in a tree.
    center, scale : Tensor of shape (k,)
        Standardisation of the inputs. Trees compare inputs in single precision.

    References
    ----------
    Meinshausen (2006), "Quantile regression forests". Here, quantiles are averaged over
    trees.
    """

    roots: Tensor
    below: Tensor
    above: Tensor
    feature: Tensor
    threshold: Tensor
    quantiles: Tensor
    depth: int
    center: Tensor
    scale: Tensor

    @classmethod
    def fit(
        cls, inputs: Array, z: Array, weights: Array, group: NDArray[np.integer]
    ) -> "tuple[QuantileForest, Array]":
        """Return a forest, and out-of-fold quantiles (n, n_levels) of each residual.

        `TREES_PER_GROUP` trees are fitted to the residuals of all groups but one, for
        each group in turn. Their targets are the clipped residuals and their absolute
        values, so that leaves differ in location or in spread. The trees are then
        joined into arrays over all nodes of all trees. A leaf stores quantiles of all
        residuals in it. The out-of-fold quantiles of a residual come from the trees
        that were not fitted to its group, and from the residuals of other groups.

        Parameters
        ----------
        inputs : ndarray of shape (n, k)
            Inputs of the trees.
        z, weights : ndarray of shape (n,)
            Standardised residuals, and their weights.
        group : ndarray of shape (n,)
            Group of each residual, below `N_GROUPS`.
        """
        # a third of the time that `import sklaplace` would take
        from sklearn.ensemble import ExtraTreesRegressor

        bounded = z.clip(-OUTLYING, OUTLYING)
        targets = np.column_stack([bounded, np.abs(bounded)])
        moments = standardisation(inputs, weights)
        center, scale = map(torch.from_numpy, moments)
        # scikit-learn's trees compare in single precision, as `__call__` does
        rounded = _single((torch.from_numpy(inputs) - center) / scale).numpy()
        trees = []
        for g in range(N_GROUPS):
            others = group != g
            # a leaf has at least a share of the total weight, for which scikit-learn
            # allows at most one half; trees are the same for the same residuals
            forest = ExtraTreesRegressor(
                TREES_PER_GROUP,
                min_weight_fraction_leaf=min(LEAF / weights[others].sum(), 0.5),
                random_state=g,
            )
            forest.fit(rounded[others], targets[others], weights[others])
            trees += [tree.tree_ for tree in forest.estimators_]
        # the last entry is the number of all nodes
        roots = np.cumsum([0, *(tree.node_count for tree in trees)])
        offsets = np.repeat(roots[:-1], np.diff(roots))  # root of each node's tree

        def joined(name: str) -> Array:
            return np.concatenate([getattr(tree, name) for tree in trees])

        def next_nodes(name: str) -> Tensor:
            # scikit-learn marks leaves with negative children, numbered within a tree
            children, nodes = joined(name), np.arange(len(offsets))
            return torch.from_numpy(np.where(children < 0, nodes, children + offsets))

        # node of the leaf of each residual in each tree, (n, n_trees)
        leaves = np.stack([tree.apply(rounded) for tree in trees], 1) + roots[:-1]
        quantiles = _leaf_quantiles(leaves, len(offsets), z, weights)
        # whether a tree was fitted to a residual, (n, n_trees)
        is_seen = group[:, None] != np.repeat(np.arange(N_GROUPS), TREES_PER_GROUP)
        seen_weights = np.where(is_seen, weights[:, None], 0.0)
        of_seen = _leaf_quantiles(leaves, len(offsets), z, seen_weights)
        unseen_leaves = leaves[~is_seen].reshape(len(z), TREES_PER_GROUP)
        out_of_fold = of_seen[unseen_leaves].mean(1)
        forest = cls(
            torch.from_numpy(roots[:-1]),
            next_nodes("children_left"),
            next_nodes("children_right"),
            torch.from_numpy(joined("feature").clip(0)),  # negative in leaves
            torch.from_numpy(joined("threshold")),
            torch.from_numpy(quantiles),
            max(tree.max_depth for tree in trees),
            center,
            scale,
        )
        return forest, out_of_fold

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return quantiles (n, n_levels) at `LEVELS`, in increasing order.

        All samples go down all trees at the same time, one comparison per step.
        """
        rounded = _single((inputs - self.center) / self.scale).double()
        nodes = self.roots + torch.zeros_like(rounded[:, :1], dtype=torch.long)
        for _ in range(self.depth):  # samples stay in leaves that they have reached
            is_above = rounded.gather(1, self.feature[nodes]) > self.threshold[nodes]
            nodes = torch.where(is_above, self.above[nodes], self.below[nodes])
        return self.quantiles[nodes].mean(1)


def _leaf_quantiles(
    leaves: NDArray[np.integer], n_nodes: int, z: Array, weights: Array
) -> Array:
    """Return quantiles (n_nodes, n_levels) of residuals (n,) in leaves (n, n_trees).

    The quantiles of a leaf are weighted averages of its residuals' quantiles and of
    normal quantiles. The share of the former grows with the number of residuals, in
    total and in the leaf. Nodes that are not leaves have normal quantiles, which are
    not used. The weights are (n,), or (n, n_trees) with zeros for residuals to leave
    out of a tree.
    """
    n_trees = leaves.shape[1]
    weights = np.broadcast_to(weights.reshape(len(z), -1), leaves.shape).T
    total = weights.sum() / n_trees
    # one entry per tree and residual; each residual is in one leaf of every tree
    kept = weights > 0
    values, leaf = np.broadcast_to(z, weights.shape)[kept], leaves.T[kept]
    n = np.bincount(leaf, weights[kept], n_nodes)[:, None]  # weight of each node
    probabilities, values, leaf = empirical_distribution(values, weights[kept], leaf)
    # entries are now sorted by leaf: find the first and the last of each leaf
    nodes, first = np.unique(leaf, return_index=True)
    last = np.append(first[1:], len(leaf)) - 1
    # no quantile lies beyond the outermost residuals of a leaf
    levels = LEVELS.clip(probabilities[first, None], probabilities[last, None])
    # one interpolation for all leaves: the number of the node plus the probability
    # increases over all entries, because probabilities are below one
    leaf_quantiles = np.interp(nodes[:, None] + levels, leaf + probabilities, values)
    # each factor of the share is one half if the number of residuals is `HALF` in
    # total, or `HALF_OF_LEAF` in the leaf
    share = total / (total + HALF) * n[nodes] / (n[nodes] + HALF_OF_LEAF)
    quantiles = np.tile(SCORES, (n_nodes, 1))
    quantiles[nodes] += share * (leaf_quantiles - SCORES)
    return quantiles


def _single(values: Tensor) -> Tensor:
    """Convert values to single precision, clipped below its largest number, 3e38."""
    return values.clamp(-1e30, 1e30).float()
