# The API and the vLLM worker in one image. Build it where the GPU's driver is, or for it:
#   docker compose build --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.24.0
# vLLM's own image brings CUDA, torch and vLLM in versions that belong together.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.24.0
FROM ${VLLM_IMAGE}

COPY . /src/teachercache
# what the image has stays as it is
RUN python3 -m pip install --no-cache-dir "/src/teachercache[service,vllm]" && rm -rf /src/teachercache

RUN useradd --create-home --uid 10001 teachercache && install -d -o teachercache /data
USER teachercache
ENV TEACHERCACHE_DATA_DIR=/data \
    TEACHERCACHE_HOST=0.0.0.0 \
    TEACHERCACHE_ENGINE=vllm \
    HF_HUB_OFFLINE=1
VOLUME /data
EXPOSE 8765

HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8765/readyz', timeout=4)"]

# off loopback a server needs a token; the first one comes from a file
ENTRYPOINT ["teachercache"]
CMD ["serve"]
