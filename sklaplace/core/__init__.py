"""What all other subpackages use, and no network or posterior is needed for.

`linalg` and `newton` hold linear algebra and a Newton method, `random` reproducible
random numbers, `trees` nested inputs, `budget` limits on memory, `checks` those of
constructor values. `fingerprint` hashes the content of any object, and `cache` stores
results under such keys.
"""
