# The environment server, `sqlenv serve`: a small image without torch.
#   docker build -f docker/env.Dockerfile -t sqlenv-env .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /src
COPY docker/requirements.py pyproject.toml ./
RUN python requirements.py serve > requirements.txt

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sqlenv
ENV PATH=/opt/sqlenv/bin:$PATH
WORKDIR /src
# Before the sources: this layer stays until a requirement changes.
COPY --from=requirements /src/requirements.txt ./
COPY constraints.txt ./
RUN pip install --constraint constraints.txt -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY sqlenv sqlenv
COPY env_server env_server
RUN pip install --no-deps .

FROM ${PYTHON_IMAGE}
# Any user may run it (`user:` in docker-compose.yml), so what is written to belongs to all.
RUN install -d -m 1777 /cache /home/sqlenv
COPY --from=build /opt/sqlenv /opt/sqlenv
ENV PATH=/opt/sqlenv/bin:$PATH HOME=/home/sqlenv USER=sqlenv PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    SQLENV_HOST=0.0.0.0 SQLENV_PORT=8000 SQLENV_CACHE_DIR=/cache
USER 1000:1000
WORKDIR /home/sqlenv
EXPOSE 8000
# By http.client, which knows of no proxy: Docker may give containers HTTP_PROXY.
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=6 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); \
        c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["sqlenv"]
CMD ["serve"]
