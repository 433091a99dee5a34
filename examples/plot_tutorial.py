"""
Tutorial: from a raw table to a served model
============================================

This tutorial predicts the prices of used cars. It starts with a raw table that contains
categories and missing values. It ends with a program that predicts prices without
sklaplace. The script also needs pandas and matplotlib:
``pip install pandas matplotlib``. It takes about 20 seconds on one core.
"""

# %%
# The raw table
# -------------
#
# The data are simulated, so nothing is downloaded. Each row is a car, and its price is
# in thousands of euros. Some mileages and service records are missing. The noise is
# proportional to the price: its standard deviation is 10 % of the price by default.

import tempfile
from pathlib import Path

import joblib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from sklaplace import LaplaceRegressor
from sklaplace.metrics import interval_coverage
from sklaplace.plotting import RegressionCalibrationDisplay

torch.set_num_threads(1)  # small networks gain nothing from more


def used_cars(n_cars, seed, noise=0.1):
    rng = np.random.default_rng(seed)
    age = rng.gamma(2, 3, n_cars).clip(0, 20)
    mileage = 14 * age * rng.lognormal(0, 0.4, n_cars)
    power = rng.choice([50, 70, 90, 110, 150, 200], n_cars)
    brand = rng.choice(["Alto", "Borea", "Corsair", "Dara"], n_cars)
    fuel = rng.choice(["petrol", "diesel", "electric"], n_cars, p=[0.5, 0.35, 0.15])
    serviced = rng.choice([True, False], n_cars)
    level = pd.Series(brand).map({"Alto": 1, "Borea": 1.4, "Corsair": 0.8, "Dara": 1.1})
    price = 0.25 * power * level * np.exp(-0.08 * age - 0.002 * mileage)
    price *= np.where(fuel == "electric", 1.2, 1) * np.where(serviced, 1.1, 1)
    price *= 1 + noise * rng.standard_normal(n_cars)
    cars = {"brand": brand, "fuel": fuel, "power (kW)": power, "age (years)": age}
    table = pd.DataFrame(cars | {"mileage (1000 km)": mileage, "serviced": serviced})
    table["serviced"] = table["serviced"].mask(rng.random(n_cars) < 0.2)
    table["mileage (1000 km)"] = table["mileage (1000 km)"].mask(
        rng.random(n_cars) < 0.08
    )
    return table, price.rename("price")


table, price = used_cars(1500, seed=0)
print(table.head(3).round(1).to_string())
missing = table.isna().sum()
print(f"\nmissing values: {missing[missing > 0].to_dict()}")

# %%
# Split
# -----
#
# One third of the cars are kept for testing.

X_train, X_test, y_train, y_test = train_test_split(
    table, price, test_size=500, random_state=0
)
print(f"{len(X_train)} cars for training, {len(X_test)} for testing")

# %%
# Fit
# ---
#
# ``LaplaceRegressor`` has a default network that accepts the data frame without any
# preprocessing: strings, booleans, numbers and missing values. ``fit`` trains this
# network and measures its uncertainty. ``predict`` returns the mean of each price and,
# with ``return_std=True``, its standard deviation.

model = LaplaceRegressor(random_state=0).fit(X_train, y_train)
mean, std = model.predict(X_test, return_std=True)
print(f"R2 on test cars: {r2_score(y_test, mean):.3f}")
for k in range(3):
    print(f"test car {k}: {mean[k]:.1f} ± {std[k]:.1f}, price {y_test.iloc[k]:.1f}")

# %%
# Coverage
# --------
#
# A 90 % interval should contain about 90 % of new prices. By default, the noise of the
# model depends on the inputs, so expensive cars should have wider intervals.


def coverage(X, y):
    return interval_coverage(y, model.predict_interval(X, coverage=0.9))


is_expensive = mean > np.median(mean)
for name, rows in {"cheap": ~is_expensive, "expensive": is_expensive}.items():
    inside = coverage(X_test[rows], y_test[rows])
    print(f"{name} half: coverage {inside:.1%}, mean std {std[rows].mean():.2f}")

# %%
# Unknown rows
# ------------
#
# The intervals are valid only for cars that resemble the training data.
# ``score_samples`` measures this similarity, and rows with a low score are flagged. The
# threshold is the score that 99 % of the test cars exceed. We copy one car four times
# and change three copies: a new brand, an age of 80 years, and a power entered in
# watts.

threshold = np.quantile(model.score_samples(X_test), 0.01)
unknown = pd.concat([X_test[:1]] * 4, ignore_index=True)
unknown.loc[1, "brand"] = "Elan"
unknown.loc[2, "age (years)"] = 80.0
unknown.loc[3, "power (kW)"] *= 1000
names = ["unchanged", "new brand", "80 years old", "power in watts"]
scores = model.score_samples(unknown)
_, stds = model.predict(unknown, return_std=True)
for name, score, deviation in zip(names, scores, stds, strict=True):
    print(f"{name:15} flagged: {score < threshold!s:6} std {deviation:.2f}")

# %%
# Recalibrate
# -----------
#
# A second dealer sells the same kinds of cars, but the prices vary more: the noise is
# 20 % of the price. The intervals are too narrow for these cars. ``recalibrate``
# multiplies all standard deviations by one factor, which it chooses on 200 cars of this
# dealer. The network does not change. The figure shows the coverage at all levels on
# the other 800 cars.

X_dealer, y_dealer = used_cars(1000, seed=1, noise=0.2)
X_new, X_check, y_new, y_check = train_test_split(
    X_dealer, y_dealer, train_size=200, random_state=0
)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained")
for ax, title in zip(axes, ["original", "recalibrated"], strict=True):
    if title == "recalibrated":
        model.recalibrate(X_new, y_new)
    print(f"{title} model: coverage {coverage(X_check, y_check):.1%}")
    RegressionCalibrationDisplay.from_estimator(model, X_check, y_check, ax=ax)
    ax.set(title=title)
print(f"standard deviations multiplied by {model.sigma_scaling_[0]:.2f}")
plt.show()

# %%
# Save and load
# -------------
#
# ``joblib`` stores the whole estimator, including the encoding of the data frame and
# the factor of ``recalibrate``. A service that loads this file needs sklaplace, and
# predicts from data frames.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "cars.joblib"
    joblib.dump(model, path, compress=3)
    loaded = joblib.load(path)
    size = path.stat().st_size / 1e6
same = np.array_equal(loaded.predict_interval(X_test), model.predict_interval(X_test))
print(f"file of {size:.1f} MB, same intervals after loading: {same}")

# %%
# Export
# ------
#
# ``to_module`` returns the predictions as a torch module. ``torch.export`` turns the
# module into a program that runs without sklaplace. The program accepts tensors, but
# not data frames. We therefore fit a second model in a pipeline whose first step
# encodes the table.

encoder = make_column_transformer(
    (OneHotEncoder(), ["brand", "fuel", "serviced"]),
    (SimpleImputer(add_indicator=True), ["mileage (1000 km)"]),
    remainder="passthrough",
)
pipeline = make_pipeline(encoder, LaplaceRegressor(random_state=0))
pipeline.fit(X_train, y_train)
print(f"R2 on test cars: {pipeline.score(X_test, y_test):.3f}")

rows = torch.from_numpy(pipeline[:-1].transform(X_test))
program = torch.export.export(
    pipeline[-1].to_module(coverage=0.9),
    (rows[:2],),
    dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    strict=False,
)

# %%
# Serve
# -----
#
# The program is saved to a file, loaded and called with one encoded row. A service
# needs torch for the program, and scikit-learn for the encoder. Here, the files are
# temporary; use a permanent folder for your own files.

with tempfile.TemporaryDirectory() as folder:
    torch.export.save(program, Path(folder) / "cars.pt2")
    served = torch.export.load(Path(folder) / "cars.pt2").module()
mean, variance, interval = served(rows[:1])
low, high = interval[0].tolist()
expected = pipeline[-1].predict_interval(rows[:1].numpy(), coverage=0.9)[0]
print(f"exported program: mean {mean.item():.3f}, interval {low:.3f} to {high:.3f}")
print(f"pipeline: interval {expected[0]:.3f} to {expected[1]:.3f}")

# %%
# A single call to ``fit`` handled the categories and the missing values. The intervals
# cover about 90 % of the test prices in the cheap and in the expensive half, and all
# three changed rows are flagged. Recalibration on 200 cars of the second dealer raises
# the coverage from 66 % to 93 %. The exported program returns the same interval as the
# pipeline.
