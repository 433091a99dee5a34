"""A skorch net as a function: outputs of a batch, and how its weights are trained.

`Forward` maps a batch to outputs (b, c) and `OutputSpec` says which likelihood they
parametrise; both leave the network unchanged. The other files hold the data sets, the
training loop with sample weights, the split into training and validation data, and the
default networks for tables.
"""
