"""What all other subpackages use, and no network or posterior is needed for.

`linalg`, `newton` and `bisection` hold numerical methods, `random` reproducible random
numbers, `trees` nested inputs, `lazy` properties that are computed once. `checks` and
`arrays` refuse values and data, `warn` shows warnings once, `budget` and `memory` limit
memory. `cache` stores results in a `joblib.Memory`, by the content of all that they
depend on. `persistence` says what pickle keeps of an object, and `serialise` stores
objects for readers who do not trust their maker.
"""
