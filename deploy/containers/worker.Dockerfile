# A Beam worker: samples, packs and writes batches.  No TensorFlow.
#   docker build -f deploy/containers/worker.Dockerfile -t dpsgd-worker:0.2.0 .
# The base is pinned by version; pin it by digest once you have pulled it.
FROM apache/beam_python3.11_sdk:2.77.0

WORKDIR /opt/dpsgd
COPY deploy/lock/py3.11.txt constraints.txt
COPY setup.py pyproject.toml README.md ./
COPY accounting accounting
COPY dpsgd dpsgd
COPY pipelines pipelines
COPY trainer trainer
# The lock file's versions, and gcsfs, which is in none; trainer is listed in setup.py, and no worker needs it.
RUN sed 's/ *\\$//; /--hash/d' constraints.txt > versions.txt \
    && pip install --no-cache-dir --constraint versions.txt '.[pipelines,aws,gcp]' \
    && rm -rf trainer build \
        "$(python -I -c 'import os, trainer; print(os.path.dirname(trainer.__file__))')"

# As a pool beside an engine's worker, start with the arguments --worker_pool: Beam's
# entry point serves port 50000.  Without them it is what Dataflow starts.
RUN useradd --uid 10001 --create-home worker
USER 10001:10001
