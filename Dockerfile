# The worker's image. With GPUs it is vLLM's own image and this project beside it; ENGINE=cpu puts the CPU engine on a plain
# Python base instead (Debian's python3 with python3-venv, or the official Python image). `make image` builds either.
ARG VLLM_VERSION=0.32.0
# sha256:… of that image: a tag may come to mean another image, a digest may not.
ARG VLLM_DIGEST=""
ARG BASE_IMAGE=docker.io/vllm/vllm-openai:v${VLLM_VERSION}${VLLM_DIGEST:+@${VLLM_DIGEST}}

FROM ${BASE_IMAGE}

ARG ENGINE=gpu
# More of pip's arguments for torch, such as the index that has the CPU build.
ARG TORCH_ARGS=""

USER 0

# The base keeps its packages as they are; ours are found first.
RUN python3 -m venv --system-site-packages /opt/llm-array
ENV PATH=/opt/llm-array/bin:$PATH

# torch first and with its dependencies, the rest whole and pinned: requirements/engine-cpu.txt says why.
COPY requirements/core.txt requirements/engine-cpu.txt /opt/llm-array/requirements/
# hadolint ignore=DL3008,SC2086
RUN case "$ENGINE" in \
      gpu) pip install --no-cache-dir --no-deps nvidia-ml-py==13.615.71 ;; \
      cpu) apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/* && \
        pip install --no-cache-dir $TORCH_ARGS --constraint /opt/llm-array/requirements/core.txt \
          --constraint /opt/llm-array/requirements/engine-cpu.txt torch==2.13.0 ;; \
      *) echo "build image: ENGINE is $ENGINE (expected gpu or cpu)" >&2; exit 1 ;; \
    esac
# In a layer of its own: layers are pulled side by side.
# hadolint ignore=DL3059
RUN if [ "$ENGINE" = cpu ]; then \
      pip install --no-cache-dir --no-deps -r /opt/llm-array/requirements/engine-cpu.txt; \
    fi && \
    pip install --no-cache-dir --no-deps -r /opt/llm-array/requirements/core.txt

# An account with a name and a home: torch asks for both.
RUN useradd --no-log-init --uid 10001 --create-home --shell /usr/sbin/nologin worker && install -d -m 1777 /scratch

# Everything that grows is below /scratch, as in job_definitions/: there it is the host's, and outlives the container.
ENV HOME=/home/worker \
    HF_HOME=/scratch/huggingface \
    VLLM_CACHE_ROOT=/scratch/vllm \
    TORCHINDUCTOR_CACHE_DIR=/scratch/torchinductor \
    TRITON_CACHE_DIR=/scratch/triton \
    FLASHINFER_WORKSPACE_BASE=/scratch/flashinfer \
    CUDA_CACHE_PATH=/scratch/cuda \
    XDG_CACHE_HOME=/scratch/cache \
    VLLM_NO_USAGE_STATS=1

# What changes most comes last.
COPY pyproject.toml README.md LICENSE /opt/llm-array/src/
COPY submitter /opt/llm-array/src/submitter
COPY worker /opt/llm-array/src/worker
RUN pip install --no-cache-dir --no-deps /opt/llm-array/src && rm -rf /opt/llm-array/src/build /opt/llm-array/src/*.egg-info

USER 10001:10001
# vLLM's own working folder holds code, and Python looks for modules there first.
WORKDIR /home/worker
# As the user of the image, and with what the base brought: a base without an engine is no worker's.
RUN worker --version && \
    python -c "import importlib.util as u; assert all(map(u.find_spec, ('vllm', 'torch', 'jsonschema'))), 'no engine in the base'"

ARG BASE_IMAGE
ARG REVISION=""
LABEL org.opencontainers.image.title="llm-array" \
      org.opencontainers.image.description="One worker of an offline inference run" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}"

STOPSIGNAL SIGTERM
# Without arguments it is an error: a container that does nothing must not look like one that is done.
ENTRYPOINT ["worker"]
CMD []
