"""Data: arrays, tables, streams and data sets, their batches, and their split.

`arrays` converts user input to numbers or labels, and `table` encodes data frames.
`stored` reads arrays in parts, and `streams` reads iterable datasets. `dataset` joins
inputs, targets and weights, and yields batches. `split` holds out samples by a hash.
"""
