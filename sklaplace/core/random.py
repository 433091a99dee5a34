"""Random numbers per sample, quasi-Monte Carlo points, and seeded global generators.

`counter_uniforms` is a counter-based generator: its n-th number for a sample with
hash k is ``mix(k ^ mix(seed) + n·γ)``, where ``mix`` is the finaliser of splitmix64
(Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). Numbers
depend neither on the batch nor on the order of samples. Equal samples get equal
numbers.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sklaplace.core.trees import Batch, leaves

RandomState: TypeAlias = int | np.random.RandomState | None

# torch and numpy each have one global generator for all threads
_training = RLock()
# γ and the shifts and multipliers of splitmix64, as signed integers
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)
# numbers that a CPU hashes at once, so that they stay in its cache
_BLOCK = 2**16


def row_hash(x: Batch) -> Tensor:
    """Return a 64-bit hash of each sample of a batch, (b,), int64.

    Parameters
    ----------
    x : Tensor, or dict, list or tuple of tensors
        Batch of b samples.
    """
    # each tensor of the batch is hashed, and mixed into the hash of the previous ones
    keys = torch.zeros((), dtype=torch.int64)
    for leaf in leaves(x):
        keys = _mixed(keys + _hashed(leaf.detach()))
    # through numpy, since a tensor made in inference mode has limited uses later
    return torch.from_numpy(keys.cpu().numpy())


def counter_uniforms(keys: Tensor, n: int, seed: int = 0) -> Tensor:
    """Return uniform numbers strictly between zero and one, (b, n), float64.

    Parameters
    ----------
    keys : Tensor of shape (b,)
        Hashes of the samples, from `row_hash`.
    n : int
        Number of values per sample.
    seed : int, default=0
        Seed. Different seeds produce independent numbers.
    """
    # mix(k ^ mix(seed) + n·γ) for the n-th number of a sample with hash k
    start = keys.cpu()[:, None] ^ _mixed(torch.tensor([seed]))
    bits = _mixed(start + _STEP * torch.arange(1, n + 1))
    # odd multiples of 2⁻⁵³, so neither end is reached
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def _hashed(samples: Tensor) -> Tensor:
    """Return a hash of each sample's bytes, (b,), int64, on the samples' device.

    The bytes of a sample are split into words of eight bytes. Each mixed word is
    multiplied by an odd number that depends on its position, and the products are
    summed. Odd numbers lose no bits of a word, and the positions make the order of the
    words matter. A few words of all samples are processed at a time.
    """
    flat = samples.reshape(len(samples), -1)
    total, n_words = torch.zeros(len(flat), dtype=torch.int64, device=flat.device), 0
    size = _BLOCK if flat.is_cpu else flat.numel()  # numbers of all samples at a time
    # numbers per sample at a time; multiples of 8 fill whole words in each dtype
    n_columns = 8 * max(1, size // (8 * len(flat) + 1))
    for part in flat.split(n_columns, 1):
        # -0.0 + 0.0 is 0.0, so that both have the same hash
        part = part + 0.0 if part.is_floating_point() else part
        data = part.contiguous().view(torch.uint8)
        words = pad(data, (0, -data.shape[1] % 8)).view(torch.int64)
        positions = torch.arange(1, words.shape[1] + 1, device=words.device) + n_words
        n_words += words.shape[1]
        total += _mixed(words).mul_(_mixed(positions * _STEP) | 1).sum(1)
    return total


def _mixed(z: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, a bijection, to 64-bit integers in place."""
    for shift, factor in _MIX:
        z = z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return z


def _shifted(z: Tensor, n: int) -> Tensor:
    """Shift bits to the right, and fill with zeros."""
    return (z >> n).bitwise_and_(2 ** (64 - n) - 1)


def sobol_normals(n_samples: int, dim: int, seed: int) -> Tensor:
    """Return scrambled Sobol points of a standard normal distribution.

    Parameters
    ----------
    n_samples : int
        Number of points, at least one. Powers of two give the best coverage.
    dim : int
        Number of dimensions.
    seed : int
        Seed of the scrambling. The global random state is unchanged.

    Returns
    -------
    Tensor of shape (n_samples, dim)
        Normal quantiles of Sobol points, float64. The second half is the negative of
        the first half, so odd moments are zero if ``n_samples`` is even. If
        ``n_samples >= 2 * dim``, the second moments equal the identity matrix.

    Raises
    ------
    ValueError
        If ``n_samples`` is not positive.

    Notes
    -----
    The cost is O(n_samples · dim). Sobol sequences are tabulated for up to 21,201
    dimensions. In higher dimensions, the points are antithetic normal draws.

    References
    ----------
    Owen (1998), "Scrambling Sobol and Niederreiter-Xing points", Journal of
    Complexity 14(4).
    """
    if n_samples < 1:
        raise ValueError(f"n_samples={n_samples} is not positive. Use at least 1.")
    half = (n_samples + 1) // 2
    if dim > torch.quasirandom.SobolEngine.MAXDIM:
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(half, dim, generator=generator, dtype=torch.float64)
    else:
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        # Points are multiples of 2⁻³⁰, and 0 and 1 have infinite quantiles; half a step
        # away from 0 and 1, quantiles are finite.
        uniform = engine.draw(half, dtype=torch.float64).clamp(2**-31, 1 - 2**-31)
        points = torch.special.ndtri(uniform)
    if half >= dim:  # make the second moments equal the identity
        root = torch.linalg.cholesky(points.mT @ points / half)
        points = torch.linalg.solve_triangular(root, points.mT, upper=False).mT
    return torch.cat([points, -points])[:n_samples]


# Returns the same points in every call; do not write to them. Points made in inference
# mode could not be used later where gradients are needed.
cached_sobol_normals = lru_cache(maxsize=8)(torch.inference_mode(False)(sobol_normals))


@contextmanager
def private_rng(seed: int | None, device: Any = "cpu") -> Iterator[None]:
    """Seed torch's and numpy's global generators, and restore their states on exit.

    Parameters
    ----------
    seed : int or None
        Seed. If None, continue from the global state, which is also restored.
    device : str or torch.device, default="cpu"
        Device of the network. The generator of this device is also seeded and restored.

    Notes
    -----
    Training needs this context, because skorch and torch draw from the global
    generators. Only one thread can enter the context at a time, but other threads can
    still draw from the same global generators. Predictions do not use this context.
    """
    on_gpu = torch.device(device or "cpu").type == "cuda"
    if on_gpu:
        torch.cuda.init()
    devices = list(range(torch.cuda.device_count())) if on_gpu else []
    with _training:
        numpy_state = np.random.get_state()  # noqa: NPY002
        try:
            with torch.random.fork_rng(devices=devices):
                if seed is not None:
                    # torch.manual_seed would also seed devices that are not forked
                    torch.default_generator.manual_seed(seed)
                    np.random.seed(seed)  # noqa: NPY002
                    if on_gpu:
                        torch.cuda.manual_seed_all(seed)
                yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002


def _renew_lock() -> None:
    """Replace the lock after a fork, because its holder may not exist in the child."""
    global _training
    _training = RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)
