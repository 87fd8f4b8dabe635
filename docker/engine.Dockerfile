# Gateway and bundled engine in one image: the engine's processes are children of the gateway's. From the top folder:
#   docker build -f docker/engine.Dockerfile -t kvgate .
# PIP_ARGS may name an index of CPU-only builds of torch; the usual ones bring CUDA libraries and are much larger.
FROM python:3.11-slim

ARG PIP_ARGS=""
ENV PYTHONUNBUFFERED=1 KVGATE_CACHE_DIR=/home/kvgate/cache

# The engine compiles its kernels for the processor it runs on, at its first start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home kvgate

WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./
COPY gateway gateway
COPY backends backends
RUN pip install --no-cache-dir $PIP_ARGS --constraint constraints.txt '.[engine]'

USER kvgate
RUN kvgate model pull smollm2

COPY docker/engine.toml /etc/kvgate/kvgate.toml

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
CMD ["kvgate", "serve", "--config", "/etc/kvgate/kvgate.toml"]
