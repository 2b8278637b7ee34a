"""The data of the forecast: yearly fields, the samples made of them, and the picture of a forecast."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HISTORY = 4  # years that the network sees


@dataclass(frozen=True)
class Fields:
    """Yearly fields (T, H, W) in kelvin, the coordinates of their grid, and how many years to train on."""

    values: np.ndarray
    years: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    num_train: int


def read_fields() -> Fields:
    """Read the climate run that comes with `iris-sample-data`."""
    import iris_sample_data
    import xarray

    path = Path(iris_sample_data.path) / "A1B_north_america.nc"
    # The calendar has 360 days a year: hours since 1970 are all that is needed to name the years.
    with xarray.open_dataset(path, engine="h5netcdf", decode_times=False) as dataset:
        air = dataset["air_temperature"]
        years = 1970 + np.floor(air["time"].values / (360 * 24)).astype(int)
        return Fields(
            air.values.astype(np.float64),
            years,
            air["latitude"].values,
            air["longitude"].values,
            num_train=200,
        )


def travelling_waves(height: int, width: int, *, num_train: int = 8, num_validation: int = 4) -> Fields:
    """Make smooth waves that travel around the globe at speeds of their own, on a grid of any size."""
    random = np.random.default_rng(0)
    latitude = np.linspace(-90, 90, height)
    longitude = np.linspace(0, 360, width, endpoint=False)
    north, east = np.radians(latitude)[:, None], np.radians(longitude)[None, :]
    years = np.arange(num_train + num_validation)
    values = np.full((len(years), height, width), 280.0, dtype=np.float32)
    for wave in range(1, 7):
        phase, speed, tilt = random.uniform(0, 2 * np.pi), random.uniform(0.1, 0.6), random.integers(-3, 4)
        for year in years:
            shape = np.cos(wave * east + tilt * north - speed * year + phase) * np.cos(north)
            values[year] += (10 / wave) * shape.astype(np.float32)
    return Fields(values, years, latitude, longitude, num_train)


class Samples:
    """Standardised samples: `HISTORY` years and the year after them.

    Mean and spread are those of the training years, by grid point. A sample is named by the index of the year
    that is to be forecast.
    """

    def __init__(self, fields: Fields, dtype: torch.dtype) -> None:
        self.dtype = dtype
        train = fields.values[: fields.num_train]
        self.mean = train.mean(axis=0, keepdims=True)
        self.spread = train.std(axis=0, keepdims=True) + 1e-3
        self.values = torch.from_numpy((fields.values - self.mean) / self.spread).to(dtype)
        self.train = list(range(HISTORY, fields.num_train))
        self.validation = list(range(max(HISTORY, fields.num_train), len(fields.values)))

    def load(self, targets: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs (B, HISTORY, H, W) and targets (B, 1, H, W)."""
        inputs = torch.stack([self.values[t - HISTORY : t] for t in targets])
        return inputs, torch.stack([self.values[t : t + 1] for t in targets])

    def anomaly(self, standardised: Tensor) -> np.ndarray:
        """Return a standardised field (H, W) as kelvin above the mean of the training years."""
        return standardised.double().cpu().numpy() * self.spread[0]


def draw(path: Path, fields: Fields, truth: np.ndarray, forecast: np.ndarray, *, domain_size: int) -> None:
    """Write truth, forecast and error side by side, with the borders between the domain ranks' rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    error = forecast - truth
    height = len(fields.latitude)
    rows_each = math.ceil(height / domain_size)
    row = float(fields.latitude[1] - fields.latitude[0])
    borders = [float(fields.latitude[r]) - row / 2 for r in range(rows_each, height, rows_each)]
    scale = float(np.abs(truth).max())
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained", sharey=True)
    titles = ("truth", "forecast", f"error (root mean square {np.sqrt((error**2).mean()):.2f} K)")
    for axis, field, title in zip(axes, (truth, forecast, error), titles, strict=True):
        limit = float(np.abs(error).max()) if field is error else scale
        image = axis.pcolormesh(
            fields.longitude, fields.latitude, field, cmap="RdBu_r", vmin=-limit, vmax=limit, rasterized=True
        )
        for border in borders:
            axis.axhline(border, color="black", linewidth=1, linestyle="--")
        axis.set(title=title, xlabel="longitude (degrees east)")
        figure.colorbar(image, ax=axis, label="anomaly (K)", shrink=0.9)
    axes[0].set_ylabel("latitude (degrees north)")
    note = f"; dashed: borders between the rows of {domain_size} ranks" if borders else ""
    figure.suptitle(f"Air temperature of year {fields.years[-1]}{note}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
