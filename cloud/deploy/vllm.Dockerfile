# vLLM for processors, with the connector that keeps contexts over restarts:
#
#   docker build -f cloud/deploy/vllm.Dockerfile --build-arg VLLM_IMAGE=… -t ctxreuse-vllm .   (from the repository's root)

ARG VLLM_IMAGE
FROM ${VLLM_IMAGE}
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
# What vLLM has installed stays as it is.
RUN python3 -m pip freeze --exclude ctxreuse >/src/has.txt \
    && python3 -m pip install --no-cache-dir -c /src/has.txt '/src[cloud]' && rm -r /src
