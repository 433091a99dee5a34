"""The reader of IDX files that the examples on the Laplace bridge share."""

from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
from idx import write_idx, write_set

from examples import FOLDER

spec = spec_from_file_location("mnist", FOLDER / "laplace_bridge" / "mnist.py")
mnist = module_from_spec(spec)
spec.loader.exec_module(mnist)


def pixels(images):
    return images[:, None].astype("float32") / 255


def in_order(X):
    """Return images in an order that does not depend on shuffling."""
    return X[np.lexsort(X.reshape(len(X), -1).T)]


def as_torchvision(root):
    """Write the folders of torchvision; return training, test and Fashion images."""
    return (
        write_set(root / "MNIST" / "raw", "train", 30, seed=0),
        write_set(root / "MNIST" / "raw", "t10k", 20, seed=1),
        write_set(root / "FashionMNIST" / "raw", "t10k", 15, seed=2)[0],
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(7,), (3, 28, 28), (2, 3, 4, 5)])
def test_a_file_is_read_as_it_was_written(tmp_path, suffix, shape):
    values = np.random.default_rng(0).integers(0, 256, shape)
    path = tmp_path / f"some-idx-ubyte{suffix}"
    write_idx(path, values)
    np.testing.assert_array_equal(mnist.read_idx(path), values)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]))  # floats
    with pytest.raises(ValueError, match="not an IDX file of bytes"):
        mnist.read_idx(path)


def test_the_folders_of_torchvision_are_read(tmp_path):
    (X, y), (X_test, y_test), fashion = as_torchvision(tmp_path)
    train, test, unknown = mnist.load(tmp_path)
    np.testing.assert_array_equal(train[0], pixels(X))
    np.testing.assert_array_equal(train[1], y)
    assert train[1].dtype == test[1].dtype == np.int64
    for label in range(10):  # each image keeps its label
        expected = in_order(pixels(X_test[y_test == label]))
        np.testing.assert_array_equal(in_order(test[0][test[1] == label]), expected)
    assert list(unknown) == ["Fashion"]
    np.testing.assert_array_equal(
        in_order(unknown["Fashion"]), in_order(pixels(fashion))
    )


def test_test_images_are_split_without_training_images(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "TRAIN", 12)
    X, y = write_set(tmp_path, "mnist-t10k", 30, seed=0, suffix=".gz")
    write_set(tmp_path, "notmnist-t10k", 20, seed=1, suffix=".gz")
    write_set(tmp_path, "fashion-first4000", 20, 2, labelled=False, suffix=".gz")
    train, test, unknown = mnist.load(tmp_path, most=10)
    np.testing.assert_array_equal(train[0], pixels(X[:12]))
    np.testing.assert_array_equal(train[1], y[:12])
    others = {image.tobytes(): label for image, label in zip(pixels(X), y, strict=True)}
    assert [others[image.tobytes()] for image in test[0]] == test[1].tolist()
    known = {image.tobytes() for image in pixels(X[12:])}
    assert len({image.tobytes() for image in test[0]} & known) == 10
    assert test[1].tolist() != y[12:22].tolist()  # shuffled
    assert {name: len(rows) for name, rows in unknown.items()} == {
        "notMNIST": 10,
        "Fashion": 10,
    }
    again = mnist.load(tmp_path, most=10)
    np.testing.assert_array_equal(again[1][0], test[0])
    assert (mnist.load(tmp_path, most=10, seed=1)[1][0] != test[0]).any()


def test_notmnist_is_not_taken_for_mnist(tmp_path):
    for name in ("notMNIST", "KMNIST", "FashionMNIST", "EMNIST"):
        write_set(tmp_path / name / "raw", "t10k", 20, seed=0)
    with pytest.raises(FileNotFoundError, match="no test images of MNIST"):
        mnist.load(tmp_path)


def test_a_folder_of_one_set_is_known_by_its_name(tmp_path):
    write_set(tmp_path / "MNIST" / "raw", "t10k", 20, seed=0)
    assert ("MNIST", "test", "images") in mnist.find(tmp_path / "MNIST")


def test_missing_files_are_named(tmp_path):
    as_torchvision(tmp_path)
    (tmp_path / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="no unknown images"):
        mnist.load(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="train images of MNIST, but no labels"):
        mnist.load(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").unlink()
    with pytest.raises(ValueError, match="more than 8000 are needed"):
        mnist.load(tmp_path)
