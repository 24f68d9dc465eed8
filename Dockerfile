# An image for NVIDIA GPUs. The driver of the host must support the CUDA version of BASE.
#
#   docker build -t eepo .
#   docker run --gpus all -v eepo-data:/data eepo train countdown/eepo --out runs/eepo
#
# With vLLM, which chooses its own versions and may need a CUDA compiler:
#
#   docker build -t eepo-vllm --build-arg EXTRAS=data,lora,trl,vllm \
#     --build-arg CONSTRAINTS=/dev/null --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}

# Triton compiles its launchers with gcc and the headers of Python.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home eepo \
    && mkdir /opt/eepo /opt/venv /data \
    && chown eepo:eepo /opt/venv /data
USER eepo
ENV PATH=/opt/venv/bin:$PATH

ARG EXTRAS=data,lora,trl
ARG CONSTRAINTS=constraints.txt
WORKDIR /opt/eepo
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY recipes recipes
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir -c "${CONSTRAINTS}" ".[${EXTRAS}]"

# Runs and downloaded models are kept in the volume.
ENV HF_HOME=/data/.cache/huggingface EEPO_CACHE=/data/.cache/eepo
WORKDIR /data
ENTRYPOINT ["eepo"]
CMD ["--help"]
