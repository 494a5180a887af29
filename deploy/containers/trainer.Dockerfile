# The trainer and the command line: exactly the lock file's packages, with hashes.
#   docker build -f deploy/containers/trainer.Dockerfile -t dpsgd-trainer:0.2.0 .
# The base is pinned by version; pin it by digest once you have pulled it.
FROM python:3.11.13-slim-bookworm

WORKDIR /opt/dpsgd
COPY deploy/lock/py3.11.txt lock.txt
RUN pip install --no-cache-dir --require-hashes -r lock.txt
COPY setup.py pyproject.toml README.md ./
COPY accounting accounting
COPY dpsgd dpsgd
COPY pipelines pipelines
COPY trainer trainer
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --uid 10001 --create-home trainer
USER 10001:10001
WORKDIR /home/trainer
ENTRYPOINT ["dpsgd"]
