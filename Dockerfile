# One image per service, router first: it needs no torch and is built without the engine's layers.
#   docker build --target router -t epd-router .
# BASE_IMAGE is any image with Python 3.11 or newer, its venv module and pip.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PATH=/opt/epd/bin:$PATH
RUN python3 -m venv /opt/epd \
 && useradd --system --uid 10001 --home-dir /home/epd --create-home epd

FROM base AS wheel
WORKDIR /src
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir build
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos protos
COPY epd epd
COPY services services
# With a compiler in the base image the wheel carries native kernels; without, torch computes alone.
RUN if command -v g++ >/dev/null; then python3 -m epd.engine.native.build; fi
RUN /opt/build/bin/python -m build --wheel --outdir /wheels .

FROM base AS router-base
COPY requirements.lock /tmp/requirements.lock
COPY --from=wheel /wheels /wheels
# The lock file pins the versions; the wheel's own list decides what of it the router needs.
RUN pip install --no-cache-dir --constraint /tmp/requirements.lock /wheels/*.whl
USER epd
ENTRYPOINT ["python", "-m"]

FROM router-base AS router
EXPOSE 50050 8000 9090
CMD ["services.router"]

FROM router-base AS client
ENTRYPOINT ["epd"]
CMD ["--help"]

FROM base AS engine-base
# Optional groups of the package for the data plane: nixl, or nixl,mooncake.
ARG TRANSPORTS=nixl
RUN case ",$TRANSPORTS," in *,mooncake,*) apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4 \
 && rm -rf /var/lib/apt/lists/* ;; esac
COPY requirements.lock /tmp/requirements.lock
# Its own layer: torch is large and changes seldom.
RUN pip install --no-cache-dir --constraint /tmp/requirements.lock torch transformers
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/requirements.lock \
    "$(echo /wheels/*.whl)[engine,$TRANSPORTS]"
USER epd
ENTRYPOINT ["python", "-m"]

FROM engine-base AS encoder
EXPOSE 50051 9090
CMD ["services.encoder"]

FROM engine-base AS prefill
EXPOSE 50052 9090
CMD ["services.prefill"]

FROM engine-base AS decode
EXPOSE 50053 9090
CMD ["services.decode"]
