# vLLM with the connector:
#   docker build -f deploy/docker/engine.Dockerfile -t pdx-engine .
# BASE: vLLM's own image of a release that PDX supports (docs/vllm.md).
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE} AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[gpu,nixl]" && mkdir -m 0700 /run/pdx && mkdir /models \
    && chown 10001:10001 /run/pdx /models
# A user without a name has no home folder, and torch asks for both.
ENV HOME=/tmp \
    HF_HOME=/models \
    USER=pdx \
    PDX_NODE=ipc:///run/pdx/node.sock \
    PDX_PROXY=ipc:///run/pdx/proxy.sock
USER 10001:10001
ENTRYPOINT ["pdx", "serve"]
CMD ["--help"]
