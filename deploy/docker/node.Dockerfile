# Node and proxy, without torch:
#   docker build -f deploy/docker/node.Dockerfile -t pdx-node .
# BASE: any image with Python 3.11 or newer and its venv module. EXTRAS: what nodes need beside TCP, as nixl.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
ARG EXTRAS=otel,redis,s3,tls
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/pdx && /opt/pdx/bin/pip install --no-cache-dir ".[${EXTRAS}]"

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /opt/pdx /opt/pdx
ENV PATH=/opt/pdx/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TMPDIR=/run/pdx \
    PDX_NODE=ipc:///run/pdx/node.sock \
    PDX_PROXY=ipc:///run/pdx/proxy.sock
# Engines must run as the same user: node and engines share memory that belongs to it.
RUN mkdir -m 0700 /run/pdx && chown 10001:10001 /run/pdx
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["pdx"]
CMD ["node"]
