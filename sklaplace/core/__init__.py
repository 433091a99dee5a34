"""What all other subpackages use, and no network or posterior is needed for.

`linalg`, `newton` and `bisection` hold numerical methods, `random` reproducible random
numbers, `trees` nested inputs, `lazy` properties that are computed once. `checks` and
`arrays` refuse values and data, `warn` shows warnings once, `budget` and `memory` limit
memory. `fingerprint` hashes the content of any object, with the help of
`bytecode` and `modules`, and `cache` stores results under such keys, in a `folder` that
nobody else may write to. `persistence` writes objects without pickle, with the names of
classes in `trusted`.
"""
