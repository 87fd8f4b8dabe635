# The gateway alone, for an upstream: no torch, no model. Build from the top folder:
#   docker build -f docker/gateway.Dockerfile -t kvgate-gateway .
FROM python:3.11-slim

ARG PIP_ARGS=""
ENV PYTHONUNBUFFERED=1

WORKDIR /app
COPY pyproject.toml constraints.txt README.md ./
COPY gateway gateway
COPY backends backends
RUN pip install --no-cache-dir $PIP_ARGS --constraint constraints.txt . && useradd --create-home kvgate

COPY docker/gateway.toml /etc/kvgate/kvgate.toml

USER kvgate
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
CMD ["kvgate", "serve", "--config", "/etc/kvgate/kvgate.toml"]
