# The trainer, `sqlenv train`; and evaluation, reports and everything else that the command does.
#   docker build -f docker/trainer.Dockerfile -t sqlenv/trainer .
#   with vLLM beside it, which --weight_sync nccl needs:  --build-arg EXTRAS=train,trackers,vllm
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /src
COPY docker/requirements.py pyproject.toml ./
ARG EXTRAS=train,trackers
RUN python requirements.py train --only torch > torch.txt \
    && python requirements.py $(echo "$EXTRAS" | tr , ' ') > requirements.txt

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sqlenv
ENV PATH=/opt/sqlenv/bin:$PATH
WORKDIR /src
# The index of torch's CPU builds, as pytorch.org names it. Without, pip takes the CUDA build.
ARG TORCH_INDEX_URL=
COPY --from=requirements /src/torch.txt ./
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r torch.txt
# Before the sources: this layer stays until a requirement changes.
COPY --from=requirements /src/requirements.txt ./
RUN pip install -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY sqlenv sqlenv
COPY env_server env_server
COPY inference inference
COPY trainer trainer
RUN pip install --no-deps .

FROM ${PYTHON_IMAGE}
# On a GPU, TRL's loss runs on Triton, which compiles a module of Python's at the first step. Python's headers are in
# the official image, and a package of their own where Python is Debian's; the last command fails where something is
# missing.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')" \
    && if [ ! -f "$headers/Python.h" ]; then apt-get install -y --no-install-recommends python3-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && echo '#include <Python.h>' | cc -x c -fsyntax-only -I "$headers" -
RUN install -d -m 1777 /cache /hub /weights /runs /home/sqlenv
COPY --from=build /opt/sqlenv /opt/sqlenv
WORKDIR /app
COPY trainer/tiny/base trainer/tiny/base
COPY configs configs
ENV PATH=/opt/sqlenv/bin:$PATH HOME=/home/sqlenv USER=sqlenv PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/hub XDG_CACHE_HOME=/cache SQLENV_CACHE_DIR=/cache MPLCONFIGDIR=/cache/matplotlib \
    TRACKIO_DIR=/runs/trackio TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
USER 1000:1000
ENTRYPOINT ["sqlenv"]
CMD ["--help"]
